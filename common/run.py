"""A run of a trainer: its opening, its log (terminal, log.txt, metrics.jsonl, trackers) and its end."""

import atexit
import fcntl
import json
import math
import os
import platform
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import psutil
import torch
import torch.distributed as dist
from tqdm import tqdm

from common.arguments import MODELS
from common.files import file_digest, json_line, replacing, weights_digest

# files that decide what is learned
FILES = "train_files", "reward_fn", "env", "chat_template", "policy_loss", "adv_estimator"
MAY_CHANGE = set(  # when a run resumes; all other flags must agree. Of weights and files the content counts
    "model critic_model reward_model teacher output_dir resume lr critic_lr lr_schedule warmup_steps"
    " decay_steps total_epochs total_steps save_freq test_freq keep_checkpoints tracker val_files"
    " val_group_size val_temperature rollout_dump hsdp_replicas tp_size sp_size sp_attention packing offload"
    " gradient_checkpointing compile max_tokens_per_microbatch gpu_memory_utilization attn_implementation"
    " liger reward_timeout_s env_timeout_s max_gen_batches".split()
)
TOKENIZER = "tokenizer*", "chat_template*", "vocab.*", "merges.txt"  # its files
UNSAVED = []  # what writes the last whole step, until a checkpoint has it or the next update begins
HELD = {}  # locks of directories, until the process ends
DATA = set(  # may differ too where --resume PATH begins another run
    "train_files prompt_key response_key messages_key text_key chosen_key rejected_key seed reward_fn"
    " reward_weights env".split()
)


def fail(message):
    """Stop with one line. Every rank calls this at the same place; rank 0 speaks."""
    save_first()
    for bar in [*getattr(tqdm, "_instances", ())]:
        bar.close()  # the line is below it
    raise SystemExit(1 if int(os.environ.get("RANK", 0)) else f"error: {message}")


def save_first():
    """Before the run ends: write the last whole step, if no checkpoint has it and all ranks end together."""
    while UNSAVED:
        write, store = UNSAVED.pop(), dist.distributed_c10d._get_default_store()
        store.set(f"end of rank {dist.get_rank()}", "")
        try:
            store.wait([f"end of rank {rank}" for rank in range(dist.get_world_size())], timedelta(minutes=1))
            Logger.here.say(f"saved first: {write()}")
        except (Exception, SystemExit) as error:  # whatever it is, the run ends for another reason
            print(f"what was trained since the last checkpoint is lost: {error}", file=sys.stderr)


def stop_on_signals():
    """-> [the number of a SIGTERM or SIGINT, 0 until one comes]. A second one ends the process at once."""
    stop = [0]

    def end(number, _):
        stop[0] = number
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stop


def refuse(problems):
    """Stop with the first message of {message: condition} whose condition is true."""
    for message in [text for text, is_so in problems.items() if is_so][:1]:
        fail(message)


def open_run(args):
    """Check output_dir against the arguments -> the checkpoint to resume from, or None."""
    out, latest = Path(args.output_dir), Path(args.output_dir, "checkpoints/latest")
    real = lambda name: os.path.realpath(name) if os.path.isdir(name) else name
    for flag in MODELS:  # not by symbolic links, which may move, as `latest` of another run does
        if name := getattr(args, flag, None):
            setattr(args, flag, real(name) if isinstance(name, str) else (*map(real, name),))
    if args.tracker != "none" and not find_spec(args.tracker):
        fail(f"--tracker {args.tracker} is missing: pip install --no-deps -r requirements-extra.txt")
    hold(out, f"--output_dir {out}")
    known = digests(args)  # now, because a file may change during the run
    if (out / "args.json").exists():
        if args.resume == "never":
            fail(f"--output_dir {out} already holds a run: choose another, or resume it by --resume auto")
        changes = latest.exists() and differences(out / "args.json", args, MAY_CHANGE)
        if changes:  # without one there is nothing to go on from
            fail(f"--output_dir {out} holds a run with other arguments ({changes}): choose another")
    checkpoint = latest if latest.exists() else Path(args.resume)  # the same command resumes its own run
    if checkpoint != latest and args.resume in ("auto", "never"):
        return None
    if checkpoint != latest and not (checkpoint / "trainer_state.json").is_file():
        fail(f"--resume {args.resume}: not a checkpoint, it has no trainer_state.json")
    if checkpoint != latest and (checkpoint.resolve().parents[1] / "args.json").exists():
        if changes := differences(checkpoint.resolve().parents[1] / "args.json", args, MAY_CHANGE | DATA):
            fail(f"--resume {args.resume} is of a run with other arguments ({changes}): pass those")
        known = {flag: digest for flag, digest in known.items() if flag not in DATA}
    with suppress(OSError, ValueError):  # what is damaged, checkpoint or model, is refused when it is loaded
        saved = json.loads((checkpoint / "trainer_state.json").read_text()).get("digests", {})
        for flag, digest in known.items():
            if saved.get(flag, digest) != digest:
                what = f"--{flag} {vars(args)[flag]}" if flag in vars(args) else f"the {flag} of {args.model}"
                problem = f"{what} has another content than when {checkpoint} was written"
                fail(f"{problem}: put it back, or begin in another --output_dir by --resume {checkpoint}")
    return checkpoint.resolve()


def differences(path, args, may):
    """What differs between the arguments of a run and those of now, except flags that may."""
    saved, now = json.loads(path.read_text()), json.loads(json.dumps(asdict(args)))
    other = [k for k in saved if k not in may and k in now and saved[k] != now[k]]
    return "; ".join(f"--{k} {saved[k]} there, {now[k]} now" for k in other)


def hold(out, flag):
    """Stop if another process writes to this directory. A kill frees the lock; workers do not inherit it."""
    if int(os.environ.get("RANK", 0)) or out in HELD:
        return
    out.mkdir(parents=True, exist_ok=True)
    HELD[out] = file = (out / ".lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        fail(f"{flag} is in use by {file.read()}: wait for it, or choose another")
    except OSError:  # a file system without locks
        return
    file.truncate(0)
    print(f"process {os.getpid()} of {platform.node()}", end="", file=file, flush=True)


def digests(args):
    """{flag: digests} of the models and files that decide what a run learns; a checkpoint keeps them."""
    names = {flag: getattr(args, flag, None) or () for flag in (*MODELS, *FILES)}
    names = {flag: [x] if isinstance(x, str) else x for flag, x in names.items()}
    found = {flag: [*map(weights_digest, names[flag])] for flag in MODELS}
    tokenizer = sorted(str(path) for name in TOKENIZER for path in Path(args.model).glob(name))
    found["tokenizer"] = [*map(file_digest, tokenizer)]
    return found | {flag: [*map(file_digest, names[flag])] for flag in FILES}


def in_one_line(error):
    """An error of torch.distributed.checkpoint, which has a cause for each rank, or of this rank's files."""
    by_rank = getattr(error, "failures", {dist.get_rank(): (error, None)})
    return "; ".join(f"rank {rank}: {' '.join(str(cause).split())}" for rank, (cause, _) in by_rank.items())


def open_tracker(args, step):
    """-> a function of (metrics, step). What TensorBoard has of steps after `step` goes: they come again."""
    out = Path(args.output_dir)
    if args.tracker == "wandb":  # which reads WANDB_PROJECT, and WANDB_MODE=offline for no network
        import wandb

        name = out / "wandb.id"  # a resumed run continues in the same one
        if not name.exists():
            name.write_text(uuid4().hex[:8])
        own = dict(id=name.read_text(), resume="allow", config=asdict(args))
        return wandb.init(dir=out, name=out.name, **own).log
    if args.tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out / "tensorboard", purge_step=step + 1)

        def track(metrics, step):
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()  # it writes every two minutes, and not at exit

        return track
    return lambda metrics, step: None


class Logger:
    """Terminal, log.txt, metrics.jsonl and the tracker of rank 0; the other ranks are silent."""

    here = None  # the one of this process

    def __init__(self, args, step, total_steps):
        sys.excepthook = lambda *error: (save_first(), sys.__excepthook__(*error))
        Logger.here = self
        self.out, self.rank0 = Path(args.output_dir), dist.get_rank() == 0
        self.bar = tqdm(total=total_steps, initial=step, desc="step", disable=not self.rank0)
        if not self.rank0:
            return
        for checkpoint in self.out.glob("checkpoints/step_*"):
            if not (checkpoint / "trainer_state.json").exists():  # its last file: a kill left it unfinished
                shutil.rmtree(checkpoint)
        self.metrics = self.out / "metrics.jsonl"
        lines = self.metrics.read_text().splitlines() if step and self.metrics.exists() else []
        # steps after the checkpoint, without one all steps, are done again: their lines go, and one cut short
        keep = lambda line: line.endswith("}") and json.loads(line)["training/global_step"] <= step
        kept = "".join(f"{line}\n" for line in filter(keep, lines))
        for name, text in (("metrics.jsonl", kept), ("args.json", json.dumps(asdict(args), indent=2))):
            with replacing(self.out / name) as new:
                new.write_text(text)
        self.track = open_tracker(args, step)

    def say(self, message):
        """A line for people, in the terminal and in log.txt."""
        if self.rank0:
            self.bar.write(message)
            with (self.out / "log.txt").open("a") as file:
                file.write(message + "\n")

    def log(self, metrics, step, **shown):
        """One dict a step; shown: metrics at the progress bar, under shorter names."""
        metrics = {name: float(value) for name, value in metrics.items()}
        metrics["training/nonfinite"] = sum(not math.isfinite(value) for value in metrics.values())
        if self.rank0:
            with self.metrics.open("a") as file:
                file.write(json_line(metrics))
            self.bar.set_postfix({k: f"{metrics[name]:.4g}" for k, name in shown.items()}, refresh=False)
            self.bar.update(step - self.bar.n)
            self.track(metrics, step)

    def close(self):
        """Say where the results are, and what to do next."""
        save_first()
        self.bar.close()
        done = "done" if self.bar.n >= self.bar.total else "stopped; the same command resumes it"
        self.say(f"step {self.bar.n} of {self.bar.total}, {done}\nweights: {self.out}/checkpoints/latest/hf")
        self.say(f"report:  python algos/report.py {self.out} --output report.html")


def learning_rate(args, step, total_steps):
    """The learning rate of `step` (from 1): a function of it alone, so resuming needs no state."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    done = (step - 1 - args.warmup_steps) / max(1, total_steps - args.warmup_steps)
    decay = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return args.lr * decay[args.lr_schedule]


def leave(stop=(0,)):
    """End the process together with the other ranks: the last call of a script."""
    # Python's own end would abort if a thread of gloo still has a tensor (pytorch PR 179291)
    dist.barrier()
    atexit._run_exitfuncs()  # of libraries: W&B sends its last metrics in one
    sys.stdout.flush()
    os._exit(128 + int(stop[0]) if any(stop) else 0)


def ranks_on(device, lm, args):
    """A run's first lines: how many ranks on what, and what they train; what would be faster."""
    ranks, threads = dist.get_world_size(), torch.get_num_threads()
    here = ranks // int(os.environ.get("GROUP_WORLD_SIZE", 1))  # vLLM replaces LOCAL_WORLD_SIZE on a CPU
    cores = psutil.cpu_count(logical=False) or here * threads  # unknown on some machines
    text, idle = f"{ranks} rank{'s' * (ranks > 1)} on {device.type}", cores - here * threads
    if device.type == "cpu" and idle > 0:
        text += f", {idle} of {cores} cores idle: OMP_NUM_THREADS={cores // here} or --nproc_per_node {cores}"
    trained = {name: p.numel() for name, p in lm.named_parameters() if p.requires_grad}
    layers = " ".join(sorted({n.split(".lora_")[0].rpartition(".")[2] for n in trained if ".lora_" in n}))
    part = f"{sum(trained.values()) / 1e6:.3g}M of {sum(p.numel() for p in lm.parameters()) / 1e6:.4g}M"
    text += f"\nLoRA trains {part} weights: {layers}" if layers else f"\ntrains {part} weights"
    faster = "; faster, with more memory: --gradient_checkpointing none"
    return text + faster * (args.gradient_checkpointing != "none")
