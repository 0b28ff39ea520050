"""A run of a trainer: its steps, its log, and its end, which saves what is whole."""

import faulthandler
import json
import logging
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

from system import ranks
from system.arguments import fail
from system.checkpoints import damaged, load_checkpoint, read_state, write_checkpoint
from system.files import json_line, replacing, steps_in
from system.ranks import all_reduce, leave, ranks_on
from system.resume import content, open_run, program
from system.tracker import TEXTS, open_tracker

END = timedelta(minutes=1)  # that ranks wait for one another at the end of the process
REPEAT_S = 10  # a signal within this time is the first one again: torchrun passes on what all ranks got


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
        self.content = content(args)  # now: files may change later
        self.unsaved = None  # the state of the last whole step that is in no checkpoint yet
        self.seconds = {}  # of the last checkpoint, for the timing of the step after it
        self.process = os.getpid()
        self.signal = 0  # its number
        self.signalled = 0  # the time of the first one
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the first step there is nothing to save

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        self.save_first()
        if error is None:
            self.close()
            return
        for number in (signal.SIGTERM, signal.SIGINT):  # nothing is left to save
            signal.signal(number, signal.SIG_DFL)

    def plan(self, total_steps, summary):
        """Say what the run has read; end it here, before a model is loaded, if it has all its steps.

        summary: of its data.
        """
        self.total = total_steps
        self.say(summary)
        if self.step < total_steps:
            return
        if self.step > total_steps or self.checkpoint.parent.parent != self.out.resolve():
            steps = f"{self.step} steps, and this run has {total_steps}"
            fail(f"{self.checkpoint} has {steps}: pass more, by --total_steps or --total_epochs")
        if not (self.checkpoint / "hf").is_dir():
            damaged(self.checkpoint, "hf/ is missing")
        self.say_end()
        sys.exit()

    def load(self, models, optimizers, tokenizer, whole_weights, ends=()):
        """Load the weights of the checkpoint to go on from; say how those of the next ones are made.

        models: {directory in a checkpoint: model}, with one optimizer or a list of them.
        whole_weights(lm, dtype): yields names and whole weights of a sharded model, on all ranks alike.
        ends: tokens that end turns, besides EOS.
        """
        self.parts = models, optimizers, tokenizer, whole_weights, ends
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
        logger.propagate = False
        logger.addHandler(handler)
        if self.rank0:
            clean(self.out, self.step, self.args)
            self.track = open_tracker(self.args, self.step)
        self.say(f"{self.total} steps, {ranks_on(lm)}")
        self.first = self.step + 1
        self.between = min(self.args.save_freq or self.total, self.total)  # steps, of two checkpoints
        save = min(self.step - self.step % self.between + self.between, self.total)
        self.say(f"the next checkpoint comes after step {save}")
        if self.checkpoint:
            self.say(f"resumed from {self.checkpoint}")

    def steps(self):
        """Each step that is left, and a dict for the seconds of its parts; none after any rank's signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
        while self.step < self.total:
            self.step += 1
            # stacks of all ranks, in turn, of a step that hangs
            faulthandler.dump_traceback_later(0.9 * ranks.TIMEOUT_S + dist.get_node_local_rank() / 4)
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
        if os.getpid() != self.process:  # a fork, as of multiprocessing, ends by it as any process
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signalled = self.signalled or time.monotonic()
        if time.monotonic() - self.signalled > REPEAT_S:
            raise SystemExit(128 + number)
        self.signal = number

    def elapsed(self):
        """Seconds since the step began."""
        return time.perf_counter() - self.begin

    def updated(self, **state):
        """The weights are of a whole step that has passed its checks: whatever ends the run, it is saved.

        state: `self.state` of a run that resumes here.
        """
        self.unsaved = dict(state, step=self.step, content=self.content)

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
                    line = dict(row["sampled"], response_ids=row["response_ids"].tolist())
                    for name in ("index", "sample", "finish_reason"):
                        line[name] = row[name]
                    for name, value in row["reward"].items():
                        while name in line:  # a reward's own key of this name
                            name = f"reward_{name}"
                        line[name] = value
                    file.write(json_line(line))

    def say(self, message, in_terminal=True):
        """A line for people, in the terminal and in log.txt."""
        if not self.rank0:
            return
        if in_terminal:
            tqdm.write(message)
        append(self.out / "log.txt", message + "\n")

    def log(self, metrics, **shown):
        """One dict a step; shown: metrics at the progress bar, under shorter names."""
        metrics = {name: float(value) for name, value in metrics.items()}
        metrics["training/global_step"] = self.step
        skipped = [value for name, value in metrics.items() if name.endswith("skipped_updates")]
        if any(skipped):
            self.say(f"warning: step {self.step}: updates were skipped, their gradients are not finite")
        lost = metrics.get("lora/merge_error", 0)
        if lost > 0.8 and self.due(self.args.save_freq):
            remedy = "a larger --lr, a model in float32, or export.py --adapters"
            self.say(
                f"warning: step {self.step}: rounding loses {lost:.0%} of the adapters' update: {remedy}"
            )
        missing = metrics.get("training/rollout_logp_missing")
        if missing:
            self.say(f"warning: step {self.step}: {missing:.0f} log-probs of the sampler are not finite")
        metrics["training/nonfinite"] = sum(not math.isfinite(value) for value in metrics.values())
        if not self.rank0:
            return
        append(self.out / "metrics.jsonl", json_line(metrics))
        if self.step == self.first and "timing_s/step" in metrics:
            self.say(self.at_stake(metrics["timing_s/step"]))
        postfix = {short: f"{metrics[name]:.4g}" for short, name in shown.items()}
        self.bar.set_postfix(postfix, refresh=False)
        self.bar.update(self.step - self.bar.n)
        self.track(metrics, self.step)

    def at_stake(self, seconds):
        """How much work a kill may cost, by the seconds of a step."""
        hours = self.between * seconds / 3600
        text = f"a step takes {seconds:.1f} s: a kill costs {self.between} steps at most, "
        if hours <= 1:
            return f"{text}{60 * hours:.0f} minutes" if hours > 1 / 60 else f"{text}less than a minute"
        return f"warning: {text}{hours:.1f} hours; one hour is --save_freq {max(int(3600 / seconds), 1)}"

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
        others = range(dist.get_world_size())
        try:
            store.set(f"end of rank {dist.get_rank()}", "")
            store.wait([f"end of rank {rank}" for rank in others], END)
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
        self.say(f"report:  python algos/report.py {self.out}")


def append(path, text):
    try:
        with path.open("a") as file:
            file.write(text)
    except OSError as error:  # as of a full disk
        fail(f"{path} cannot be written: {error}")


def clean(out, step, args):
    """Make the directory of a run what it was after `step`, with args.json of now: later steps come again."""
    for checkpoint in steps_in(out / "checkpoints"):
        if not (checkpoint / "trainer_state.json").exists():  # its last file: a kill left it unfinished
            shutil.rmtree(checkpoint)
    metrics = out / "metrics.jsonl"
    kept = ""
    if step and metrics.exists():
        for line in metrics.read_text(errors="replace").splitlines():
            if step_of(line) <= step:
                kept += f"{line}\n"
    with replacing(metrics) as new:
        new.write_text(kept)
    with replacing(out / "args.json") as new:
        new.write_text(json.dumps(asdict(args) | dict(program=program(args)), indent=2))


def step_of(line):
    """The step of a line of metrics.jsonl; infinity for a line that is none, as one that was cut short."""
    try:
        step = json.loads(line)["training/global_step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf
    return step if isinstance(step, int | float) else math.inf


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
