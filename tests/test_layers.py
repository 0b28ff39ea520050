"""Layers that are recomputed, compiled or have windows: the same gradients, and what that costs."""

import pytest
import torch
from families import FAMILIES, build, table
from test_batches import Gpu, flash
from torch.nn.attention import varlen
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from system import families
from system.attention import packed_attention, states_apart
from system.batches import token_logps
from system.gpu import move, prepare_layers
from system.model import TokenLogps

SIZES = dict(hidden_size=64, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
SIZES["vocab_size"] = 64
LENGTHS = 23, 40, 7, 31


def make_model(recompute, compiler=None):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", num_hidden_layers=6, **SIZES))
    prepare_layers(lm, recompute, compiler is not None, **compiler or {})
    return lm


def backward(lm, length):
    ids = torch.arange(length)[None] % 64
    lm(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    grads = [p.grad for p in lm.parameters()]
    lm.zero_grad()
    return grads


@pytest.fixture(scope="module")
def gradients():
    lm = make_model("none")
    return [backward(lm, length) for length in LENGTHS]


@pytest.mark.parametrize(("recompute", "flops"), [("full", 7.5), ("selective", 6), ("none", 6)])
def test_what_is_computed_again(recompute, flops, gradients):
    """FLOPs a weight and token; a checkpoint stops before the last product of its layer."""
    lm = make_model(recompute)
    with FlopCounterMode(display=False) as counter:
        first = backward(lm, LENGTHS[0])
    weights = sum(p.numel() for p in lm.parameters() if p.dim() == 2)
    assert counter.get_total_flops() / weights / LENGTHS[0] == pytest.approx(flops, abs=0.4)
    for got, expected in zip(first, gradients[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def compiler(monkeypatch):
    """An engine that an earlier test started in this process has disabled it."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_compiled_layers_share_a_graph(recompute, gradients, compiler):
    """Over six layers and all lengths, without a break: fullgraph raises at one."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    lm = make_model(recompute, dict(backend="aot_eager"))
    for length, expected in zip(LENGTHS, gradients, strict=True):
        for got, grad in zip(backward(lm, length), expected, strict=True):
            torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_layers_with_a_state_are_not_compiled(compiler):
    lm = build("lfm2")
    prepare_layers(lm, "full", True, states_apart(lm), backend="aot_eager")
    compiled = [hasattr(layer.forward, "_torchdynamo_orig_callable") for layer in lm.model.layers]
    assert compiled == [kind == "full_attention" for kind in lm.config.layer_types]


def test_the_names_of_files_are_found_once(monkeypatch):
    calls, found = [], families.get_model_conversion_mapping

    def counted(lm, **options):
        return calls.append(lm) or found(lm, **options)

    monkeypatch.setattr(families, "get_model_conversion_mapping", counted)
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=1, num_experts=4, moe_intermediate_size=8)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    for _ in range(2):
        to_files = families.to_files(lm)
        names = [name for key, x in lm.state_dict().items() for name in to_files({key: x})]
    assert len(calls) == 1 and "model.layers.0.mlp.experts.3.up_proj.weight" in names


WINDOWS = "qwen2_window mistral gemma3_text cohere2 olmo3 exaone4 phi3 starcoder2 smollm3".split()
MORE = table("families_of_layers")
STATES = families.STATES - {"qwen3_5_moe_text"} | {"qwen3_5", "qwen3_5_moe"}


PACKED = "llama qwen2 qwen3 granite cohere minicpm3 mixtral qwen3_moe glm4_moe deepseek_v3".split()
PACKED += ["mistral3", "qwen3_vl"]  # without images


def on_a_gpu(module, query, *others, **segments):
    out, _ = packed_attention(module, query.as_subclass(Gpu), *others, **segments)
    return out.as_subclass(torch.Tensor), None


@pytest.mark.parametrize("family", [*PACKED, *WINDOWS, *sorted(STATES)])
def test_texts_share_a_row_where_the_layers_let_them(family, monkeypatch):
    """With the log-probs and gradients of rows of their own; full attention also as on a GPU."""
    if family in MORE:
        monkeypatch.setitem(FAMILIES, family, MORE[family])
    monkeypatch.setattr(varlen, "varlen_attn", flash)
    AttentionInterface.register("on_a_gpu", on_a_gpu)
    AttentionInterface.register("packed", packed_attention)
    lm = build(family)
    config = lm.config
    assert bool(families.special_layers(config)) == (family not in PACKED)
    assert not families.special_layers(config, one_row=True)
    assert (config.get_text_config().model_type in families.STATES) == (family in STATES)
    prompts = [[*range(3, 12)]] * 3 + [[5, 9], [*range(20, 31)], [4]]
    responses = [[*range(40, 47)], [60, 61], [7] * 9, [*range(8, 20)], [33], [*range(3, 60)]]
    rows = [dict(prompt_ids=p, response_ids=r) for p, r in zip(prompts, responses, strict=True)]
    if family not in PACKED:
        prepare_layers(lm, "full", eager=states_apart(lm))
    found = []
    for attention in ("sdpa", "packed", "on_a_gpu")[: 2 + (family in PACKED)]:
        lm.set_attn_implementation(attention)
        policy = TokenLogps(lm, packed=attention != "sdpa")
        logp_nt, entropy_nt = token_logps(policy, rows)
        (logp_nt + entropy_nt).sum().backward()
        grads = [p.grad for p in lm.parameters() if p.grad is not None]
        found.append([logp_nt.detach(), entropy_nt.detach(), *grads])
        lm.zero_grad()
    for padded, *others in zip(*found, strict=True):
        for packed in others:
            assert (packed - padded).abs().max() <= 3e-5 * padded.abs().max()


@pytest.mark.parametrize("recompute", ["full", "selective", "none"])
@pytest.mark.parametrize("family", ["lfm2", "falcon_h1"])
def test_a_shared_prompt_costs_a_state_no_memory(family, recompute, monkeypatch):
    """30 responses to a prompt of 60 tokens, 2,010 with it each time, in a row of 210: as a text of 210."""
    lm = build(family)
    prepare_layers(lm, recompute, eager=states_apart(lm))
    calls, found, saved = [], [], []
    for layer in lm.modules():
        if any(isinstance(x, torch.nn.Conv1d) for x in layer.children()):
            into = next(x for x in layer.children() if isinstance(x, torch.nn.Linear))
            into.register_forward_pre_hook(lambda _, given: calls.append(given[0].shape[:-1].numel()))
    shared = [dict(prompt_ids=[*range(3, 63)], response_ids=[*range(i, i + 1 + i % 9)]) for i in range(8, 38)]
    alone = [dict(prompt_ids=[*range(3, 63)], response_ids=[*range(3, 103)] + [*range(3, 53)])]
    for rows, attention in (alone, "packed"), (shared, "packed"), (shared, "sdpa"):
        lm.set_attn_implementation(attention)
        lm.zero_grad()
        calls.clear()
        policy, held = TokenLogps(lm, packed=attention == "packed"), []

        def keep(x, held=held):
            return held.append(x.nbytes) or x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logp_nt, _ = token_logps(policy, rows)
        logp_nt.sum().backward()
        saved.append((sum(held), max(calls)))
        found.append([logp_nt.detach(), *(p.grad for p in lm.parameters())])
    for padded, packed in zip(found[2], found[1], strict=True):
        assert (packed - padded).abs().max() <= 3e-5 * padded.abs().max()
    assert saved[1][0] <= 2 * saved[0][0] and saved[1][1] <= 2 * saved[0][1]


def test_a_text_part_without_an_entry():
    """transformers lists no model for it, as for Qwen2.5-Omni's; then the whole model's source counts."""

    class Text(Qwen2Config):
        model_type = "unlisted"

    assert families.passes_windows(Text(), Qwen2ForCausalLM) and families.passes_windows(Qwen2Config(), None)
    assert not families.passes_windows(Text(), None)


def test_a_move_waits_for_each_copy(monkeypatch):
    """FSDP reads a shard of another size on the host as soon as it is there."""
    done = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: done.append("copy"))
    model = torch.nn.Linear(3, 5)
    monkeypatch.setattr(model, "_apply", lambda f, apply=model._apply: (apply(f), done.append("FSDP"))[0])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    move("cpu", [model], optimizer)
    assert done == [*["copy"] * 4, "FSDP", *["copy"] * 4]  # weights and gradients; two moments of each
