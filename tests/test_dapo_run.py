"""DAPO from end to end, and its sampling loop with a made-up sampler."""

import ast
from itertools import groupby

import pytest
import torch
from conftest import (
    ROOT,
    changed,
    check_advantages,
    column,
    flags_of,
    healthy,
    hf,
    load_weights,
    metrics,
    rollouts,
    run,
    same,
    state,
)

from algos.dapo import group_advantages, overlong_penalty

DAPO = ROOT / "algos/dapo.py"
PROMPTS, SAMPLES = 8, 8  # groups of a step, responses of a group
TOKENS = 8  # of most groups of dapo_loop.py


FLAGS = (
    f"--train_batch_size {PROMPTS} --ppo_mini_batch_size 4 --group_size {SAMPLES} --max_prompt_length 16"
    " --max_response_length 12 --max_tokens_per_microbatch 300 --lr 3e-3 --warmup_steps 2 --total_steps 6"
    " --save_freq 3 --test_freq 3 --rollout_dump --temperature 0.9 --keep_checkpoints 0"
)


def flags(tiny, arithmetic, out, *more):
    reward = "--reward_fn", f"{ROOT}/tests/dapo_reward.py:mixed"
    return [*flags_of(tiny, arithmetic, out, FLAGS), *reward, *more]


def groups(out, step):
    """The groups that a step trained on: {prompt number: rows}."""
    return {k: list(rows) for k, rows in groupby(rollouts(out, step), key=lambda row: row["index"])}


@pytest.fixture(scope="module")
def straight(tiny, arithmetic, tmp_path_factory):
    """Six steps on one rank, undisturbed."""
    out = tmp_path_factory.mktemp("straight")
    run(DAPO, *flags(tiny, arithmetic, out))
    return out


def test_it_learns_and_reports(straight, tiny):
    steps = healthy(straight)
    assert list(steps) == [0, 1, 2, 3, 4, 5, 6]
    assert steps[6]["critic/rewards/mean"] > steps[1]["critic/rewards/mean"] + 0.12
    assert [steps[step]["actor/lr"] for step in range(1, 7)] == [1.5e-3, *[3e-3] * 5]  # of the optimizer
    assert changed(tiny, hf(straight)) == load_weights(tiny).keys()


def test_the_batch_is_as_asked_for_and_each_group_has_spread(straight):
    for step in range(1, 7):
        trained = groups(straight, step)
        assert len(trained) == PROMPTS and all(len(rows) == SAMPLES for rows in trained.values())
        assert all(len({row["acc"] for row in rows}) == 2 for rows in trained.values())
    steps = [m for step, m in metrics(straight).items() if step]
    assert max(m["dapo/gen_batches"] for m in steps) > 1 and max(m["dapo/carried_over"] for m in steps) > 0
    for name in ("dapo/dropped_all_right", "dapo/dropped_all_wrong"):
        assert min(m[name] for m in steps) > 0


def test_advantages_are_those_of_the_groups(straight):
    """Recomputed from the dumped scores and lengths, by place in the stream."""

    def advantages(rows):
        length_n = torch.tensor([len(row["response_ids"]) for row in rows])
        reward_n = column(rows, "score") + overlong_penalty(length_n, 12, 12 // 5)
        return group_advantages(reward_n, column(rows, "index"))

    check_advantages(straight, range(1, 7), advantages)


def test_two_ranks_equal_one(straight, tiny, arithmetic, tmp_path):
    """Which share each row; of rows that are dealt to them: test_dapo_partial.py."""
    more = "--total_steps", 2, "--test_freq", 0, "--sp_size", 2
    run(DAPO, *flags(tiny, arithmetic, tmp_path, *more), ranks=2)
    same(straight, tmp_path, (1, 2), 1e-3, but=("timing", "perf", "global_seqlen", "val"))
    for step in (1, 2):
        for name in ("index", "acc"):
            assert [r[name] for r in rollouts(tmp_path, step)] == [r[name] for r in rollouts(straight, step)]


@pytest.fixture(scope="module")
def loop(tiny, arithmetic, tmp_path_factory):
    """dapo_loop.py on two ranks: its directory, {scenario: [how it ended on each rank]}."""
    out = tmp_path_factory.mktemp("loop")
    done = run(ROOT / "tests/workers/dapo_loop.py", tiny, arithmetic / "train.parquet", out, ranks=2)
    lines = [line.split("|") for line in done.stdout.splitlines() if line.startswith("SCENARIO")]
    return out, {name: ast.literal_eval(found) for _, name, found in lines}


def test_nothing_left_to_learn(loop):
    """All right: the run ends well. All wrong: an error, on both ranks."""
    assert loop[1]["always right"] == [("ended", 3, 1, [])] * 2
    log = (loop[0] / "always right/log.txt").read_text()
    assert "--max_gen_batches 3: less than a group a rank has both kinds; 100% of " in log
    assert "all correct, 0% all wrong: solved\n" in log
    [(line, *counts), other] = loop[1]["always wrong"]
    assert counts == [4, 1, []] and other == (1, 4, 1, [])
    assert line.startswith("error: step 1: --max_gen_batches 4: less") and "100% all wrong" in line


def test_few_groups_are_trained_on_and_saved(loop):
    """Three groups for two ranks: one each, then the third is alone; the step that was trained is kept."""
    assert [rank[:3] for rank in loop[1]["solved"]] == [("ended", 2, 2)] * 2
    out = loop[0] / "solved"
    assert metrics(out)[1]["dapo/groups"] == 2 and list(groups(out, 1)) == [0, 1]
    assert state(out, 1)["step"] == 1 and {row["index"] for row in state(out, 1)["surplus"]} == {2}
    assert "solved\n" in (out / "log.txt").read_text()


def test_one_sync_a_step(loop):
    """The weights are the same for all generation batches of a step."""
    assert [rank[:3] for rank in loop[1]["surplus"]] == [("ended", 3 + 1 + 1, 3)] * 2


def test_a_generation_batch_is_at_most_three_batches(loop):
    """After a batch without a group the keep rate is 1 / 5, and 4 groups would need 20 prompts."""
    out = loop[0] / "three batches"
    assert [m["dapo/tokens_generated"] / TOKENS for m in metrics(out).values()] == [4 + 3 * 4]
    assert metrics(out)[1]["dapo/gen_batches"] == 2


def test_overlong_but_right_is_not_rescued_or_lost(loop):
    """Kinds by prompt number, modulo 5: 1 mixed, 4 right but long among wrong; the others have no spread."""
    trained = [k for step in (1, 2, 3, 4) for k in groups(loop[0] / "kinds", step)]
    assert trained == [k for k in range(100) if k % 5 in (1, 4)][:16]
    for m in metrics(loop[0] / "kinds").values():
        assert m["critic/score/mean"] == (2 + 1) / 8  # as many of one kind as of the other
        assert m["critic/rewards/mean"] == (2 + 0) / 8 and m["dapo/overlong"] == 2
        assert m["dapo/dropped_all_right"] > m["dapo/dropped_all_wrong"] > 0


def test_overlong_filtering(loop):
    """Truncated responses have no token in the loss, and are no responses: 2 in each step of 4 groups.

    Groups of 8 tokens in 4 responses, and of 10 of which 4 are the truncated response's.
    """
    plain, filtered = ([totals for *_, totals in loop[1][name]] for name in ("kinds", "filtered"))
    assert plain == [[(2 * 8 + 2 * 10, 16)] * 4] * 2 and filtered == [[(2 * 8 + 2 * 6, 14)] * 2] * 2


def test_surplus_groups_are_trained_next_or_thrown_away(loop):
    """Of prompts 0 to 9 the first is kept, and all from 10 on: what is sampled follows the keep rate.

    Step 1: 4 prompts, keeps 1; 3 / (2 / 5) -> 8, keeps 2; 1 / (4 / 13) -> 4, keeps all, 3 of them surplus.
    Step 2, with half the counts: 1 / (4.5 / 9) = 2 prompts, 1 surplus. Step 3: 3 / (3.75 / 6) -> 5.
    """
    out = loop[0] / "surplus"
    first, *later = (list(groups(out, step)) for step in (1, 2, 3))
    assert first == [0, 10, 11, 12] and later == [[13, 14, 15, 16], [17, 18, 19, 20]]
    assert [list(groups(loop[0] / "resumed", step)) for step in (1, 2, 3)] == [first, *later]
    carried, thrown = metrics(out), metrics(loop[0] / "thrown")
    assert [m["dapo/gen_batches"] for m in carried.values()] == [3, 1, 1]
    assert [m["dapo/tokens_generated"] / TOKENS for m in carried.values()] == [4 + 8 + 4, 2, 5]
    assert [m["dapo/tokens_thrown_away"] / TOKENS for m in carried.values()] == [9, 0, 0]
    assert [m["dapo/carried_over"] for m in carried.values()] == [0, 3 / 4, 1 / 4]
    assert all(m["dapo/carried_over"] == 0 for m in thrown.values())
    assert list(groups(loop[0] / "thrown", 1)) == first
    assert min(groups(loop[0] / "thrown", 2)) == 16
    assert thrown[1]["dapo/tokens_thrown_away"] / TOKENS == 9 + 3


def test_surplus_groups_without_correction_are_warned_of(loop):
    log = "warning: with --rollout_is None tokens of older weights are not corrected"
    assert log in (loop[0] / "always right/log.txt").read_text()
    assert log not in (loop[0] / "surplus/log.txt").read_text()


def test_an_epoch_ends_with_its_data(loop, tiny):
    out = loop[0] / "epoch"
    *_, last = metrics(out)
    assert last < 64 // 4 and state(out, last)["step"] == last
    assert 64 <= state(out, last)["drawn"] <= 64 + 12
    assert max(k for k in groups(out, last)) < state(out, last)["drawn"]
    assert loop[1]["epoch again"] == [(None, 0, 0, [])] * 2  # resumed at the end: no model is loaded
    linear = {name for name in load_weights(tiny) if "_proj.weight" in name}
    assert changed(tiny, hf(out)) == linear  # --lora_rank: merged
