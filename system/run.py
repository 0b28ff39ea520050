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
from system.checkpoints import load_checkpoint, read_state, write_checkpoint
from system.cpu import keep_freed_memory
from system.files import digest_of_file, digests_of_model, hold, json_line, replacing
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
    flags = vars(args)
    for flag in flags.keys() & MODELS:  # not by symbolic links, which may move, as `latest` of another run
        if isinstance(flags[flag], str):
            flags[flag] = without_links(flags[flag])
        elif flags[flag]:
            flags[flag] = tuple(without_links(name) for name in flags[flag])
    if args.tracker != "none" and not find_spec(args.tracker):
        fail(f"--tracker {args.tracker} is missing: pip install --no-deps -r requirements-extra.txt")
    for flag, value in flags.items():  # parse() has not loaded torch
        needs_gpu = flag in KNOWN and KNOWN[flag].gpu and value not in (False, "none")
        if needs_gpu and not torch.cuda.is_available():
            fail(f"--{flag} needs a GPU")

    out = Path(args.output_dir)
    hold(out, f"--output_dir {out}")
    if args.resume == "never" and (out / "args.json").exists():
        fail(f"--output_dir {out} already holds a run: choose another, or resume it by --resume auto")
    latest = out / "checkpoints/latest"
    if latest.exists():  # the same command resumes its own run
        checkpoint = latest.resolve()
        changes = differences(checkpoint, args, MAY_CHANGE)
        if changes:
            new = "choose another"
            if not differences(checkpoint, args, MAY_CHANGE | DATA):
                new = f"begin in another one by --resume {latest}"
            fail(f"--output_dir {out} holds a run with other arguments ({changes}): put them back, or {new}")
        return checkpoint

    if args.resume in ("auto", "never"):
        return None
    checkpoint = Path(args.resume).resolve()
    if not (checkpoint / "trainer_state.json").is_file():
        fail(f"--resume {args.resume}: not a checkpoint, it has no trainer_state.json")
    changes = differences(checkpoint, args, MAY_CHANGE | DATA)
    if changes:
        fail(f"--resume {args.resume} is of a run with other arguments ({changes}): pass those")
    return checkpoint


def without_links(name):
    """The path of a directory; the name of a model on the hub as it is."""
    if os.path.isdir(name):
        return os.path.realpath(name)
    return name


def differences(checkpoint, args, may):
    """What differs between the run of a checkpoint and this one, except flags that may."""
    saved = {}
    saved_digests = {}
    with suppress(OSError, ValueError):  # what is damaged is refused when it is loaded
        saved_digests = json.loads((checkpoint / "trainer_state.json").read_text()).get("content", {})
        saved = json.loads((checkpoint.parents[1] / "args.json").read_text())
    digests_now = digests(args)
    found = []
    for flag, value in json.loads(json.dumps(asdict(args))).items():
        if flag in may:
            continue
        before = saved.get(flag, value)
        change = f"{before} there, {value} now" if before != value else ""
        if flag in MODELS or flag in FILES:
            digest = digests_now.get(flag)
            digest_before = saved_digests.get(flag, digest)
            if digest is None or digest_before == digest:
                continue
            if flag in MODELS:
                change = f"{value} has another {changed_files(digest_before, digest)}"
            elif not change:
                change = f"{value} has another content"
        if change:
            found.append(f"--{flag} {change}")
    return "; ".join(found)


def changed_files(before, now):
    """Names of the files of models that differ."""
    names = set()
    for one, other in zip(before, now):
        names |= {name for name, _ in one.items() ^ other.items()}
    return ", ".join(sorted(names)) or "number of models"


def digests(args):
    """{flag: digests} of the models and files that decide what a run learns; a checkpoint keeps them."""
    if int(os.environ.get("RANK", 0)):  # the first rank reads, and speaks
        return {}
    found = {}
    for flag, value in vars(args).items():
        if flag not in MODELS and flag not in FILES:
            continue
        names = value or ()
        if isinstance(names, str):
            names = [names]
        digest = digests_of_model if flag in MODELS else digest_of_file
        found[flag] = [digest(name) for name in names]
    return found


def open_tracker(args, step):
    """-> a function of ({name: number or rows of TEXTS}, step). Those after `step` go: they come again."""
    if args.tracker == "wandb":
        return wandb_tracker(args)
    if args.tracker == "tensorboard":
        return tensorboard_tracker(args, step)
    return lambda metrics, step: None


def wandb_tracker(args):
    """W&B reads WANDB_PROJECT, and WANDB_MODE=offline for no network."""
    import wandb

    out = Path(args.output_dir)
    name = out / "wandb.id"  # a resumed run continues in the same one
    if not (name.exists() and name.read_text()):  # empty: a kill, as it was written
        name.write_text(uuid4().hex[:8])
    run = wandb.init(dir=out, name=out.name, id=name.read_text(), resume="allow", config=asdict(args))

    def track(metrics, step):
        values = {}
        for name, value in metrics.items():
            if isinstance(value, list):
                value = wandb.Table(columns=TEXTS, data=value)
            values[name] = value
        run.log(values, step)

    return track


def tensorboard_tracker(args, step):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(Path(args.output_dir) / "tensorboard", purge_step=step + 1)

    def track(metrics, step):
        for name, value in metrics.items():
            if isinstance(value, list):  # of texts: as Markdown has code
                texts = "\n\n".join(cell for row in value for cell in row)
                writer.add_text(name, indent(texts, "    "), step)
            else:
                writer.add_scalar(name, value, step)
        writer.flush()  # it writes every two minutes, and not at exit

    return track


class Run:
    """A run of a trainer, the block of a `with`. Rank 0 writes its directory; the other ranks are silent.

    step: the last one that the weights have, then the one in progress. total: the number of steps.
    state: what `updated` was given before the run was stopped; {} in a new run.
    Whatever ends the block, the last whole step is saved.
    """

    def __init__(self, args):
        """Open output_dir, before anything slow; see `open_run`."""
        self.args = args
        self.out = Path(args.output_dir)
        self.rank0 = int(os.environ.get("RANK", 0)) == 0
        self.checkpoint = open_run(args)
        self.state = read_state(self.checkpoint) if self.checkpoint else dict(step=0)
        self.step = self.state.pop("step")
        self.state.pop("content", None)
        self.digests = digests(args)  # now: files may change later
        self.unsaved = None  # the state of the last whole step that is in no checkpoint yet
        self.seconds = {}  # of the last checkpoint, for the timing of the step after it
        self.signal = 0  # its number
        self.signalled = 0  # the time of the first one
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the first step there is nothing to save

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        self.save_first()
        if error is None:
            self.close()

    def plan(self, total_steps, summary):
        """Say what the run has read; end it here, before a model is loaded, if it has all its steps.

        summary: of its data.
        """
        self.total = total_steps
        self.say(summary)
        if self.step < total_steps:
            return
        if self.checkpoint.parents[1] != self.out.resolve():
            steps = f"{self.step} steps, and this run has {total_steps}"
            fail(f"--resume {self.args.resume} has {steps}: pass more, by --total_steps or --total_epochs")
        self.say_end()
        sys.exit()

    def load(self, models, optimizers, tokenizer, whole_weights):
        """Load the weights of the checkpoint to go on from; say how those of the next ones are made.

        models: {directory in a checkpoint: model}, with one optimizer or a list of them.
        whole_weights(lm, dtype): yields names and whole weights of a sharded model, on all ranks alike.
        """
        self.parts = models, optimizers, tokenizer, whole_weights
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.register_step_pre_hook(lambda *_: self.forget())
        if self.checkpoint:
            load_checkpoint(self.checkpoint, models, optimizers)

    def start(self, lm):
        """Write what a run has from its start, and say what it is about to do."""
        self.bar = tqdm(total=self.total, initial=self.step, desc="step", disable=not self.rank0)
        handler = logging.Handler()  # what rewards and environments have to say; info is for log.txt alone
        handler.emit = lambda record: self.say(record.getMessage(), record.levelno > logging.INFO)
        logger = logging.getLogger("rewards")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        if self.rank0:
            clean(self.out, self.step, self.args)
            self.track = open_tracker(self.args, self.step)
        self.say(f"{self.total} steps, {ranks_on(lm)}")
        if self.checkpoint:
            self.say(f"resumed from {self.checkpoint}")

    def steps(self):
        """Each step that is left, and a dict for the seconds of its parts; none after any rank's signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
        while self.step < self.total:
            self.step += 1
            # stacks of all ranks, in turn, of a step that hangs
            faulthandler.dump_traceback_later(0.9 * TIMEOUT_S + dist.get_node_local_rank() / 4)
            self.begin = time.perf_counter()
            timing = self.seconds
            self.seconds = {}
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
        self.unsaved = dict(state, step=self.step, content=self.digests)

    def forget(self):
        """An update has begun: until `updated` the weights belong to no step, and are not saved."""
        self.unsaved = None

    def end_after(self, step):
        """End the run with the step in progress, or with the one before it, whose weights it then has."""
        self.step = step
        self.total = step

    def due(self, freq):
        """Whether something is done in this step that is done in every freq-th and in the last one."""
        return self.step == self.total or (freq and self.step % freq == 0)

    def dump(self, rows, kind="step"):
        """With --rollout_dump: scored rows, one JSON line each. kind val: a tracker has some of them, too."""
        if not self.rank0:
            return
        if kind == "val":
            texts = []
            for row in rows:
                if row["sample"] == 0 and len(texts) < 8:
                    text = row["sampled"] | row["reward"]
                    texts.append([str(text[key]) for key in TEXTS])
            self.track({"val/texts": texts}, self.step)
        if self.args.rollout_dump:
            folder = self.out / "rollouts"
            folder.mkdir(exist_ok=True)
            with (folder / f"{kind}_{self.step:06d}.jsonl").open("w") as file:
                for row in rows:
                    line = row["sampled"] | row["reward"]
                    for name in ("index", "sample", "finish_reason"):
                        line[name] = row[name]
                    line["response_ids"] = row["response_ids"].tolist()
                    file.write(json_line(line))

    def say(self, message, in_terminal=True):
        """A line for people, in the terminal and in log.txt."""
        if not self.rank0:
            return
        if in_terminal:
            tqdm.write(message)
        with (self.out / "log.txt").open("a") as file:
            file.write(message + "\n")

    def log(self, metrics, **shown):
        """One dict a step; shown: metrics at the progress bar, under shorter names."""
        metrics = {name: float(value) for name, value in metrics.items()}
        metrics["training/global_step"] = self.step
        skipped = [value for name, value in metrics.items() if name.endswith("skipped_updates")]
        if any(skipped):
            self.say(f"warning: step {self.step}: updates were skipped, their gradients are not finite")
        metrics["training/nonfinite"] = sum(not math.isfinite(value) for value in metrics.values())
        if not self.rank0:
            return
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json_line(metrics))
        postfix = {short: f"{metrics[name]:.4g}" for short, name in shown.items()}
        self.bar.set_postfix(postfix, refresh=False)
        self.bar.update(self.step - self.bar.n)
        self.track(metrics, self.step)

    def save(self):
        """Write a checkpoint. Its seconds are in the timing of the next step."""
        begin = time.perf_counter()
        state = self.unsaved
        self.unsaved = None
        path = write_checkpoint(self.out, self.args.model, self.args.keep_checkpoints, state, *self.parts)
        self.seconds = dict(save_checkpoint=time.perf_counter() - begin)
        return path

    def save_first(self):
        """At the end of the process, whatever ends it: save a whole step if all ranks end together."""
        if self.unsaved is None:
            return
        store = dist.distributed_c10d._get_default_store()
        ranks = range(dist.get_world_size())
        try:
            store.set(f"end of rank {dist.get_rank()}", "")
            store.wait([f"end of rank {rank}" for rank in ranks], END)
            self.say(f"saved first: {self.save()}")
        except (Exception, SystemExit) as error:  # whatever it is, the run ends for another reason
            print(f"what was trained since the last checkpoint is lost: {error}", file=sys.stderr)

    def close(self):
        """Say where the results are and what to do next, and end the process."""
        self.bar.close()
        self.say_end()
        stopped = self.signal and self.step < self.total
        leave(128 + self.signal if stopped else 0)

    def say_end(self):
        whole = self.step >= self.total
        done = "done" if whole else "stopped; the same command resumes it"
        weights = self.out / "checkpoints/latest/hf"
        if not weights.exists():
            weights = self.args.model
        self.say(f"step {self.step} of {self.total}, {done}")
        self.say(f"weights: {weights}")
        self.say(f"report:  python algos/report.py {self.out} --output report.html")


def clean(out, step, args):
    """Make the directory of a run what it was after `step`, with args.json of now: later steps come again."""
    for checkpoint in out.glob("checkpoints/step_*"):
        if not (checkpoint / "trainer_state.json").exists():  # its last file: a kill left it unfinished
            shutil.rmtree(checkpoint)
    metrics = out / "metrics.jsonl"
    kept = ""
    if step and metrics.exists():
        for line in metrics.read_text().splitlines():
            whole = line.endswith("}")  # one may be cut short
            if whole and json.loads(line)["training/global_step"] <= step:
                kept += f"{line}\n"
    with replacing(metrics) as new:
        new.write_text(kept)
    with replacing(out / "args.json") as new:
        new.write_text(json.dumps(asdict(args), indent=2))


def setup_distributed(hsdp_replicas=1):
    """Join the processes of torchrun, or run alone -> the device of this rank and the FSDP mesh."""
    if "RANK" not in os.environ:  # plain `python`: a world of one
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # CAREFUL: torchrun keeps its store over restarts, with addresses of dead ranks (pytorch 135712)
    new_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and not os.environ.get(new_store):
        fail(f"--max-restarts: set {new_store}=1 for torchrun on each node")
    cuda = torch.cuda.is_available()
    if cuda:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        gpus = torch.cuda.device_count()
        if here > gpus:
            fail(f"{here} ranks on a machine with {gpus} GPUs: --nproc_per_node {gpus}")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
    timeout = timedelta(seconds=TIMEOUT_S)
    c10d = dist.distributed_c10d
    c10d.default_pg_timeout = timeout  # for subgroups
    c10d.default_pg_nccl_timeout = timeout
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    shape = (hsdp_replicas, dist.get_world_size() // hsdp_replicas)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    if hsdp_replicas == 1:
        mesh = mesh["shard"]
    return device, mesh


def sum_over_ranks(sums):
    """{name: scalar tensor of this rank} -> {name: sum over all ranks}."""
    totals = all_reduce(torch.stack(list(sums.values())).tolist())
    return dict(zip(sums, totals))


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
    if decay_steps:
        decaying = min(decay_steps, decaying)
    decaying = max(decaying, 1)
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
    ranks = dist.get_world_size()
    device = compute_device().type
    text = f"{ranks} rank{'s' * (ranks > 1)} on {device}"
    here = ranks // int(os.environ.get("GROUP_WORLD_SIZE", 1))  # vLLM replaces LOCAL_WORLD_SIZE on a CPU
    busy = here * torch.get_num_threads()
    cores = psutil.cpu_count(logical=False) or busy  # unknown on some machines
    idle = cores - busy
    if device == "cpu" and idle > 0:
        remedy = f"OMP_NUM_THREADS={cores // here} or --nproc_per_node {cores}"
        text += f", {idle} of {cores} cores idle: {remedy}"

    weights = sum(p.numel() for p in lm.parameters())
    trained = 0
    layers = set()  # with LoRA
    for name, p in lm.named_parameters():
        if not p.requires_grad:
            continue
        trained += p.numel()
        layer, lora, _ = name.partition(".lora_")
        if lora:
            layers.add(layer.rpartition(".")[2])
    part = f"{trained / 1e6:.3g}M of {weights / 1e6:.4g}M"
    if layers:
        return f"{text}\nLoRA trains {part} weights: {' '.join(sorted(layers))}"
    return f"{text}\ntrains {part} weights"
