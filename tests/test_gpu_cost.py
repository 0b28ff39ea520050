"""What benchmarks/gpu_cost.py counts: its instruments on cases with known counts, and limits of grpo.py."""

import sys
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest.mock import MagicMock, patch

import pytest
import torch
from conftest import ROOT
from families import build
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.append(str(ROOT / "benchmarks"))
import gpu_cost
from gpu_cost import RECOMPUTE, TINY, grpo

SMALL = (256, 512, 2, 4, 2, 1024)


@pytest.fixture
def one_rank():
    with gpu_cost.world(1):
        yield


def test_micro_batches_are_full(one_rank):
    for rows, least in ((gpu_cost.gpu_check_rows, 0.85), (gpu_cost.long_tail_rows, 0.9)):
        _, fill, more = gpu_cost.micro_batches(*rows(), 1)
        assert least <= fill <= 1 <= more < 1.2, rows.__name__
        _, fill, _ = gpu_cost.micro_batches(*rows(), 8)
        assert fill > 0.7, rows.__name__


def test_fill_by_hand(one_rank):
    """Two prompts of 10 tokens, two responses of 15 to each: 80 tokens, and a budget of 160."""
    rows = gpu_cost.same_rows(2, 2, 10, 15)
    number, fill, more = gpu_cost.micro_batches(rows, (10, 15), 1, budget=160)
    assert (number, fill, more) == (1, 0.5, 1.0)


def test_flops(one_rank):
    """6 a weight and token; recomputed: 8, but the last product of a layer is not needed again."""
    found = {name: gpu_cost.flops_a_token(SMALL, name) for name in RECOMPUTE}
    h, mlp, *_ = SMALL
    layer = 2 * h * h + h * h + 3 * h * mlp
    head = SMALL[-1] * h * 8 * 512 / (256 + 8 * 512)
    part = 2 * layer / (2 * layer + head)  # of the layers; three of four chunks of logits are made twice
    assert found["none"] == pytest.approx(6 * part + 7.5 * (1 - part), rel=0.01)
    again = 2 * (layer - h * mlp) / layer
    assert found["selective"] == pytest.approx(found["none"], rel=0.01)
    assert found["full"] == pytest.approx(found["none"] + again * part, rel=0.01)


def test_what_the_watch_sees():
    on_host = torch.arange(4.0)
    mask = torch.ones(4, dtype=torch.bool)
    with gpu_cost.Watch() as watch:
        x = on_host.to("meta")
        on_host.clone().to("meta", non_blocking=True)  # nothing is pinned
        grpo.send(on_host.clone(), "meta")
        x.copy_(on_host)
        (x.view(2, 2) * 2).to(torch.bfloat16)
        on_host[mask].sum().item()  # of the host alone
    assert watch.counts == dict(copies=4, pageable=3, operators=2)
    with gpu_cost.Watch() as watch:
        x.sum().item(), x.cpu(), x.tolist()
    assert watch.counts == dict(operators=1, waits=3)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_an_update_does_not_wait(one_rank, recompute):
    each, _, layer = gpu_cost.update_costs(recompute)
    assert each["waits"] == each["pageable"] == 0 < layer and each["copies"] <= 9
    assert layer < dict(full=180, none=140).get(recompute, 180)


def test_a_sync_gathers_each_weight_once():
    weights, collectives, mappings = gpu_cost.sync_costs(TINY)
    assert weights == collectives == 3 + 2 * 12 and mappings == 1


def test_layers_compile_whole(one_rank):
    """One graph where prompts are shared, and one where none are."""
    assert gpu_cost.compilations("selective") == 2


def test_memory_of_few_layers_gives_that_of_all():
    sizes = (*TINY[:2], 6, *TINY[3:])
    rest, peak = gpu_cost.on_gpu_memory(sizes, 2, "full", tokens=1024)
    _, *_, counted = direct = gpu_cost.count_memory(sizes, 2, "full", 1024)
    assert (rest * gpu_cost.GIB, peak * gpu_cost.GIB) == pytest.approx((direct[0], counted))


def test_a_32b_model_fits_16_gpus():
    rest, peak = gpu_cost.on_gpu_memory(gpu_cost.gpu_memory.SIZES["32B"], 16, "full")
    formula = gpu_cost.gpu_memory.memory(gpu_cost.gpu_memory.qwen2("32B"), 16)
    assert rest == pytest.approx(formula[0], rel=0.01) and 0.75 * formula[1] < peak <= formula[1] < 76


@contextmanager
def gpu_beside_cpu(ranks):
    """Tensors without values, and a GPU that is the meta device -> the mesh of that GPU."""
    streams = MagicMock()
    streams.stream = lambda stream: nullcontext()
    new = dict(
        _get_device_handle=lambda name: streams, _get_device_from_mesh=lambda mesh: torch.device("meta")
    )
    modules = [module for name, module in sys.modules.items() if "fsdp._fully_shard._f" in name]
    patches = [patch.object(m, name, x) for m in modules for name, x in new.items() if hasattr(m, name)]
    patches.append(patch.object(torch.accelerator, "current_stream", streams))
    not_pinned = partial(grpo.CPUOffloadPolicy, pin_memory=False)
    patches.append(patch.object(grpo, "CPUOffloadPolicy", not_pinned))
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        mesh = stack.enter_context(gpu_cost.world(ranks))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield mesh


def test_devices_are_not_mixed():
    with gpu_beside_cpu(1), pytest.raises(RuntimeError, match="device"):
        torch.ones(2, device="meta") + torch.ones(2)


@pytest.mark.parametrize("family, rank", (("qwen2", 0), ("qwen2", 4), ("llama4", 0)))
def test_offload_always_keeps_weights_on_the_host(family, rank, tmp_path):
    """A step of full weights and of adapters: no operation has an operand on the other device."""
    config = build(family).config
    with gpu_beside_cpu(2) as mesh:
        args = gpu_cost.make_args(TINY, tmp_path, offload="always", lora_rank=rank)
        config.save_pretrained(tmp_path)
        with gpu_cost.without_weights():
            device = gpu_cost.computes_on("meta")
            policy = grpo.load_model(args, mesh, device, grpo.add_adapters, grpo.TokenLogps)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        logp_nt, _ = grpo.token_logps(policy, gpu_cost.same_rows(2, 4, 20, 30), args)
        logp_nt.sum().backward()
        on_host = [*policy.parameters(), *(p.grad for p in parameters)]
        on_host.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).full_tensor())
        optimizer.step()
        on_host += [x for state in optimizer.state.values() for x in state.values()]
        weights = [x for _, x in grpo.whole_weights(policy.lm, torch.bfloat16)]
        assert {x.device.type for x in on_host} == {"cpu"}
        assert {x.device.type for x in (logp_nt, *policy.buffers())} == {"meta"}
        assert {x.device.type for x in weights} == {"meta"}
