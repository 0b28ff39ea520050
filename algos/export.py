"""A trainer's checkpoint for other programs: its model in another dtype, or its LoRA adapters for peft.

Every checkpoint has its whole model in hf/ already, with LoRA the merged one, which transformers and vLLM
load as it is. One process, no GPU; the checkpoint may come from any number of ranks.

Commands:   python algos/export.py runs/grpo models/mine --save_dtype bfloat16
            python algos/export.py runs/sft models/adapters --adapters
Docs: docs/guides/export-quantize.md
"""

import json
import os
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from system.arguments import parse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")

import tyro


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[str]
    """A run's directory (its latest checkpoint) or one of its checkpoints."""
    output: tyro.conf.Positional[str]
    """Directory to write; it must not exist."""
    adapters: bool = False
    """Write LoRA adapters as peft loads them, in float32, and not the model."""
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Without --adapters: dtype of the model's weights; None: the dtype of hf/."""


if __name__ == "__main__":
    flags = parse(Args)  # before the libraries below are loaded: a wrong flag is answered at once

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from system.files import replacing


def read_weights(directory):
    """{name: tensor} of what a run trained, from a directory of torch.distributed.checkpoint."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
    entries = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    entries = {name: entry for name, entry in entries.items() if name.startswith("model.hf.")}
    weights = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(weights, checkpoint_id=directory, no_dist=True)
    return {name.removeprefix("model.hf."): weight for name, weight in weights.items()}


def save_adapters(weights, run, hf, directory):
    """Write LoRA matrices under peft's names; AdaLoRA as LoRA, with E in B. With rm.py's head.

    hf: the merged model, whose tokenizer, chat template and end tokens come along.
    """
    from peft import LoraConfig  # here, because it takes two seconds

    shutil.copytree(hf, directory, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    base = Path(run["model"])
    if (base.resolve().parent / "trainer_state.json").exists():
        run["model"] = str(base.resolve())
        print(f"note: the base is a checkpoint, {base.resolve()}, which its run may delete", file=sys.stderr)
    state = {}
    for name, weight in weights.items():
        if name.endswith("lora_B.default.weight"):
            scale = weights.get(name.replace("lora_B.default.weight", "lora_E"))  # AdaLoRA
            weight = weight if scale is None else weight * scale
        if name.endswith(".default.weight") or name == "score.weight":
            state[f"base_model.model.{name.replace('.default.', '.')}"] = weight.contiguous()
    head = dict(task_type="SEQ_CLS", modules_to_save=["score"])
    config = LoraConfig(
        r=next(len(weight) for name, weight in state.items() if name.endswith("lora_A.weight")),
        lora_alpha=run["lora_alpha"],
        target_modules=sorted({name.partition(".lora_")[0] for name in weights if ".lora_A." in name}),
        base_model_name_or_path=run["model"],
        **(head if "score.weight" in weights else dict(task_type="CAUSAL_LM")),
    )
    config.save_pretrained(directory)
    save_file(state, directory / "adapter_model.safetensors")


def save_model(hf, dtype, directory):
    """Write the model in hf/ again, in this dtype -> its number of weights.

    Weights of another dtype than the model's, as of experts' biases, keep it.
    """
    shutil.copytree(hf, directory)
    config = json.loads((hf / "config.json").read_text())
    dtypes = [x.dtype for path in hf.glob("*.safetensors") for x in load_file(path).values()]
    own = max(set(dtypes), key=dtypes.count)  # not of the config, which may say another
    count = size = 0
    for path in directory.glob("*.safetensors"):
        weights = load_file(path)
        if dtype:
            for name, weight in weights.items():
                if weight.dtype == own:
                    weights[name] = weight.to(getattr(torch, dtype))
            save_file(weights, path, dict(format="pt"))
        count += sum(weight.numel() for weight in weights.values())
        size += sum(weight.nbytes for weight in weights.values())
    if dtype:
        for part in (config, *config.values()):  # a model of images and text has a config for each half
            if isinstance(part, dict) and "dtype" in part:
                part["dtype"] = dtype
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (index := directory / "model.safetensors.index.json").exists():
        shards = json.loads(index.read_text())
        shards["metadata"]["total_size"] = size
        index.write_text(json.dumps(shards, indent=2) + "\n")
    return count


def main(args):
    root = Path(args.checkpoint)
    found = [path for path in (root, root / "checkpoints/latest") if (path / "dcp/.metadata").is_file()]
    if not found:
        sys.exit(f"error: {root}: no checkpoint of a trainer, it has no dcp/ and no checkpoints/latest/dcp/")
    if os.path.lexists(args.output):
        sys.exit(f"error: {args.output} exists: choose another directory, or remove it")
    checkpoint = found[0].resolve()
    try:
        run = json.loads((checkpoint.parent.parent / "args.json").read_text())
        if args.adapters and not run.get("lora_rank"):
            raise ValueError(f"--adapters: {checkpoint} has none, the run was without --lora_rank")
        with replacing(args.output) as new:
            if args.adapters:
                weights = read_weights(checkpoint / "dcp")
                save_adapters(weights, run, checkpoint / "hf", new)
                count = sum(weight.numel() for weight in weights.values())
            else:
                count = save_model(checkpoint / "hf", args.save_dtype, new)
    except dcp.CheckpointException as error:
        causes = "; ".join(" ".join(str(cause).split()) for cause, _ in error.failures.values())
        sys.exit(f"error: {checkpoint} is damaged: {causes}")
    except (ValueError, OSError, EOFError, SafetensorError) as error:
        sys.exit("error: " + " ".join(str(error).split()))
    print(f"{args.output}: {count:,} weights of {checkpoint}")


if __name__ == "__main__":
    main(Args(**flags))
