"""GRPO from end to end, as a user runs it."""

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from subprocess import DEVNULL

import psutil
import pytest
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
    start,
)
from torch.distributed.checkpoint import FileSystemReader
from transformers import GenerationConfig

from algos.grpo import group_advantages

GRPO = ROOT / "algos/grpo.py"


FLAGS = (
    "--train_batch_size 8 --ppo_mini_batch_size 4 --max_prompt_length 16 --max_response_length 12"
    " --lr 3e-3 --warmup_steps 2 --save_freq 3 --test_freq 3 --rollout_dump --use_kl_loss"
    " --max_tokens_per_microbatch 300 --total_steps 6 --keep_checkpoints 0"
)


def flags(tiny, arithmetic, out, *more):
    reward = () if "--reward_fn" in more else ("--reward_fn", f"{ROOT}/tests/guest_reward.py:digits")
    return [*flags_of(tiny, arithmetic, out, FLAGS), *reward, *more]


@pytest.fixture(scope="module")
def straight(tiny, arithmetic, tmp_path_factory):
    """Six steps on one rank, undisturbed, and without a warning."""
    out = tmp_path_factory.mktemp("straight")
    assert "UserWarning" not in run(GRPO, *flags(tiny, arithmetic, out)).stderr
    return out


def test_it_learns_and_reports(straight, tiny):
    steps = healthy(straight)
    assert list(steps) == [0, 1, 2, 3, 4, 5, 6]
    assert steps[6]["critic/score/mean"] > steps[1]["critic/score/mean"] + 0.03
    assert [steps[step]["actor/lr"] for step in range(1, 7)] == [1.5e-3, *[3e-3] * 5]  # of the optimizer
    assert steps[6]["val-core/arithmetic/reward/mean@1"] > steps[0]["val-core/arithmetic/reward/mean@1"]
    assert changed(tiny, hf(straight)) == load_weights(tiny).keys()


def test_sampler_and_trainer_agree_every_step(straight):
    assert all(m["training/rollout_probs_diff_max"] < 1e-4 for s, m in metrics(straight).items() if s)


def test_advantages_are_those_of_the_groups(straight):
    """Recomputed from the dumped scores by prompt; the responses to a prompt are not one and the same."""

    def advantages(rows):
        return group_advantages(column(rows, "score"), column(rows, "index"))

    check_advantages(straight, range(1, 7), advantages)
    for step in range(1, 7):
        texts = {}
        for row in rollouts(straight, step):
            texts.setdefault(row["index"], set()).add(tuple(row["response_ids"]))
        assert min(map(len, texts.values())) > 1


def test_texts_of_validations_are_kept(straight):
    kept = sorted((straight / "rollouts").glob("val_*"))
    assert [path.name[4:10] for path in kept] == ["000000", "000003", "000006"]
    for step, path in zip((0, 3, 6), kept):
        found = column(map(json.loads, path.read_text().splitlines()), "score").mean().item()
        assert found == pytest.approx(metrics(straight)[step]["val-core/arithmetic/reward/mean@1"])


@pytest.mark.parametrize("lora_rank", (0, 4))
def test_first_mini_batch_is_on_policy(tiny, arithmetic, tmp_path, lora_rank):
    one = "--total_steps", 2, "--ppo_mini_batch_size", 8, "--warmup_steps", 0, "--temperature", 0.7
    run(GRPO, *flags(tiny, arithmetic, tmp_path, *one, "--lora_rank", lora_rank))
    [_, first, second] = metrics(tmp_path).values()
    for step in (first, second):
        assert step["actor/pg_clipfrac"] == step["actor/ppo_kl"] == 0
        assert "timing_s/old_log_prob" not in step  # one optimizer step: not computed twice
        assert step["actor/grad_norm"] > 0
    # the reference is the model of the start, and stays so
    assert first["actor/kl_loss"] == 0 and second["actor/kl_loss"] > 1e-6
    if lora_rank:  # the model without adapters is the reference; adapters, and nothing else, are saved
        saved = tmp_path / "checkpoints/latest"
        names = FileSystemReader(saved / "dcp").read_metadata().state_dict_metadata
        names = [name for name in names if "param_groups" not in name]
        assert len(names) == 4 * 28 and all("lora" in name for name in names)  # a weight, two moments, a step
        linear = {name for name in load_weights(tiny) if name.endswith("proj.weight")}
        assert changed(tiny, saved / "hf") == linear  # hf/ is the merged model


def test_two_ranks_equal_one_and_resume_on_one(straight, tiny, arithmetic, tmp_path):
    """With the same reward, which then leaves its process as it is."""
    rewards = "--reward_manager prime --reward_weights 0 1 --reward_fn rewards".split()
    rewards.append(f"{ROOT}/tests/digit_reward.py:digits")
    run(GRPO, *flags(tiny, arithmetic, tmp_path, "--total_steps", 3, *rewards), ranks=2)
    same(straight, tmp_path, [1], 1e-4)
    run(GRPO, *flags(tiny, arithmetic, tmp_path, "--total_steps", 4, *rewards))
    assert list(healthy(tmp_path)) == [0, 1, 2, 3, 4]


def test_several_rewards_own_variants_and_the_off_policy_mask(tiny, arithmetic, tmp_path):
    """Twice gdpo, recomputed from the dumped scores; the mask acts only in the second of two mini-batches."""
    own = f"{ROOT}/tests/own_variants.py"
    files = [f"{ROOT}/tests/digit_reward.py:{name}" for name in ("digits", "shortness")]
    more = "--reward_weights", 0.5, 2, "--adv_estimator", f"{own}:twice_gdpo", "--reward_fn", *files
    more = *more, "--policy_loss", f"{own}:reinforce", "--total_steps", 2
    mask = "--rollout_rs", "off_policy", "--rollout_rs_threshold", 0.003
    run(GRPO, *flags(tiny, arithmetic, tmp_path, *more, *mask, "--lr", 0.01, "--warmup_steps", 0))
    _, first, second = metrics(tmp_path).values()

    def advantages(rows):
        def of(name):
            return group_advantages(column(rows, f"score/digit_reward.{name}"), column(rows, "index"))

        sum_n = 0.5 * of("digits") + 2 * of("shortness")
        return 2 * sum_n / sum_n.std()

    check_advantages(tmp_path, (1, 2), advantages)
    assert first["critic/rewards/mean"] == pytest.approx(column(rollouts(tmp_path, 1), "score").mean().item())
    for found in (first, second):
        assert 0 < found["actor/rollout_rs_masked"] < 0.5
        assert found["actor/pg_clipfrac"] == pytest.approx(1) and found["actor/pg_clipfrac_lower"] == 0
    used = json.loads((tmp_path / "args.json").read_text())
    names = "clip_ratio_low", "clip_ratio_high", "loss_agg"
    assert [used[name] for name in names] == [None, 0.7, "seq-mean-token-sum"]


@pytest.mark.parametrize("who", ("one rank", "all, and again by torchrun"))
def test_sigterm_saves_and_succeeds(who, tiny, arithmetic, tmp_path):
    more = "--total_steps", 1000, "--save_freq", 0, "--test_freq", 0
    run_ = start(GRPO, *flags(tiny, arithmetic, tmp_path, *more), ranks=2, stdout=DEVNULL, stderr=DEVNULL)
    while not (tmp_path / "metrics.jsonl").exists() or len(metrics(tmp_path)) < 3:
        assert run_.poll() is None
        time.sleep(0.1)
    named = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or [])]
    ranks = [p for p in named if p.pid != run_.pid]
    last = max(ranks, key=lambda rank: rank.environ()["RANK"])
    for process in [last] if who == "one rank" else named:
        process.terminate()
    assert run_.wait()
    step = int(os.readlink(tmp_path / "checkpoints/latest").removeprefix("step_"))
    assert json.loads((tmp_path / "checkpoints/latest/trainer_state.json").read_text())["step"] == step
    assert 2 <= step < 1000


@pytest.mark.parametrize("tp_size", (1, 2))
def test_sync(tiny, tp_size, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")
    GenerationConfig(eos_token_id=[1, *range(20, 50)]).save_pretrained(model)
    worker = ROOT / "tests/workers/sync.py"
    with ThreadPoolExecutor() as threads:  # two runs at once do not share what their ranks share
        runs = [threads.submit(run, worker, model, tp_size, ranks=2) for _ in range(tp_size)]
    for done in runs:
        print(done.result().stdout)
