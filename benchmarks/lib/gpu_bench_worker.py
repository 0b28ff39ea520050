"""The parts of gpu_bench.py that run no script: DIRECTORY TABLE END training|sampling.

Each is a process, because a sampler wants an empty GPU. END: when its time is over.
"""

import gc
import statistics
import sys
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import grpo
from algos.variants import load_loss
from benchmarks.gpu_bench import CUDA, MODELS, ROWS, Budget
from benchmarks.gpu_check import write_random
from system.batches import distribute, join, micro_batches, padded
from system.log_probs import CHUNK, log_probs
from system.metrics import matmul_speed, speed_metrics
from system.ranks import leave, setup_distributed

# FLOP/s of products in bfloat16 by the data sheet, without sparsity
DATA_SHEET = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
BUDGETS = (8192, 16384) if CUDA else (128, 256)  # tokens of a micro-batch
RECOMPUTE = "full", "selective", "none"
DTYPE = torch.bfloat16 if CUDA else torch.float32
GIB = 2**30


def wait():
    if CUDA:
        torch.cuda.synchronize()


def clock(function):
    """Seconds of a call, until the GPU has done it."""
    wait()
    begin = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - begin


def seconds(function, repeats=3):
    """Median seconds of a call, after a first one that does not count."""
    function()
    return statistics.median(clock(function) for _ in range(repeats))


def empty():
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak():
    return f"peak {torch.cuda.max_memory_allocated() / GIB:.1f} GiB" if CUDA else "peak: needs CUDA"


def make_args(model, **flags):
    """Arguments of grpo.py, and its loss."""
    args = grpo.Args(model=str(model), train_files=(), output_dir="", **flags)
    args, token_loss = load_loss(args, clip=grpo.policy_loss)
    return args, partial(grpo.actor_loss, args, token_loss)


def make_rows(vocabulary):
    """Rows of one step."""
    prompts, group, prompt_length, length = ROWS[CUDA]
    rng, rows = np.random.default_rng(0), []
    for number in range(prompts * group):
        g = number // group
        row = dict(group=g, prompt_length=prompt_length, length=length, mask_t=np.ones(length, bool))
        row["prompt_ids"] = [7 + g % (vocabulary - 7)] * prompt_length
        row["response_ids"] = rng.integers(7, vocabulary, length).astype(np.int32)
        row["adv_t"] = np.full(length, 1.0 - 2 * (number % 2), np.float32)
        rows.append(row | dict(rollout_logp_t=np.full(length, -9.0, np.float32)))
    return rows


def speed(policy, args, rows, measured):
    """Tokens/s with each response's prompt, MFU against a measured product and against the data sheet."""
    lengths = [row["prompt_length"] + row["length"] for row in rows]
    trained = sum(row["length"] for row in rows)
    trained += sum({row["group"]: row["prompt_length"] for row in rows}.values())
    timing = dict(step=measured, update_actor=measured)
    mfu = speed_metrics(lengths, policy, timing, args.compute_dtype, trained)["perf/mfu/actor"]
    words = f"{sum(lengths) / measured:.0f} tokens/s, MFU {mfu:.3f}"
    for name, flops in DATA_SHEET.items():
        if CUDA and name in torch.cuda.get_device_name():
            product = matmul_speed(args.compute_dtype)
            words += f", {mfu * product / flops:.3f} by the data sheet"
    return words


# ---- training ----------------------------------------------------------------------------------------------
class Training:
    """Parts that need no sampler."""

    def __init__(self, budget, directory):
        self.budget, self.directory = budget, directory
        self.device, self.mesh = setup_distributed()
        self.sizes = MODELS[CUDA]["short"]
        self.rows = make_rows(self.sizes[-1])
        grpo.families.from_files = cache(grpo.families.from_files)  # read once

    def write(self):
        """Random weights of both models."""
        for name, sizes in MODELS[CUDA].items():
            took = clock(lambda: write_random(sizes, self.directory / name, device=self.device))  # noqa: B023
            empty()
            self.budget.say(f"write the {name} model, {sizes[2]} layers", f"{took:.1f} s")

    def update(self, recompute, compiled):
        """Updates with each budget of tokens."""
        group = dict(ppo_mini_batch_size=ROWS[CUDA][0], group_size=ROWS[CUDA][1])
        flags = group | dict(gradient_checkpointing=recompute, compile=compiled)
        args, loss = make_args(self.directory / "short", **flags)
        policy = grpo.load_model(args, self.mesh, self.device, None, grpo.adapters_of(args))
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-9)  # Adam's moments would leave no room
        for tokens in BUDGETS:
            name = f"update, recompute {recompute}, {'compiled' if compiled else 'eager'}, {tokens} tokens"
            now = replace(args, max_tokens_per_microbatch=tokens)
            self.budget.run(name, 6, self.one_budget, name, policy, optimizer, loss, now)

    def one_budget(self, name, policy, optimizer, loss, args):
        empty()
        measured = seconds(lambda: step(policy, optimizer, loss, args, self.rows), repeats=1)
        budget = args.max_tokens_per_microbatch
        [(sequences, _)], _, _ = distribute(self.rows, 1, budget, policy.packed)
        batches = [*micro_batches(policy, sequences, budget)]
        words = f"{measured:.3f} s, {speed(policy, args, self.rows, measured)}, {peak()}"
        self.budget.say(name, f"{words}; micro-batches: {len(batches)}")

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=DTYPE).requires_grad_()

    def head(self):
        """Log-probs of a micro-batch, forward and backward, and the four products in that."""
        h, n, vocabulary = self.sizes[0], BUDGETS[0], self.sizes[-1]
        hidden, weight = self.random(n, h), self.random(vocabulary, h)
        target = torch.arange(n, device=self.device) % vocabulary

        def whole():
            logp = log_probs(hidden, weight, target)[0]
            torch.autograd.grad(logp.sum(), (hidden, weight))

        @torch.no_grad()
        def products():
            for part in hidden.split(CHUNK):
                logits = part @ weight.t()
                part @ weight.t(), logits @ weight, logits.t() @ part

        words = f"{1000 * seconds(whole):.1f} ms, its products {1000 * seconds(products):.1f} ms"
        self.budget.say(f"output layer, {n} tokens, forward and backward", words)

    def plain(self):
        """Forward and backward of transformers' model on the same rows, padded; nothing is computed twice."""
        options = dict(dtype=DTYPE, attn_implementation="sdpa")
        lm = AutoModelForCausalLM.from_pretrained(self.directory / "short", **options).to(self.device)
        length = self.rows[0]["prompt_length"] + self.rows[0]["length"]
        at_once = max(BUDGETS[0] // length, 1)

        def both():
            for i in range(0, len(self.rows), at_once):
                rows = self.rows[i : i + at_once]
                responses = [row["response_ids"] for row in rows]
                inputs, where = padded([row["prompt_ids"] for row in rows], responses)
                ids, target = inputs["input_ids"].to(self.device), join(responses).to(self.device)
                hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
                logits = lm.get_output_embeddings()(hidden.flatten(0, 1)[where.to(self.device)])
                nn.functional.cross_entropy(logits.float(), target).backward()
            lm.zero_grad()

        empty()
        took = seconds(both, repeats=1)
        words = f"{took:.3f} s, {len(self.rows) * length / took:.0f} tokens/s, {peak()}"
        self.budget.say("plain transformers, forward and backward", words)


def step(policy, optimizer, loss, args, rows):
    """An update; the rows get no old log-probs."""
    rows = [dict(row) for row in rows]
    mini_batches, _, _ = distribute(rows, 1, args.max_tokens_per_microbatch, policy.packed)
    grpo.update_actor(policy, optimizer, mini_batches, loss, args)


def training(budget, directory):
    parts = Training(budget, directory)
    budget.run("write models", 35, parts.write)
    for recompute in RECOMPUTE:
        budget.run(f"update, recompute {recompute}, eager", 16, parts.update, recompute, False)
        empty()
    for recompute in ("selective", "full", "none") if CUDA else ():  # 45 of it are for what follows
        budget.run(f"update, recompute {recompute}, compiled", 80 + 45, parts.update, recompute, True)
        empty()
    if not CUDA:
        budget.say("update, compiled", "needs CUDA")
    budget.run("output layer", 8, parts.head)
    empty()
    budget.run("plain transformers, forward and backward", 20, parts.plain)
    leave()


# ---- sampling ----------------------------------------------------------------------------------------------
def sampling(budget, directory):
    """A sampler next to a trainer with adapters: what wakes, moves and sleeps, three times each."""
    device, mesh = setup_distributed()
    args, _ = make_args(directory / "deep", lora_rank=16, max_prompt_length=256, max_response_length=256)
    begin = time.perf_counter()
    engine = grpo.build_engine(args, device)
    budget.say("sampler, start", f"{time.perf_counter() - begin:.1f} s")
    policy = grpo.load_model(args, mesh, device, None, grpo.adapters_of(args))
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True)
    weights = sum(p.numel() for name, p in policy.lm.named_parameters() if ".lora_" not in name)
    parts = {
        "wake, weights": lambda: engine.wake_up(tags=["weights"]),
        "sync": lambda: grpo.sync_weights(engine, policy.lm, sees_images=False),
        "wake, KV cache": lambda: engine.wake_up(tags=["kv_cache"]),
        "sleep": lambda: engine.sleep(level=2),
    }
    sizes = dict(sync=weights * dict(float32=4, bfloat16=2)[args.compute_dtype])
    for to in ("cpu", "cuda") if CUDA else ():
        parts[f"move the trainer to {to}"] = lambda to=to: grpo.move(to, [policy], optimizer)
        sizes[f"move the trainer to {to}"] = sum(p.to_local().nbytes for p in policy.parameters())
    measured = {name: [] for name in parts}
    for _ in range(3):
        for name, part in parts.items():
            measured[name].append(clock(part))
    for name, times in measured.items():
        words = ", ".join(f"{x:.3f}" for x in times) + " s"
        words += f", at best {sizes[name] / min(times) / 1e9:.3g} GB/s" if name in sizes else ""
        budget.say(f"sampler, {name}", words)
    if not CUDA:
        budget.say("sampler, move the trainer", "needs CUDA")
    cache_config = engine.vllm_config.cache_config
    tokens = cache_config.num_gpu_blocks * cache_config.block_size
    budget.say("sampler, KV cache", f"{tokens} tokens")
    leave()  # here, because an engine takes the process group with it


def main(directory, table, end, name):
    part = dict(training=training, sampling=sampling)[name]
    part(Budget(table, end), Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
