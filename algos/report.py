"""A run, or several side by side, as one HTML file that opens offline: what is wrong by the checks of
docs/debugging.md, curves with bands over seeds, where the time goes, how the arguments differ, and rollouts.

Runs whose arguments differ in `seed` and `output_dir` alone are one group: the mean of its runs, and the band
from the lowest to the highest. Nothing of a run is executed, and it may still be going on.

Command:    python algos/report.py runs/grpo_1 runs/grpo_2 --output report.html
            python algos/report.py runs/grpo --output report.html --follow 30
Docs: docs/report.md
"""

import base64
import fnmatch
import gzip
import html
import json
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data_prep.arguments import parse
from data_prep.atomic import replacing

LIMIT = 5_900_000  # bytes of the file; rollouts take what the rest leaves
STEPS = 16  # dumped steps that at least have a share of the rollouts
CUT = 20_000  # characters of one text, its head and its tail; the middle is left out
GAP = "training/rollout_probs_diff"
SCORE = "critic/score/mean"


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """Directories of runs: the --output_dir of a trainer."""
    output: str
    """The HTML file."""
    follow: float = 0.0
    """Seconds after which it is written anew, until interrupted; the page reloads itself. 0: once."""


# ---- The checks: (rows of metrics.jsonl, arguments) -> Verdict. The docstring is in docs/report.md, too
class Verdict(NamedTuple):
    word: str  # ok, warning, wrong, not applicable
    says: str  # the figure, or why there is none
    step: int | None = None  # the line of metrics.jsonl to read


def curve(rows, name):
    """[(step, value)] of a metric, where it is finite."""
    points = ((int(row["training/global_step"]), row[name]) for row in rows if name in row)
    return [(step, value) for step, value in points if np.isfinite(value)]


def table_of(rows, names):
    """[(step, a value of each metric)] of the rows that have them all."""
    rows = [row for row in rows if all(name in row for name in names)]
    return [(int(row["training/global_step"]), *(row[name] for name in names)) for row in rows]


def ends(points):
    """Means of the first and of the last tenth of a curve, at least three points each."""
    values, n = [value for _, value in points], max(3, len(points) // 10)
    return float(np.mean(values[:n])), float(np.mean(values[-n:]))


def grade(value, warning, wrong):
    """The word for a value that should be small."""
    return "wrong" if value > wrong else "warning" if value > warning else "ok"


def highest(points, warning, wrong, text):
    """The verdict on the highest point of a curve."""
    if not points:
        return Verdict("not applicable", "no such metric")
    step, value = max(points, key=itemgetter(1))
    return Verdict(grade(value, warning, wrong), f"{text} {value:.3g}", step)


def gap_limits(args):
    """Gaps of probabilities that rounding no longer explains: warning, wrong."""
    return (1e-5, 1e-4) if args.get("compute_dtype") == "float32" else (0.005, 0.01)


def one_update(args):
    """Whether there is one optimizer step a rollout; without args.json nobody knows."""
    sizes = args.get("ppo_mini_batch_size"), args.get("train_batch_size")
    return args.get("ppo_epochs") == 1 and None not in sizes and sizes[0] == sizes[1]


def score_range(rows):
    """Lowest score and width of the scores that were seen. DAPO: none, it trains on chosen groups alone."""
    lows, highs = (curve(rows, f"critic/score/{end}") for end in ("min", "max"))
    if not lows or not highs or curve(rows, "dapo/gen_batches"):
        return 0.0, 0.0
    low, high = min(value for _, value in lows), max(value for _, value in highs)
    return low, high - low


def solved(rows):
    """Whether the score ends in the highest tenth of its range; DAPO: most groups have no wrong response."""
    if right := curve(rows, "dapo/dropped_all_right"):
        return ends(right)[1] > 0.5
    low, width = score_range(rows)
    return width > 0 and ends(curve(rows, SCORE))[1] >= low + 0.9 * width


def not_finite(rows, args):
    """Any metric but a gradient norm that is NaN or infinite: wrong"""
    for row in rows:
        for name, value in row.items():
            if not np.isfinite(value) and not name.endswith("/grad_norm"):
                return Verdict("wrong", f"{name} is {value}", int(row["training/global_step"]))
    return Verdict("ok", "all are finite") if rows else Verdict("not applicable", "no steps yet")


def sampler_gap(rows, args):
    """Largest `training/rollout_probs_diff_mean`: over .005 warning, over .01 wrong; float32: 1e-5, 1e-4"""
    if args.get("top_p", 1) < 1:
        return Verdict("not applicable", "a sampler with top_p has another distribution")
    return highest(curve(rows, f"{GAP}_mean"), *gap_limits(args), "largest mean gap")


def sampler_gap_growth(rows, args):
    """From step 2, the gap of the last quarter over its warning, and 1.5 times that of the first: wrong"""
    points = curve(rows, f"{GAP}_mean")[1:]
    if len(points) < 4 or sampler_gap(rows, args).word == "not applicable":
        return Verdict("not applicable", "fewer than five steps of a sampler that is not truncated")
    quarter = len(points) // 4
    first, last = (np.mean([v for _, v in part]) for part in (points[:quarter], points[-quarter:]))
    grows = bool(last > gap_limits(args)[0] and last >= 1.5 * first)
    says = f"{first:.3g} at first, {last:.3g} at the end"
    return Verdict("wrong" if grows else "ok", says, points[-1][0])


def sampler_gap_token(rows, args):
    """Largest `training/rollout_probs_diff_max`: over .9 wrong, in bfloat16 warning"""
    if args.get("top_p", 1) < 1:
        return Verdict("not applicable", "a sampler with top_p has another distribution")
    exact = args.get("compute_dtype") == "float32"  # bf16: one flipped expert of an MoE can do it
    return highest(curve(rows, f"{GAP}_max"), 0.9, 0.9 if exact else 1.0, "largest gap of a token")


def on_policy(rows, args):
    """`actor/pg_clipfrac` or `actor/ppo_kl` not 0, though there is one optimizer step a rollout: wrong"""
    if not one_update(args):
        return Verdict("not applicable", "not known to be one mini-batch and one epoch")
    names = "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"
    points = [(step, abs(value)) for name in names for step, value in curve(rows, name)]
    return highest(points, 0, 0, "largest clip fraction or |ppo_kl|")


def no_signal(rows, args):
    """Steps whose scores are all the same, or whose advantages are all 0: over 10 % warning, 50 % wrong"""
    names = [f"critic/{what}/{end}" for what in ("score", "advantages") for end in ("max", "min")]
    points = table_of(rows, names)
    flat = [step for step, high, low, *advantages in points if high == low or advantages == [0, 0]]
    if not points:
        return Verdict("not applicable", "no advantages")
    says = f"{len(flat)} of {len(points)} steps"
    return Verdict(grade(len(flat), 0.1 * len(points), 0.5 * len(points)), says, flat[0] if flat else None)


def clipped_responses(rows, args):
    """`response_length/clip_ratio`, mean of the last tenth of the steps: over .1 warning, over .5 wrong"""
    points = curve(rows, "response_length/clip_ratio")
    if not points:
        return Verdict("not applicable", "no such metric")
    return highest([(points[-1][0], ends(points)[1])], 0.1, 0.5, "share that is cut, at the end:")


def reward_failures(rows, args):
    """`reward/errors`, `reward/timeouts`, `reward/crashes`: any warning, over 1 % of the responses wrong"""
    kinds = [f"reward/{kind}" for kind in ("errors", "timeouts", "crashes")]
    points = [(int(row["training/global_step"]), sum(row.get(k, 0) for k in kinds)) for row in rows]
    if not any(kind in row for row in rows for kind in kinds):
        return Verdict("not applicable", "no such metric")
    responses = args.get("train_batch_size", 0) * args.get("group_size", 1)
    total, wrong = sum(n for _, n in points), 0.01 * responses or float("inf")
    return highest(points, 0, wrong, f"{total:.0f} in all, most in a step:")


def score_collapse(rows, args):
    """The score lost over .25 of its best warning, over .5 wrong, if that is over .05 of its range"""
    (low, width), points = score_range(rows), curve(rows, SCORE)
    if not width or len(points) < 6:
        return Verdict("not applicable", "fewer than six scores, all alike, or of chosen groups (DAPO)")
    n = max(3, len(points) // 10)
    means = np.convolve([value for _, value in points], np.ones(n) / n, "valid")
    best, last = means.max(), means[-1]
    lost = (best - last) / (best - low) if best - last > 0.05 * width else 0.0
    return Verdict(
        grade(lost, 0.25, 0.5),
        f"best mean of {n} steps {best:.3g}, last {last:.3g}",
        points[means.argmax()][0],
    )


def score_rises(rows, args):
    """From 50 steps on, unless it is solved: the score has risen by less than .02 of its range: warning"""
    (_, width), points = score_range(rows), curve(rows, SCORE)
    if not width or len(points) < 50 or solved(rows):
        return Verdict(
            "not applicable", "fewer than 50 scores, all alike, solved, or of chosen groups (DAPO)"
        )
    first, last = ends(points)
    word = "warning" if last - first < 0.02 * width else "ok"
    return Verdict(word, f"{first:.3g} at first, {last:.3g} at the end", points[-1][0])


def held_out(rows, args):
    """Score up by .1 of its range or more, `val-core/{source}/*/mean@{N}` not: warning; down by .05: wrong"""
    (_, width), points = score_range(rows), curve(rows, SCORE)
    names = sorted(fnmatch.filter({name for row in rows for name in row}, "val-core/*/mean@*"))
    curves = {name: line for name in names if len(line := curve(rows, name)) > 1}
    if not width or not curves or len(points) < 6:
        return Verdict("not applicable", "no scores and validations to compare")
    first, last = ends(points)
    rise, worst = (last - first) / width, ("", 0, np.inf)
    for name, line in curves.items():
        tail = np.mean([value for _, value in line[1:][-3:]])
        change = (tail - line[0][1]) / (1 if "/acc/" in name else width)
        worst = min(worst, (name, line[-1][0], change), key=itemgetter(2))
    name, step, change = worst
    word = "ok" if rise < 0.1 or change > 0 else "wrong" if change < -0.05 else "warning"
    return Verdict(word, f"score {rise:+.3g} of its range, {name} {change:+.3g}", step)


def entropy_collapse(rows, args):
    """Unless it is solved, entropy times length at the end: under .3 nats warning, under .1 wrong"""
    entropy, length = curve(rows, "actor/entropy"), curve(rows, "response_length/mean")
    if not entropy or not length or solved(rows):
        return Verdict("not applicable", "no entropy, or solved: certainty is right")
    nats = (
        ends(entropy)[1] * ends(length)[1]
    )  # two responses to a prompt are equal with a chance over e^-nats
    return Verdict(grade(-nats, -0.3, -0.1), f"{nats:.3g} nats a response at the end", entropy[-1][0])


def entropy_explosion(rows, args):
    """Entropy 3 times that of the start: warning; 2 times, and the score under .9 of its start: wrong"""
    entropy, score, low = curve(rows, "actor/entropy"), curve(rows, SCORE), score_range(rows)[0]
    if len(entropy) < 6:
        return Verdict("not applicable", "fewer than six steps with an entropy")
    (first, last), (before, after) = ends(entropy), ends(score) if score_range(rows)[1] else (0, 0)
    fell = after - low < 0.9 * (before - low)
    word = "wrong" if last > 2 * first and fell else "warning" if last > 3 * first else "ok"
    return Verdict(word, f"{first:.3g} at first, {last:.3g} at the end", entropy[-1][0])


def gradient_spikes(rows, args):
    """A gradient norm 10 times the median of the 20 steps around it: warning; 100 times: wrong"""
    points = []
    for name in ("actor/grad_norm", "critic/grad_norm", "train/grad_norm"):
        line = curve(rows, name)
        for i, (step, norm) in enumerate(line if len(line) > 5 else ()):
            near = np.median([value for _, value in line[max(0, i - 10) : i] + line[i + 1 : i + 11]])
            points += [(step, norm / near)] if near else []
    return highest(points, 10, 100, "largest norm over that of its neighbours:")


def skipped_updates(rows, args):
    """`actor/skipped_updates` and those of critic and SFT: any warning, in over 1 % of the steps wrong"""
    names = "actor/skipped_updates", "critic/skipped_updates", "train/skipped_updates"
    points = [point for name in names for point in curve(rows, name)]
    steps = sorted({step for step, value in points if value})
    if not points:
        return Verdict("not applicable", "no such metric")
    says = f"in {len(steps)} of {len(rows)} steps"
    return Verdict(grade(len(steps), 0, 0.01 * len(rows)), says, steps[0] if steps else None)


def kl_first_step(rows, args):
    """KL to the reference before the first update: over 1e-6 wrong, in bfloat16 over 1e-3"""
    names = ["actor/kl_loss"] * bool(args.get("use_kl_loss") and one_update(args))
    names += ["actor/reward_kl_penalty"] * bool(args.get("use_kl_in_reward"))
    points = [(1, abs(value)) for name in names for step, value in curve(rows, name) if step == 1]
    limit = 1e-6 if args.get("compute_dtype") == "float32" else 1e-3
    if not points:
        return Verdict("not applicable", "no reference, no step 1, or several updates in it")
    return highest(points, limit, limit, "KL of step 1:")


def kl_curve(rows):
    """The KL to the reference, if there is one: of the loss, else of PPO's reward."""
    curves = [curve(rows, name) for name in ("actor/kl_loss", "actor/reward_kl_penalty")]
    return next((points for points in curves if any(value for _, value in points)), [])


def kl_stays_zero(rows, args):
    """The KL is exactly 0 after step 1 though there is a reference, and the rate is not 0: wrong"""
    used = args.get("use_kl_loss") or args.get("use_kl_in_reward")
    steps = [step for step, value in curve(rows, "actor/lr") if step > 1 and value]
    if not used or len(steps) < 2:
        return Verdict("not applicable", "no reference, or fewer than three steps that train")
    if kl_curve(rows):
        return Verdict("ok", "it moves")
    return Verdict("wrong", "0 in every step: the reference is the policy itself", steps[-1])


def kl_growth(rows, args):
    """KL at the end over .5 nats a token: warning, over 1 or, on average, under -.05: wrong"""
    points = kl_curve(rows)
    if not points:
        return Verdict("not applicable", "no reference, or a KL of 0")
    mean, (_, last) = np.mean([value for _, value in points]), ends(points)
    if mean < -0.05:
        return Verdict("wrong", f"mean {mean:.3g}, but a KL is not negative", points[-1][0])
    return highest([(points[-1][0], last)], 0.5, 1, "nats a token at the end:")


def explained_variance(rows, args):
    """`critic/vf_explained_var` at the end: from 100 steps under .02 warning, from 20 under -.1 wrong"""
    points = curve(rows, "critic/vf_explained_var")
    if len(points) < 20:
        return Verdict("not applicable", "no critic, or fewer than 20 steps")
    last = ends(points)[1]
    return Verdict(
        grade(-last, -0.02 if len(points) >= 100 else 0.1, 0.1), f"{last:.3g} at the end", points[-1][0]
    )


def empty_returns(rows, args):
    """`critic/returns/*` all within 1e-6 of 0 in a step whose `critic/rewards/mean` is not 0: wrong"""
    points = table_of(rows, ["critic/returns/max", "critic/returns/min", "critic/rewards/mean"])
    lost = [step for step, high, low, reward in points if -1e-6 < low <= high < 1e-6 and reward]
    if not points:
        return Verdict("not applicable", "no critic")
    says = f"{len(lost)} of {len(points)} steps"
    return Verdict("wrong" if lost else "ok", says, lost[0] if lost else None)


def dynamic_sampling(rows, args):
    """`dapo/gen_batches` at --max_gen_batches: in any step warning, in over 10 % wrong"""
    points, limit = curve(rows, "dapo/gen_batches"), args.get("max_gen_batches")
    if not points or not limit:
        return Verdict("not applicable", "no dynamic sampling with a known limit")
    steps = [step for step, value in points if value >= limit]
    says = f"{len(steps)} of {len(points)} steps at the limit of {limit}"
    return Verdict(grade(len(steps), 0, 0.1 * len(points)), says, steps[0] if steps else None)


def dynamic_sampling_filter(rows, args):
    """`dapo/dropped_all_right` always 0 though `critic/score/mean` ends over .95 of its range: wrong"""
    right, points = curve(rows, "dapo/dropped_all_right"), curve(rows, SCORE)
    if not right or not points:
        return Verdict("not applicable", "no dynamic sampling")
    ranges = [value for end in ("min", "max") for _, value in curve(rows, f"critic/score/{end}")]
    near = ends(points)[1] > min(ranges) + 0.95 * (max(ranges) - min(ranges))
    dropped = max(value for _, value in right)
    word = "wrong" if near and not dropped else "ok"
    return Verdict(word, f"score {ends(points)[1]:.3g}, at most {dropped:.3g} dropped", points[-1][0])


def learning_rate(rows, args):
    """0 in all steps, or after warm-up a change over .05 of the peak and 3 times its neighbours': wrong"""
    for name in ("actor/lr", "critic/lr", "train/lr"):
        points = curve(rows, name)
        rates = np.array([value for _, value in points])
        if len(rates) and not rates.any():
            return Verdict("wrong", f"{name} is 0 in all steps", points[0][0])
        change = abs(np.diff(rates))
        top = next((i for i, up in enumerate(np.diff(rates) <= 0) if up), len(change))
        for i in range(max(top, 2), len(change) - 2):
            near = np.median([*change[i - 2 : i], *change[i + 1 : i + 3]])
            if change[i] > max(0.05 * rates.max(), 3 * near):
                says = f"{name} jumps from {rates[i]:.3g} to {rates[i + 1]:.3g}"
                return Verdict("wrong", says, points[i + 1][0])
    known = any(name in row for row in rows for name in ("actor/lr", "train/lr"))
    return Verdict("ok", "no jump") if known else Verdict("not applicable", "no such metric")


def validation_loss(rows, args):
    """SFT: the last `val/loss` over 1.1 times the lowest: warning, over 1.5 times: wrong"""
    points = curve(rows, "val/loss")
    if len(points) < 2:
        return Verdict("not applicable", "fewer than two validation losses")
    step, low = min(points, key=itemgetter(1))
    return highest([(step, points[-1][1] / low)], 1.1, 1.5, f"lowest {low:.3g}; the last is times")


CHECKS = {
    check.__name__.replace("_", "-"): check
    for check in (
        *(not_finite, sampler_gap, sampler_gap_growth, sampler_gap_token, on_policy, no_signal),
        *(clipped_responses, reward_failures, score_collapse, score_rises, held_out, entropy_collapse),
        *(entropy_explosion, gradient_spikes, skipped_updates, kl_first_step, kl_stays_zero, kl_growth),
        *(explained_variance, empty_returns, dynamic_sampling, dynamic_sampling_filter, learning_rate),
        validation_loss,
    )
}


# ---- What is read of a run -----------------------------------------------------------------------------
class Run(NamedTuple):
    name: str
    path: Path
    args: dict  # empty without args.json
    rows: list  # of metrics.jsonl, by step
    broken: int  # lines that could not be read


def read_run(path, name):
    """A run's arguments and metrics; of a step that is there twice, after a resume, the later line counts."""
    if not path.is_dir():
        raise ValueError(f"{path} is no directory; give the --output_dir of a run")
    if not (path / "metrics.jsonl").is_file():
        raise ValueError(
            f"{path} has no metrics.jsonl: it is no run's --output_dir, or its models still load"
        )
    rows, broken, lines = {}, 0, (path / "metrics.jsonl").read_text(errors="replace").split("\n")
    for line in lines[:-1]:  # the last one is empty, or still being written
        try:
            row = {k: v for k, v in json.loads(line).items() if isinstance(v, int | float)}
            step = int(row["training/global_step"])
        except (ValueError, AttributeError, KeyError, OverflowError):
            broken += 1
            continue
        if step in rows:  # what came after was of the part that is done again
            rows = {old: row for old, row in rows.items() if old < step}
        rows[step] = row
    args = {}
    with suppress(OSError, ValueError, TypeError):
        args = dict(json.loads((path / "args.json").read_text()))
    return Run(name, path, args, [rows[step] for step in sorted(rows)], broken)


def group_runs(runs):
    """{label: runs}: together those whose arguments differ in seed and output_dir alone."""
    groups = {}
    for run in runs:
        same = {k: v for k, v in run.args.items() if k not in ("seed", "output_dir")}
        groups.setdefault(json.dumps(same, sort_keys=True) if run.args else run.name, []).append(run)
    labels = {}
    for group in groups.values():
        stems = {re.sub(r"[\W_]*\d*$", "", run.name) for run in group}  # grpo_1, grpo_2: grpo
        common = min(stems) if len(stems) == 1 and min(stems) else group[0].name
        seeds = ", ".join(str(run.args.get("seed")) for run in group)
        label = f"{common} (seeds {seeds})" if len(group) > 1 else group[0].name
        labels[label if label not in labels else f"{label} {len(labels) + 1}"] = group
    return labels


def thin(values_rs, steps, points):
    """[runs, steps] -> x, mean, lowest, highest of at most `points` bins of neighbouring steps."""
    values_rs = np.asarray(values_rs, dtype=float)
    starts = np.unique(np.linspace(0, len(steps), min(len(steps), points), endpoint=False).astype(int))
    sizes = np.diff([*starts, len(steps)])
    mean = np.add.reduceat(values_rs.mean(0), starts) / sizes
    low, high = np.minimum.reduceat(values_rs.min(0), starts), np.maximum.reduceat(values_rs.max(0), starts)
    return [[int(x) for x in steps[starts + sizes // 2]], *map(numbers, (mean, low, high))]


def numbers(values):
    """Five digits each; None for what is no finite number: a gap of a curve."""
    return [float(f"{x:.5g}") if isinstance(x, int | float) and np.isfinite(x) else None for x in values]


def traces(group, number, name, points):
    """The curves of a metric in a group of runs: where all have the steps one, beyond each its own."""
    lines = [
        {int(row["training/global_step"]): row[name] for row in run.rows if name in row} for run in group
    ]
    lines = [line for line in lines if line]
    shared = sorted(set.intersection(*map(set, lines))) if lines else []
    last = max(shared, default=-1)
    parts = [(lines, shared), *(([line], [step for step in line if step > last]) for line in lines)]
    for part, steps in parts:
        if steps:
            with np.errstate(invalid="ignore"):  # infinities
                values = [[line[step] for step in steps] for line in part]
                x, mean, low, high = thin(values, np.array(steps), points)
            band = dict(low=low, high=high) if low != high and (low, high) != (mean, mean) else {}
            yield dict(group=number, x=x, y=mean) | band


def time_parts(group, points):
    """Seconds of a step by its parts. `step` is all but the checkpoint; what no part counts is `other`."""
    rows = [{int(r["training/global_step"]): r for r in run.rows if "timing_s/step" in r} for run in group]
    steps = sorted(set.intersection(*map(set, rows)))
    names = {k for run in rows for row in run.values() for k in row if k.startswith("timing_s/")}
    parts = sorted(names - {"timing_s/step", "timing_s/save_checkpoint"})
    values = {name: np.array([[run[s].get(name, 0) for s in steps] for run in rows]) for name in names}
    if not steps:
        return {}
    values["timing_s/other"] = (values["timing_s/step"] - sum(values[name] for name in parts)).clip(0)
    chosen = [*parts, "timing_s/other", *sorted(names & {"timing_s/save_checkpoint"})]
    total = sum(values[name].sum() for name in chosen) or 1.0
    thinned = {name: thin(values[name], np.array(steps), points) for name in chosen}
    shares = {name: f"{name[9:]} {values[name].sum() / total:.0%}" for name in chosen}
    return dict(x=thinned[chosen[0]][0], parts=[[shares[name], thinned[name][1]] for name in chosen])


def spread(items):
    """The same items in an order whose beginning is spread over all of them: first, middle, quarters ..."""
    order = sorted(range(len(items)), key=lambda i: f"{i * 65536 // len(items):016b}"[::-1])
    return [items[i] for i in order]


def cut(text):
    """A text that is not too long for the page; the middle of others is left out."""
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    left_out = f"\n[... {len(text) - CUT:,} characters left out ...]\n"
    return text if len(text) <= CUT else text[: CUT - CUT // 4] + left_out + text[-CUT // 4 :]


# keys of a dumped response that have a place on the page, or say nothing there
SHOWN = set(
    "data_source prompt_str solution_str ground_truth extra_info score index sample finish_reason"
    " response_ids advantages".split()
)


def response(row):
    """A dumped response as the page has it; keys that have no place there are shown as they are."""
    kept = dict(text=cut(row.get("solution_str", "")), score=numbers([row.get("score")])[0])
    kept |= dict(
        finish=cut(row.get("finish_reason") or ""), more={k: cut(v) for k, v in row.items() if k not in SHOWN}
    )
    if isinstance(row.get("advantages"), list):  # of its tokens
        kept["advantages"] = numbers(row["advantages"])
    return kept


def read_rollouts(run, budget):
    """Whole groups of dumped responses, spread over steps and prompts, while they fit -> groups, a remark."""
    dumps = sorted(path for path in run.path.glob("rollouts/step_*.jsonl") if path.stem[5:].isdigit())
    groups, shown, seen, steps = [], 0, 0, 0
    share = budget // max(1, min(len(dumps), STEPS))
    for path in spread(dumps):
        if budget < share // 20:
            break
        found, left, before = {}, min(share, budget), shown
        for line in path.read_text(errors="replace").split("\n"):
            with suppress(ValueError):  # being written
                if isinstance(row := json.loads(line), dict):
                    found.setdefault((str(row.get("data_source")), str(row.get("index"))), []).append(row)
        for (source, _), rows in spread([*found.items()]):
            group = dict(run=run.name, step=int(path.stem[5:]), source=source)
            group |= dict(prompt=cut(rows[0].get("prompt_str", "")), truth=cut(rows[0].get("ground_truth")))
            group["rows"] = [response(row) for row in rows]
            size, seen = len(embed(group).encode()), seen + len(rows)
            if size <= left or (shown == before and size <= budget):  # of every step at least one
                groups.append(group)
                shown, left, budget = shown + len(rows), left - size, budget - size
        steps += shown > before
    remark = f"{run.name}: {shown:,} responses of {steps} of {len(dumps)} dumped steps"
    if seen > shown or steps < len(dumps):
        remark += f"; to keep this file under {LIMIT / 1e6:.0f} MB, {seen - shown:,} more responses of these"
        remark += f" steps and all others are left out: see {run.path}/rollouts"
    return sorted(groups, key=itemgetter("step")), remark if dumps else f"{run.name}: no --rollout_dump"


def embed(value):
    """JSON that no text in it can leave: '<' is escaped, and half surrogate pairs are '?'."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return text.encode("utf-8", "replace").decode()


# ---- The page ------------------------------------------------------------------------------------------
# its curves: {heading: metrics}; what is 0 in all steps of all runs is named, not drawn
CURVES = {
    "Learning": "critic/score/mean val-core/*/mean@* val-core/*/maj@* val-core/*/best@* train/loss val/loss"
    " critic/rewards/mean critic/advantages/max critic/advantages/min reward/*",
    "Responses": "response_length/mean response_length/max response_length/clip_ratio prompt_length/mean",
    "Policy": "actor/entropy actor/teacher_kl actor/kl_loss actor/reward_kl_penalty"
    " actor/reward_kl_penalty_coeff actor/ppo_kl actor/pg_clipfrac actor/pg_clipfrac_lower actor/pg_loss"
    " actor/grad_norm train/grad_norm actor/lr train/lr actor/skipped_updates train/skipped_updates",
    "Sampler and trainer": f"{GAP}_mean {GAP}_max",
    "Critic": "critic/vf_* critic/vpred_mean critic/values/mean critic/returns/mean critic/grad_norm"
    " critic/lr critic/skipped_updates critic/score_rules/mean critic/score_model/mean",
    "Dynamic sampling": "dapo/*",
    "Preferences": "rewards/* val/rewards/* logps/*",
    "Speed and memory": "timing_s/step perf/throughput perf/mfu/actor perf/max_memory_allocated_gb"
    " perf/cpu_memory_used_gb global_seqlen/minmax_diff",
}
WORDS = "wrong", "warning", "ok", "not applicable"  # the worst first
MARKS = dict(zip(WORDS, "✕!✓–", strict=True))


def esc(value):
    return html.escape(value if isinstance(value, str) else json.dumps(value))


@cache
def plotly():
    """plotly.js as the page holds it: compressed, which leaves more room for rollouts."""
    return base64.b64encode(
        gzip.compress((files("plotly") / "package_data/plotly.min.js").read_bytes())
    ).decode()


def table(head, rows):
    """Rows of cells; a first cell is the row's heading. Cells are HTML."""
    cells = "".join(f"<th scope=col>{cell}</th>" for cell in head)
    body = "".join(f"<tr><th scope=row>{r[0]}</th>" + "".join(f"<td>{c}</td>" for c in r[1:]) for r in rows)
    return f"<div class=wide><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>"


def badge(word):
    return f'<b class="verdict {word.split()[0]}"><i aria-hidden=true>{MARKS[word]}</i> {word}</b>'


def summary_html(runs, verdicts):
    """A row a run: how far it is, its scores, and how many checks say what."""
    rows = []
    for run, found in zip(runs, verdicts, strict=True):
        lines = {name: curve(run.rows, name) for name in sorted({name for row in run.rows for name in row})}
        shown = [SCORE, "train/loss", "val/loss", *fnmatch.filter(lines, "val-core/*/mean@*")]
        scores = "<br>".join(
            f"<code>{esc(name)}</code> {lines[name][0][1]:.3g} → {lines[name][-1][1]:.3g}"
            for name in shown
            if lines.get(name)
        )
        words = [verdict.word for verdict in found.values()]
        counts = " ".join(f"{words.count(w)}&nbsp;{badge(w)}" for w in WORDS[:3] if w in words)
        total, done = run.args.get("total_steps"), run.rows[-1]["training/global_step"] if run.rows else 0
        steps = f"{done:.0f}" + f" of {total}" * bool(total)
        steps += f"<br>lines that could not be read: {run.broken}" * bool(run.broken)
        hours = sum(value for _, value in lines.get("timing_s/step", ())) / 3600
        name = f"{esc(run.name)}<br><span class=path>{esc(str(run.path))}</span>"
        rows.append((name, steps, f"{hours:.2g}", scores, counts))
    return table(["run", "steps", "hours", "first → last", "checks"], rows)


def checks_html(runs, verdicts):
    """The checks, the worst first; those that are ok or do not apply are folded."""
    parts = {word: [] for word in WORDS}
    for name, check in CHECKS.items():
        found = [verdict[name] for verdict in verdicts]
        same = {}  # runs of one verdict share a line
        for run, verdict in zip(runs, found, strict=True):
            same.setdefault(verdict, []).append(run.name)
        order, lines = sorted(same, key=lambda verdict: WORDS.index(verdict.word)), ""
        for verdict in order:
            where = "" if verdict.step is None else f" <span class=where>step {verdict.step}</span>"
            label = f"{badge(verdict.word)} <b>{esc(', '.join(same[verdict]))}</b> " if len(runs) > 1 else ""
            lines += f"<li>{label}{esc(verdict.says)}{where}"
        worst = order[0].word
        about = "".join(
            f"<code>{esc(x)}</code>" if i % 2 else esc(x) for i, x in enumerate(check.__doc__.split("`"))
        )
        parts[worst].append(
            f'<article class="check {worst.split()[0]}" data-check={name} data-verdict="{worst}">'
            f"{badge(worst)}<div><h3>{name}</h3><ul>{lines}</ul><p class=about>{about}.</p></div></article>"
        )
    bad = [*parts["wrong"], *parts["warning"]]
    text = "".join(bad) or f"<p class=fine>{badge('ok')} No check found anything wrong.</p>"
    for word in WORDS[2:]:
        text += f"<details><summary>{len(parts[word])} {word}</summary>{''.join(parts[word])}</details>"
    return text


def arguments_html(runs):
    """Arguments that differ, and folded those that are equal or that not all scripts have."""
    runs = [run for run in runs if run.args]
    names = list(dict.fromkeys(chain.from_iterable(run.args for run in runs)))
    there = {name: [run.args[name] for run in runs if name in run.args] for name in names}
    own = [name for name in names if len(there[name]) < len(runs)]
    equal = [name for name in names if name not in own and all(x == there[name][0] for x in there[name])]
    differ = [name for name in names if name not in own and name not in equal]
    head = ["argument", *(esc(run.name) for run in runs)]
    rows = lambda chosen: [
        [f"--{esc(n)}", *(esc(run.args[n]) if n in run.args else "–" for run in runs)] for n in chosen
    ]
    text = table(head, rows(differ)) if differ else "<p>There is no difference between runs to show.</p>"
    if own:
        text += (
            f"<details><summary>{len(own)} of some scripts only</summary>{table(head, rows(own))}</details>"
        )
    same = table(["argument", "value"], [(f"--{esc(n)}", esc(there[n][0])) for n in equal])
    return text + (f"<details><summary>{len(equal)} equal in all</summary>{same}</details>" if equal else "")


def charts_html(runs, groups, points):
    """{heading: places of its charts}, and the charts' curves."""
    metrics = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    nonzero = {name for run in runs for row in run.rows for name, value in row.items() if value}
    sections, charts = {}, []
    for heading, patterns in CURVES.items():
        found = [name for pattern in patterns.split() for name in sorted(fnmatch.filter(metrics, pattern))]
        found = [name for name in dict.fromkeys(found) if not name.endswith(("best@1", "maj@1"))]
        text = ""
        for name in [name for name in found if name in nonzero]:
            text += f"<figure><figcaption><code>{esc(name)}</code></figcaption>"
            text += f"<div class=chart id=chart{len(charts)}></div></figure>"
            lines = chain.from_iterable(traces(g, i, name, points) for i, g in enumerate(groups.values()))
            charts.append(dict(name=name, lines=list(lines)))
        sections[heading] = f"<div class=grid>{text}</div>" if text else ""
        if zero := ", ".join(f"<code>{esc(name)}</code>" for name in found if name not in nonzero):
            sections[heading] += f"<p class=about>0 in all steps: {zero}</p>"
    return sections, charts


def times_html(groups, points):
    """Places of the charts of where time goes, and their data."""
    text, times = "", []
    for label, group in groups.items():
        if stack := time_parts(group, points):
            text += f"<figure><figcaption>{esc(label)}: seconds of a step</figcaption>"
            text += f'<div class="chart tall" id=time{len(times)}></div></figure>'
            times.append(stack)
    return f'<div class="grid broad">{text}</div>', times


def build(paths, reload_s=0):
    """The whole page, in bytes, and lines that say what the checks found."""
    paths = list(dict.fromkeys(map(Path, paths)))
    if not paths:
        raise ValueError("no run given; give the --output_dir of one or more: algos/report.py RUN [RUN ...]")
    names = [path.resolve().name for path in paths]
    runs = [read_run(p, n if names.count(n) == 1 else str(p)) for p, n in zip(paths, names, strict=True)]
    verdicts = [{name: check(run.rows, run.args) for name, check in CHECKS.items()} for run in runs]
    groups = group_runs(runs)
    points = max(40, min(400, 1200 // len(groups)))
    sections, charts = charts_html(runs, groups, points)
    stacks, times = times_html(groups, points)
    data = dict(groups=list(groups), charts=charts, times=times, reload_s=reload_s, rollouts=[])
    reloads = f"; anew every {reload_s:g} s, and this page reloads itself" if reload_s else ""
    speed = sections.pop("Speed and memory")
    curves = "".join(f"<h3>{heading}</h3>{text}" for heading, text in sections.items() if text)
    parts = dict(
        TITLE=esc(", ".join(run.name for run in runs)),
        WRITTEN=f"Written {time.strftime('%Y-%m-%d %H:%M:%S')}{reloads}",
        SUMMARY=summary_html(runs, verdicts),
        CHECKS=checks_html(runs, verdicts),
        CURVES=curves or "<p>There are no steps yet.</p>",
        TIME=stacks + speed,
        ARGUMENTS=arguments_html(runs),
        PLOTLY=plotly(),
    )
    page = Path(__file__).with_suffix(".html").read_text()
    size = sum(len(part.encode("utf-8", "replace")) for part in (page, embed(data), *parts.values()))
    budget, remarks = LIMIT - size - 10_000, ""
    if budget < 0:
        raise ValueError(f"{len(runs)} runs make a file over {LIMIT / 1e6:.1f} MB; give fewer at a time")
    for run in runs:
        rollouts, remark = read_rollouts(run, budget // len(runs))
        data["rollouts"] += rollouts
        remarks += f"<li>{esc(remark)}"
    parts |= dict(REMARKS=remarks, DATA=embed(data))
    # in one pass: nothing of a run is taken for a place of the template
    page = re.sub(r"@@(\w+)@@", lambda place: parts[place[1]], page).encode("utf-8", "replace")
    lines = []
    for run, found in zip(runs, verdicts, strict=True):
        words = [verdict.word for verdict in found.values()]
        lines.append(f"{run.name}: " + ", ".join(f"{words.count(w)} {w}" for w in WORDS[:3]))
        bad = [(name, v) for name, v in found.items() if v.word in ("wrong", "warning")]
        lines += [f"  {v.word}: {name}, {v.says}" + f" (step {v.step})" * bool(v.step) for name, v in bad]
    return page, lines


def write(args, reload_s):
    page, lines = build(args.runs, reload_s)
    with replacing(args.output) as new:
        new.write_bytes(page)
    lines.append(f"{args.output}: {len(page) / 1e6:.1f} MB, {time.strftime('%H:%M:%S')}")
    print(*lines, sep="\n", flush=True)


def main(args):
    try:
        if Path(args.output).is_dir():
            raise ValueError(f"--output {args.output} is a directory; give the name of an HTML file in it")
        try:
            write(args, args.follow)
            while args.follow > 0:
                time.sleep(args.follow)
                write(args, args.follow)
        except KeyboardInterrupt:
            if args.follow > 0:  # once more, as a page that does not reload
                write(args, 0)
    except (ValueError, OSError) as error:
        sys.exit("error: " + " ".join(str(error).split()))


if __name__ == "__main__":
    main(Args(**parse(Args)))
