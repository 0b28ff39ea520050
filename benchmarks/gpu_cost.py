"""What GRPO would cost on GPUs, counted on a CPU in two minutes.

    python benchmarks/gpu_cost.py

grpo.py runs on meta tensors: they have shapes and no values, and a copy to them or a wait for them is seen.
Memory is counted by FSDP's own tracker, on fake tensors of as many ranks as are asked for.
Docs: docs/results/gpu.md
"""

import os
import random
import re
import sys
import tempfile
import types
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters as dynamo_counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, addmm_flop
from transformers import AttentionInterface, Qwen2Config, conversion_mapping

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data_prep.lib.packing import one_row, packed_attention

from benchmarks import gpu_check, gpu_memory
from system import families
from system.arguments import command_line

TINY = (64, 128, 2, 2, 1, 512)  # as gpu_memory.SIZES: width, MLP, layers, heads, KV heads, vocabulary
GIB = 2**30
aten = torch.ops.aten


def as_on_gpu(path):
    """A copy of a file's module in which every tensor says that it is on a GPU."""
    file = ROOT / path
    module = types.ModuleType(f"{file.stem}_as_on_gpu")
    sys.modules[module.__name__] = module  # dataclasses look there
    module.__file__ = str(file)
    source = re.sub(r"\.is_cuda\b", " is not None", file.read_text())
    exec(compile(source, file, "exec"), module.__dict__)
    return module


def trainer():
    """algos/grpo.py as on a GPU, with the log-probs that it imports."""
    module = as_on_gpu("algos/grpo.py")
    module.log_probs = as_on_gpu("system/log_probs.py").log_probs
    module.send = marking(module)
    return module


def marking(module):
    """The module's `send`. A CPU cannot pin memory: what would be pinned is marked."""
    send = module.send

    def mark(x):
        x.would_be_pinned = True
        return x

    def call(x, device=None):
        with patch.object(torch.Tensor, "pin_memory", mark):
            return send(x, device or module.compute_device())

    return call


grpo = trainer()
ON_GPU = as_on_gpu("data_prep/lib/packing.py").packed_attention  # in a `world`
AttentionInterface.register("packed", packed_attention)  # which the line above has replaced
RECOMPUTE = get_args(grpo.Args.__annotations__["gradient_checkpointing"])


@contextmanager
def world(ranks):
    """A process group of so many ranks; its collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    AttentionInterface.register("packed", ON_GPU)
    try:
        yield dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    finally:
        AttentionInterface.register("packed", packed_attention)
        dist.destroy_process_group()


def make_args(sizes, directory, **flags):
    """Arguments of grpo.py for a model of these sizes: its directory has a configuration and no weights."""
    h, mlp, layers, heads, kv_heads, vocabulary = sizes
    config = dict(hidden_size=h, intermediate_size=mlp, num_hidden_layers=layers, vocab_size=vocabulary)
    config |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads)
    Qwen2Config(**config, tie_word_embeddings=False, dtype="bfloat16").save_pretrained(directory)
    args = grpo.Args(model=directory, train_files=(), output_dir="", compute_dtype="bfloat16", **flags)
    return grpo.with_defaults(args, clip=grpo.policy_loss)


@contextmanager
def without_weights():
    """In this block a model is made as on a rank that gets its weights from rank 0; none come."""
    nothing = lambda *values, **options: None
    ranks = patch.multiple(dist, get_rank=lambda: 1, broadcast=nothing)
    with ranks, patch.object(grpo.dcp_state, "set_model_state_dict", nothing):
        yield


def load(args, mesh):
    """A sharded model without values; inside a FakeTensorMode."""
    with without_weights():
        return grpo.load_model(args, mesh, computes_on("cpu"), grpo.add_adapters, grpo.TokenLogps)


def computes_on(name):
    """The device of that name, which is the GPU from now on."""
    device = torch.device(name)
    grpo.compute_device = lambda: device
    return device


def load_meta(sizes, **flags):
    """A model on the meta device, not sharded, in the dtype that it computes in -> the model, arguments."""
    same = lambda module, **options: module
    with (
        tempfile.TemporaryDirectory() as directory,
        without_weights(),
        patch.object(grpo, "fully_shard", same),
    ):
        args = make_args(sizes, directory, **flags)
        policy = grpo.load_model(args, None, computes_on("meta"), grpo.add_adapters, grpo.TokenLogps)
    policy.set_requires_all_reduce = lambda wanted: None  # as FSDP has it
    return policy.bfloat16(), args


def make_row(group, prompt_length, length):
    """A row as a step has it."""
    row = dict(group=group, prompt_ids=[group] * prompt_length, prompt_length=prompt_length, length=length)
    row |= dict(response_ids=np.zeros(length, np.int32), mask_t=np.ones(length, bool))
    return row | {f"{name}_t": np.zeros(length, np.float32) for name in ("adv", "rollout_logp")}


def same_rows(prompts, group, prompt_length, length):
    """Rows of one shape."""
    return [make_row(g, prompt_length, length) for g in range(prompts) for _ in range(group)]


# ---- micro-batches -----------------------------------------------------------------------------------------
def gpu_check_rows():
    """Lengths of gpu_check.py on a GPU, all responses as long as they may be -> rows, limits."""
    prompts, group, prompt_length, length = gpu_check.WORK[True]
    rng = random.Random(0)
    lengths = [int(prompt_length * rng.uniform(0.5, 1.5)) for _ in range(prompts)]
    rows = [make_row(g, n, length) for g, n in enumerate(lengths) for _ in range(group)]
    return rows, (2 * prompt_length, length)


def long_tail_rows(prompts=64, group=8, median=500, limit=4096):
    """Log-normal lengths of responses, of which 2 % reach the limit -> rows, limits."""
    rng, rows = np.random.default_rng(0), []
    for g in range(prompts):
        prompt_length = int(rng.integers(64, 512))
        lengths = np.exp(rng.normal(np.log(median), 1, group)).astype(int).clip(1, limit)
        rows += [make_row(g, prompt_length, n) for n in lengths.tolist()]
    return rows, (512, limit)


def micro_batches(rows, longest, ranks, budget=8192):
    """Micro-batches of a rank, the share of their budget that is used, and tokens over the fewest possible.

    longest: limits of prompt and response.
    """
    batches, dealer = [], types.SimpleNamespace(packed=True, set_requires_all_reduce=lambda wanted: None)
    limits = dict(zip(("max_prompt_length", "max_response_length"), longest))
    limits |= dict(max_tokens_per_microbatch=budget, ppo_mini_batch_size=len(rows), group_size=1)
    args = grpo.Args(model="", train_files=(), output_dir="", **limits)
    for rank in range(ranks):
        with patch.multiple(dist, get_rank=lambda rank=rank: rank, get_world_size=lambda: ranks):
            [(sequences, _)], _, _ = grpo.distribute(rows, True, args)
        batches.append([*grpo.micro_batches(dealer, sequences, args)])
    texts = [[(row["prompt_ids"], row["response_ids"]) for row in part] for part in sum(batches, [])]
    tokens = sum(one_row(*zip(*part))[0]["input_ids"].numel() for part in texts if part)
    fewest = sum({row["group"]: row["prompt_length"] for row in rows}.values())
    fewest += sum(row["length"] for row in rows)
    number = max(map(len, batches))
    return number, tokens / (ranks * number * budget), tokens / fewest


# ---- FLOPs -------------------------------------------------------------------------------------------------
def flops_a_token(sizes, recompute):
    """FLOPs of products with weights, over tokens and the weights that each of them meets.

    All tokens meet those of the layers, and the response tokens those of the output layer.
    """
    policy, args = load_meta(sizes, gradient_checkpointing=recompute)
    rows = same_rows(1, 8, 256, 512)
    count = FlopCounterMode(display=False, custom_mapping={aten.addmm_: addmm_flop.__wrapped__})
    with count:
        logps = grpo.token_logps(policy, rows, args)[0]
        logps.sum().backward()
    products = {name: n for name, n in count.get_flop_counts()["Global"].items() if "mm" in str(name)}
    layers = sum(p.numel() for layer in blocks(policy) for p in layer.parameters())
    tokens = 8 * 512
    meetings = (256 + tokens) * layers + tokens * policy.lm.get_output_embeddings().weight.numel()
    return sum(products.values()) / meetings


def blocks(policy):
    return [m for m in policy.modules() if type(m).__name__ in policy.lm._no_split_modules]


# ---- operators, copies and waits ---------------------------------------------------------------------------
class Watch(TorchDispatchMode):
    """Counts what a GPU's host does: operators on the device, copies to it, and waits for it."""

    WAITS = "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"
    NO_WORK = re.compile("(new_)?empty|lift_fresh|_unsafe_view")  # of the device

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        tensors = [x for x in args if torch.is_tensor(x)]
        on_device = [x.is_meta for x in tensors]
        target = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
        if name in ("_to_copy", "copy_") and target.type == "meta" and not all(on_device):
            pinned = any(getattr(x, "would_be_pinned", False) for x in tensors)
            self.counts.update(copies=1, pageable=not (pinned and kwargs.get("non_blocking")))
        elif any(on_device) and name == "_to_copy" and target.type == "cpu":
            self.counts["waits"] += 1
            return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        elif any(on_device) and name in self.WAITS:
            self.counts["waits"] += 1
            return 1.0 if name == "_local_scalar_dense" else func(*args, **kwargs)
        elif target.type == "meta" and not func.is_view and not self.NO_WORK.match(name):
            self.counts["operators"] += 1
        return func(*args, **kwargs)


def count_update(layers, prompts, recompute):
    """Counts of one update of `prompts` groups, and the number of its micro-batches."""
    sizes = (*TINY[:2], layers, *TINY[3:])
    policy, args = load_meta(sizes, gradient_checkpointing=recompute, max_tokens_per_microbatch=512)
    args.group_size, args.ppo_mini_batch_size = 4, prompts
    mini_batches, _, _ = grpo.distribute(same_rows(prompts, 4, 64, 16), policy.packed, args)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-6)
    whole = patch.object(torch.Tensor, "full_tensor", lambda x: x, create=True)  # as a DTensor has it
    passes = patch.object(grpo, "token_logps", wraps=grpo.token_logps)
    with whole, passes as calls, Watch() as watch:
        grpo.update_actor(policy, optimizer, mini_batches, args)
    return watch.counts, calls.call_count


def update_costs(recompute):
    """-> what a micro-batch costs, what an optimizer step costs in addition, operators of a layer in each."""
    (few, n), (more, m), (deep, _) = (count_update(*size, recompute) for size in ((2, 8), (2, 16), (4, 16)))
    kinds = "operators", "copies", "pageable", "waits"
    each = {kind: (more[kind] - few[kind]) / (m - n) for kind in kinds}
    step = {kind: few[kind] - n * each[kind] for kind in kinds}
    return each, step, (deep["operators"] - more["operators"]) / (2 * m)


# ---- the sync ----------------------------------------------------------------------------------------------
class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # it becomes operators on shards, which come here again
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def sync_costs(sizes):
    """-> weights that the sampler gets, collectives, and how often the mapping of names is built."""
    build = conversion_mapping.get_model_conversion_mapping
    by_us, by_transformers = (
        patch.object(module, build.__name__, wraps=build) for module in (families, conversion_mapping)
    )
    with world(2) as mesh, FakeTensorMode(allow_non_fake_inputs=True), tempfile.TemporaryDirectory() as out:
        policy = load(make_args(sizes, out), mesh)
        with by_us as ours, by_transformers as theirs, Collectives() as collectives:
            weights = sum(1 for _ in grpo.whole_weights(policy.lm, torch.bfloat16))
        return weights, sum(collectives.counts.values()), ours.call_count + theirs.call_count


# ---- compiled blocks ---------------------------------------------------------------------------------------
def compilations(recompute, layers=2):
    """Graphs of the layers over micro-batches of several shapes; an error at a graph break."""
    torch._dynamo.reset()
    dynamo_counters.clear()
    prepared = patch.object(grpo, "prepare_layers", partial(grpo.prepare_layers, backend="aot_eager"))
    allowed = patch.dict(os.environ, TORCHDYNAMO_DISABLE="0")  # vLLM for CPUs is started without a compiler
    with prepared, allowed, torch._dynamo.config.patch(disable=False):
        sizes = (*TINY[:2], layers, *TINY[3:])
        policy, args = load_meta(sizes, gradient_checkpointing=recompute, compile=True)
        for shape in ((2, 4, 20, 30), (3, 4, 31, 17), (4, 1, 50, 9), (1, 7, 9, 40)):
            grpo.token_logps(policy, same_rows(*shape), args)[0].sum().backward()
    torch._dynamo.reset()
    return dynamo_counters["stats"]["unique_graphs"]


# ---- memory ------------------------------------------------------------------------------------------------
def on_gpu_memory(sizes, ranks, recompute, tokens=8192):
    """GiB of a rank at rest, and at the peak of an update in which gradients are already there.

    The blocks are alike, so three and four of them give the memory of all. Which moment has the peak may
    change with their number: the end of the forward pass, the backward pass of a block, or what follows.
    """
    three, four = (count_memory((*sizes[:2], n, *sizes[3:]), ranks, recompute, tokens) for n in (3, 4))
    rest, *peaks = (b + (sizes[2] - 4) * (b - a) for a, b in zip(three, four))
    return rest / GIB, max(peaks) / GIB


def count_memory(sizes, ranks, recompute, tokens):
    """Bytes at rest, and at the peaks of the forward pass, of a block's backward pass and of all."""
    length = tokens // 16
    rows = same_rows(1, 15, tokens - 15 * length, length)
    with (
        world(ranks) as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
        tempfile.TemporaryDirectory() as out,
    ):
        args = make_args(sizes, out, gradient_checkpointing=recompute, max_tokens_per_microbatch=tokens)
        policy = load(args, mesh)
        optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
        for p in policy.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        tracker = FSDPMemTracker(policy, optimizer)
        with tracker:
            grpo.token_logps(policy, rows, args)[0].sum().backward()
        peaks = defaultdict(int)
        for module, stats in tracker.memory_tracking.items():
            for moment, snapshots in stats.snapshots.items():
                peak = max(of_device(snapshot)["Total"] for snapshot in snapshots)
                peaks[module is policy, moment.name] = max(peaks[module is policy, moment.name], peak)
        end = {str(kind): n for kind, n in of_device(tracker.get_tracker_snapshot("current")).items()}
        whole = of_device(tracker.get_tracker_snapshot("peak"))["Total"]
    rest = end["Total"] - end["_FSDPRefType.SHARDED_GRAD"]
    return rest, peaks[True, "PEAK_FW"], peaks[False, "PEAK_BW"], whole


def of_device(snapshot):
    """A snapshot of FSDPMemTracker has bytes by device; there is one."""
    [bytes_by_kind] = snapshot.values()
    return bytes_by_kind


# ---- the table ---------------------------------------------------------------------------------------------
def for_each(count, form):
    """A count for each kind of recomputation, as words."""
    return ", ".join(f"{recompute} {count(recompute):{form}}" for recompute in RECOMPUTE)


def lines():
    """What is counted, and its value, one after another."""
    size = gpu_memory.SIZES["7B"]
    with world(1):
        for name, rows in {"gpu_check's lengths": gpu_check_rows, "a long tail": long_tail_rows}.items():
            found = [micro_batches(*rows(), ranks) for ranks in (1, 8)]
            words = [f"{number}, {fill:.0%} full, {more:.2f}" for number, fill, more in found]
            yield f"micro-batches and tokens over the fewest, {name}, 1 GPU; 8 GPUs", "; ".join(words)
        yield "FLOPs per token over N, 7B", for_each(partial(flops_a_token, size), ".2f")
        costs = {recompute: update_costs(recompute) for recompute in RECOMPUTE}
        each, step, layer = costs["full"]
        yield "operators a layer and micro-batch", for_each(lambda recompute: costs[recompute][2], ".0f")
        yield "operators a micro-batch besides its layers", f"{each['operators'] - 2 * layer:.0f}"
        copies = f"{each['copies']:.0f}, of them wait {each['pageable']:.0f}"
        yield "copies to the GPU a micro-batch", copies
        yield "other waits for the GPU: a micro-batch, a step", f"{each['waits']:.0f}, {step['waits']:.0f}"
        yield "graphs of compiled layers, without a break", for_each(compilations, "d")
    weights, collectives, mappings = sync_costs(size)
    yield "a sync of 7B: weights, collectives, mappings of names", f"{weights}, {collectives}, {mappings}"
    for name in ("7B", "14B", "32B"):
        words = []
        for ranks in (1, 8, 16):
            _, peak = on_gpu_memory(gpu_memory.SIZES[name], ranks, "full")
            _, formula, _ = gpu_memory.memory(gpu_memory.qwen2(name), ranks)
            words.append(f"{peak:.1f} ({formula:.1f})")
        yield f"GiB of {name} in an update (by gpu_memory.py), 1, 8, 16 GPUs", ", ".join(words)
    peak = lambda recompute: on_gpu_memory(gpu_memory.SIZES["32B"], 16, recompute)[1]
    yield "GiB of 32B in an update, 16 GPUs", for_each(peak, ".1f")


def main():
    print("| Counted | Value |\n|---|---|")
    for line in lines():
        print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    command_line(main)
