"""The log-probs that scripts share: chunks, dtype and memory. test_grpo_math.py has each script's use."""

import pytest
import torch

from system import log_probs as module
from system.families import hf_overrides
from system.log_probs import LogProbs, log_probs
from tests import families


def test_logits_are_float32():
    """Also those of a bfloat16 model, in trainer and sampler: nothing is rounded after the output layer."""
    hidden, weight = torch.randn(5, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    out = LogProbs.logits(hidden, weight, 1.0, None, [], torch.empty(5, 9))
    assert torch.equal(out, hidden.float() @ weight.float().t())
    config = families.build("qwen3").config
    assert hf_overrides(config, sees=False)(config).head_dtype == "float32"


@pytest.mark.parametrize("chunk", (1, 2, 3, 100))
@pytest.mark.parametrize("scale", (1.0, 1.7))
@pytest.mark.parametrize("softcap", (None, 0.5))
@pytest.mark.parametrize("never", ((), (1, 4)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_chunks_of_logits_change_nothing(monkeypatch, chunk, scale, softcap, never, dtype):
    """Log-probs, entropies and all gradients are those of plain autograd, whatever the chunk."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "CHUNK", chunk)
    inputs = [torch.randn(n, 4, dtype=dtype, requires_grad=True) for n in (5, 7)]
    target, a, b = torch.tensor([0, 6, 2, 2, 5]), torch.randn(5), torch.randn(5)
    logits = inputs[0].float() @ inputs[1].float().t()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logits = logits.index_fill(1, torch.tensor(never, dtype=torch.long), -1e4)
    logp_lv = (logits * scale).log_softmax(-1)
    plain = logp_lv[torch.arange(5), target], -(logp_lv.exp() * logp_lv).sum(-1)
    near = dict(rtol=1e-4, atol=2e-6) if dtype is torch.float32 else dict(rtol=0.05, atol=0.05)
    for weights in ((a, b), (a,)):  # without a loss on the entropy it has no backward pass
        chunked = log_probs(*inputs, target, scale, softcap, never)
        torch.testing.assert_close(chunked, plain, **near)
        losses = (sum((w * x).sum() for w, x in zip(weights, columns)) for columns in (chunked, plain))
        ours, theirs = (torch.autograd.grad(loss, inputs, retain_graph=True) for loss in losses)
        torch.testing.assert_close(ours, theirs, **near)
    alone = log_probs(*inputs, target, scale, softcap, never, entropy=False)
    torch.testing.assert_close(alone, plain[:1], **near)


def test_logits_take_two_buffers_of_a_chunk(monkeypatch):
    """No pass, forward or backward, makes a tensor as large as a chunk of logits except those two."""
    monkeypatch.setattr(module, "CHUNK", 64)
    hidden, weight = torch.randn(640, 8, requires_grad=True), torch.randn(999, 8)
    with torch.profiler.profile(profile_memory=True) as profile:
        log_probs(hidden, weight, torch.zeros(640, dtype=torch.long))[0].sum().backward()
    made = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sum(n for n in made if n >= 64 * 999 * 4) == 2 * 64 * 999 * 4
