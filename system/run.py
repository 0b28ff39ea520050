"""A run of a trainer: its opening, its steps, its end and its log."""

import atexit
import faulthandler
import json
import logging
import math
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from uuid import uuid4

import psutil
import torch
import torch.distributed as dist
from tqdm import tqdm

from system.arguments import KNOWN, MODELS, fail
from system.checkpoints import load_checkpoint, write_checkpoint
from system.cpu import keep_freed_memory
from system.files import content, hold, json_line, model_content, replacing
from system.gpu import compute_device

MAY_CHANGE = {flag for flag, known in KNOWN.items() if known.resume == "may change"}  # when a run resumes
DATA = {flag for flag, known in KNOWN.items() if known.resume == "may begin"}  # and another run begins
FILES = [flag for flag, known in KNOWN.items() if known.content == "file"]
END = timedelta(minutes=1)  # that ranks wait for one another at the end of the process
REPEAT_S = 10  # a signal within this time is the first one again: torchrun passes on what all ranks got
TEXTS = ["prompt_str", "solution_str", "ground_truth", "score"]  # what a tracker has of a row
TIMEOUT_S = 3600  # seconds that a rank waits for the others


def open_run(args):
    """Check output_dir against the arguments -> the checkpoint to resume from, or None."""
    out, latest = Path(args.output_dir), Path(args.output_dir, "checkpoints/latest")
    real = lambda name: os.path.realpath(name) if os.path.isdir(name) else name
    for flag in MODELS:  # not by symbolic links, which may move, as `latest` of another run does
        if name := getattr(args, flag, None):
            setattr(args, flag, real(name) if isinstance(name, str) else (*map(real, name),))
    if args.tracker != "none" and not find_spec(args.tracker):
        fail(f"--tracker {args.tracker} is missing: pip install --no-deps -r requirements-extra.txt")
    for flag in [flag for flag, known in KNOWN.items() if known.gpu]:  # parse() has not loaded torch
        if vars(args).get(flag, "none") not in (False, "none") and not torch.cuda.is_available():
            fail(f"--{flag} needs a GPU")
    hold(out, f"--output_dir {out}")
    if (out / "args.json").exists() and args.resume == "never":
        fail(f"--output_dir {out} already holds a run: choose another, or resume it by --resume auto")
    if latest.exists():  # the same command resumes its own run
        if changes := differences(latest.resolve(), args, MAY_CHANGE):
            may = not differences(latest.resolve(), args, MAY_CHANGE | DATA)
            new = f"begin in another one by --resume {latest}" if may else "choose another"
            fail(f"--output_dir {out} holds a run with other arguments ({changes}): put them back, or {new}")
        return latest.resolve()
    if args.resume in ("auto", "never"):
        return None
    checkpoint = Path(args.resume)
    if not (checkpoint / "trainer_state.json").is_file():
        fail(f"--resume {args.resume}: not a checkpoint, it has no trainer_state.json")
    if changes := differences(checkpoint.resolve(), args, MAY_CHANGE | DATA):
        fail(f"--resume {args.resume} is of a run with other arguments ({changes}): pass those")
    return checkpoint.resolve()


def differences(checkpoint, args, may):
    """What differs between the run of a checkpoint and this one, except flags that may."""
    saved, saved_content, found = {}, {}, []
    with suppress(OSError, ValueError):  # what is damaged is refused when it is loaded
        saved_content = json.loads((checkpoint / "trainer_state.json").read_text()).get("content", {})
        saved = json.loads((checkpoint.parents[1] / "args.json").read_text())
    now, content_now = json.loads(json.dumps(asdict(args))), contents(args)
    for flag in [flag for flag in now if flag not in may]:
        one, other = (saved_content, content_now) if flag in (*MODELS, *FILES) else (saved, now)
        if flag not in other or one.get(flag, other[flag]) == other[flag]:
            continue
        what = f"{saved.get(flag, now[flag])} there, {now[flag]} now"
        if flag in MODELS:  # which files
            pairs = [(a.items(), b.items()) for a, b in zip(one[flag], other[flag])]
            files = sorted({name for a, b in pairs for name, _ in a ^ b})
            what = f"{now[flag]} has another {', '.join(files) or 'number of models'}"
        elif saved.get(flag, now[flag]) == now[flag]:
            what = f"{now[flag]} has another content"
        found.append(f"--{flag} {what}")
    return "; ".join(found)


def contents(args):
    """{flag: digests} of the models and files that decide what a run learns; a checkpoint keeps them."""
    if int(os.environ.get("RANK", 0)):  # the first rank reads, and speaks
        return {}
    names = {flag: getattr(args, flag, None) or () for flag in (*MODELS, *FILES)}
    names = {flag: [x] if isinstance(x, str) else x for flag, x in names.items()}
    return {flag: [*map(model_content if flag in MODELS else content, some)] for flag, some in names.items()}


def open_tracker(args, step):
    """-> a function of ({name: number or rows of TEXTS}, step). Those after `step` go: they come again."""
    out = Path(args.output_dir)
    if args.tracker == "wandb":  # which reads WANDB_PROJECT, and WANDB_MODE=offline for no network
        import wandb

        name = out / "wandb.id"  # a resumed run continues in the same one
        if not (name.exists() and name.read_text()):  # empty: a kill, as it was written
            name.write_text(uuid4().hex[:8])
        own = dict(id=name.read_text(), resume="allow", config=asdict(args))
        log = wandb.init(dir=out, name=out.name, **own).log
        table = lambda x: wandb.Table(columns=TEXTS, data=x) if isinstance(x, list) else x
        return lambda metrics, step: log({name: table(x) for name, x in metrics.items()}, step)
    if args.tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out / "tensorboard", purge_step=step + 1)

        def track(metrics, step):
            for name, value in metrics.items():
                if isinstance(value, list):  # of texts: as Markdown has code
                    texts = "\n\n".join(cell for row in value for cell in row)
                    writer.add_text(name, indent(texts, "    "), step)
                else:
                    writer.add_scalar(name, value, step)
            writer.flush()  # it writes every two minutes, and not at exit

        return track
    return lambda metrics, step: None


class Run:
    """A run of a trainer. Rank 0 writes its directory; the other ranks are silent.

    step: the last one that the weights have, then the one in progress. total: the number of steps.
    """

    def __init__(self, args):
        """Open output_dir, before anything slow; see `open_run`."""
        self.args, self.out, self.rank0 = args, Path(args.output_dir), int(os.environ.get("RANK", 0)) == 0
        self.checkpoint, self.content = open_run(args), contents(args)  # now: files may change later
        self.unsaved = None  # the state of the last whole step that is in no checkpoint yet
        self.seconds = {}  # of the last checkpoint, for the timing of the step after it
        self.signal = self.signalled = 0  # its number, and the time of the first one
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the first step there is nothing to save

    def load(self, models, optimizers, tokenizer, whole_weights):
        """Load the checkpoint to go on from -> the state that `updated` was given, {} in a new run.

        models: {directory in a checkpoint: model}, with one optimizer or a list of them.
        whole_weights(lm, dtype): yields names and whole weights of a sharded model, on all ranks alike.
        """
        self.parts = models, optimizers, tokenizer, whole_weights
        for optimizer in [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.forget())
        state = load_checkpoint(self.checkpoint, models, optimizers) if self.checkpoint else dict(step=0)
        self.step = state.pop("step")
        return {name: value for name, value in state.items() if name != "content"}

    def start(self, total_steps, summary, lm):
        """Write what a run has from its start, and say what it is about to do."""
        self.total = total_steps
        self.bar = tqdm(total=total_steps, initial=self.step, desc="step", disable=not self.rank0)
        atexit.register(self.save_first)
        # `save_first` needs the process group, which ends with an engine that nothing refers to
        self.trainer = sys._getframe(1)
        told = logging.Handler()  # what rewards and environments have to say; info is for log.txt alone
        told.emit = lambda record: self.say(record.getMessage(), record.levelno > logging.INFO)
        logging.getLogger("rewards").setLevel(logging.INFO)
        logging.getLogger("rewards").addHandler(told)
        if self.rank0:
            clean(self.out, self.step, self.args)
            self.track = open_tracker(self.args, self.step)
        origin = f"\nresumed from {self.checkpoint}" if self.checkpoint else ""
        self.say(f"{summary}\n{total_steps} steps, {ranks_on(lm)}{origin}")

    def steps(self):
        """Each step that is left, and a dict for the seconds of its parts; none after any rank's signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
        while self.step < self.total:  # which may fall, where data end
            self.step += 1
            # stacks of all ranks, in turn, of a step that hangs
            faulthandler.dump_traceback_later(0.9 * TIMEOUT_S + dist.get_node_local_rank() / 4)
            self.begin = time.perf_counter()
            timing, self.seconds = self.seconds, {}
            yield self.step, timing
            [signalled] = all_reduce([self.signal], dist.ReduceOp.MAX)
            if signalled:
                self.signal = int(signalled)
                return

    def on_signal(self, number, _):
        """The step in progress is the last; a signal long after the first one ends it, with what is saved."""
        self.signalled = self.signalled or time.monotonic()
        if time.monotonic() - self.signalled > REPEAT_S:
            raise SystemExit(128 + number)
        self.signal = number

    def elapsed(self):
        """Seconds since the step began."""
        return time.perf_counter() - self.begin

    def updated(self, **state):
        """The weights are those of a whole step: from here on it is saved, whatever ends the run.

        state: what `load` returns to a run that resumes here.
        """
        self.unsaved = dict(state, step=self.step, content=self.content)

    def forget(self):
        """An update has begun: until `updated` the weights belong to no step, and are not saved."""
        self.unsaved = None

    def due(self, freq):
        """Whether something is done in this step that is done in every freq-th and in the last one."""
        return self.step == self.total or (freq and self.step % freq == 0)

    def dump(self, rows, kind="step"):
        """With --rollout_dump: scored rows, one JSON line each. kind val: a tracker has some of them, too."""
        if self.rank0 and kind == "val":
            texts = [row["sampled"] | row["reward"] for row in rows if row["sample"] == 0]
            self.track({"val/texts": [[str(text[key]) for key in TEXTS] for text in texts[:8]]}, self.step)
        if not self.rank0 or not self.args.rollout_dump:
            return
        (self.out / "rollouts").mkdir(exist_ok=True)
        with (self.out / f"rollouts/{kind}_{self.step:06d}.jsonl").open("w") as file:
            for row in rows:
                where = {name: row[name] for name in ("index", "sample", "finish_reason")}
                ids = dict(response_ids=row["response_ids"].tolist())
                file.write(json_line(row["sampled"] | row["reward"] | where | ids))

    def say(self, message, in_terminal=True):
        """A line for people, in the terminal and in log.txt."""
        if self.rank0:
            if in_terminal:
                self.bar.write(message)
            with (self.out / "log.txt").open("a") as file:
                file.write(message + "\n")

    def log(self, metrics, **shown):
        """One dict a step; shown: metrics at the progress bar, under shorter names."""
        metrics = {name: float(value) for name, value in metrics.items()}
        metrics["training/global_step"] = self.step
        if any(n for name, n in metrics.items() if name.endswith("skipped_updates")):
            self.say(f"warning: step {self.step}: updates were skipped, their gradients are not finite")
        metrics["training/nonfinite"] = sum(not math.isfinite(value) for value in metrics.values())
        if self.rank0:
            with (self.out / "metrics.jsonl").open("a") as file:
                file.write(json_line(metrics))
            self.bar.set_postfix({k: f"{metrics[name]:.4g}" for k, name in shown.items()}, refresh=False)
            self.bar.update(self.step - self.bar.n)
            self.track(metrics, self.step)

    def save(self):
        """Write a checkpoint. Its seconds are in the timing of the next step."""
        begin, state, self.unsaved = time.perf_counter(), self.unsaved, None
        path = write_checkpoint(self.out, self.args.model, self.args.keep_checkpoints, state, *self.parts)
        self.seconds = dict(save_checkpoint=time.perf_counter() - begin)
        return path

    def save_first(self):
        """At the end of the process, whatever ends it: save a whole step if all ranks end together."""
        if self.unsaved is None:
            return
        store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
        try:
            store.set(f"end of rank {dist.get_rank()}", "")
            store.wait([f"end of rank {rank}" for rank in range(world)], END)
            self.say(f"saved first: {self.save()}")
        except (Exception, SystemExit) as error:  # whatever it is, the run ends for another reason
            print(f"what was trained since the last checkpoint is lost: {error}", file=sys.stderr)

    def close(self):
        """Say where the results are and what to do next, and end the process."""
        self.save_first()
        self.bar.close()
        done = "done" if self.step >= self.total else "stopped; the same command resumes it"
        weights = self.out / "checkpoints/latest/hf"
        self.say(f"step {self.step} of {self.total}, {done}")
        self.say(f"weights: {weights if weights.exists() else self.args.model}")
        self.say(f"report:  python algos/report.py {self.out} --output report.html")
        leave(128 + self.signal if self.signal and self.step < self.total else 0)


def clean(out, step, args):
    """Make the directory of a run what it was after `step`, with args.json of now: later steps come again."""
    for checkpoint in out.glob("checkpoints/step_*"):
        if not (checkpoint / "trainer_state.json").exists():  # its last file: a kill left it unfinished
            shutil.rmtree(checkpoint)
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if step and metrics.exists() else []
    # one may be cut short
    keep = lambda line: line.endswith("}") and json.loads(line)["training/global_step"] <= step
    kept = "".join(f"{line}\n" for line in filter(keep, lines))
    for name, text in (("metrics.jsonl", kept), ("args.json", json.dumps(asdict(args), indent=2))):
        with replacing(out / name) as new:
            new.write_text(text)


def setup_distributed(hsdp_replicas=1):
    """Join the processes of torchrun, or run alone -> the device of this rank and the FSDP mesh."""
    if "RANK" not in os.environ:  # plain `python`: a world of one
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # CAREFUL: torchrun keeps its store over restarts, with addresses of dead ranks (pytorch 135712)
    new_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and not os.environ.get(new_store):
        fail(f"--max-restarts: set {new_store}=1 for torchrun on each node")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if cuda and here > gpus:
        fail(f"{here} ranks on a machine with {gpus} GPUs: --nproc_per_node {gpus}")
    if cuda:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    timeout = timedelta(seconds=TIMEOUT_S)
    c10d = dist.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout  # for subgroups
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    shape = hsdp_replicas, dist.get_world_size() // hsdp_replicas
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return device, mesh if hsdp_replicas > 1 else mesh["shard"]


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Reduce a list of numbers over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op)
    return total.tolist()


def learning_rate(peak, step, total_steps, warmup_steps, schedule, decay_steps=0):
    """The learning rate of `step` (from 1): a function of it alone, so resuming needs no state.

    With decay_steps it is held at its peak until the last ones of them (warm-up-stable-decay).
    Ten steps, two of warm-up, three of linear decay -> 1/2 1 | 1 1 1 1 1 | 1 2/3 1/3 of the peak.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    decaying = total_steps - warmup_steps
    decaying = max(min(decay_steps or decaying, decaying), 1)
    done = max(step - 1 - total_steps + decaying, 0) / decaying
    decay = {"constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return peak * decay[schedule]


def leave(code=0):
    """End the process together with the other ranks: the last call of a script."""
    # Python's own end would abort if a thread of gloo still has a tensor (pytorch PR 179291)
    dist.barrier()
    atexit._run_exitfuncs()  # of libraries: W&B sends its last metrics in one
    sys.stdout.flush()
    os._exit(code)


def ranks_on(lm):
    """A run's first lines: how many ranks on what, and what they train."""
    ranks, threads = dist.get_world_size(), torch.get_num_threads()
    device = compute_device().type
    here = ranks // int(os.environ.get("GROUP_WORLD_SIZE", 1))  # vLLM replaces LOCAL_WORLD_SIZE on a CPU
    cores = psutil.cpu_count(logical=False) or here * threads  # unknown on some machines
    text, idle = f"{ranks} rank{'s' * (ranks > 1)} on {device}", cores - here * threads
    if device == "cpu" and idle > 0:
        text += f", {idle} of {cores} cores idle: OMP_NUM_THREADS={cores // here} or --nproc_per_node {cores}"
    trained = {name: p.numel() for name, p in lm.named_parameters() if p.requires_grad}
    layers = " ".join(sorted({n.split(".lora_")[0].rpartition(".")[2] for n in trained if ".lora_" in n}))
    part = f"{sum(trained.values()) / 1e6:.3g}M of {sum(p.numel() for p in lm.parameters()) / 1e6:.4g}M"
    return text + (f"\nLoRA trains {part} weights: {layers}" if layers else f"\ntrains {part} weights")
