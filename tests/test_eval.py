"""pass@k and maj@k against tables computed by hand and against enumeration, and eval.py as users call it."""

import json
import math
from itertools import combinations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, golden, run
from hypothesis import given
from hypothesis import strategies as st

from algos.eval import load_responses, maj_at_k, pass_at_k, summarize

REWARD = """
def first_word(data_source, solution_str, ground_truth, extra_info=None):
    word = solution_str.split()[0]  # IndexError for an empty response
    return {"score": 1.0 if word == ground_truth else -1.0, "acc": word == ground_truth, "pred": word}
"""


@given(st.integers(1, 40), st.data())
def test_pass_at_k_is_the_binomial_quotient(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert pass_at_k(n, c)[k - 1] == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)
    assert pass_at_k(10_000, 1)[4_999] == pytest.approx(1 / 2, abs=1e-12)  # C(10000, 5000) is no float


@pytest.mark.parametrize("case", golden("maj_at_k"))
def test_maj_at_k(case):
    """Where an answer is ".", there is no vote."""
    votes = [None if answer == "." else answer for answer in case["answers"]]
    values = [answer == case["right"] for answer in case["answers"]]
    assert maj_at_k(votes, values, case["k"]) == pytest.approx(case["expected"], abs=1e-12)


ANSWERS = st.tuples(st.sampled_from("abcd"), st.floats(0, 1)) | st.just((None, 0.0))


@given(st.lists(ANSWERS, min_size=1, max_size=8), st.data())
def test_maj_at_k_is_the_mean_over_subsets(responses, data):
    k, means = data.draw(st.integers(1, len(responses))), []
    for subset in combinations(responses, k):
        votes = [answer for answer, _ in subset if answer is not None]
        most = max(map(votes.count, votes), default=0)
        best = [value for answer, value in subset if answer is not None and votes.count(answer) == most]
        means.append(sum(best) / max(len(best), 1))  # tied answers have as many: the mean splits evenly
    assert maj_at_k(*zip(*responses, strict=True), k) == pytest.approx(sum(means) / len(means), abs=1e-9)


@pytest.mark.parametrize("call", [(pass_at_k, 4, 5), (pass_at_k, 4, -1), (maj_at_k, "ab", [1], 1)])
def test_impossible_numbers_are_refused(call):
    with pytest.raises(ValueError):
        call[0](*call[1:])


def summary(values, n_samples=1, name="a"):
    """Mean, standard error and both ends of the interval."""
    metrics = summarize({name: np.array(values, dtype=float)}, n_samples)
    assert list(metrics) == [name + end for end in ("", "_stderr", "_low", "_high")]
    return [*metrics.values()]


@pytest.mark.parametrize("case", golden("intervals"), ids=lambda case: case["why"])
def test_standard_errors_and_intervals(case):
    found = summary(case["values"], case["n_samples"], case["metric"])
    assert found == pytest.approx(case["expected"], abs=1e-4)


@pytest.mark.parametrize(("n", "p"), [(30, 0.03), (30, 0.5), (30, 0.97), (512, 0.03), (10, 0.1)])
def test_an_interval_covers_what_it_says(n, p):
    covered = 0.0
    for k in range(n + 1):
        _, _, low, high = summary([1] * k + [0] * (n - k))
        covered += math.comb(n, k) * p**k * (1 - p) ** (n - k) * (low <= p <= high)
    assert covered > 0.92  # the bootstrap's: 0.59 of 30 questions with 3 %


@pytest.mark.parametrize(
    ("n", "samples", "easy", "hard", "better", "covers"),  # a prompt's chance: Beta(easy, hard)
    [
        (30, 1, 2, 2, 0, 0.94),
        (30, 16, 2, 2, 0, 0.94),
        (30, 32, 0.2, 4, 0, 0.94),
        (200, 4, 1, 4, 0, 0.94),
        (30, 64, 2, 2, 0.05, 0.94),  # in each prompt
        (30, 1024, 2, 2, 0.05, 0.94),
        (200, 4, 0.05, 4, -1, 0.91),  # few prompts have what the other file never has: answers that are cut
    ],
)
def test_an_interval_of_a_difference_covers_and_is_no_wider(n, samples, easy, hard, better, covers):
    rng, held, widths = np.random.default_rng(1), 0, []
    for _ in range(800):
        p = rng.beta(easy, hard, n) * (1 - abs(better) * (better > 0))
        other = p * 0 if better < 0 else p + better
        differences = (rng.binomial(samples, other) - rng.binomial(samples, p)) / samples
        _, _, low, high = summary(differences, samples, "response_length/clip_ratio_diff")
        held += low <= (better if better >= 0 else -easy / (easy + hard)) <= high
        widths.append((high - low) / (4 * differences.std() / math.sqrt(n) + 1e-9))
    assert held / 800 > covers and np.median(widths) < 1.5


def write(path, *rows, **columns):
    """Rows of (data_source, ground truth, responses)."""
    records = []
    for i, (source, truth, responses) in enumerate(rows):
        row = dict(data_source=source, prompt=[dict(role="user", content="?")], extra_info=dict(index=i))
        row |= dict(reward_model=dict(style="rule", ground_truth=truth), responses=responses)
        records.append(row)
    table = pa.Table.from_pylist(records)
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    pq.write_table(table, path)
    return path


def evaluate(tmp_path, *files, **options):
    (tmp_path / "reward.py").write_text(REWARD)
    command = ["--reward_fn", f"{tmp_path}/reward.py:first_word", "--output", tmp_path / "out"]
    done = run(ROOT / "algos/eval.py", "--data", *files, *command, **options)
    return done, json.loads((tmp_path / "out/results.json").read_text())


def test_equal_answers_are_one_vote(tmp_path):
    """0.5, 1/2 and \\frac12 outvote 7 and 7, and responses without an answer outvote nobody."""
    said = ["\\boxed{0.5}", "\\boxed{1/2}", "\\boxed{\\frac12}", "\\boxed{7}", "\\boxed{7}"]
    one = write(tmp_path / "one.parquet", ("lighteval/MATH", "\\frac{1}{2}", said))
    said = ["?", "", "I do not know", " ", "\\boxed{2}"]
    none = write(tmp_path / "none.parquet", ("lighteval/MATH", "2", said))
    never = write(tmp_path / "$\\frac$.parquet", ("lighteval/MATH", "2", ["?"] * 5))  # names are no formulas
    run(ROOT / "algos/eval.py", "--data", one, none, never, "--output", tmp_path / "out")
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert [results[str(path)]["all"]["maj@5"] for path in (one, none, never)] == [1, 1, 0]
    entry = results[str(never)]["all"]
    assert (entry["pass@5"], entry["pass@5_low"]) == (0, 0) and entry["pass@5_high"] > 0.7  # of one prompt


def test_end_to_end(tmp_path):
    before = write(
        tmp_path / "before.parquet",
        ("one", "4", ["4", "4 x", "5", ""]),  # "" is an error of the reward
        ("one", "7", ["1", "2", "3", "7"]),
        ("two", "9", ["9", "9", "9", "9"]),
        ("two", "9", [""] * 4),
        response_tokens=[[2, 4, 2, 2], [2, 2, 2, 8], [2, 2, 2, 2], [0] * 4],
        finish_reasons=[["stop"] * 4, ["stop"] * 3 + ["length"], ["stop"] * 4, ["prompt_too_long"] * 4],
    )
    other = write(tmp_path / "other.parquet", ("one", "4", ["4", "4"]))
    done, results = evaluate(tmp_path, before, other)
    assert "pass@4" in done.stdout and "maj@2" in done.stdout and "pass@3" not in done.stdout
    assert list(results) == [str(before), str(other)]
    one, two, total = (results[str(before)][name] for name in ("one", "two", "all"))
    expected = {
        "prompts": 2,
        "mean@4": (1 / 2 + 1 / 4) / 2,
        "pass@2": (5 / 6 + 1 / 2) / 2,
        "pass@3": (1 + 3 / 4) / 2,
        "pass@4": 1,
        # 4 4 5 and no vote: 3 of 6 pairs are right, 2 half; 7 of four different answers: half of 3 of 6 pairs
        "maj@2": ((3 + 2 / 2) / 6 + 3 / 2 / 6) / 2,
        "maj@4": (1 + 1 / 4) / 2,
        "reward_errors": 1 / 8,
        "response_length/mean": 24 / 8,
        "response_length/clip_ratio": 1 / 8,
        "prompts_too_long": 0,
    }
    assert {name: one[name] for name in expected} == pytest.approx(expected)
    assert two["mean@4"] == 0.5 and two["prompts_too_long"] == 0.5 and two["response_length/mean"] == 1
    assert total["mean@4"] == pytest.approx((1 / 2 + 1 / 4 + 1 + 0) / 4) and total["reward_errors"] == 5 / 16
    other = results[str(other)]["all"]
    assert other["pass@2"] == 1 and "pass@2_diff" not in other  # its prompts are others
    scored = pq.read_table(tmp_path / "out/scored_A.parquet")
    assert scored.drop_columns(["scores", "results"]).equals(pq.read_table(before))
    assert scored["scores"].to_pylist()[0] == [1, 1, -1, 0]
    fourth = json.loads(scored["results"].to_pylist()[0][3])
    assert fourth["score"] == 0 and fourth["failure"].startswith("IndexError")
    assert (tmp_path / "out/pass_at_k.png").read_bytes().startswith(b"\x89PNG")


def test_differences_are_paired(tmp_path, monkeypatch):
    """B has one right answer more to each prompt. The prompts differ by far more, which pairs do not see."""
    rights = [0, 0, 1, 2, 3, 3]
    a, b, c = (
        write(tmp_path / name, *((s, "4", ["4"] * right + ["5"] * (n - right)) for s, right in rows))
        for name, n, rows in (
            ("a.parquet", 4, [("one", right) for right in rights]),
            ("b.parquet", 4, [("one", right + 1) for right in rights]),
            ("c.parquet", 2, [("one", right % 2) for right in rights]),
        )
    )
    monkeypatch.setenv("COLUMNS", "100")
    done, results = evaluate(tmp_path, a, b, c)
    entry = results[str(b)]["all"]
    assert entry["mean@4_diff"] == 0.25 and entry["mean@4_diff_high"] - entry["mean@4_diff_low"] < 0.6
    assert entry["mean@4_low"] < 0.45 and entry["mean@4_high"] > 0.75
    pairs = (1 / 2 + 1 / 2 + 1 / 3 + 1 / 6 + 0 + 0) / 6  # pass@2 with 0 to 4 right of 4: 0 1/2 5/6 1 1
    assert entry["pass@2_diff"] == pytest.approx(pairs)
    assert entry["pass@2_diff_low"] < pairs < entry["pass@2_diff_high"]
    third, first = results[str(c)]["all"], results[str(a)]["all"]
    assert "mean@2" in third and "mean@2_diff" not in third
    assert third["pass@1_diff"] == pytest.approx(third["pass@1"] - first["pass@1"])
    assert not any(name.endswith("_diff") for name in first)
    assert "+0.250 [" in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines()) and "…" not in done.stdout


@pytest.mark.parametrize("case", golden("bad_evaluations"), ids=lambda case: case["message"])
def test_bad_input_gives_one_line(tmp_path, case):
    two = "nobody/knows", "1", ["1", "2"]
    data = write(tmp_path / "data.parquet", two)
    write(tmp_path / "scored.parquet", two, scores=[[0, 1]])
    write(tmp_path / "uneven.parquet", two, ("nobody/knows", "1", ["1"]))
    write(tmp_path / "empty.parquet", ("nobody/knows", "1", []))
    (tmp_path / "reward.py").write_text(REWARD)
    arguments = [str(argument).format(here=tmp_path) for argument in case["arguments"]]
    command = [*(() if "--data" in arguments else ("--data", data)), "--output", tmp_path / "out", *arguments]
    done = run(ROOT / "algos/eval.py", *command, check=False)
    assert done.returncode == 1 and not (tmp_path / "out/results.json").exists()
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert case["message"] in done.stderr


def test_a_reward_is_shown_what_was_asked(tmp_path):
    """Whatever generate.py's --prompt_key was, which its file says, or by the names of prompts."""
    row = dict(question="1+2=", riddle="2+2=", solution="3", responses=["3"])
    table = pa.Table.from_pylist([row])
    for key, expected in (("riddle", "2+2="), (None, "1+2=")):
        if key:
            table = table.replace_schema_metadata(dict(prompt_key=key))
        pq.write_table(table, tmp_path / "g.parquet")
        [found] = load_responses(str(tmp_path / "g.parquet"), "responses")
        assert found["prompt"] == [dict(role="user", content=expected)] and found["ground_truth"] == "3"
        table = table.replace_schema_metadata(None)


def test_what_is_printed(tmp_path):
    """A sample with its prompt; mean@1, pass@1 and maj@1 are one row where they are one number."""
    one = tmp_path / "one.parquet"
    row = dict(data_source="one", prompt=[dict(role="user", content="6-2=")], responses=["4"])
    row |= dict(reward_model=dict(style="rule", ground_truth="4"), extra_info=dict(index=0))
    pq.write_table(pa.Table.from_pylist([row]), one)
    done, _ = evaluate(tmp_path, one)
    assert "one: 6-2= [4]\n" in done.stdout
    assert "mean@1 = pass@1 = maj@1" in done.stdout and done.stdout.count("pass@1") == 1
