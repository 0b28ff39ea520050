"""TRL's GRPOTrainer, SFTTrainer, RewardTrainer or DPOTrainer on the rows of a benchmark; peer.py starts it.

    pip install --no-deps -r requirements-bench.txt

TRL's defaults, but for what makes the work the same as ours: float32 on a CPU, no gradient checkpointing.
OUTPUT_DIR/metrics.jsonl gets a line after every step.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
import torch
import tyro
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.trainer import grpo_trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.talk_env import CALL
from envs.calculator import calculate


@dataclass
class Args:
    model: str
    """Hugging Face directory of the model."""
    train_files: str
    """Parquet file of one step's rows."""
    output_dir: Path
    """Directory for metrics.jsonl."""
    algo: Literal["grpo", "agent", "sft", "rm", "dpo"]
    """Which trainer."""
    total_steps: int
    """Optimizer steps."""
    per_device_batch: int
    """Rows of a forward pass."""
    accumulation: int
    """Forward passes of an optimizer step."""
    group_size: int = 4
    """Responses to each prompt."""
    response_length: int = 64
    """Longest response, in tokens."""
    turns: int = 1
    """Turns of an agent, which calls the tool after each but the last."""
    temperature: float = 1.0
    """Sampling temperature."""
    vllm: bool = False
    """Sample with vLLM in the same process."""
    packing: bool = False
    """Pack SFT rows into sequences of max_length."""
    max_length: int = 512
    """Longest sequence, in tokens."""


class Stamp(TrainerCallback):
    """A line in metrics.jsonl after every step, with what TRL has logged and its seconds so far."""

    def __init__(self, path):
        self.path = path

    def on_train_begin(self, *_, **__):
        self.begin = time.perf_counter()

    def on_log(self, args, state, control, logs, **_):
        if state.is_world_process_zero and state.global_step and "train_runtime" not in logs:
            with self.path.open("a") as file:
                line = dict(logs, step=state.global_step, seconds=time.perf_counter() - self.begin)
                file.write(json.dumps(line) + "\n")


def alternating(completions, **_):
    """Advantages that are not zero, whatever the model says."""
    return [float(i % 2) for i in range(len(completions))]


def calling(tokenizer, parse):
    """TRL's parser of turns, but every turn is the same call of the calculator."""
    call = tokenizer.encode(CALL + tokenizer.eos_token, add_special_tokens=False)
    return lambda tokenizer, ids, **more: parse(tokenizer, call, **more)


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
    stamp = Stamp(args.output_dir / "metrics.jsonl")
    if args.algo == "sft":
        columns = [
            dict(prompt=r["prompt"], completion=[dict(role="assistant", content=r["extra_info"]["answer"])])
            for r in rows
        ]
        config = SFTConfig(**common, packing=args.packing, max_length=args.max_length)
        trainer = SFTTrainer(args.model, config, train_dataset=Dataset.from_list(columns), callbacks=[stamp])
    elif args.algo in ("rm", "dpo"):
        rows = Dataset.from_list([{name: r[name] for name in ("prompt", "chosen", "rejected")} for r in rows])
        common |= dict(max_length=args.max_length)
        if args.algo == "rm":
            make, config = RewardTrainer, RewardConfig(**common)
        else:
            make, config = DPOTrainer, DPOConfig(**common, precompute_ref_log_probs=True)
        trainer = make(args.model, args=config, train_dataset=rows, callbacks=[stamp])
    else:
        if args.vllm and not cuda:
            os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
            from vllm.model_executor.layers import utils

            # or it packs the weights and drops them, and TRL's sync fails
            plain = lambda layer, **_: setattr(layer, "cpu_linear", torch.nn.functional.linear)
            utils.dispatch_cpu_unquantized_gemm = plain
        agent = args.algo == "agent"
        if agent:
            tokenizer = AutoTokenizer.from_pretrained(args.model)
            grpo_trainer.parse_response = calling(tokenizer, grpo_trainer.parse_response)
        config = GRPOConfig(
            **common,
            max_tool_calling_iterations=args.turns - 1 if agent else None,
            num_generations=args.group_size,
            max_completion_length=args.response_length,
            temperature=args.temperature,
            use_vllm=args.vllm,
            vllm_max_model_length=args.max_length,
        )
        trainer = GRPOTrainer(
            args.model,
            reward_funcs=alternating,
            tools=[calculate] if agent else None,
            args=config,
            train_dataset=Dataset.from_list([dict(prompt=row["prompt"]) for row in rows]),
            callbacks=[stamp],
        )
    trainer.train()


if __name__ == "__main__":
    main()
