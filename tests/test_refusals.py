"""Bad input: one clear line and a non-zero exit, before any model is loaded."""

import json
import shutil
from importlib import import_module
from itertools import product
from types import SimpleNamespace

import families
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from conftest import ROOT, each, golden
from workers.ppo_reward_model import write_reward_model

from algos import agent, dapo, grpo
from algos.variants import OF_SCRIPTS, known
from data_prep.lib.schema import write_parquet
from system.arguments import impossible

VARIANTS = """
def one(logp_nt, old_logp_nt, adv_nt, mask_nt): return logp_nt
def raises(logp_nt, old_logp_nt, adv_nt, mask_nt): return logp_nt @ adv_nt
def swapped(old_logp_nt, logp_nt, adv_nt, mask_nt): pass
def short(score_n, group_n): pass
def open(score_n, group_n, length_n, parts, more): pass
number = 3
"""


def pair(question, *replies):
    talks = [[dict(role="assistant", content=reply)] for reply in replies]
    return dict(zip(("prompt", "chosen", "rejected"), ([dict(role="user", content=question)], *talks)))


class Files(dict):
    """Files and models by name, made when they are asked for."""

    def __init__(self, directory, **given):
        super().__init__(given, here=directory, talk=f"{ROOT}/tests/talk_env.py", envs=ROOT / "envs")

    def __missing__(self, name):
        path = self[name] = self["here"] / name.replace("_parquet", ".parquet").replace("_py", ".py")
        if name in families.FAMILIES:
            families.write(name, path)
        elif hasattr(self, name):
            getattr(self, name)(path)
        return path

    def empty(self, path):
        path.mkdir()

    def unread(self, path):
        path.mkdir()
        (path / "config.json").write_text("{}")

    def wrapped(self, path):
        transformers.Gemma3Config().save_pretrained(path)

    def wrapped_with_states(self, path):
        transformers.Qwen3_5Config().save_pretrained(path)

    def variants_py(self, path):
        path.write_text(VARIANTS)

    def short_parquet(self, path):
        pq.write_table(pa.table({"prompt": [[{"role": "user", "content": "x"}]]}), path)

    def pairs_parquet(self, path):
        write_parquet([pair("1+1=", "2", "3")] * 4, path)

    def equal_parquet(self, path):
        write_parquet([pair("1+1=", "2", "3"), pair("1+2=", "3", "3")], path)

    def unfit_parquet(self, path):
        case = golden("unfit_truths")[0]
        model = dict(style="rule", ground_truth=case["unfit"])
        about = dict(data_source=case["data_source"], reward_model=model, extra_info=dict(index=0))
        pq.write_table(pa.Table.from_pylist([about | dict(prompt=pair("?")["prompt"])]), path)

    def judge(self, path):
        write_reward_model(path)

    def judge_of_two(self, path):
        write_reward_model(path, num_labels=2)

    def judge_without_template(self, path):
        self.judge(path)
        (path / "chat_template.jinja").unlink()

    def twin(self, path):
        shutil.copytree(self["tiny"], path)

    def policy_without_template(self, path):
        self.twin(path)
        (path / "chat_template.jinja").unlink()

    def critic_of_two(self, path):
        auto = transformers.AutoModelForSequenceClassification
        auto.from_pretrained(self["tiny"], num_labels=2).save_pretrained(path)

    def critic_with_other_tokens(self, path):
        self.twin(path)
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab.update(a=vocab["b"], b=vocab["a"])
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))


# without which a script stops before what a case is about
NEEDS = dict(agent="--env {talk}:Talk", distill="--teacher {tiny}")
NEEDS |= dict.fromkeys(("dpo", "rm"), "--train_files {pairs_parquet}")


@pytest.mark.parametrize("case", golden("refusals"), ids=lambda case: f"{case['script']} {case['flags']}")
def test_a_line_before_a_model_is_loaded(case, refused, tiny, arithmetic, pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(case.get("world", 1)))
    files = Files(tmp_path, tiny=tiny, pictures=pictures, val=arithmetic / "val.parquet")
    name = case["script"]
    script = import_module(f"algos.{name}")
    needed = NEEDS.get(name, "")
    if needed.partition(" ")[0] in case["flags"].split():
        needed = ""
    words = f"{needed} {case['flags']}".format_map(files).split()
    assert case["line"].format_map(files) in refused(script, *words)


@each(grpo, agent)
@pytest.mark.parametrize("estimator", (*OF_SCRIPTS["adv_estimator"], *known("adv_estimator")))
def test_an_estimator_has_an_advantage_or_is_refused(script, estimator):
    """Enumerated: some scores from 0 to 1 give an advantage and equal ones none, or sizes are refused."""
    for prompts, group_size in product((1, 2), (1, 2)):
        sizes = dict(adv_estimator=estimator, train_batch_size=prompts, group_size=group_size)
        group_n = torch.arange(prompts).repeat_interleave(group_size)
        length_n, learns = 1 + torch.arange(len(group_n)), False
        for scores in product((0.0, 1.0), repeat=len(group_n)):
            score_n, parts = torch.tensor(scores).double(), [(1.0, list(scores))]
            adv_n = script.advantages(SimpleNamespace(**sizes), score_n, group_n, length_n, parts)
            learns |= adv_n.abs().max().item() > 1e-3
        learns &= adv_n.abs().max().item() == 0  # all scores are 1: without a baseline that is learned from
        line = impossible(sizes)
        assert line is None if learns else line.startswith(f"--adv_estimator {estimator} needs --group_size ")


def test_ranks_may_share_a_row(refused, tiny, tmp_path, monkeypatch):
    """If they divide the heads of the model; the table has what is refused."""
    shutil.copytree(tiny, tmp_path / "more")
    config = json.loads((tmp_path / "more/config.json").read_text())
    config |= dict(num_attention_heads=4, head_dim=16)
    (tmp_path / "more/config.json").write_text(json.dumps(config))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(pytest.fail.Exception, match="went on to load a model"):
        refused(dapo, "--sp_size", 4, "--model", tmp_path / "more")
