"""Scores a batch of responses, in this process or in a pool; shows, writes and sums up the results."""

import itertools
import json
import math
import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from common.files import json_line
from rewards import compute_score
from rewards.manager.worker import Worker

SHOWN_CHARS = 240  # of a text in a printed sample
PATIENCE_S = 1.0  # a sample that takes longer gives its place in the pool to the next
IN_FLIGHT = 4  # times `workers`: samples at work, those that gave up their place included
_idle = queue.LifoQueue()  # workers that are not at work, of all managers


class RewardManager:
    """Scores rows with `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    mode: "naive" scores in this process, one row after the other, without a time-out.  "prime" scores
        `workers` rows at a time, each in a process that is killed and replaced when it takes over timeout_s
        seconds or dies.  Slow samples do not hold up the others: several time out at the same time.
    num_examine: samples of each data source that every call of `score` prints, the next ones each time.
    """

    def __init__(self, mode="naive", compute_score=compute_score, num_examine=0, timeout_s=30.0, workers=4):
        if mode not in ("naive", "prime"):
            raise ValueError(f"unknown reward manager {mode!r}; known: naive, prime")
        if workers < 1 or not timeout_s > 0:
            raise ValueError(f"reward manager with {workers} workers, {timeout_s} s: both must be above 0")
        self.mode, self.compute_score, self.num_examine = mode, compute_score, num_examine
        self.timeout_s, self.workers = timeout_s, workers
        self._places, self._calls = threading.Semaphore(workers), itertools.count()
        if mode == "prime":
            self._check_process()

    def score(self, rows):
        """Score dicts with data_source, solution_str, ground_truth, extra_info (and prompt_str, to be shown).

        Returns one dict a row, in their order: `score` (float) and the extra keys of the reward, as JSON has
        them (`acc` a float; `pred` a text, None: no answer).  A reward that fails gives score 0.0 and
        `failure`, e.g. "TypeError: ...", "TimeoutError: ...", "WorkerError: ..." (its process died).  No
        row can raise, so one bad row ends no training.  `failure` means that and nothing else: a reward's
        own key of this name is left out.
        """
        if self.mode == "naive":
            results = [score_row(self.compute_score, row) for row in rows]
        else:
            with ThreadPoolExecutor(IN_FLIGHT * self.workers) as threads:
                results = list(threads.map(self._score_in_worker, rows))
            for _ in range(_idle.qsize() - self.workers):
                _idle.get().close()
        if self.num_examine:
            _print_samples(rows, results, self.num_examine, next(self._calls))
        return results

    def score_responses(self, rows, tokenizer):
        """Score a trainer's rows -> the rows with `sampled`, what was scored, and `reward`.

        Of a response of several turns the last one, `answer_ids`, is scored: not what a tool wrote. Special
        tokens may mark thoughts and calls: the text has all but the one that ended the response.
        """
        ends = [len(row["response_ids"]) - (row["finish_reason"] == "stop") for row in rows]
        texts = [row.get("answer_ids", row["response_ids"][:end]) for row, end in zip(rows, ends)]
        samples = [
            dict(
                data_source=row["data_source"],
                prompt_str=row["prompt"][-1]["content"],
                solution_str=tokenizer.decode(text),
                ground_truth=row["reward_model"]["ground_truth"],
                extra_info=row["extra_info"],
            )
            for row, text in zip(rows, texts, strict=True)
        ]
        results = zip(rows, samples, self.score(samples), strict=True)
        return [dict(row, sampled=sample, reward=reward) for row, sample, reward in results]

    def _check_process(self):
        """Raise ValueError, in one line, if the reward does not arrive in a process."""
        worker = Worker()
        try:
            worker.call("builtins:callable", self.compute_score, timeout_s=self.timeout_s)
        except Exception as error:  # anything in a user's file, or a function that cannot be pickled
            raise ValueError(
                "--reward_manager prime cannot send the reward to a process:"
                f" {type(error).__name__}: {' '.join(str(error).split())};"
                " write a plain function at the top of its file, or take --reward_manager naive"
            ) from None
        finally:
            _idle.put(worker)

    def _score_in_worker(self, row):
        row = {name: row.get(name) for name in row.keys() - {"prompt_str"}}
        with ExitStack() as place:
            place.enter_context(self._places)
            try:
                worker = _idle.get_nowait()
            except queue.Empty:
                worker = Worker()
            try:
                reply = worker.call(
                    score_row,
                    *(self.compute_score, row),
                    timeout_s=self.timeout_s,
                    patience_s=PATIENCE_S,
                    on_slow=place.close,
                )
                # a process that a response has taken over may send anything
                result = _plain(reply)
                return {"score": 0.0, "failure": str(reply["failure"])} if "failure" in reply else result
            except Exception as error:  # as in score_row: also a row or a function that cannot be pickled
                return _failed(error)
            finally:
                _idle.put(worker)


def score_row(compute_score, row):
    """One result of `RewardManager.score`."""
    try:
        result = compute_score(
            data_source=row["data_source"],
            solution_str=row["solution_str"],
            ground_truth=row["ground_truth"],
            extra_info=row.get("extra_info"),
        )
        return _plain(result if isinstance(result, dict) else {"score": result})
    # CAREFUL: the one place that catches everything. A reward is anybody's code run on anything a model
    # writes; its failure is reported in the row, where the trainer counts it, not disguised as a 0.
    except Exception as error:
        return _failed(error)


def _plain(result):
    """The dict of a reward as `score` promises it; raises what its values raise."""
    result = {key: value for key, value in result.items() if key != "failure"}
    result["score"] = _number(result["score"])
    if (acc := result.pop("acc", None)) is not None:
        result["acc"] = _number(acc)
    if result.get("pred") is not None:
        result["pred"] = str(result["pred"]).strip() or None
    return json.loads(json.dumps(result, default=_as_json, skipkeys=True))


def _number(value):
    value = value.item() if hasattr(value, "item") else value  # one element, of numpy or torch
    if not math.isfinite(value):  # TypeError if it is no number
        raise ValueError(f"the reward returned {value}")
    return float(value)


def _as_json(value):
    """For JSON: a number for one element of numpy or torch, lists for an array, the text of all else."""
    if hasattr(value, "shape") and hasattr(value, "tolist"):
        return value.item() if math.prod(value.shape) == 1 else value.tolist()
    return str(value)


def _failed(error):
    return {"score": 0.0, "failure": f"{type(error).__name__}: {error}"}


def demote_failures(rows):
    """Rows, with `group` and `reward`, in which a failed reward counts as the lowest of its group.

    A failure says nothing about the response. As a 0 it would beat the wrong ones of a reward of +1 and -1.
    Where all of a group failed, they stay as they are.
      scores  1  -1  0 failed | 1  0.5  0 failed | 0 failed  0 failed
      become  1  -1 -1        | 1  0.5  0        | 0         0
    """
    lowest = {}  # of each group, of those that did not fail
    for row in rows:
        if "failure" not in row["reward"]:
            known = lowest.setdefault(row["group"], row["reward"])
            lowest[row["group"]] = min(known, row["reward"], key=lambda result: result["score"])

    def demoted(result, floor):
        names = [k for k in floor if k in ("score", "acc") or k.startswith("score/")]
        low = {k: floor[k] if k.startswith("score/") else min(result.get(k, 0.0), floor[k]) for k in names}
        return result | low  # parts: those of the lowest response, because weights may be negative

    return [
        row | dict(reward=demoted(row["reward"], lowest.get(row["group"], {})))
        if "failure" in row["reward"]
        else row
        for row in rows
    ]


def _print_samples(rows, results, num_examine, call):
    """Print `num_examine` rows of each data source: in the first call the first ones, and so on."""
    by_source = {}
    for row, result in zip(rows, results, strict=True):
        by_source.setdefault(str(row.get("data_source")), []).append((row, result))
    for source, scored in by_source.items():
        for i in range(call * num_examine, call * num_examine + min(num_examine, len(scored))):
            row, result = scored[i % len(scored)]
            truth = _one_line(row.get("ground_truth"))
            print(f"{_one_line(source)}: {_one_line(row.get('prompt_str', ''))} [{truth}]")
            print(f"  {_one_line(row.get('solution_str'))} -> {_one_line(result)}", flush=True)


def _one_line(value):
    """Text for the terminal: no control characters, in its encoding, the middle of a long text left out."""
    text = str(value)
    if len(text) > SHOWN_CHARS:
        text = f"{text[: SHOWN_CHARS // 2]} [...] {text[-SHOWN_CHARS // 2 :]}"
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def validation_metrics(rows):
    """val-core/{source}/{acc|reward}/{mean@N,best@N,maj@N}: means over prompts with N responses each.

    rows: dicts with data_source, index (of the prompt) and reward (a result of the reward manager).
    The value is `acc` where the scorer returns it, else the score; maj, the value of the most frequent
    `pred`, needs one, and is 0 where no response has any. A response whose reward failed counts 0.
    """
    metrics = {}
    for source in sorted({row["data_source"] for row in rows}):
        groups = {}
        for row in rows:
            if row["data_source"] == source:
                groups.setdefault(row["index"], []).append(row["reward"])
        results = [result for group in groups.values() for result in group]
        kind, key = ("acc", "acc") if any("acc" in result for result in results) else ("reward", "score")
        values = [[float(result.get(key, 0)) for result in group] for group in groups.values()]
        prefix, n = f"val-core/{source}/{kind}", len(values[0])
        metrics[f"{prefix}/mean@{n}"] = sum(sum(v) / len(v) for v in values) / len(values)
        metrics[f"{prefix}/best@{n}"] = sum(max(v) for v in values) / len(values)
        if any("pred" in result for result in results):
            votes = [[result.get("pred") for result in group] for group in groups.values()]
            winners = []
            for value, vote in zip(values, votes, strict=True):
                cast = [answer for answer in vote if answer is not None]
                winners.append(value[vote.index(max(cast, key=cast.count))] if cast else 0.0)
            metrics[f"{prefix}/maj@{n}"] = sum(winners) / len(values)
    return metrics


def dump_rollouts(rows, path):
    """Write scored rows of a trainer to a file, one JSON line each."""
    lines = []
    for row in rows:
        where = {name: row[name] for name in ("index", "sample", "finish_reason")}
        lines.append(row["sampled"] | row["reward"] | where | dict(response_ids=row["response_ids"].tolist()))
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(map(json_line, lines)))
