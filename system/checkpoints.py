"""What a checkpoint holds, how it is written, and how a run is loaded from one."""

import json
import shutil
import sys

import numpy as np
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state

from system.arguments import fail
from system.families import add_older_names, save_tokenizer
from system.files import share_weights, steps_in, to_disk
from system.ranks import of_first

TRAINED = dcp_state.StateDictOptions(ignore_frozen_params=True, strict=False)


def checkpointed(models, optimizers):
    """What dcp/ holds: the optimizers' state and what they train, with LoRA the adapters alone.

    models: {directory in the checkpoint: model}.
    """
    module = nn.ModuleDict(models)
    model, optim = dcp_state.get_state_dict(module, optimizers, options=TRAINED)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}  # tied weights once
    model = {name: x for name, x in model.items() if name in trained or ".lora_" in name}
    return dict(model=model, optimizer=optim)


def read_state(path):
    """The trainer's state of a checkpoint, with the number of its step."""
    try:
        state = json.loads((path / "trainer_state.json").read_text())
        step = int(state["step"])
        if step < 0:
            raise ValueError(f"step {step}")
        return dict(state, step=step)
    except (OSError, ValueError, TypeError, LookupError, OverflowError) as error:
        damaged(path, " ".join(str(error).split()))


def load_checkpoint(path, models, optimizers):
    """Load weights and optimizers of a checkpoint, at any world size."""
    content = checkpointed(models, optimizers)
    try:
        dcp.load(content, checkpoint_id=path / "dcp")
    except (dcp.CheckpointException, OSError, ValueError) as error:
        damaged(path, in_one_line(error))
    states = dict(model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    dcp_state.set_state_dict(nn.ModuleDict(models), optimizers, **states, options=TRAINED)


def damaged(path, why):
    remedy = f"point {path.parent / 'latest'} at an earlier step, or remove {path.name}"
    fail(f"{path} is damaged, or of another model ({why}): {remedy}")


def write_checkpoint(out, model, keep, state, models, optimizers, tokenizer, whole_weights, ends=()):
    """Write out/checkpoints/step_N -> its path; `latest` is moved last, so a kill leaves the last good one.

    model: the name whose other files come along. keep: the number of newest checkpoints, 0: all.
    ends: tokens that end turns, besides EOS.
    """
    root = out / "checkpoints"
    path = root / f"step_{state['step']:06d}"
    rank0 = dist.get_rank() == 0
    content = checkpointed(models, optimizers)
    weights = {name: {} for name in models}
    for name, lm in models.items():
        for key, x in whole_weights(lm, torch.float32):
            if rank0:  # it also held the whole model when it was loaded
                dtype = lm.file_dtypes.get(key, lm.config.dtype) if x.is_floating_point() else x.dtype
                weights[name][key] = x.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
    problem = None
    try:
        if rank0:
            remove(path)  # left by an earlier attempt
        dist.barrier()
        dcp.save(content, checkpoint_id=path / "dcp")  # all ranks fail, or none
        if rank0:
            for name, lm in models.items():
                write_hf(path / name, lm, weights[name], {tokenizer.eos_token_id, *ends})
            save_tokenizer(tokenizer, model, path / "hf")
            # the last file: a directory without it is unfinished
            (path / "trainer_state.json").write_text(json.dumps(state))
            to_disk(path)
            point_latest_at(path, keep)
    except (dcp.CheckpointException, OSError, safetensors.SafetensorError) as error:
        problem = in_one_line(error)
    problem = of_first(problem)
    if problem:
        free = f"{shutil.disk_usage(root.parent).free / 2**30:.1f} GiB are free"
        fail(f"{path} cannot be written: {problem}; {free}")
    return path


def in_one_line(error):
    """An error of torch.distributed.checkpoint, which has a cause for each rank, or of this rank's files."""
    by_rank = getattr(error, "failures", {dist.get_rank(): (error, None)})
    return "; ".join(f"rank {rank}: {' '.join(str(cause).split())}" for rank, (cause, _) in by_rank.items())


def write_hf(directory, lm, weights, ends=()):
    """Whole weights and their configuration as a Hugging Face directory, with the tokens that end turns."""
    lm.config.architectures = [type(lm).__name__]  # the config of a new critic names a causal LM
    lm.config.save_pretrained(directory)
    add_older_names(directory / "config.json")
    if lm.can_generate():
        sampling = lm.generation_config  # as it was read
        sampling.eos_token_id = sorted({*ends, *np.ravel(sampling.eos_token_id).tolist()} - {None})
        sampling.to_json_file(directory / "generation_config.json")
    save_torch_state_dict(weights, directory)
    share_weights(directory)


def point_latest_at(path, keep):
    """Point `latest` at a checkpoint, then remove all but the newest `keep`."""
    root = path.parent
    link = path.parent / ".latest"
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    latest = root / "latest"
    if latest.is_dir() and not latest.is_symlink():  # of a run that was copied with its links followed
        print(f"{latest} is a copy of a checkpoint: it is a link again", file=sys.stderr)
        latest.rename(root / ".copy")
        shutil.rmtree(root / ".copy")
    link.replace(latest)
    steps = steps_in(root)
    done = steps[: steps.index(path) + 1]
    for old in done[:-keep] if keep else ():
        remove(old)


def remove(checkpoint):
    """Delete a checkpoint; its last file first: one that is half deleted counts as unfinished."""
    if checkpoint.exists():
        (checkpoint / "trainer_state.json").unlink(missing_ok=True)
        shutil.rmtree(checkpoint)
