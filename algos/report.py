"""One HTML file for a run, or for several side by side. It opens without a network and shows the checks of
docs/guides/report.md, curves with bands over seeds, where the time goes, differences of arguments, rollouts.

Runs that differ only in `seed` and `output_dir` are one series: the mean, and a band from lowest to highest.

Command:    python algos/report.py runs/grpo
            python algos/report.py runs/grpo_1 runs/grpo_2 --output report.html
            python algos/report.py runs/grpo --follow 30
Docs: docs/guides/report.md
"""

import base64
import fnmatch
import gzip
import json
import math
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
try:
    from system.arguments import one_line_errors, parse
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: activate .venv; a copy elsewhere needs pip install --no-deps -e REPOSITORY")

import jinja2
import numpy as np
import tyro
from scipy.optimize import least_squares
from scipy.special import expit

from system.files import replacing

LIMIT = 5_900_000  # bytes of the HTML file; rollouts get what the other parts leave
STEPS = 16  # number of dumped steps that each get a share of the rollouts
SCORES = "critic/score/mean", "critic/score/min", "critic/score/max"
CUT = 20_000  # longest text in characters; a longer one loses its middle
MARKS = {"wrong": "✕", "warning": "!", "ok": "✓", "not applicable": "–"}  # verdicts, the worst first


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # directories of runs: the --output_dir of a trainer
    output: str | None = None  # HTML file to write; of one run: report.html in its directory
    follow: float = 0.0  # seconds between updates of the file, until Ctrl-C; 0: write it once


# ---- Verdicts ------------------------------------------------------------------------------------------
class Verdict(NamedTuple):
    word: str  # wrong, warning, ok or not applicable
    says: str  # the figure, or why there is none
    step: int | None = None  # the line of metrics.jsonl to read


class NotApplicable(Exception):
    """Why a check has nothing to say about a run."""


def need(condition, why):
    if not condition:
        raise NotApplicable(why)


def matching(metrics, patterns):
    """The metrics that match one of the patterns, in the order of the patterns."""
    found = []
    for pattern in patterns.split():
        found += sorted(fnmatch.filter(metrics, pattern))
    return found


def ends(values):
    """Means of the first and of the last tenth of a curve, at least three points each."""
    n = max(3, len(values) // 10)
    return values[:n].mean(), values[-n:].mean()


def grade(value, warning, wrong):
    """The word for a value that should be small."""
    if value > wrong:
        return "wrong"
    if value > warning:
        return "warning"
    return "ok"


def highest(steps, values, warning, wrong, text):
    """The verdict on the highest value of a curve."""
    i = np.argmax(values)
    return Verdict(grade(values[i], warning, wrong), f"{text} {values[i]:.3g}", steps[i])


def share(bad, n, warning, wrong, text):
    """The verdict on bad steps, by their share of n steps."""
    first = bad[0] if len(bad) else None
    word = grade(len(bad), warning * n, wrong * n)
    return Verdict(word, f"{len(bad)} of {n} steps {text}", first)


def fit_sigmoid(x, y, level=None):
    """The best y = start + (level - start) / (1 + (middle / x)^slope) -> its level, its squared error.

    level: where it is given. The fit begins at the best point of a grid of middles and slopes.
    """

    def errors(point):
        start, log_middle, slope, *free = point
        end = free[0] if free else level
        return start + (end - start) * expit(slope * (np.log(x) - log_middle)) - y

    def squared_error(point):
        return (errors(point) ** 2).sum()

    free = [y[-len(y) // 10 :].mean()] if level is None else []
    log_middles = np.log(np.geomspace(x[0], 10 * x[-1], 30))
    slopes = np.geomspace(0.5, 8, 8)
    grid = [[y[0], log_middle, slope, *free] for log_middle in log_middles for slope in slopes]
    fit = least_squares(errors, min(grid, key=squared_error), method="lm")
    return fit.x[-1], squared_error(fit.x)


def level(steps, values, within):
    """Where a curve levels off (ScaleRL, 2510.13786, eq. 1), and the limits of that; None if it is open.

    Means of up to 100 parts are fitted. A limit is the first value, in tenths of `within`, to which the best
    fit is worse than noise explains, at 95 %; open: none is within.
    """
    parts = np.array_split(np.arange(len(steps)), min(len(steps), 100))
    x = np.array([steps[part].mean() for part in parts])
    y = np.array([values[part].mean() for part in parts])
    found, least = fit_sigmoid(x, y)
    explained = least * (1 + 3.84 / (len(x) - 4))
    limits = []
    for sign in (-1, 1):
        for far in within * np.linspace(0.1, 1, 10):
            limit = found + sign * far
            if fit_sigmoid(x, y, limit)[1] > explained:
                limits.append(limit)
                break
    return (found, *limits) if len(limits) == 2 else None


# ---- A run and its checks ------------------------------------------------------------------------------
class Run:
    """The files of a run. A method check_* is a check; guides/report.md and the page have its docstring."""

    def __init__(self, path, name):
        if not (path / "metrics.jsonl").is_file():
            raise ValueError(f"{path} has no metrics.jsonl; give the --output_dir of a started run")
        self.path = path
        self.name = name
        self.args = {}
        self.broken = 0  # lines that cannot be read
        rows = {}
        lines = (path / "metrics.jsonl").read_text(errors="replace").split("\n")
        for line in lines[:-1]:  # the last one is empty, or still being written
            try:
                row = {}
                for key, value in json.loads(line).items():
                    if isinstance(value, int | float | None):
                        row[key] = math.nan if value is None else float(value)
                step = int(row["training/global_step"])
            except (ValueError, AttributeError, KeyError, OverflowError):
                self.broken += 1
                continue
            if step in rows:  # a resume repeats this step and all later ones
                rows = {old: row for old, row in rows.items() if old < step}
            rows[step] = row
        self.rows = dict(sorted(rows.items()))  # {step: {metric: value}}
        self.metrics = set().union(*rows.values())
        with suppress(OSError, ValueError, TypeError):
            self.args = dict(json.loads((path / "args.json").read_text()))
        self.what = " on ".join(str(self.args[key]) for key in ("program", "model") if key in self.args)
        self.log = []
        log = path / "log.txt"
        if log.is_file():
            self.log = log.read_text(errors="replace").splitlines()

    @cached_property
    def verdicts(self):
        found = {}  # {name of a check: its verdict}
        for name, check in CHECKS.items():
            try:
                found[name] = check(self)
            except NotApplicable as why:
                found[name] = Verdict("not applicable", str(why))
        return found

    def curve(self, *names, least=1):
        """Steps where all these metrics are finite, and the values of each; a check needs `least` steps."""
        need(names, "no such metric")
        rows = []
        for step, row in self.rows.items():
            values = [row.get(name, math.nan) for name in names]
            if all(map(math.isfinite, values)):
                rows.append([step, *values])
        need(len(rows) >= least, f"{len(rows)} steps with {', '.join(names)}, at least {least} needed")
        steps, *values = np.array(rows).reshape(-1, 1 + len(names)).T
        return steps.astype(int), *values

    def gap(self, end, least=1):
        """The gap between the probabilities of sampler and trainer: its mean or max."""
        need(self.args.get("top_p", 1) >= 1, "a sampler with top_p has another distribution")
        return self.curve(f"training/rollout_probs_diff_{end}", least=least)

    def by_dtype(self, float32, bfloat16):
        """A limit that depends on rounding; it is that of bfloat16 where the dtype is unknown."""
        if self.args.get("compute_dtype") == "float32":
            return float32
        return bfloat16

    def nats(self, name):
        """Steps, and a KL in nats a token: --loss_agg weighs `actor/kl_loss` as it weighs the loss."""
        mode = self.args.get("loss_agg") or ""
        if name != "actor/kl_loss" or not mode.startswith("seq-mean-token-sum"):
            return self.curve(name, least=0)
        others = matching(self.metrics, "response_length/mean env/token_ratio")
        steps, values, lengths, *environment = self.curve(name, *others, least=0)
        lengths = lengths * (1 - sum(environment))  # tokens of an environment are not trained
        values = values / lengths
        if mode.endswith("norm"):
            values = values * self.args["max_response_length"]
        return steps, values

    def one_update(self):
        """Whether a rollout has one optimizer step; without args.json it is unknown, and False."""
        batch = self.args.get("train_batch_size", 0)
        return self.args.get("ppo_epochs") == 1 and self.args.get("ppo_mini_batch_size") == batch

    def scores(self, least=1):
        """Steps, mean scores, lowest score, width of the range of the scores."""
        need("dapo/gen_batches" not in self.metrics, "scores of selected groups (DAPO)")
        steps, means, lows, highs = self.curve(*SCORES, least=least)
        need(highs.max() > lows.min(), "all scores are equal")
        return steps, means, lows.min(), highs.max() - lows.min()

    def solved(self):
        """Whether the score ends in the top tenth of its range; DAPO: most groups have no wrong response."""
        if "dapo/dropped_all_right" in self.metrics:
            return ends(self.curve("dapo/dropped_all_right")[1])[1] > 0.5
        with suppress(NotApplicable):
            _, means, low, width = self.scores()
            return ends(means)[1] >= low + 0.9 * width
        return False

    def check_not_finite(self):
        """A metric other than a gradient norm is NaN or infinite: wrong"""
        need(self.rows, "no steps yet")
        for step, row in self.rows.items():
            for name, value in row.items():
                if not math.isfinite(value) and not name.endswith("/grad_norm"):
                    return Verdict("wrong", f"{name} is {value}", step)
        return Verdict("ok", "all are finite")

    def check_sampler_gap(self):
        """`training/rollout_probs_diff_mean`: over 0.005 warning, over 0.01 wrong; float32: 1e-5, 1e-4"""
        return highest(*self.gap("mean"), *self.by_dtype((1e-5, 1e-4), (0.005, 0.01)), "largest mean gap")

    def check_sampler_gap_growth(self):
        """From step 2, the last quarter of the gap over its warning and 1.5 times the first: wrong"""
        steps, gaps = self.gap("mean", least=5)
        quarter = (len(gaps) - 1) // 4
        first = gaps[1 : 1 + quarter].mean()
        last = gaps[-quarter:].mean()
        grows = last > self.by_dtype(1e-5, 0.005) and last >= 1.5 * first
        word = "wrong" if grows else "ok"
        return Verdict(word, f"{first:.3g} at the start, {last:.3g} at the end", steps[-1])

    def check_sampler_gap_token(self):
        """Largest `training/rollout_probs_diff_max`: over 0.9 wrong, in bfloat16 warning"""
        wrong = self.by_dtype(0.9, 1.0)  # in bfloat16 one flipped expert of an MoE is enough
        return highest(*self.gap("max"), 0.9, wrong, "largest gap of a token")

    def check_on_policy(self):
        """`actor/pg_clipfrac` or `actor/ppo_kl` not 0 with one optimizer step a rollout: wrong"""
        need(self.one_update(), "not known to be one mini-batch and one epoch")
        steps, *values = self.curve(*matching(self.metrics, "actor/pg_clipfrac* actor/ppo_kl"))
        return highest(steps, np.abs(values).max(0), 0, 0, "largest clip fraction or |ppo_kl|")

    def check_no_signal(self):
        """Steps whose scores are all equal, or advantages all 0: over 10 % warning, over 50 % wrong"""
        advantages = "critic/advantages/min", "critic/advantages/max"
        steps, worst, best, low, high = self.curve(*SCORES[1:], *advantages)
        flat = (worst == best) | ((low == 0) & (high == 0))
        return share(steps[flat], len(steps), 0.1, 0.5, "have no signal")

    def check_clipped_responses(self):
        """`response_length/clip_ratio` at the end: over 0.1 warning, over 0.5 wrong"""
        steps, ratios = self.curve("response_length/clip_ratio")
        return highest(steps[-1:], ends(ratios)[1:], 0.1, 0.5, "share of cut responses at the end:")

    def check_failures(self):
        """Errors, timeouts, crashes of `reward/*` and `env/*`: any warning, over 1 % of responses wrong"""
        said = [line for line in self.log if line.startswith(("warning: the ", "error: the "))]
        if said and said[-1] == self.log[-1] and said[-1].startswith("error"):  # nothing came after it
            return Verdict("wrong", said[-1].removeprefix("error: "), max(self.rows, default=None))
        steps, *failures = self.curve(*matching(self.metrics, "*/errors */timeouts */crashes"))
        failures = np.sum(failures, 0)
        responses = self.args.get("train_batch_size", 0) * self.args.get("group_size", 1)
        text = f"{failures.sum():.0f} in all, most in a step:"
        if failures.any():
            text = "; ".join([*(line.removeprefix("warning: ") for line in said), text])
        return highest(steps, failures, 0, 0.01 * responses or math.inf, text)

    def check_score_collapse(self):
        """Score lost since its best: over 0.25 warning, over 0.5 wrong, if over 0.05 of the range"""
        steps, scores, low, width = self.scores(least=6)
        n = max(3, len(scores) // 10)
        means = np.convolve(scores, np.ones(n) / n, "valid")
        best = means.max()
        last = means[-1]
        lost = 0.0
        if best - last > 0.05 * width:
            lost = (best - last) / (best - low)
        says = f"best mean of {n} steps {best:.3g}, last {last:.3g}"
        return Verdict(grade(lost, 0.25, 0.5), says, steps[means.argmax()])

    def check_score_rises(self):
        """From 50 steps on, unless solved: the score rises by less than 0.02 of its range: warning"""
        steps, scores, _, width = self.scores(least=50)
        need(not self.solved(), "solved")
        first, last = ends(scores)
        word = "warning" if last - first < 0.02 * width else "ok"
        return Verdict(word, f"{first:.3g} at the start, {last:.3g} at the end", steps[-1])

    def check_held_out(self):
        """Score up by 0.1 of its range, `val-core/{source}/*/mean@{N}` not: warning; down by 0.05: wrong"""
        _, scores, _, width = self.scores(least=6)
        changes = []
        for name in matching(self.metrics, "val-core/*/mean@*"):
            steps, values = self.curve(name, least=0)
            if len(values) > 1:
                change = values[1:][-3:].mean() - values[0]
                if "/acc/" not in name:
                    change = change / width
                changes.append((change, name, steps[-1]))
        need(changes, "fewer than two validations")
        change, name, step = min(changes)
        [rise] = np.diff(ends(scores)) / width
        word = "ok"
        if rise >= 0.1 and change <= 0:
            word = "wrong" if change < -0.05 else "warning"
        return Verdict(word, f"score {rise:+.3g} of its range, {name} {change:+.3g}", step)

    def check_best_validation(self):
        """Validation lost since its best: over 0.25 of its span warning, over 0.5 wrong, if over 0.15"""
        accuracy = "val-core/*/acc/mean@* val/accuracy val/rewards/accuracies"
        names = matching(self.metrics, accuracy)
        width = 1 if names else self.scores()[3]
        found = []
        for name in names or matching(self.metrics, "val-core/*/mean@*"):
            steps, values = self.curve(name, least=3)
            best = values.max()
            lost = best - values[-1]
            span = 0.0
            if lost > 0.15 * width:
                span = lost / max(best - values.min(), 1e-9)
            found.append((span, name, values[-1], best, steps[values.argmax()]))
        need(found, "fewer than three validations")
        span, name, last, best, step = max(found)
        where = f"checkpoints/step_{step:06d}"
        if not (self.path / where).is_dir():
            where = "no checkpoint"
        says = f"{name} is best, {best:.3g}, at step {step}; {where} has it; the last {last:.3g}"
        return Verdict(grade(span, 0.25, 0.5), says, step)

    def check_entropy_collapse(self):
        """Unless solved, entropy times length at the end: under 0.3 nats warning, under 0.1 wrong"""
        steps, entropy, length = self.curve("actor/entropy", "response_length/mean")
        need(not self.solved(), "solved: low entropy is expected")
        nats = ends(entropy)[1] * ends(length)[1]  # two responses are equal more often than e^-nats
        return Verdict(grade(-nats, -0.3, -0.1), f"{nats:.3g} nats a response at the end", steps[-1])

    def check_entropy_explosion(self):
        """Entropy 3 times its start: warning; 2 times, and the score under 0.9 of its start: wrong"""
        steps, entropy = self.curve("actor/entropy", least=6)
        first, last = ends(entropy)
        fell = False
        with suppress(NotApplicable):
            _, scores, low, _ = self.scores()
            score_first, score_last = ends(scores - low)
            fell = score_last < 0.9 * score_first
        word = "ok"
        if last > 3 * first:
            word = "warning"
        if last > 2 * first and fell:
            word = "wrong"
        return Verdict(word, f"{first:.3g} at the start, {last:.3g} at the end", steps[-1])

    def check_gradient_spikes(self):
        """A gradient norm 10 times the median of the 20 steps around it: warning; 100 times: wrong"""
        points = []
        for name in matching(self.metrics, "*/grad_norm"):
            steps, norms = self.curve(name, least=0)
            if len(norms) < 6:
                continue
            for i in range(len(norms)):
                near = np.median(np.delete(norms, i)[max(0, i - 10) : i + 10])
                if near:
                    points.append((steps[i], norms[i] / near))
        need(points, "fewer than six gradient norms")
        return highest(*zip(*points), 10, 100, "largest norm over that of its neighbours:")

    def check_skipped_updates(self):
        """`actor/skipped_updates` and those of critic and SFT: any warning, in over 1 % of steps wrong"""
        names = matching(self.metrics, "*/skipped_updates")
        need(names, "no such metric")
        skipped = [step for step, row in self.rows.items() if any(map(row.get, names))]
        return share(skipped, len(self.rows), 0, 0.01, "skipped an update")

    def check_kl_first_step(self):
        """KL to the reference before the first update: over 1e-6 wrong, in bfloat16 over 1e-3"""
        names = []
        if self.args.get("use_kl_loss") and self.one_update():
            names.append("actor/kl_loss")
        if self.args.get("kl_coef"):
            names.append("actor/reward_kl_penalty")
        values = []
        for name in names:
            steps, nats = self.nats(name)
            values += abs(nats[steps == 1]).tolist()
        need(values, "no reference, no step 1, or several updates in step 1")
        return highest([1], [max(values)], *self.by_dtype((1e-6, 1e-6), (1e-3, 1e-3)), "KL of step 1:")

    def check_kl_growth(self):
        """KL at the end over 0.5 nats a token: warning, over 1 or, on average, under -0.05: wrong"""
        need("actor/teacher_kl" not in self.metrics, "no reference, but a teacher")
        curves = [self.nats(name) for name in ("actor/kl_loss", "actor/reward_kl_penalty")]
        curves = [curve for curve in curves if curve[1].any()]
        need(curves, "no reference, or a KL of 0")
        steps, values = curves[0]
        if values.mean() < -0.05:
            return Verdict("wrong", f"mean {values.mean():.3g}, but a KL is not negative", steps[-1])
        return highest(steps[-1:], ends(values)[1:], 0.5, 1, "nats a token at the end:")

    def check_explained_variance(self):
        """`critic/vf_explained_var` ends under 0.02 after 100 steps: warning, under -0.1 after 20: wrong"""
        steps, values = self.curve("critic/vf_explained_var", least=20)
        last = ends(values)[1]
        warning = 0.02 if len(values) >= 100 else -0.1
        return Verdict(grade(-last, -warning, 0.1), f"{last:.3g} at the end", steps[-1])

    def check_empty_returns(self):
        """`critic/returns/*` all within 1e-6 of 0 in a step whose `critic/rewards/mean` is not 0: wrong"""
        names = "critic/returns/min", "critic/returns/max", "critic/rewards/mean"
        steps, low, high, reward = self.curve(*names)
        lost = (low > -1e-6) & (high < 1e-6) & (reward != 0)
        return share(steps[lost], len(steps), 0, 0, "have empty returns")

    def check_dynamic_sampling(self):
        """`dapo/gen_batches` at --max_gen_batches: in any step warning, in over 10 % wrong"""
        steps, batches = self.curve("dapo/gen_batches")
        limit = self.args.get("max_gen_batches")
        need(limit, "--max_gen_batches is not known")
        return share(steps[batches >= limit], len(steps), 0, 0.1, f"at the limit of {limit}")

    def check_dynamic_sampling_filter(self):
        """`dapo/dropped_all_right` always 0 though `critic/score/mean` ends over 0.95 of its range: wrong"""
        steps, dropped, means, lows, highs = self.curve("dapo/dropped_all_right", *SCORES)
        last = ends(means)[1]
        low = lows.min()
        high = highs.max()
        solved = last > low + 0.95 * (high - low)
        word = "wrong" if solved and not dropped.any() else "ok"
        return Verdict(word, f"score {last:.3g}, at most {dropped.max():.3g} dropped", steps[-1])

    def check_learning_rate(self):
        """All 0, or after warm-up a change over 0.05 of the peak and 3 times the changes near it: wrong"""
        names = matching(self.metrics, "*/lr")
        need(names, "no such metric")
        for name in names:
            steps, rates = self.curve(name)
            if not rates.any():
                return Verdict("wrong", f"{name} is 0 in all steps", steps[0])
            changes = np.diff(rates)
            falls = np.flatnonzero(changes <= 0)
            start = max(2, falls[0]) if len(falls) else len(changes)  # where the warm-up ends
            for i in range(start, len(changes) - 2):
                near = np.median(abs(changes[[i - 2, i - 1, i + 1, i + 2]]))
                if abs(changes[i]) > max(0.05 * rates.max(), 3 * near):
                    says = f"{name} jumps from {rates[i]:.3g} to {rates[i + 1]:.3g}"
                    return Verdict("wrong", says, steps[i + 1])
        return Verdict("ok", "no jump")

    def check_stays_zero(self):
        """Gradient norms, a reference's KL, `actor/ppo_kl` of several updates 0; PPO's actor rests: wrong"""
        args = self.args
        names = matching(self.metrics, "*/grad_norm")
        warmup = args.get("critic_warmup", 0)
        total = args.get("total_steps") or math.inf
        trains = "actor/grad_norm" in names or max(self.rows, default=0) <= warmup < total
        if "critic/grad_norm" in names and not trains:
            return Verdict("wrong", f"the actor rests in all steps: --critic_warmup {warmup}")
        if args.get("use_kl_loss"):
            names.append("actor/kl_loss")
        if args.get("kl_coef"):
            names.append("actor/reward_kl_penalty")
        if "ppo_epochs" in args and not self.one_update():
            names.append("actor/ppo_kl")
        for name in names:
            steps, values = self.curve(name, least=3)
            if not values.any():
                return Verdict("wrong", f"{name} is 0 in all steps", steps[-1])
        need(names, "no such metric")
        return Verdict("ok", "they move")

    def check_levels_off(self):
        """From 50 steps on, where a sigmoid through the scores levels off; there in mid-run: warning"""
        steps, means, _, width = self.scores(least=50)
        first, last = ends(means)
        need(last - first > 0.1 * width, "the score rises by less than a tenth of its range")
        found = level(steps, means, 0.1 * width)
        need(found, "too short, or too noisy, to say where the score levels off")
        at, low, high = found
        middle = len(means) // 2
        far = len(means) // 20
        word = "warning" if means[middle - far : middle + far].mean() > low else "ok"
        return Verdict(word, f"at {at:.3g}, with 95 % between {low:.3g} and {high:.3g}", steps[-1])

    def check_pairs(self):
        """From 20 steps on, accuracy at the end: under 0.55 warning, under 0.45 or a margin under 0 wrong"""
        name = "train/accuracy" if "train/accuracy" in self.metrics else "rewards/accuracies"
        steps, accuracies, margins = self.curve(name, "rewards/margins", least=20)
        accuracy = ends(accuracies)[1]
        margin = ends(margins)[1]
        word = grade(-accuracy, -0.55, -0.45)
        if margin < 0:
            word = "wrong"
        return Verdict(word, f"{name} {accuracy:.3g}, margin {margin:.3g} at the end", steps[-1])

    def check_training_loss(self):
        """`train/loss`, distillation's `actor/teacher_kl`: end over 1.1 times start warning, 1.5 wrong"""
        need(not self.args.get("dft"), "a loss that is weighed by probabilities (--dft) may rise")
        steps, values = self.curve(*matching(self.metrics, "train/loss actor/teacher_kl")[:1], least=6)
        first, last = ends(values)
        word = grade(last / max(first, 0.05), 1.1, 1.5)
        return Verdict(word, f"{first:.3g} at the start, {last:.3g} at the end", steps[-1])

    def check_validation_loss(self):
        """The last `val/loss` over 1.1 times the lowest: warning, over 1.5 times: wrong"""
        steps, losses = self.curve("val/loss", least=2)
        i = losses.argmin()
        need(losses[i] > 0, "the lowest loss is not above 0")
        word = grade(losses[-1] / losses[i], 1.1, 1.5)
        return Verdict(word, f"lowest {losses[i]:.3g}, the last {losses[-1]:.3g}", steps[i])


CHECKS = {name: check for name, check in vars(Run).items() if name.startswith("check_")}
CHECKS = {name.removeprefix("check_").replace("_", "-"): check for name, check in CHECKS.items()}


# ---- Parts of the page ---------------------------------------------------------------------------------
def series_of(runs):
    """{label: runs}: together those whose arguments differ only in seed and output_dir."""
    found = {}
    for run in runs:
        key = run.name
        if run.args:
            same = {k: v for k, v in run.args.items() if k not in ("seed", "output_dir")}
            key = json.dumps(same, sort_keys=True)
        found.setdefault(key, []).append(run)
    labels = {}
    for alike in found.values():
        label = alike[0].name
        if len(alike) > 1:
            stems = {run.name.rstrip("_-.0123456789") for run in alike}  # grpo_1, grpo_2: grpo
            if len(stems) == 1:
                label = stems.pop() or label
            seeds = ", ".join(str(run.args.get("seed")) for run in alike)
            label = f"{label} (seeds {seeds})"
        if label in labels:
            label = f"{label} {len(labels) + 1}"
        labels[label] = alike
    return labels


def spread(items):
    """The same items in an order that begins everywhere: the first, the middle, the quarters ..."""
    order = sorted(range(len(items)), key=lambda i: f"{i * 65536 // len(items):016b}"[::-1])
    return [items[i] for i in order]


def cut(value):
    """A value as text; a long one loses its middle."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= CUT:
        return text
    left_out = f"\n[... {len(text) - CUT:,} characters left out ...]\n"
    return text[: CUT - CUT // 4] + left_out + text[-CUT // 4 :]


def response(row):
    """A dumped response as the page has it; keys that have no place there are in `more`."""
    shown = "data_source prompt_str solution_str ground_truth extra_info score index sample finish_reason"
    shown += " response_ids advantages"
    more = {key: cut(value) for key, value in row.items() if key not in shown.split()}
    advantages = row.get("advantages")  # of its tokens
    if not isinstance(advantages, list):
        advantages = []
    return {
        "text": cut(row.get("solution_str", "")),
        "finish": cut(row.get("finish_reason") or ""),
        "more": more,
        "advantages": numbers(advantages),
        "score": number(row.get("score")),
    }


def read_dump(path):
    """The rows of a dumped step: a list for each prompt."""
    groups = {}
    for line in path.read_text(errors="replace").split("\n"):
        with suppress(ValueError, AttributeError):  # a half-written line, or no dict
            row = json.loads(line)
            groups.setdefault((str(row.get("data_source")), str(row.get("index"))), []).append(row)
    return list(groups.values())


def read_rollouts(run, budget):
    """Groups of dumped responses that fit, spread over steps and prompts -> groups, a remark."""
    dumps = sorted(path for path in run.path.glob("rollouts/step_*.jsonl") if path.stem[5:].isdigit())
    per_step = budget // max(1, min(len(dumps), STEPS))
    groups = []
    left_out = 0
    for path in spread(dumps):
        if budget < per_step // 20:
            break
        taken = 0  # bytes of this step, whose first group may be larger than its share
        found = read_dump(path)
        for rows in spread(found):
            group = {
                "run": run.name,
                "step": int(path.stem[5:]),
                "source": str(rows[0].get("data_source")),
                "prompt": cut(rows[0].get("prompt_str", "")),
                "truth": cut(rows[0].get("ground_truth")),
                "index": str(rows[0].get("index")),  # one text may be asked of several pictures
                "rows": [response(row) for row in rows],
            }
            size = len(embed(group).encode("utf-8", "replace"))
            if size > budget or (taken and taken + size > per_step):
                left_out += len(rows)
                continue
            groups.append(group)
            taken += size
            budget -= size
        if found and not taken:  # there is no room for a group, and reading all others would find none
            break
    return sorted(groups, key=lambda group: group["step"]), (run, len(dumps), left_out)


def numbers(values):
    return [number(x) for x in values]


def number(value):
    """Five digits; None for what is no finite number: a gap of a curve."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(f"{value:.5g}")
    return None


def thin(values_rs, steps, points):
    """[runs, steps] -> a curve of at most `points` bins of neighbouring steps, and its band if any."""
    values_rs = np.where(np.isinf(values_rs), np.nan, values_rs)
    starts = np.linspace(0, len(steps), min(len(steps), points), endpoint=False).astype(int)
    sizes = np.diff([*starts, len(steps)])
    mean = numbers(np.add.reduceat(values_rs.mean(0), starts) / sizes)
    low = numbers(np.minimum.reduceat(values_rs.min(0), starts))
    high = numbers(np.maximum.reduceat(values_rs.max(0), starts))
    line = dict(x=[steps[i] for i in starts + sizes // 2], y=mean)
    if low != high:
        line |= dict(low=low, high=high)
    return line


def traces(runs, name, points):
    """Curves of a metric in a series: one of the steps of all runs, and one of each longer run."""
    runs = [run for run in runs if name in run.metrics]
    lines = [{step: row[name] for step, row in run.rows.items() if name in row} for run in runs]
    if not lines:
        return
    shared = sorted(set.intersection(*map(set, lines)))
    last = max(shared, default=-1)
    parts = [(lines, shared)]
    for line in lines:
        parts.append(([line], [step for step in line if step > last]))
    for part, steps in parts:
        if steps:
            yield thin([[line[step] for step in steps] for line in part], steps, points)


def charts_of(series, points, patterns):
    """{metric: its curves} of the metrics that match a pattern; no curves if it is always 0."""
    rows = []
    for runs in series:
        for run in runs:
            rows += run.rows.values()
    charts = {}
    for name in matching(set().union(*rows), patterns):
        if name.endswith(("best@1", "maj@1")):
            continue
        charts[name] = []
        if any(row.get(name) for row in rows):
            for i, runs in enumerate(series):
                charts[name] += [dict(series=i) | line for line in traces(runs, name, points)]
    return charts


def time_parts(runs, points):
    """Seconds of a step by its parts, except the checkpoint; what no part counts is `other`."""
    timed = [run.curve("timing_s/step", least=0)[0].tolist() for run in runs]
    steps = sorted(set.intersection(*map(set, timed)))
    if not steps:
        return None
    seconds = {}
    names = set().union(*(run.metrics for run in runs))
    for name in matching(names, "timing_s/*"):
        values = [[run.rows[step].get(name, 0) for step in steps] for run in runs]
        seconds[name.removeprefix("timing_s/")] = np.array(values)
    whole = seconds.pop("step")
    checkpoint = seconds.pop("save_checkpoint", None)
    seconds["other"] = (whole - sum(seconds.values())).clip(0)
    if checkpoint is not None:
        seconds["save_checkpoint"] = checkpoint
    total = sum(part.sum() for part in seconds.values()) or 1.0
    parts = [(f"{name} {x.sum() / total:.0%}", thin(x, steps, points)) for name, x in seconds.items()]
    return dict(x=parts[0][1]["x"], parts=[[name, line["y"]] for name, line in parts])


def duration(seconds):
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


@cache
def described():
    """[pattern of metrics, what they are] of docs/reference/metrics.md; a copy without that page has none."""
    found = []
    section = ""
    with suppress(OSError):
        for line in (ROOT / "docs/reference/metrics.md").read_text().splitlines():
            if line.startswith("## "):
                section = line.removeprefix("## ")
            if not section or not line.startswith("| `"):
                continue
            names, *cells = line.strip("| ").split(" | ")
            text = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", "; ".join(cells))
            for name in re.findall(r"`([^`]+)`", names):
                found.append((re.sub(r"\{.*?\}", "*", name), f"{section}: {text}"))
    return found


def meaning(name):
    """What a metric is, a line for each kind of run that has it."""
    return "\n".join(text for pattern, text in described() if fnmatch.fnmatchcase(name, pattern))


def address(folder, *parts):
    """The link from a page in `folder` to a file or a folder; "" if it is missing."""
    path = Path(*parts)
    return quote(os.fsencode(os.path.relpath(path, folder))) if path.exists() else ""


def embed(value):
    """JSON that no text in it can leave."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def compare_arguments(runs):
    """Rows of kind, argument and its value in each run; kinds: differ, own (of some scripts), equal."""
    for name in dict.fromkeys(name for run in runs for name in run.args):
        values = [cut(run.args[name]) if name in run.args else "–" for run in runs]
        kind = "differ"
        if "–" in values:
            kind = "own"
        elif len(set(values)) == 1:
            kind = "equal"
        yield kind, name, *values


# ---- The page: report.html, a template of jinja2, which escapes all text --------------------------------
def build(runs, folder, reload_s=0):
    """The whole page, in bytes; folder: where it will be, for its links."""
    series = series_of(runs)
    points = max(40, min(400, 1200 // len(series)))
    script = (files("plotly") / "package_data/plotly.min.js").read_bytes()
    page = {
        "runs": runs,
        "checks": CHECKS,
        "marks": MARKS,
        "limit": LIMIT,
        "embed": embed,
        "duration": duration,
        "meaning": meaning,
        "address": partial(address, folder),
        "guide": ROOT / "docs/guides/debugging.md",
        "matching": matching,
        "strftime": time.strftime,
        "series": list(series),
        "reload_s": reload_s,
        "rollouts": [],
        "remarks": [],
        "arguments": list(compare_arguments([run for run in runs if run.args])),
        "charts": cache(partial(charts_of, series.values(), points)),
        "times": {label: time_parts(alike, points) for label, alike in series.items()},
        "plotly": base64.b64encode(gzip.compress(script)).decode(),  # leaves more room for rollouts
    }
    source = Path(__file__).with_suffix(".html").read_text()
    template = jinja2.Template(source, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    budget = LIMIT - len(template.render(page).encode("utf-8", "replace")) - 10_000
    if budget < 0:
        raise ValueError(f"{len(runs)} runs make a file over {LIMIT / 1e6:.1f} MB; give fewer at a time")
    for run in runs:
        groups, remark = read_rollouts(run, budget // len(runs))
        page["rollouts"] += groups
        page["remarks"].append(remark)
    return template.render(page).encode("utf-8", "replace")


def write(args, reload_s):
    """Write the HTML file, and print what the checks found."""
    paths = list(dict.fromkeys(map(Path, args.runs)))
    if args.output is None and len(paths) > 1:
        raise ValueError("several runs in one page: pass --output FILE.html")
    output = Path(args.output or paths[0] / "report.html")
    if output.is_dir():
        raise ValueError(f"--output {output} is a directory; give the name of an HTML file")
    names = [path.resolve().name for path in paths]
    runs = []
    for path, name in zip(paths, names):
        if names.count(name) > 1:
            name = str(path)
        runs.append(Run(path, name))
    page = build(runs, output.parent, reload_s)
    with replacing(output) as new:
        new.write_bytes(page)
    for run in runs:
        words = [verdict.word for verdict in run.verdicts.values()]
        counts = [f"{words.count(word)} {word}" for word in ("wrong", "warning", "ok")]
        print(f"{run.name}: {', '.join(counts)}")
        for name, (word, says, step) in run.verdicts.items():
            if word in ("wrong", "warning"):
                at = f" (step {step})" if step else ""
                print(f"  {word}: {name}, {says}{at}")
    print(f"{output}: {len(page) / 1e6:.1f} MB, {time.strftime('%H:%M:%S')}", flush=True)


def main(args):
    with one_line_errors():
        with suppress(KeyboardInterrupt):
            while args.follow > 0:
                write(args, args.follow)
                time.sleep(args.follow)
        write(args, 0)  # once, or after Ctrl-C again, as a page that does not reload


if __name__ == "__main__":
    main(Args(**parse(Args)))
