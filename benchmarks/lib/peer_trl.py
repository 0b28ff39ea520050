"""TRL's GRPOTrainer or SFTTrainer on the rows of a benchmark; peer.py starts it.

    pip install --no-deps -r requirements-bench.txt

TRL's defaults, except for what makes the work the same as ours: float32 on a CPU, no gradient checkpointing.
OUTPUT_DIR/metrics.jsonl gets a line after every step.
"""

import json
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
import torch
import trl
import tyro
from datasets import Dataset
from transformers import TrainerCallback


@dataclass
class Args:
    model: str
    """Hugging Face directory of the model."""
    train_files: str
    """Parquet file of one step's rows."""
    output_dir: Path
    """Directory for metrics.jsonl."""
    algo: Literal["grpo", "sft"]
    """Which trainer."""
    total_steps: int
    """Optimizer steps."""
    per_device_batch: int
    """Rows of a forward pass."""
    accumulation: int
    """Forward passes of an optimizer step."""
    max_length: int
    """Longest sequence, in tokens."""
    group_size: int
    """Responses to each prompt."""
    response_length: int
    """Longest response, in tokens."""
    temperature: float = 1.0
    """Sampling temperature."""
    vllm: bool = False
    """Sample with vLLM in the same process."""
    packing: bool = False
    """Pack SFT rows into sequences of max_length."""


class Stamp(TrainerCallback):
    """A line in metrics.jsonl after every step, with what TRL has logged and its seconds so far."""

    def __init__(self, path):
        self.path = path

    def on_train_begin(self, *_, **__):
        self.begin = time.perf_counter()

    def on_log(self, args, state, control, logs, **_):
        if state.is_world_process_zero and state.global_step and "train_runtime" not in logs:
            line = dict(logs, step=state.global_step, seconds=time.perf_counter() - self.begin)
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def alternating(completions, **_):
    """Advantages that are not zero, whatever the model says."""
    return [float(i % 2) for i in range(len(completions))]


def keep_weights():
    """vLLM on a CPU packs the weights and drops them, and TRL's sync would fail."""
    os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm.model_executor.layers import utils

    def plain(layer, **_):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def sft_row(row):
    answer = dict(role="assistant", content=row["extra_info"]["answer"])
    return dict(prompt=row["prompt"], completion=[answer])


def main():
    args = tyro.cli(Args)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    rows = pq.read_table(args.train_files).to_pylist()
    cuda = torch.cuda.is_available()
    common = dict(
        output_dir=args.output_dir,
        max_steps=args.total_steps,
        per_device_train_batch_size=args.per_device_batch,
        gradient_accumulation_steps=args.accumulation,
        gradient_checkpointing=False,
        bf16=cuda,
        use_cpu=not cuda,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs=dict(dtype="float32"),
    )
    if args.algo == "grpo":
        if args.vllm and not cuda:
            keep_weights()
        config = trl.GRPOConfig(
            **common,
            num_generations=args.group_size,
            max_completion_length=args.response_length,
            temperature=args.temperature,
            use_vllm=args.vllm,
            vllm_max_model_length=args.max_length,
        )
        trainer = partial(trl.GRPOTrainer, reward_funcs=alternating)
        rows = [dict(prompt=row["prompt"]) for row in rows]
    else:
        config = trl.SFTConfig(**common, packing=args.packing, max_length=args.max_length)
        trainer = trl.SFTTrainer
        rows = [sft_row(row) for row in rows]
    stamp = Stamp(args.output_dir / "metrics.jsonl")
    trainer(args.model, args=config, train_dataset=Dataset.from_list(rows), callbacks=[stamp]).train()


if __name__ == "__main__":
    main()
