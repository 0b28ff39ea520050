"""Many families of models, each layout: the log-probs are the model's own, or one line says why not."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
from conftest import ROOT, run
from transformers import AutoConfig

from system.families import auto_class, check_positions
from tests import families

WORKER = ROOT / "tests/workers/sft_families.py"
BIAS = "its output layer has a bias"
NO_SDPA = "does not support an attention implementation through .*scaled_dot_product_attention"
SOFT_CAP = "caps attention, sdpa cannot: --attn_implementation eager$"
# sdpa padded, sdpa packed, and where sdpa is refused eager packed: in one row only where that is right
ONE_RANK = dict.fromkeys(families.FAMILIES, ("equal$", "equal, one row$"))
ONE_RANK["llama4"] = "equal$", "equal$"  # chunks
ONE_RANK |= dict.fromkeys(("mamba", "falcon_mamba", "mamba2", "gpt_oss"), (NO_SDPA, NO_SDPA, "equal$"))
ONE_RANK |= dict(phi=(BIAS,) * 3, gemma2=(SOFT_CAP, SOFT_CAP, "equal$"))
TWO_RANKS = dict.fromkeys("llama granite cohere minicpm3 qwen3_moe deepseek_v3".split(), "equal, one row$")
TWO_RANKS |= dict(mistral="has sliding_window, which --sp_size 2 does not implement$")
TWO_RANKS |= dict(gemma2=SOFT_CAP)
TWO_RANKS |= dict(lfm2="has a state, which --sp_size 2 does not implement$")


def check(names, ranks, directory):
    """{family: {layout: what check_model and check_layout say}}"""
    run(WORKER, directory, directory / "found.json", *names, ranks=ranks)
    return json.loads((directory / "found.json").read_text())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return check(ONE_RANK, 0, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return check(TWO_RANKS, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("family", ONE_RANK)
def test_padded_and_packed(one_rank, family):
    for (layout, said), expected in zip(one_rank[family].items(), ONE_RANK[family], strict=True):
        assert re.search(expected, said), (layout, said)


@pytest.mark.parametrize("family", TWO_RANKS)
def test_over_two_ranks(two_ranks, family):
    assert len(two_ranks[family]) == 2
    for kind, said in two_ranks[family].items():
        assert re.search(TWO_RANKS[family], said), (kind, said)


def test_a_run_ends_before_its_first_step(arithmetic, tmp_path):
    families.write("gemma2", tmp_path / "model")
    files = "--model", tmp_path / "model", "--train_files", arithmetic / "train.parquet"
    done = run(ROOT / "algos/sft.py", *files, "--output_dir", tmp_path / "run", check=False)
    assert done.returncode == 1 and not (tmp_path / "run/args.json").exists()
    [line] = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith(f"error: {tmp_path}/model (gemma2) ") and re.search(SOFT_CAP, line)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("gpt2", "n_positions"), ("gpt_bigcode", "n_positions"), ("gpt_neo", "max_position_embeddings")]
    + [("opt", "max_position_embeddings"), ("biogpt", "max_position_embeddings")],
)
def test_rows_beyond_a_table_of_positions(kind, name):
    """A run would end at its first long row, whenever that comes; rotary positions have no table."""
    limits = dict.fromkeys((name, "max_position_embeddings"), 128)
    sizes = dict(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_layers=2, attention_types=[[["global"], 2]]) if kind == "gpt_neo" else {}
    for family, limit, refused in ((kind, 128, False), (kind, 129, True), ("llama", 129, False)):
        config = AutoConfig.for_model(family, **sizes, **limits)
        with torch.device("meta"):
            lm = auto_class(config).from_config(config, attn_implementation="eager")  # GPT-Neo has no other
        with pytest.raises(SystemExit, match="table of 128 positions") if refused else nullcontext():
            check_positions(lm, limit)
