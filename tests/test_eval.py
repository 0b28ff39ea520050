"""pass@k and maj@k against tables computed by hand and against enumeration, and eval.py as users call it."""

import json
import math
from itertools import combinations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, run
from hypothesis import given
from hypothesis import strategies as st

from algos.eval import bootstrap_error, maj_at_k, pass_at_k

REWARD = """
def first_word(data_source, solution_str, ground_truth, extra_info=None):
    word = solution_str.split()[0]  # IndexError for an empty response
    return {"score": 1.0 if word == ground_truth else -1.0, "acc": word == ground_truth, "pred": word}
"""


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0),
        (1, 1, 1, 1),
        (4, 1, 1, 1 / 4),
        (4, 2, 2, 5 / 6),  # 1 - C(2,2) / C(4,2)
        (4, 1, 2, 1 / 2),  # 1 - C(3,2) / C(4,2)
        (5, 2, 3, 9 / 10),  # 1 - C(3,3) / C(5,3)
        (5, 3, 3, 1),  # only two are wrong
        (4, 0, 4, 0),
        (10_000, 1, 5_000, 1 / 2),  # C(10000, 5000) is no float
    ],
)
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 40), st.data())
def test_pass_at_k_is_the_binomial_quotient(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "right", "k", "expected"),
    [
        ("aab", "a", 1, 2 / 3),
        ("aab", "a", 2, 2 / 3),  # aa 1, ab 1/2, ab 1/2
        ("aab", "a", 3, 1),
        ("aab", "b", 2, 1 / 3),
        ("abc", "a", 2, 1 / 3),  # ab 1/2, ac 1/2, bc 0
        ("aabb", "a", 3, 1 / 2),  # aab aab abb abb
        ("aabb", "a", 4, 1 / 2),  # a tie
        ("aabc", "a", 3, 2 / 3),  # aab 1, aac 1, abc 1/3, abc 1/3
        ("abcd", "x", 2, 0),
        ("a" * 600 + "b" * 400, "a", 1000, 1),
        ("a" * 500 + "b" * 500, "a", 500, 1 / 2),  # by symmetry; C(1000, 500) subsets
    ],
)
def test_maj_at_k(answers, right, k, expected):
    assert maj_at_k(list(answers), [a == right for a in answers], k) == pytest.approx(expected, abs=1e-12)


def test_maj_at_k_takes_the_mean_of_an_answer():
    """One answer, right in one wording and wrong in the other."""
    assert maj_at_k(["a", "a", "b"], [1, 0, 0], 3) == pytest.approx(1 / 2)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 1)), min_size=1, max_size=8), st.data())
def test_maj_at_k_is_the_mean_over_subsets(responses, data):
    k, means = data.draw(st.integers(1, len(responses))), []
    for subset in combinations(responses, k):
        votes = [answer for answer, _ in subset]
        most = max(map(votes.count, votes))
        best = [value for answer, value in subset if votes.count(answer) == most]
        means.append(sum(best) / len(best))  # tied answers have as many responses: the mean splits evenly
    assert maj_at_k(*zip(*responses, strict=True), k) == pytest.approx(sum(means) / len(means), abs=1e-9)


@pytest.mark.parametrize("call", [(pass_at_k, 4, 5, 1), (pass_at_k, 4, 1, 5), (maj_at_k, "ab", [1], 1)])
def test_impossible_numbers_are_refused(call):
    with pytest.raises(ValueError):
        call[0](*call[1:])


def test_bootstrap_error():
    values = [0.0, 1.0] * 50
    assert bootstrap_error(values, 1) == bootstrap_error(values, 1) != bootstrap_error(values, 2)
    assert bootstrap_error(values, 1) == pytest.approx(0.5 / math.sqrt(100), rel=0.15)


def write(path, *rows, **columns):
    """Rows of (data_source, ground truth, responses)."""
    records = [
        dict(
            data_source=source,
            prompt=[dict(role="user", content="?")],
            reward_model=dict(style="rule", ground_truth=truth),
            extra_info=dict(index=i),
            responses=responses,
        )
        for i, (source, truth, responses) in enumerate(rows)
    ]
    table = pa.Table.from_pylist(records)
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    pq.write_table(table, path)
    return path


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
    after = write(tmp_path / "after.parquet", ("one", "4", ["4", "4"]))
    (tmp_path / "reward.py").write_text(REWARD)
    command = ["--reward_fn", f"{tmp_path}/reward.py:first_word", "--output", tmp_path / "out"]
    done = run(ROOT / "algos/eval.py", "--data", before, after, *command)
    assert "pass@4" in done.stdout and "maj@2" in done.stdout
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert list(results) == [str(before), str(after)]
    one, two, total = (results[str(before)][name] for name in ("one", "two", "all"))
    expected = {
        "prompts": 2,
        "mean@4": (1 / 2 + 1 / 4) / 2,
        "pass@1": (1 / 2 + 1 / 4) / 2,
        "pass@2": (5 / 6 + 1 / 2) / 2,
        "pass@4": 1,
        # 4 4 5 None: 1 of 6 pairs is right, 4 of 6 half; 7 of four different answers: half of 3 of 6 pairs
        "maj@2": ((1 + 4 / 2) / 6 + 3 / 2 / 6) / 2,
        "maj@4": (1 + 1 / 4) / 2,
        "reward_errors": 1,
        "response_length/mean": 24 / 8,
        "response_length/clip_ratio": 1 / 8,
        "prompts_too_long": 0,
    }
    assert {name: one[name] for name in expected} == pytest.approx(expected)
    assert two["mean@4"] == 0.5 and two["prompts_too_long"] == 1 and two["response_length/mean"] == 2
    assert total["mean@4"] == pytest.approx((1 / 2 + 1 / 4 + 1 + 0) / 4) and total["reward_errors"] == 5
    assert total["mean@4_stderr"] > 0 and results[str(after)]["all"]["pass@2"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", 3], "--k 3"),
        (["--response_key", "answers"], "answers"),
        (["--reward_fn", "nowhere.py:f"], "nowhere.py"),
        ([], "nobody/knows"),
    ],
)
def test_bad_input_gives_one_line(tmp_path, arguments, message):
    data = write(tmp_path / "data.parquet", ("nobody/knows", "1", ["1", "2"]))
    (tmp_path / "reward.py").write_text(REWARD)
    known = ["--reward_fn", f"{tmp_path}/reward.py:first_word"] if "--k" in arguments else []
    done = run(
        ROOT / "algos/eval.py", "--data", data, "--output", tmp_path / "out", *known, *arguments, check=False
    )
    assert done.returncode == 1 and not (tmp_path / "out/results.json").exists()
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr
