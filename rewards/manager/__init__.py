"""Scores a batch of responses, in this process or in a pool."""

import copy
import itertools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from rewards import check_sources, compute_score, row_check
from rewards.manager.calls import call_here, call_once, failed, keys, name_of, received, sees_group
from rewards.manager.combined import parts_of
from rewards.manager.failures import check_environments, check_failures, check_results, demote_failures
from rewards.manager.samples import print_samples, validation_metrics, validation_summary
from rewards.manager.worker import Worker
from system.plugins import guest
from system.thoughts import with_opening

__all__ = ["RewardManager", "check_environments", "check_failures", "check_results", "demote_failures"]
__all__ += ["validation_metrics", "validation_summary"]
PATIENCE_S = 1.0  # a call that takes longer gives its place in the pool to the next
IN_FLIGHT = 4  # times `workers`: calls at work, those that gave up their place included
AWAITED = 16  # times `workers`: calls of an `async def` that are awaited at the same time
_idle = queue.LifoQueue()  # workers that are not at work, of all managers


class RewardManager:
    """Scores rows with `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    A reward with the parameters `solution_strs`, `data_sources`, `ground_truths`, `extra_infos` is called
    once for each group, with lists, and returns a list.  An `async def` is awaited.
    mode: "naive" scores in this process, one call after the other; only an `async def` has a time-out.
        "prime" makes `workers` calls at a time, each in a process that is killed and replaced when it takes
        over timeout_s seconds or dies.  Slow calls do not hold up the others: several time out at once.
    num_examine: rows of each data source that `score` prints, the first ones.
    """

    def __init__(self, mode="naive", compute_score=compute_score, num_examine=0, timeout_s=30.0, workers=4):
        if mode not in ("naive", "prime"):
            raise ValueError(f"unknown reward manager {mode!r}; known: naive, prime")
        if workers < 1 or not timeout_s > 0:
            raise ValueError(f"reward manager with {workers} workers, {timeout_s} s: both must be above 0")
        self.mode = mode
        self.compute_score = compute_score
        self.num_examine = num_examine
        self.timeout_s = timeout_s
        self.workers = workers
        self._places = threading.Semaphore(workers)
        if mode == "prime":
            self._check_process()

    def check(self, *tables):
        """Raise ValueError, in one line, for a row that a reward cannot score: before a response is sampled.

        tables: Rows of data_prep/lib/cache.py. What is checked: see `faults`.
        """
        sources = set().union(*(rows.unique("data_source") for rows in tables))
        faults = self.faults(sources, itertools.chain(*tables))
        if faults:
            raise faults[0]

    def faults(self, sources, rows):
        """A ValueError, in one line, for each row that a reward cannot score, by `row_check`.

        sources: data sources of the rows.  Raises ValueError for one of them, by `check_sources`.
        """
        functions = parts_of(self.compute_score).functions.values()
        if compute_score in functions:
            check_sources(sources)
        checks = [*filter(None, map(row_check, functions))]
        found = []
        with guest(", ".join(map(name_of, checks))):
            for row in rows if checks else ():
                source = row["data_source"]
                truth = row["reward_model"].get("ground_truth")
                try:
                    for check in checks:
                        check(*copy.deepcopy((source, truth, row["extra_info"])))
                except (Exception, SystemExit) as error:  # of anybody's code
                    why = f"{error}"
                    if not isinstance(error, ValueError):
                        why = f"{name_of(check)}: {type(error).__name__}: {error}"
                    found.append(ValueError(f"row {row['index']}, data_source {source!r}: {why}"))
        return found

    def score(self, rows, groups=None):
        """Score dicts with data_source, solution_str, ground_truth, extra_info.

        They may have `prompt`, chat messages for a reward that asks for them, and prompt_str, to be shown.
        groups: number of the prompt of each row; none: each row is a group.
        Returns one dict a row, in their order: `score` (float) and the extra keys of the reward, as JSON has
        them (`acc` a float; `pred` a text, None: no answer).  A reward that fails gives score 0.0 and
        `failure`, e.g. "TypeError: ...", "TimeoutError: ...", "WorkerError: ..." (its process died).  No
        row can raise, so one bad row ends no training.  `failure` means that and nothing else: a reward's
        own key of this name is left out.
        """
        groups = range(len(rows)) if groups is None else groups
        combine = parts_of(self.compute_score)
        found = {}  # the results of each part
        for name, function in combine.functions.items():
            found[name] = self._score_part(function, rows, groups, combine.of(found, len(rows)))
        results = combine.of(found, len(rows))
        print_samples(rows, results, self.num_examine)
        return results

    def score_responses(self, rows, tokenizer):
        """Score a trainer's rows -> the rows with `sampled`, what was scored, and `reward`.

        Of a response of several turns the last one, `answer_ids`, is scored: not what a tool wrote. Special
        tokens may mark thoughts and calls: the text has all but the one that ended the response. The opening
        of a thought comes first where the prompt has it and the response does not end it.
        """
        ends = [len(row["response_ids"]) - (row["finish_reason"] == "stop") for row in rows]
        parts = [row.get("answer_ids", row["response_ids"][:end]) for row, end in zip(rows, ends)]
        prompts = {}  # the end of each, which may open a thought
        for row in rows:
            if row["group"] not in prompts:
                prompts[row["group"]] = tokenizer.decode(row["prompt_ids"][-20:])
        texts = [with_opening(tokenizer.decode(x), prompts[row["group"]]) for x, row in zip(parts, rows)]
        samples = [
            dict(
                data_source=row["data_source"],
                prompt_str=row["prompt"][-1]["content"],
                solution_str=text,
                ground_truth=row["reward_model"].get("ground_truth"),
                extra_info=row["extra_info"],
            )
            for row, text in zip(rows, texts, strict=True)
        ]
        asked = [dict(sample, prompt=row["prompt"]) for row, sample in zip(rows, samples, strict=True)]
        results = self.score(asked, [row["group"] for row in rows])
        triples = zip(rows, samples, results, strict=True)
        return [dict(row, sampled=sample, reward=reward) for row, sample, reward in triples]

    def _score_part(self, function, rows, groups, earlier):
        """The results of one reward function; earlier: those of the functions before it."""
        members = {}  # of each call
        for i, group in enumerate(groups):
            members.setdefault(group if sees_group(function) else i, []).append(i)
        calls = [([rows[i] for i in part], [earlier[i] for i in part]) for part in members.values()]
        if self.mode == "naive":
            answers = call_here(function, calls, self.timeout_s, AWAITED * self.workers)
        else:
            with ThreadPoolExecutor(IN_FLIGHT * self.workers) as threads:
                answers = list(threads.map(partial(self._call_in_worker, function), calls))
            for _ in range(_idle.qsize() - self.workers):
                _idle.get().close()
        by_row = zip(itertools.chain(*members.values()), itertools.chain(*answers), strict=True)
        return [result for _, result in sorted(by_row, key=lambda pair: pair[0])]

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
        _idle.put(worker)

    def _call_in_worker(self, function, call):
        rows, earlier = call
        needed = {*keys(function).values()}  # a prompt may be long
        rows = [{key: row[key] for key in needed & row.keys()} for row in rows]
        with ExitStack() as place:
            place.enter_context(self._places)
            try:
                worker = _idle.get_nowait()
            except queue.Empty:
                worker = Worker()
            try:
                reply = worker.call(
                    call_once,
                    *(function, rows, earlier),
                    timeout_s=self.timeout_s,
                    patience_s=PATIENCE_S,
                    on_slow=place.close,
                )
                return [received(one) for _, one in zip(rows, reply, strict=True)]
            except TimeoutError as error:
                return [failed(TimeoutError(f"{error} (--reward_timeout_s)"), function)] * len(rows)
            except Exception as error:  # also a row or a function that cannot be pickled
                return [failed(error, function)] * len(rows)
            finally:
                _idle.put(worker)
