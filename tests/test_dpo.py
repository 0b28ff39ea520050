"""DPO: its losses by hand, what is a pair, and whole runs that learn, split, are killed and resume."""

import json
import math
import resource
import shutil
from functools import partial
from types import SimpleNamespace

import conftest
import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import (
    ROOT,
    changed,
    golden,
    healthy,
    hf,
    killed_at_a_checkpoint,
    load_weights,
    losses,
    metrics,
    offline_flags,
    run,
    same,
)
from test_sft import conversation_tokenizer
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer
from workers.shared import plain_logps

from algos import dpo
from data_prep.arithmetic import make_row
from data_prep.lib.schema import load_rows, write_parquet
from data_prep.tiny_model import CHAT_TEMPLATE, make_tokenizer
from system.batches import one_row

SCRIPT, STEPS, NAMES = ROOT / "algos/dpo.py", 8, ("prompt", "chosen", "rejected")


make_args = partial(conftest.make_args, dpo)
flags = partial(offline_flags, train_batch_size=9)


def pair(question, chosen, rejected):
    def talk(role, text):
        return [dict(role=role, content=text)]

    return dict(zip(NAMES, (talk("user", question), talk("assistant", chosen), talk("assistant", rejected))))


# ---- the losses


@pytest.mark.parametrize("case", golden("preference_losses"), ids=lambda case: case["why"])
def test_losses_by_hand(case):
    """Of 2 and 4 tokens, and of 1 and 3."""
    logp_n2 = torch.tensor([[-10.0, -12.0], [-4.0, -3.0]])
    reference_n2, tokens_n2 = torch.tensor([[-11.0, -11.0], [-4.0, -3.0]]), torch.tensor([[2.0, 4], [1, 3]])
    loss_n, reward_n2 = dpo.preference_loss(make_args(**case["flags"]), logp_n2, reference_n2, tokens_n2)
    assert loss_n.tolist() == pytest.approx(case["losses"], rel=1e-5)
    assert reward_n2.tolist() == [pytest.approx(row, abs=1e-6) for row in case["rewards"]]


@pytest.mark.parametrize("case", golden("kto_of_trl"), ids=lambda case: case["why"])
def test_kto_is_trls(case, monkeypatch):
    """Numbers of KTOTrainer._compute_loss of trl 1.16, with a model that returns these log-probs."""
    args = make_args(loss="kto", **case["flags"])
    rows = []
    for values in case["rows"]:
        row = {name: [x, 0.0] if values["good"] else [0.0, x] for name, x in values.items() if name != "good"}
        rows.append(row | dict(other=dict(logp=row["other"]), other_reference=[0.0, 0.0]))

    def tensor(rows, name="logp"):
        return torch.tensor([row[name] for row in rows]).view(-1, 2)

    monkeypatch.setattr(dpo, "micro_batches", lambda policy, rows, args: (rows[:2], rows[2:]))
    monkeypatch.setattr(dpo, "pair_logps", lambda policy, rows: tensor(rows))
    monkeypatch.setattr(dpo, "all_reduce", list)
    z = dpo.reference_point(None, [rows[:3], rows[3:]], args)
    logp_n2 = tensor(rows).requires_grad_()
    terms = dpo.objective(args, rows, logp_n2, tensor(rows, "tokens").numpy(), z)
    [gradient_n2] = torch.autograd.grad(terms["loss"], logp_n2)
    assert {name: terms[name].item() for name in case["terms"]} == pytest.approx(case["terms"], abs=1e-6)
    assert gradient_n2.sum(1).tolist() == pytest.approx(case["gradient"], abs=1e-6)


# ---- what is a pair


def responses(row, tokenizer):
    """Prompt, and what is trained of the responses."""
    kept = [[x for x, on in zip(row[f"{n}_ids"], row[f"{n}_trained"]) if on] for n in ("chosen", "rejected")]
    assert [*map(len, kept)] == row["tokens"]
    return [tokenizer.decode(ids) for ids in (row["prompt_ids"], *kept)]


def test_a_pair():
    tokenizer, row = make_tokenizer(), pair("1+2=", "3", "12")
    found = dpo.encode_pair(*(row[name] for name in NAMES), tokenizer, 99)
    assert responses(found, tokenizer) == ["<|user|>1+2=<|assistant|>", "3<|eos|>", "12<|eos|>"]


@pytest.mark.parametrize("case", golden("bad_pairs"), ids=lambda case: case["kind"])
def test_bad_pairs(tmp_path, case):
    """Named in a line, or dropped and counted; a file of nothing else is an error all the same."""
    bad = case["row"]
    line = case["line"]
    good, path, args = pair("1+1=", "2", "3"), str(tmp_path / "rows.parquet"), make_args(max_length=32)
    write_parquet([good, bad, good], path)
    with pytest.raises(ValueError, match=rf"rows.parquet: row 1: {line}; .*--bad_pairs drop"):
        dpo.load_pairs([path], args, make_tokenizer())
    args.bad_pairs = "drop"
    rows, dropped = dpo.load_pairs([path], args, make_tokenizer())
    assert len(rows) == 2 and dropped == 1 and rows[0] | dict(index=2) == rows[1]
    write_parquet([bad], path)
    with pytest.raises(ValueError, match="--bad_pairs drop leaves no pair"):
        dpo.load_pairs([path], args, make_tokenizer())


def test_a_prompt_of_a_pair_is_computed_once():
    """In one row; padded, the shorter response counts as much as the longer one."""
    tokenizer, row = make_tokenizer(), pair("1+2=", "3", "12")
    row = dpo.encode_pair(*(row[name] for name in NAMES), tokenizer, 99)
    texts = dpo.responses([row])
    inputs, _ = one_row(*([text[name] for text in texts] for name in ("prompt_ids", "response_ids")))
    prompt, chosen, rejected = (len(row[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected"))
    assert inputs["input_ids"].numel() == prompt + chosen + rejected == dpo.pair_sizes([row], True)[0]
    assert dpo.pair_sizes([row], False) == [2 * (prompt + rejected)]


# ---- whole runs


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sums that are right, and wrong in the last digit or by a digit too many."""
    out, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    for split, size in (("train", 40), ("val", 10)):
        rows = []
        for i, (a, b, wrong) in enumerate(rng.integers(1, 100, (size, 3)).tolist()):
            row = pair(f"{a}+{b}=", str(a + b), str(a + b + (wrong if wrong % 2 else 1000)))
            rows.append(row | dict(prompt=make_row(split, i, a, b)["prompt"]))
        write_parquet(rows, out / f"{split}.parquet")
    return out


@pytest.fixture(scope="module")
def straight(tiny, data, tmp_path_factory):
    """A run on one rank, with many micro-batches in a step, and without a warning."""
    out = tmp_path_factory.mktemp("dpo") / "straight"
    assert "Warning: " not in run(SCRIPT, *flags(tiny, data, out)).stderr
    return out


def references(out):
    return {path.name: np.load(path) for path in (out / "reference").iterdir()}


def logps(lm, data, tokenizer):
    """Log-probs of both responses to each validation pair, [pairs, 2], by plain code."""
    sums = []
    for row in load_rows(data / "val.parquet", NAMES):
        row = dpo.encode_pair(*(row[name] for name in NAMES), tokenizer, 32)
        for ids in (row["chosen_ids"], row["rejected_ids"]):
            sums.append(plain_logps(lm, row["prompt_ids"], ids)[range(len(ids)), ids].sum())
    return torch.stack(sums).view(-1, 2).detach()


def test_the_first_step_is_at_the_reference(straight):
    for step, prefix, loss in ((0, "val/", "val/loss"), (1, "", "train/loss")):
        m = metrics(straight)[step]
        assert m[loss] == pytest.approx(math.log(2), abs=1e-6)
        assert {m[f"{prefix}rewards/{x}"] for x in ("chosen", "rejected", "margins", "accuracies")} == {0.0}


def test_it_learns(straight, tiny):
    by_step = healthy(straight)
    assert list(by_step) == list(range(STEPS + 1))
    assert by_step[2]["train/lr"] == 3e-3 and by_step[1]["train/lr"] == 1.5e-3 > by_step[STEPS]["train/lr"]
    assert by_step[STEPS]["train/loss"] < by_step[1]["train/loss"] - 0.02
    assert by_step[STEPS]["val/loss"] < by_step[0]["val/loss"] - 0.01
    assert by_step[STEPS]["val/rewards/accuracies"] > 0.55
    assert [m["training/epoch"] for s, m in by_step.items() if s] == [0] * 4 + [1] * 4  # 40 pairs, 9 a step
    assert changed(tiny, hf(straight)) == load_weights(tiny).keys()


def check_last_validation(out, policy, tiny, data):
    """The metrics of the last validation, by plain code from the saved model and the one before training."""
    tokenizer, last = AutoTokenizer.from_pretrained(tiny), metrics(out)[STEPS]
    logp_n2 = logps(policy, data, tokenizer)
    reward_n2 = 0.1 * (logp_n2 - logps(AutoModelForCausalLM.from_pretrained(tiny), data, tokenizer))
    h_n = reward_n2[:, 0] - reward_n2[:, 1]
    expected = dict(zip(("rewards/chosen", "rewards/rejected"), reward_n2.mean(0).tolist()))
    expected |= dict(zip(("logps/chosen", "logps/rejected"), logp_n2.mean(0).tolist()))
    expected |= {"rewards/margins": h_n.mean().item(), "rewards/accuracies": (h_n > 0).float().mean().item()}
    expected["loss"] = -logsigmoid(h_n).mean().item()
    assert {name: last[f"val/{name}"] for name in expected} == pytest.approx(expected, abs=1e-4)


def test_metrics_are_those_of_the_saved_model(straight, tiny, data):
    check_last_validation(straight, AutoModelForCausalLM.from_pretrained(hf(straight)), tiny, data)


def test_killed_and_resumed_equals_straight(straight, tiny, data, tmp_path):
    """Training's reference is read; validation's is lost, and computed before the checkpoint is loaded."""
    killed_at_a_checkpoint([SCRIPT, *flags(tiny, data, tmp_path)], tmp_path)
    kept, lost = sorted((tmp_path / "reference").iterdir(), key=lambda path: -path.stat().st_size)
    before = kept.stat().st_mtime_ns
    lost.unlink()
    run(SCRIPT, *flags(tiny, data, tmp_path))
    assert "resumed from" in (tmp_path / "log.txt").read_text() and kept.stat().st_mtime_ns == before
    a, b = references(straight), references(tmp_path)
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
    assert sorted(map(len, a.values())) == [10, 40]
    same(straight, tmp_path, tolerance=1e-6)
    assert not changed(hf(straight), hf(tmp_path))


def test_two_ranks_and_padded_rows_change_nothing(straight, tiny, data, tmp_path):
    """Eager attention knows no texts that share a row."""
    run(SCRIPT, *flags(tiny, data, tmp_path, attn_implementation="eager"), ranks=2)
    assert losses(tmp_path) == pytest.approx(losses(straight), abs=1e-5)
    one, two = metrics(straight), metrics(tmp_path)
    assert two[1]["rewards/margins"] == two[0]["val/rewards/margins"] == 0.0
    for name in ("val/loss", "val/rewards/margins", "perf/total_num_tokens"):
        assert two[STEPS][name] == pytest.approx(one[STEPS][name], abs=1e-5)


def test_adapters_begin_as_the_reference(straight, tiny, data, tmp_path):
    run(SCRIPT, *flags(tiny, data, tmp_path, lora_rank=4, lr=3e-2))
    by_step, first = metrics(tmp_path), references(straight)
    assert by_step[1]["rewards/margins"] == by_step[0]["val/rewards/margins"] == 0.0
    assert all(np.allclose(x, first[name], atol=1e-4) for name, x in references(tmp_path).items())
    # two updates take 0.0226 off, the same on every processor; later losses differ between them
    losses = [by_step[step]["train/loss"] for step in (1, 3)]
    assert losses[0] == pytest.approx(math.log(2)) and losses[1] < losses[0] - 0.007
    check_last_validation(tmp_path, AutoModelForCausalLM.from_pretrained(hf(tmp_path)), tiny, data)


def test_generate_ends_where_a_trained_turn_ends(tiny, data, tmp_path):
    """Of transformers, also where the model has other ends than the tokenizer, and the template a third."""
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("eos_token", "'<|system|>'"))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(config | dict(eos_token_id=4)))
    run(SCRIPT, *flags(model, data, tmp_path / "run", nll_coef=1, lr=3e-2))
    lm, tokenizer = (x.from_pretrained(hf(tmp_path / "run")) for x in (AutoModelForCausalLM, AutoTokenizer))
    end = tokenizer.convert_tokens_to_ids("<|system|>")
    assert lm.generation_config.eos_token_id == sorted({4, tokenizer.eos_token_id, end})
    torch.manual_seed(0)
    prompts = torch.tensor([tokenizer.encode("<|user|>1+2=<|assistant|>")] * 8)
    found = lm.generate(prompts, do_sample=True, max_new_tokens=60)
    assert found.shape[1] < prompts.shape[1] + 60 and (found == end).any(1).all()


def test_simpo_has_no_reference(tmp_path):
    args = make_args(loss="simpo", output_dir=str(tmp_path))
    assert dpo.reference_logps(None, [{}] * 3, range(3), args).tolist() == [[0.0, 0.0]] * 3
    assert not [*tmp_path.iterdir()]


def test_the_reference_is_kept_or_computed_again(tmp_path, monkeypatch):
    """A full disk (no file grows over 1000 bytes) leaves no file; a damaged one is not read."""
    ids = pa.array([[7, 8]] * 200)
    rows, calls = type("Rows", (list,), dict(column=lambda self, name: ids))([{}] * 200), []
    args = make_args(output_dir=str(tmp_path), train_batch_size=100)

    def nothing(x):
        return None

    one_rank = SimpleNamespace(get_rank=lambda: 0, broadcast_object_list=nothing, all_reduce=nothing)

    def micro_batches(policy, step, args):
        calls.append(len(step))
        yield step

    def pair_logps(policy, pairs):
        return torch.tensor([[row["number"], -1.0] for row in pairs])

    monkeypatch.setattr(dpo, "dist", one_rank)
    monkeypatch.setattr(dpo, "micro_batches", micro_batches)
    monkeypatch.setattr(dpo, "pair_logps", pair_logps)

    def reference():
        return dpo.reference_logps(None, rows, range(199, -1, -1), args)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        first = reference()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert first.tolist() == [[i, -1] for i in range(200)] and calls == [100, 100]
    for file in (tmp_path / "reference").glob("*"):  # numpy says nothing of a lost end
        assert file.name.endswith(".npy") and file.stat().st_size <= 1000
    assert np.array_equal(reference(), first) and len(calls) == 4  # computed again
    [file] = (tmp_path / "reference").iterdir()
    assert np.array_equal(reference(), first) and len(calls) == 4  # read
    file.write_bytes(file.read_bytes()[:-10])
    assert np.array_equal(reference(), first) and len(calls) == 6
    for flags in (dict(compute_dtype="bfloat16"), dict(qlora=True), dict(attn_implementation="eager")):
        before = len(calls)
        with monkeypatch.context() as other:  # a forward pass of another kind
            for name, value in flags.items():
                other.setattr(args, name, value)
            reference()
        assert len(calls) == before + 2, flags


def test_turns_of_the_prompt_are_context_and_a_rewritten_reply_is_refused():
    tokenizer = conversation_tokenizer()

    def said(*texts):
        return [dict(role=x, content=y) for x, y in zip(("user", "assistant") * 3, texts)]

    prompt, reply = said("1+1=", "2", "1+2="), dict(role="assistant", content="3")
    other = [reply | dict(content="4")]
    row = dpo.encode_pair(prompt, [reply], other, tokenizer, 99)
    assert tokenizer.decode(row["chosen_ids"]) == "3<|eos|>" and row["tokens"] == [2, 2]
    assert "2<|eos|>" in tokenizer.decode(row["prompt_ids"])
    longer = [reply, dict(role="user", content="?"), reply]
    assert dpo.encode_pair(prompt, longer, other, tokenizer, 99)["tokens"] == [4, 2]
    forgets = "(m.content if loop.last or m.role != 'assistant' else '...')"
    tokenizer.chat_template = tokenizer.chat_template.replace("~ m.content", f"~ {forgets}")
    with pytest.raises(ValueError, match="rewrites a turn of 'chosen' when another follows"):
        dpo.encode_pair(prompt, longer, other, tokenizer, 99)
    with pytest.raises(ValueError, match="'chosen' has no turn of the assistant that is trained"):
        dpo.encode_pair(prompt, [reply | dict(train=False)], other, tokenizer, 99)
    marks_nothing = "{% generation %}{% endgeneration %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" + marks_nothing
    with pytest.raises(ValueError, match="the chat template marks nothing"):
        dpo.encode_pair(prompt, [reply], other, tokenizer, 99)


def test_the_response_of_another_row_is_within_the_limit():
    """KTO pairs a prompt of 45 tokens with a response of 45, of which 19 are left at --max_length 64."""
    rows = []
    for prompt, response in ((3, 45), (45, 3)):
        row = dict(prompt_ids=[1] * prompt, chosen_ids=[2] * response, chosen_trained=[True] * response)
        rows.append(row | dict(rejected_ids=[], rejected_trained=[], tokens=[response, 0]))
    others = dpo.Mismatched(rows, 0, 64)
    found = [(len(x["prompt_ids"]), len(x["chosen_ids"]), x["tokens"]) for x in (others[0], others[1])]
    assert found == [(3, 3, [3, 0]), (45, 19, [19, 0])]
