"""Bad input: one clear line and a non-zero exit, before any model is loaded."""

import json
import shutil
from itertools import product
from types import SimpleNamespace

import families
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from conftest import ROOT, each
from workers.ppo_reward_model import write_reward_model

from algos import agent, dapo, distill, dpo, grpo, ppo, rm, sft
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

    def judge(self, path):
        write_reward_model(path)

    def judge_of_two(self, path):
        write_reward_model(path, num_labels=2)

    def judge_without_template(self, path):
        write_reward_model(path)
        (path / "chat_template.jinja").unlink()

    def twin(self, path):
        shutil.copytree(self["tiny"], path)

    def policy_without_template(self, path):
        shutil.copytree(self["tiny"], path)
        (path / "chat_template.jinja").unlink()

    def critic_of_two(self, path):
        auto = transformers.AutoModelForSequenceClassification
        auto.from_pretrained(self["tiny"], num_labels=2).save_pretrained(path)

    def critic_with_other_tokens(self, path):
        shutil.copytree(self["tiny"], path)
        text = (path / "tokenizer.json").read_text()
        assert '"a":' in text and '"b":' in text
        text = text.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
        (path / "tokenizer.json").write_text(text)


NEEDS = {agent: "--env {talk}:Talk", distill: "--teacher {tiny}"}
NEEDS |= dict.fromkeys((dpo, rm), "--train_files {pairs_parquet}")
LOSS, ESTIMATOR = "--policy_loss {variants_py}:", "--adv_estimator {variants_py}:"
OF_LOSS = "{variants_py}:%s must be a function of logp_nt, old_logp_nt, adv_nt, mask_nt; more"
OF_ESTIMATOR = "must be a function of score_n, group_n, length_n, parts; more needs a default"
JUDGED = "--reward_model {judge} --reward_fn --train_batch_size 65 --ppo_mini_batch_size 65"
CASES = [
    (grpo, "--model {wrapped} --train_files {pictures}", "Can't load image processor for"),
    (grpo, "--model {wrapped_with_states} --train_files {pictures}", "Can't load image processor for"),
    (ppo, "--model {wrapped} --train_files {pictures}", "(gemma3) takes images, which only grpo.py"),
    (dpo, "--model {wrapped} --train_files {pictures}", "takes images, which only grpo.py"),
    (sft, "--model {wrapped} --train_files {pictures} --truncation left", "takes images, which --text_key"),
    (grpo, "--model {phi}", "its output layer has a bias"),
    (grpo, "--model {gemma2}", "(gemma2) caps attention, sdpa cannot: --attn_implementation eager"),
    (grpo, "--model {gpt_oss}", "does not support an attention implementation through torch.nn.functional"),
    (sft, "--lora_rank 4 --lora_kind adalora --total_steps 9", "9 steps are too few to choose ranks in"),
    (grpo, "--train_files {short_parquet}", "data_source"),
    (grpo, "--max_prompt_length 5", "no prompt"),
    (grpo, "--reward_fn nowhere.py:f", "nowhere.py"),
    (grpo, "--reward_weights 1 2", "2 --reward_weights for 1"),
    (grpo, "--resume {empty}", "not a checkpoint"),
    (
        grpo,
        "--policy_loss sapo --clip_ratio_low 0.1",
        "--clip_ratio_low 0.1 has no effect with",
    ),
    (grpo, "--policy_loss sapo --clip_ratio_high 0.1", "--clip_ratio_high 0.1 has no effect with"),
    (grpo, "--adv_estimator gspo", "is none of grpo, dr_grpo, rloo, "),
    (grpo, "--policy_loss {here}/other.py:f", "no such file"),
    (grpo, LOSS + "f", "defines no 'f'"),
    (grpo, LOSS + "swapped", OF_LOSS % "swapped"),  # a user's, which takes something else
    (grpo, LOSS + "number", OF_LOSS % "number"),
    (grpo, LOSS + "one", "must return three tensors [N, T]"),
    (dapo, LOSS + "raises", ":raises raises RuntimeError: mat1 and mat2 shapes"),
    (grpo, ESTIMATOR + "short", OF_ESTIMATOR),
    (grpo, ESTIMATOR + "open", OF_ESTIMATOR),
    (ppo, "--critic_model {unread}", "{unread}"),
    (ppo, "--critic_model {judge}", "knows 100 tokens"),
    (ppo, "--critic_model {critic_of_two}", "{critic_of_two} gives 2 values, --value_quantiles is 1"),
    (ppo, "--critic_model {critic_of_two} --value_quantiles 8", "gives 2 values, --value_quantiles is 8"),
    (ppo, "--critic_model {critic_with_other_tokens}", "another vocabulary: 2 tokens have other numbers"),
    (
        ppo,
        "--reward_model {unread}",
        "error: {unread}: its tokenizer cannot be read: copy tokenizer.json and",
    ),
    (ppo, "--reward_model {judge_of_two}", "gives 2 numbers"),
    (ppo, "--reward_model {judge_without_template}", "no chat template"),
    (
        ppo,
        "--reward_model {judge} --reward_weights 1",
        "1 --reward_weights for 1 --reward_fn and 1",
    ),
    (ppo, "--reward_fn", "--reward_fn"),
    (ppo, "--reward_fn --val_files {val}", "--val_files without --reward_fn"),
    (ppo, JUDGED, "--train_batch_size 65 is more than the 64 prompts"),  # the only reward is no fault
    (ppo, JUDGED + " --reward_weights 2", "--train_batch_size 65 is more than the 64 prompts"),
    (ppo, "--lam_alpha 0.05 --max_response_length 20", "--lam_alpha 0.05: lambda is 0 up to 20 tokens"),
    (ppo, "--critic_lam 1.5", "--critic_lam 1.5 must be at least 0 and at most 1"),
    (ppo, "--lam_alpha 0", "--lam_alpha 0.0 must be above 0"),
    (ppo, "--kl_target 0", "--kl_target 0.0 must be above 0"),
    (ppo, "--critic_warmup 3 --total_steps 3", "--critic_warmup 3: the actor rests in all 3 steps"),
    (agent, "--env nowhere.py:Env", "nowhere.py"),
    (agent, "--env {talk}:Nobody", "Nobody"),
    (agent, "--env {envs}/calculator.py:TOOLS", "--env has tools, and the chat template shows none"),
    (agent, "--max_turns 0", "--max_turns"),
    (agent, "--max_observation_length 0", "--max_observation_length"),
    (agent, "--env_timeout_s 0", "--env_timeout_s 0.0 must be above 0"),
    (distill, "--teacher {unread}", "{unread}"),
    (distill, "--lam 1.5", "--lam 1.5"),
    (distill, "--lam 0.5 --kl sampled", "--kl full --group_size 1"),
    (distill, "--lam 0.5 --group_size 2", "--kl full --group_size 1"),
    (distill, "--group_size 1 --teacher_prompt {{solution}}", "{{solution}} needs --group_size above 1"),
    (distill, "--teacher_update_rate 0.5 --teacher {twin}", "--teacher_update_rate needs the --model"),
    (distill, "--teacher_update_rate 1 --lora_rank 4", "--teacher_update_rate needs the --model"),
    (sft, "--train_batch_size 65 --max_length 32", "--train_batch_size 65 is more than the 64 training rows"),
    (dpo, "--train_batch_size 5", "--train_batch_size 5 is more than the 4 training pairs"),
    (rm, "--train_batch_size 5", "--train_batch_size 5 is more than the 4 training pairs"),
    (dpo, "--train_batch_size 4 --val_files {equal_parquet}", "row 1: 'chosen' and 'rejected' are equal"),
    (rm, "--train_batch_size 4 --val_files {equal_parquet}", "{equal_parquet}: row 1: the chosen and"),
    (rm, "--model {policy_without_template}", "the tokenizer has no chat template"),
]


@pytest.mark.parametrize(("script", "words", "line"), CASES)
def test_a_line_before_a_model_is_loaded(script, words, line, refused, tiny, arithmetic, pictures, tmp_path):
    files = Files(tmp_path, tiny=tiny, pictures=pictures, val=arithmetic / "val.parquet")
    words = f"{NEEDS.get(script, '')} {words}".format_map(files).split()
    assert line.format_map(files) in refused(script, *words)


@each(grpo, agent)
@pytest.mark.parametrize("estimator", (*OF_SCRIPTS["adv_estimator"], *known("adv_estimator")))
def test_an_estimator_has_an_advantage_or_is_refused(script, estimator):
    """Enumerated: some scores from 0 to 1 give an advantage, or the sizes are refused."""
    for prompts, group_size in product((1, 2), (1, 2)):
        sizes = dict(adv_estimator=estimator, train_batch_size=prompts, group_size=group_size)
        group_n = torch.arange(prompts).repeat_interleave(group_size)
        length_n, learns = 1 + torch.arange(len(group_n)), False
        for scores in product((0.0, 1.0), repeat=len(group_n)):
            score_n, parts = torch.tensor(scores).double(), [(1.0, list(scores))]
            adv_n = script.advantages(SimpleNamespace(**sizes), score_n, group_n, length_n, parts)
            learns |= adv_n.abs().max().item() > 1e-3
        line = impossible(sizes)
        assert line is None if learns else line.startswith(f"--adv_estimator {estimator} needs --group_size ")


def test_ranks_that_share_a_row(refused, tiny, tmp_path, monkeypatch):
    """What --sp_size cannot do: a window, other attention, heads to divide."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    families.write("mistral", tmp_path / "mistral")
    for words, line in (
        (
            ("--model", tmp_path / "mistral"),
            "(mistral) has sliding_window, which --sp_size 3 does not support",
        ),
        (("--attn_implementation", "eager"), "--sp_size 3 needs --attn_implementation sdpa"),
        ((), "(llama) has 2 attention heads, which --sp_size 3 does not divide"),
    ):
        assert line in refused(dapo, "--sp_size", 3, *words)
    shutil.copytree(tiny, tmp_path / "more")  # a model that they can share
    config = json.loads((tmp_path / "more/config.json").read_text())
    config |= dict(num_attention_heads=4, head_dim=16)
    (tmp_path / "more/config.json").write_text(json.dumps(config))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(pytest.fail.Exception, match="went on to load a model"):
        refused(dapo, "--sp_size", 4, "--model", tmp_path / "more")
