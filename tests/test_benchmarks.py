"""The benchmarks still run with the trainers as they are: the smallest sizes of two of them."""

import json

from conftest import ROOT, run


def test_throughput_without_vllm(tiny, tmp_path):
    """Among others that the stand-in for vLLM has what the trainers ask of it: the run checks its sync."""
    sizes = "--prompts 2 --group_size 2 --prompt_length 16 --response_length 8 --rounds 1 --steps 1".split()
    script, out = ROOT / "benchmarks/throughput.py", tmp_path / "x.json"
    run(script, "--model", tiny, "--train_only", *sizes, "--output", out)
    [result] = json.loads(out.read_text())["rounds"]
    assert set(result["limits_s"]) == {"update_actor"} and result["overhead"] > 0
    assert set(result["parts_s"]) == {"reward", "adv", "update_actor", "other"}


def test_memory(tmp_path):
    """In the small, chunks take less memory than all logits: 2 * 1024 of 2048 positions, and no graph."""
    sizes = "--vocabularies", 16384, "--tokens", 2048
    run(ROOT / "benchmarks/memory.py", *sizes, "--output", tmp_path / "x.json")
    [peaks] = json.loads((tmp_path / "x.json").read_text())["peaks_mb"]
    assert peaks["chunked"] < peaks["whole"] / 2
