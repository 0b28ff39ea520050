"""What models do besides attention and linear layers is in sampler and trainer alike, or it is refused."""

import pytest
from conftest import ROOT, run
from families import build

RIGHT = "qwen3_moe glm4_moe gpt_oss:eager granite cohere gemma2:eager".split()
# packed by other kernels, of which AMX has one for small layers: experts, biases, convolutions
RIGHT += "mixtral:sdpa:bfloat16 qwen2:sdpa:bfloat16 falcon_h1:sdpa:bfloat16".split()
# vLLM's CPU kernels took the convolutions for packed, had float32 states, took positions from other tokens
STATES = "qwen3_next:sdpa:bfloat16 mamba2:eager:bfloat16 lfm2:sdpa:bfloat16".split()
RIGHT += "mistral3 gemma3 gemma4 llama4".split()  # their language models alone


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{family[:attention[:dtype]]: "right" and the gap, or the line that the run stops with}."""
    out = tmp_path_factory.mktemp("families")
    done = run(ROOT / "tests/workers/families.py", out, *RIGHT, *STATES, "cohere2")
    return dict(line.split("|")[1:] for line in done.stdout.splitlines() if line.startswith("FAMILY"))


@pytest.mark.parametrize("family", RIGHT)
def test_sampler_and_trainer_agree(found, family):
    """Scales and caps of logits, windows, experts, weights in buffers, states; after a second sync, too.

    A sync brings all that a sleep of level 2 drops, whatever the family.
    """
    assert found[family].startswith("right ")


@pytest.mark.parametrize("family", STATES)
def test_states_in_bfloat16(found, family):
    said, gap = found[family].split()
    assert said == "right" and float(gap) < (0.03 if "lfm2" in family else 0.1)


def test_a_model_that_the_sampler_computes_otherwise_is_refused(found):
    """vLLM's cohere2 sees one token more through its window."""
    assert "step 1: sampler and trainer differ, " in found["cohere2"]
    assert build("cohere2").config.sliding_window
