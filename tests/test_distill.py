"""Distillation: its losses against tables and plain autograd, what it refuses, and a run from end to end."""

import math
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import (
    ROOT,
    changed,
    documented,
    flags_of,
    golden,
    healthy,
    load_weights,
    metrics,
    rollouts,
    run,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from algos import distill

WEIGHED = dict(rollout_is="token", rollout_is_threshold=2.0, rollout_rs=None)
SAMPLED = SimpleNamespace(kl="sampled", clip_ratio_low=0.2, clip_ratio_high=0.2, **WEIGHED)


def divergence(hidden, weight, limits=(1.0, None), theirs=None, target=None, beta=1.0):
    target = torch.zeros(len(hidden), dtype=torch.long) if target is None else target
    hidden_q, weight_q, limits_q = theirs
    return distill.reverse_kl((hidden, weight, *limits), (hidden_q, weight_q, *limits_q), target, beta)


def test_sampled_by_hand():
    """A = teacher - student; ratio 1, over the clip, over the dual clip; times the sampler's weight."""
    part = dict(
        mask_nt=torch.ones(1, 4),
        old_logp_nt=torch.tensor([[-1.0, -1.5, -1.0, -3.0]]),
        teacher_logp_nt=torch.tensor([[-0.5, -0.5, -2.0, -2.0]]),
        rollout_logp_nt=torch.tensor([[-1.25, -1.5, -9.0, -3.0]]),
    )
    logp_nt = torch.full((1, 4), -1.0, requires_grad=True)
    loss_nt, losses, means = distill.actor_loss(SAMPLED, logp_nt, torch.ones(1, 4), part)
    # ratios 1, e^.5, 1, e^2; A = .5, .5, -1, -1; weights e^.25, 1, min(e^8, 2), 1
    assert loss_nt[0].tolist() == pytest.approx([-0.5 * math.exp(0.25), -0.6, 2.0, 3.0])
    loss_nt.sum().backward()
    assert logp_nt.grad[0].tolist() == pytest.approx([-0.5 * math.exp(0.25), 0, 2.0, 0])
    assert losses["pg_loss"] is loss_nt and means["teacher_kl"][0].tolist() == [-0.5, -0.5, 1.0, 1.0]
    assert means["pg_clipfrac"][0].tolist() == [False, True, False, False]
    assert means["pg_clipfrac_lower"][0].tolist() == [False, False, False, True]
    assert means["ppo_kl"][0].tolist() == [0, -0.5, 0, -2] and not means["rollout_rs_masked"].any()


@pytest.mark.parametrize("missing", (math.nan, math.inf, -math.inf))
def test_a_token_that_the_teacher_gave_no_number_is_not_trained(missing):
    """Sampled or full: the others have the gradient that they would have without it."""
    logp_nt = torch.full((1, 2), -1.0, requires_grad=True)
    part = dict(mask_nt=torch.ones(1, 2), rollout_logp_nt=torch.full((1, 2), -1.0))
    part["teacher_logp_nt"] = torch.tensor([[missing, -0.5]])
    loss_nt, _, means = distill.actor_loss(SAMPLED, logp_nt, torch.ones(1, 2), part)
    loss_nt.sum().backward()
    assert logp_nt.grad[0].tolist() == [0, -0.5] and means["teacher_missing"][0].tolist() == [True, False]
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 4), torch.randn(7, 4)
    teacher_hidden = torch.randn(2, 4)
    teacher_hidden[0] = missing
    grads = []
    for rows in (slice(0, 2), slice(1, 2)):
        ours = hidden[rows].clone().requires_grad_()
        theirs = teacher_hidden[rows], weight, (1.0, None)
        _, kl = divergence(ours, weight, theirs=theirs)
        loss_nt, _, means = distill.actor_loss(SimpleNamespace(kl="full"), None, kl[None], {})
        assert means["teacher_missing"].sum() == len(ours) - 1
        assert not loss_nt[means["teacher_missing"]].any() and loss_nt.isfinite().all()
        loss_nt.sum().backward()
        grads.append(ours.grad)
    assert not grads[0][0].any()
    torch.testing.assert_close(grads[0][1:], grads[1])
    never = torch.ones(1, 1), torch.tensor([[0], [0], [-math.inf]]), (1.0, None)  # one word of three
    _, kl = divergence(torch.zeros(1, 3), torch.eye(3), theirs=never)
    assert kl.isnan().all()


def gkd_of_trl(logp_lv, logq_lv, beta):
    """As TRL's `generalized_jsd_loss` writes it, by the divergences of torch."""

    def kl_div(q_lv, p_lv):  # KL(p || q)
        return torch.nn.functional.kl_div(q_lv, p_lv, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        return kl_div(logp_lv, logq_lv) if beta == 0 else kl_div(logq_lv, logp_lv)
    parts = torch.stack([logp_lv + math.log(1 - beta), logq_lv + math.log(beta)])
    mixture_lv = torch.logsumexp(parts, dim=0)
    return beta * kl_div(mixture_lv, logq_lv) + (1 - beta) * kl_div(mixture_lv, logp_lv)


@pytest.mark.parametrize("beta", (0.0, 0.1, 0.5, 1.0))
@pytest.mark.parametrize("softcap", (None, 0.5))
@pytest.mark.parametrize("temperature", (1.0, 0.7))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_full_equals_plain_autograd(dtype, temperature, softcap, beta):
    """The student's logits may be bounded where the teacher's are not, and its width is its own."""
    torch.manual_seed(0)
    ours = [torch.randn(n, 4, dtype=dtype, requires_grad=True) for n in (5, 7)]
    theirs = [torch.randn(n, 6, dtype=dtype) for n in (5, 7)]
    target, share = torch.tensor([0, 6, 2, 2, 5]), torch.randn(5)
    logits = [x.float() @ w.float().t() for x, w in (ours, theirs)]
    logits[0] = softcap * torch.tanh(logits[0] / softcap) if softcap else logits[0]
    logp_lv, logq_lv = ((x / temperature).log_softmax(-1) for x in logits)
    plain = gkd_of_trl(logp_lv, logq_lv, beta)
    logp, kl = divergence(*ours, (temperature, softcap), (*theirs, (temperature, None)), target, beta)
    near = dict(rtol=1e-4, atol=1e-6) if dtype is torch.float32 else dict(rtol=0.05, atol=0.05)
    torch.testing.assert_close(logp, logp_lv[torch.arange(5), target], **near)
    torch.testing.assert_close(kl, plain, **near)
    found = [torch.autograd.grad((x * share).sum(), ours) for x in (kl, plain)]
    torch.testing.assert_close(*found, **near)


def test_between_by_hand():
    """p = 1/4 3/4, q = 1/2 1/2: m is 3/8 5/8 for beta 1/2, and 1/4 q + 3/4 p for 1/4."""
    p, q = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    for beta, expected in ((0.0, 0.1438), (0.25, 0.02605), (0.5, 0.0338), (1.0, 0.1308)):
        _, kl = divergence(p.log(), torch.eye(2), theirs=(q.log(), torch.eye(2), (1.0, None)), beta=beta)
        assert kl.item() == pytest.approx(expected, abs=1e-4), beta
        same = divergence(p.log(), torch.eye(2), theirs=(p.log(), torch.eye(2), (1.0, None)), beta=beta)
        assert same[1].item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("beta", (0.0, 0.5, 1.0))
def test_distributions_without_common_words_are_finite(beta):
    """A word that one model rules out by 200 nats: the value is bounded or large, the gradient finite."""
    ours = torch.tensor([[0.0, -200.0]], requires_grad=True)
    theirs = torch.tensor([[-200.0, 0]]), torch.eye(2), (1.0, None)
    _, kl = divergence(ours, torch.eye(2), theirs=theirs, beta=beta)
    [grad] = torch.autograd.grad(kl.sum(), [ours])
    assert kl.item() == pytest.approx({0.5: math.log(2)}.get(beta, 200)) and grad.isfinite().all()


def test_logits_exist_for_one_chunk_at_a_time(monkeypatch):
    """The largest memory that forward and backward take does not grow with the number of chunks."""
    monkeypatch.setattr(distill, "KL_CHUNK", 64)

    def peak(positions):
        hidden, weight = torch.randn(positions, 8, requires_grad=True), torch.randn(999, 8)
        theirs = torch.randn(positions, 4), torch.randn(999, 4)
        student = SimpleNamespace(scale=1, softcap=None, hidden=lambda where, _: hidden[where])
        student.lm = SimpleNamespace(get_output_embeddings=lambda: SimpleNamespace(weight=weight))
        target = torch.zeros(positions, dtype=torch.long)
        with torch.profiler.profile(profile_memory=True) as profile:
            where = torch.arange(positions)
            _, kl = distill.Student.forward(student, where, target, 1.0, teacher=(*theirs, 1.0, None))
            kl.sum().backward()
        assert weight.grad is None and hidden.grad.abs().sum() > 0
        made = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        return max(accumulate(n for n in made if abs(n) >= 64 * 999 * 4))

    assert peak(1280) <= peak(128)


def test_rows_of_the_data(tiny, monkeypatch):
    """This rank's share, with the EOS that a sampler would give, or cut where it would be."""
    monkeypatch.setattr(distill.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(distill.dist, "get_world_size", lambda: 2)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompts = [dict(extra_info=dict(answer=x), prompt_ids=[7, 8]) for x in ("9", "12", "9", "12345")]
    rows = distill.data_rows(prompts, tokenizer, SimpleNamespace(max_response_length=4))
    assert [tokenizer.decode(row["response_ids"]) for row in rows] == ["12<|eos|>", "1234"]
    assert [row["finish_reason"] for row in rows] == ["stop", "length"]
    assert [row["length"] for row in rows] == [len(row["rollout_logp_t"]) for row in rows] == [3, 4]
    assert [row["mask_t"].tolist() for row in rows] == [[True] * 3, [True] * 4]
    assert [row["older_t"].tolist() for row in rows] == [[True] * 3, [True] * 4]
    assert rows[0]["response_ids"].dtype == np.int32 and "length" not in prompts[1]
    opened = tokenizer.encode("<think>\n", add_special_tokens=False)  # by the generation prompt
    said = [dict(extra_info=dict(answer="<think>\n5\n</think>9"), prompt_ids=opened)] * 2
    [row] = distill.data_rows(said, tokenizer, SimpleNamespace(max_response_length=99))
    assert tokenizer.decode(row["response_ids"]) == "5\n</think>9<|eos|>"


class Letters:
    """A tokenizer with a letter a token."""

    def encode(self, text, add_special_tokens):
        return list(text)


def in_brackets(messages, tokenizer, tools):
    assert messages[0] == dict(role="system", content="s") and messages[1]["role"] == "user"
    return f"[{messages[1]['content']}]"


def test_what_a_teacher_is_shown(monkeypatch):
    """Two groups: one has two right responses, in the other the right one has only its feedback."""
    monkeypatch.setattr(distill, "render", in_brackets)
    args = SimpleNamespace(teacher_prompt=("{solution}\\boxed{}{prompt}", "{feedback}+{prompt}"))
    args.max_tokens_per_microbatch, args.max_response_length = 30, 10  # 20 tokens are for the prompt
    assert distill.teacher_text(["{feedback}x"], dict(feedback=0)) == "0x"
    assert distill.teacher_text(["{feedback}x"], dict(feedback=None)) is None
    cases, rows = golden("teacher_prompts"), []
    for case in cases:
        question = f"x{case['group']}"
        prompt = [dict(role="system", content="s"), dict(role="user", content=question)]
        row = dict(group=case["group"], prompt=prompt, sampled=dict(solution_str=case["text"]), extra_info={})
        row |= dict(reward=case["reward"], prompt_ids=[*f"[{question}]"], mask_t=np.array([True, False]))
        rows.append(row)
    assert distill.show_teacher(args, rows, Letters()) == 5 / 7
    for case, row in zip(cases, rows, strict=True):
        shown = [*f"[{case['shown'] or row['prompt'][1]['content']}]"]
        assert row["teacher"] == dict(prompt_ids=shown, prompt_length=len(shown))
        assert row["sampled"]["teacher_prompt_str"] == case["shown"]
        assert row["mask_t"].tolist() == [case["shown"] is not None, False]
        assert row["prompt"][1]["content"] == f"x{case['group']}"  # the student's


def test_a_teacher_follows():
    teacher, student = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    teacher.weight.data.fill_(1.0), student.weight.data.fill_(3.0)
    for rate, expected in ((0.25, 1.5), (0.25, 1.875), (1.0, 3.0)):
        distill.follow(teacher, student, rate)
        assert teacher.weight.item() == expected and student.weight.item() == 3.0


# ---- what it refuses
def write_model(tiny, out, tokens=0, **changes):
    """A model like `tiny` but for its configuration and how many tokens its tokenizer has."""
    config = AutoConfig.from_pretrained(tiny)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens([f"<{i}>" for i in range(tokens)])
    tokenizer.save_pretrained(out)
    return out


def test_a_teacher_with_another_vocabulary(refused, tiny, tmp_path):
    larger = write_model(tiny, tmp_path / "larger", vocab_size=128)
    line = refused(distill, "--teacher", larger)
    assert "--kl full" in line and "102" in line and "128" in line and "--kl sampled" in line
    other = write_model(tiny, tmp_path / "other", tokens=2)
    for kl in ("full", "sampled"):
        line = refused(distill, "--kl", kl, "--teacher", other)
        assert f"--teacher {other} has another vocabulary: 2 tokens differ, '<0>' is number 102 there" in line


def test_rows_without_an_answer(refused, tiny, arithmetic, tmp_path):
    """Which the data's share of the responses or the teacher's prompt would need."""
    rows = pq.read_table(arithmetic / "train.parquet").to_pylist()
    rows[3]["extra_info"]["answer"] = ""
    numbers = [row | dict(extra_info=row["extra_info"] | dict(answer=7)) for row in rows]
    for made, line in (
        (rows, "1 rows have no text in extra_info.answer, first 3"),
        (numbers, "64 rows have no"),
    ):
        pq.write_table(pa.Table.from_pylist(made), tmp_path / "rows.parquet")
        for words in (("--lam", 0.5), ("--teacher_prompt", "{answer} {prompt}")):
            words = *words, "--teacher", tiny, "--train_files", tmp_path / "rows.parquet"
            assert line in refused(distill, *words)


def test_teachers_that_do_not_fit(refused, tiny, tmp_path):
    both = "--teacher", tiny, write_model(tiny, tmp_path / "other")
    assert "several --teacher need --kl sampled" in refused(distill, *both)
    line = refused(distill, "--kl", "sampled", *both)
    assert "2 --teacher and 0 --teacher_sources: give one for each" in line
    for names, odd in ((("x", "y"), "arithmetic, x, y"), (("arithmetic", "y"), "y")):
        line = refused(distill, "--kl", "sampled", "--teacher_sources", *names, *both)
        assert line.endswith(f"--teacher_sources: a data_source without a teacher or without rows: {odd}")


# ---- from end to end
FLAGS = (
    "--train_batch_size 16 --ppo_mini_batch_size 8 --max_prompt_length 16 --max_response_length 12"
    " --lr 1e-2 --total_steps 4 --save_freq 2 --test_freq 0 --keep_checkpoints 0 --rollout_dump"
    " --lr_schedule linear"
)


def flags(tiny, teacher, arithmetic, out, *more):
    return [*flags_of(tiny, arithmetic, out, FLAGS), "--teacher", teacher, *more]


@pytest.mark.parametrize("itself", (False, True))
def test_full_from_end_to_end(tiny, arithmetic, tmp_path, itself):
    """Half of the responses are the data's; two optimizer steps a rollout; a teacher of another width.

    Or the student itself, which reads the answer and follows: a checkpoint holds its average.
    """
    teacher, more = tiny, ("--lam", 0.5, "--temperature", 0.8)
    if itself:
        more += "--teacher_prompt", "{answer} {prompt}", "--teacher_update_rate", 0.3, "--save_freq", 1
    else:
        sizes = dict(hidden_size=96, num_attention_heads=3, num_key_value_heads=3)
        teacher = write_model(tiny, tmp_path / "teacher", **sizes)
    script, out = ROOT / "algos/distill.py", tmp_path / "straight"
    run(script, *flags(tiny, teacher, arithmetic, out, *more))
    steps = healthy(out)
    assert list(steps) == [0, 1, 2, 3, 4]
    assert [steps[step]["actor/lr"] for step in range(1, 5)] == [1e-2, 7.5e-3, 5e-3, 2.5e-3]
    assert itself or steps[4]["actor/teacher_kl"] < steps[1]["actor/teacher_kl"]
    assert not itself or steps[1]["actor/teacher_kl"] > 1e-4
    assert all(m["rollout_corr/rollout_is_mean"] == 1 for s, m in steps.items() if s)  # no correction
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    answers = [row["ground_truth"] == tokenizer.decode(row["response_ids"][:-1]) for row in rollouts(out, 1)]
    assert 0 < sum(answers) < 16  # a random student gives no right one
    assert changed(tiny, out / "checkpoints/step_000004/hf") == load_weights(tiny).keys()
    if itself:
        parts = "step_000003/teacher", "step_000004/hf", "step_000004/teacher"
        before, student, after = (load_weights(out / "checkpoints" / part) for part in parts)
        for name, x in after.items():
            torch.testing.assert_close(x, 0.7 * before[name] + 0.3 * student[name])


def test_sampled_from_end_to_end(tiny, arithmetic, tmp_path):
    """One optimizer step a rollout: the loss is the estimated KL. Its own teacher has nothing to say.

    Two ranks answer half of the prompts each, and score all.
    """
    more = "--kl", "sampled", "--ppo_mini_batch_size", 16, "--total_steps", 2
    run(ROOT / "algos/distill.py", *flags(tiny, tiny, arithmetic, tmp_path, *more), ranks=2)
    _, first, second = metrics(tmp_path).values()
    assert len({row["index"] for row in rollouts(tmp_path, 1)}) == 16 == len(rollouts(tmp_path, 1))
    assert abs(first["actor/teacher_kl"]) < 1e-6 and first["actor/grad_norm"] < 1e-4
    assert abs(second["actor/teacher_kl"]) < 0.01 and "timing_s/ref" in second
    for m in (first, second):
        assert m["actor/pg_loss"] == pytest.approx(m["actor/teacher_kl"], rel=1e-3, abs=1e-7)
        assert m["actor/ppo_kl"] == 0 and not {name for name in m if not documented(name)}
