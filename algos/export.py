"""The weights of a trainer's checkpoint as a Hugging Face directory that transformers and vLLM load.

For checkpoints without weights in hf/ (`--no-save_hf`), and to add LoRA adapters to their model. One process,
no GPU; the checkpoint may come from any number of ranks. Of a PPO run it takes the actor: the critic is of
use only to go on with the run.

Command:    python algos/export.py runs/grpo/checkpoints/latest models/mine
Docs: docs/distributed.md
"""

import json
import os
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.arguments import parse


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[str]
    """A run's directory (its latest checkpoint) or one of its checkpoints."""
    output: tyro.conf.Positional[str]
    """Directory to write; it must not exist."""
    merge_lora: bool = False
    """Add LoRA adapters to the weights of their model; else they are written as peft loads them."""
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; None: that in which the model came. Adapters alone stay float32."""


if __name__ == "__main__":
    flags = parse(Args)  # before the libraries below are loaded: a wrong flag is answered at once

import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from data_prep.atomic import replacing
from data_prep.images import auto_class, load_processor


def read_weights(directory):
    """{name: tensor} of the model in a directory of torch.distributed.checkpoint."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
    known = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    [prefix, *_] = [p for p in ("model.actor.", "model.") if any(name.startswith(p) for name in known)]
    entries = {name: entry for name, entry in known.items() if name.startswith(prefix)}
    weights = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(weights, checkpoint_id=directory, no_dist=True)
    return {name.removeprefix(prefix): weight for name, weight in weights.items()}


def scores(weights):
    """Whether they are a reward model's: of rm.py."""
    return not weights.keys().isdisjoint(("score.weight", "score/weight"))


def full_model(weights, hf):
    """The model that hf/ describes, with these weights."""
    config = AutoConfig.from_pretrained(hf)
    auto = AutoModelForSequenceClassification if scores(weights) else auto_class(config)
    lm = auto.from_config(config, dtype=torch.float32)
    lm.load_state_dict(weights)
    return lm


def folded(weights):
    """LoRA's matrices, of AdaLoRA's: E goes into B."""
    parts = {name: w for name, w in weights.items() if name.endswith("/weight")}
    scale = lambda name, w: w * weights[name.replace("lora_B/weight", "lora_E")] if "lora_B" in name else w
    return {name: scale(name, w) for name, w in parts.items()}


def adapters(weights, run):
    """peft's configuration and names for the adapters of a trainer, of rm.py with their head."""
    names = run["lora_target_modules"]
    targets = "all-linear" if names == ["all-linear"] else names
    rank = next(len(w) for name, w in weights.items() if name.endswith("lora_A/weight"))
    sizes = dict(r=rank, lora_alpha=run["lora_alpha"], target_modules=targets)
    head = dict(task_type="SEQ_CLS", modules_to_save=["score"])
    task = head if scores(weights) else dict(task_type="CAUSAL_LM")
    config = LoraConfig(**sizes, **task, base_model_name_or_path=run["model"])
    return config, {f"base_model.model.{name.replace('/', '.')}": w for name, w in weights.items()}


def merged_model(weights, run):
    """The model that the adapters were trained on, with them in its weights."""
    config, state = adapters(weights, run)
    lm = AutoModelForCausalLM.from_pretrained(run["model"], dtype=torch.float32)
    lm = get_peft_model(lm, config)
    set_peft_model_state_dict(lm, state)
    return lm.merge_and_unload()


def main(args):
    root = Path(args.checkpoint)
    found = [path for path in (root, root / "checkpoints/latest") if (path / "dcp/.metadata").is_file()]
    if not found:
        sys.exit(f"error: {root}: no checkpoint of a trainer, it has no dcp/ and no checkpoints/latest/dcp/")
    if os.path.lexists(args.output):
        sys.exit(f"error: {args.output} is there already: choose another directory, or remove it")
    checkpoint = found[0].resolve()
    try:
        run = json.loads((checkpoint.parents[1] / "args.json").read_text())
        with_lora = run.get("lora_rank", 0) > 0
        if args.merge_lora and not with_lora:
            raise ValueError(f"--merge_lora: {checkpoint} has no adapters, the run was without --lora_rank")
        weights = read_weights(checkpoint / "dcp")
        if run.get("lora_kind") == "adalora":
            weights = folded(weights)
        if args.merge_lora and scores(weights):  # whose pad token only rm.py knows
            raise ValueError(f"{checkpoint} is a reward model: go on with its run by rm.py --merge_lora")
        with replacing(args.output) as new:
            load = AutoTokenizer.from_pretrained if with_lora else load_processor
            load(checkpoint / "hf").save_pretrained(new)
            if with_lora and not args.merge_lora:
                config, state = adapters(weights, run)
                config.save_pretrained(new)
                save_file(state, new / "adapter_model.safetensors")
            else:
                base = run["model"] if with_lora else checkpoint / "hf"
                dtype = AutoConfig.from_pretrained(base).dtype or torch.float32  # in which it came
                lm = merged_model(weights, run) if with_lora else full_model(weights, base)
                lm.to(getattr(torch, args.save_dtype) if args.save_dtype else dtype).save_pretrained(new)
            for source in (run["model"], checkpoint / "hf"):  # it names the tokens that end a response
                with suppress(OSError):
                    GenerationConfig.from_pretrained(source).save_pretrained(new)
    except dcp.CheckpointException as error:
        causes = "; ".join(" ".join(str(cause).split()) for cause, _ in error.failures.values())
        sys.exit(f"error: {checkpoint} is damaged: {causes}")
    except (ValueError, OSError, EOFError, SafetensorError) as error:
        sys.exit("error: " + " ".join(str(error).split()))
    print(f"{args.output}: {sum(weight.numel() for weight in weights.values()):,} weights of {checkpoint}")


if __name__ == "__main__":
    main(Args(**flags))
