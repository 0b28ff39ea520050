"""What is trained of a conversation: tables by hand, and one property under every template.

The property: what a sampler is given as a prompt is a prefix of what is trained; what it would write follows.
benchmarks/chat_templates.py makes the table of docs/reference/chat-templates.md from all templates of TRL.
"""

import itertools
import json
import random
import re
import shutil

import pytest
from conftest import ROOT, golden, make_args
from conversations import (
    CALCULATE,
    SHAPES,
    TOOL_TEMPLATES,
    TOOLS,
    ends_of,
    make_tokenizer,
    messages_of,
    of_turns,
    tool_tokenizer,
)
from test_columns import says, tokenizer_with, user
from transformers import AutoTokenizer

from algos import sft
from benchmarks import chat_templates
from data_prep import rejection
from data_prep.lib import templates, turns
from data_prep.lib.images import encode_prompt
from data_prep.lib.schema import write_parquet
from data_prep.lib.turns import encode_messages
from envs.messages import observation
from system.thoughts import after_thought

TEMPLATES = ROOT / "tests/fixtures/chat_templates"
PUBLISHED = [case["template"] for case in golden("rows_of_shapes")]


def tokenizer_of(template):
    """Of the name of a published template, or the text of another one."""
    if template.isidentifier():
        return make_tokenizer(template, (TEMPLATES / f"{template}.jinja").read_text())
    return tokenizer_with(template)


# ---- the property


def conversations():
    """Of all roles in any order, some with an assistant that begins or speaks twice."""
    draw = random.Random(0)
    for size in [*range(1, 9)] * 6:
        roles = draw.choices(("user", "assistant", "tool", "system"), (3, 4, 1, 1), k=size)

        def words(role):
            return ("1+2=", "3", "a\n b", *[""] * (role != "assistant"))  # no turn is empty

        yield [dict(role=role, content=draw.choice(words(role))) for role in roles]
    yield [user("12"), says("12")] * 5


def sampled_turns(messages, tokenizer):
    """Prompt and text of each turn, by two renderings of each: what a sampler reads and writes."""

    def render(some, **how):
        return tokenizer.apply_chat_template(some, tokenize=False, **how)

    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:i], add_generation_prompt=True)
        upto = render(messages[: i + 1])
        text = upto.removeprefix(prompt)
        if text == upto or message["content"].strip() not in text:
            text = message["content"] + re.search(r"(<\|eos\|>\s*)?$", upto)[0]
        yield prompt, re.sub(r"<\|eos\|>\s*$", "", text) + "<|eos|>"


@pytest.mark.parametrize("case", golden("turn_templates"), ids=lambda case: case["name"])
def test_what_a_sampler_is_given_is_a_prefix_of_what_is_trained(case):
    """Forward: a template that writes message after message, and then the same for all; others know more."""
    tokenizer = tokenizer_with(case["template"])
    good = 0
    for messages in conversations():
        try:
            rows = chat_templates.encode(messages, None, tokenizer)
        except ValueError as error:
            first = messages[0]["role"] == "assistant" and "nobody has spoken" in str(error)
            assert first or not case["forward"]
            continue
        good += 1
        expected = list(sampled_turns(messages, tokenizer))
        assert sum(rows, []) == expected, messages
        wholes = [prompt + text for prompt, text in expected]  # no row could be part of the next
        apart = [not later.startswith(whole) for whole, (later, _) in zip(wholes, expected[1:])]
        assert len(rows) == (1 + sum(apart) if expected else 0)
    assert good > (30 if case["forward"] else 1)


@pytest.mark.parametrize("case", golden("rows_of_shapes"), ids=lambda case: case["template"])
def test_rows_of_each_shape_and_their_marks(case):
    """Any exception besides a refusal ends this test; -: refused."""
    found = chat_templates.try_template(case["template"], TEMPLATES)
    assert {shape: str(row.get("rows", "-")) for shape, row in found.items()} == case["rows"]
    for row in found.values():
        assert not row.get("wrong") and "leaves out" in row.get("refused", "leaves out")
    assert sum(row.get("compared", 0) for row in found.values()) > 8


def rollout(prompt_ids, turns, tokenizer, tools):
    """-> ids of a rollout whose turns have these texts, each but the last with the messages that answer it;
    which were sampled."""
    ids = [*prompt_ids]
    sampled = [False] * len(prompt_ids)
    for text, answers in turns:
        turn = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
        follow = observation(tokenizer, answers, tools, turn[-1]) if answers else []
        ids += turn + follow
        sampled += [True] * len(turn) + [False] * len(follow)
    return ids, sampled


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
@pytest.mark.parametrize("case", golden("tool_turns"), ids=lambda case: case["said"])
@pytest.mark.parametrize("system", ([], [dict(role="system", content="Be exact.")]))
def test_sft_trains_on_the_tokens_of_a_rollout(name, case, system):
    tokenizer = tool_tokenizer(name)
    tools = CALCULATE if TOOL_TEMPLATES[name]["shows_tools"] else None
    turns, before = case["turns"], [*system, user("What is 37*85?")]
    if name == "qwen3":
        turns = [(f"<think>\nHm.\n</think>\n\n{text}", answers) for text, answers in turns]

    def given(messages):
        return encode_prompt(dict(prompt=messages), tokenizer, tools)["prompt_ids"]

    expected = [rollout(given(before), turns, tokenizer, tools)]
    assert ("calculate" in tokenizer.decode(expected[0][0])) == bool(tools)
    if (name, case["said"]) == ("qwen3", "a user answers"):  # the template then forgets the thought
        later = given(before + of_turns(turns[:1]))
        assert "Hm." not in tokenizer.decode(later)
        expected = [rollout(given(before), [(turns[0][0], [])], tokenizer, tools)]
        expected += [rollout(later, turns[1:], tokenizer, tools)]
    assert encode_messages(before + of_turns(turns), tokenizer, tools) == expected


@pytest.mark.parametrize("shape", ("one turn", "reasoning"))
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_sampler_wrote_is_trained_as_it_was(name, shape):
    """Decoded, and read again as rejection.py writes it, it is the same tokens; some marks are special."""
    tokenizer = tokenizer_of(name)
    [*prompt, reply], _ = messages_of(shape, tokenizer)
    if shape == "reasoning" and name in ("qwen2_5", "phi3"):  # which have no place for it, and may write it
        reply = says("<think>\nIt is so.\n</think>\n\nFirst.")
    [(ids, trained)] = encode_messages([*prompt, reply], tokenizer)
    begin = trained.index(True)
    end = next(i for i in range(begin, len(ids)) if tokenizer.decode(ids[i]) in ends_of(name)[1:])
    text = tokenizer.decode(ids[begin:end])
    assert "First." in text and ("It is so." in text) == (shape == "reasoning")
    [(again, _)] = encode_messages([*prompt, says(rejection.whole_thought(text))], tokenizer)
    assert again[: end + 1] == ids[: end + 1]


# ---- by hand


def marked(ids, trained, tokenizer):
    """A row as the table has it; a token is trained as a whole."""
    texts = []
    for on, run in itertools.groupby(range(len(ids)), key=trained.__getitem__):
        text = tokenizer.decode([ids[i] for i in run])
        texts.append(f"⟦{text}⟧" if on else text)
    return "".join(texts)


@pytest.mark.parametrize("case", golden("trained"))
def test_by_hand(case):
    """Rows of a template and a conversation; what is between ⟦ and ⟧ is trained, and ends with a stop."""
    tokenizer = tokenizer_of(case["template"])
    messages, tools = case.get("messages"), None
    if "shape" in case:
        messages, tools = messages_of(case["shape"], tokenizer)
    if "refused" in case:
        with pytest.raises(ValueError, match=re.escape(case["refused"])):
            encode_messages(messages, tokenizer, tools)
        return
    rows = encode_messages(messages, tokenizer, tools)
    for (ids, trained), expected in zip(rows, case["rows"], strict=True):
        text = marked(ids, trained, tokenizer)
        if case["template"] == "gptoss":  # before it are the date and the tools
            text = text[text.index("<|start|>user") :]
        assert text == expected
        ends = re.findall(r"(<[^<>]+>)\s*⟧", text)
        assert turns.stops(ids, trained, tokenizer) == {*tokenizer.convert_tokens_to_ids(ends)}


def test_thoughts():
    """Whether a response leaves a thought open, and what is trained of it as an answer to a prompt."""
    for case in golden("thoughts"):
        assert (after_thought(case["text"], case["prompt"]) is None) == case["opens_only"], case
        try:
            found = dict(answer=turns.answer_after(case["prompt"], case["text"]))
        except ValueError as error:
            found = dict(refused=str(error))
        assert found.items() <= case.items()


def test_a_long_conversation_is_rendered_and_tokenised_once(monkeypatch):
    """Renderings do not grow with the turns, and each part of the text is tokenised a few times."""
    tokenizer = tokenizer_with()
    renderings = []
    sizes = []
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *a, **k: renderings.append(1) or apply(*a, **k)
    )
    tokenise = turns.ids_of
    monkeypatch.setattr(
        turns, "ids_of", lambda texts, x: sizes.append(sum(map(len, texts))) or tokenise(texts, x)
    )
    for number in (5, 50):
        renderings.clear()
        sizes.clear()
        [(ids, trained)] = encode_messages([user("12"), says("12")] * number, tokenizer)
        assert sum(trained) == number * 3
        assert len(renderings) < 30 and sum(sizes) < 4 * len(tokenizer.decode(ids))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_long_conversation_is_read_as_turn_by_turn(name, monkeypatch):
    """Rows, or the refusal, are those of a reader who renders each turn apart."""
    tokenizer = tokenizer_of(name)
    for seed in range(6):
        draw = random.Random(seed)
        messages = []
        for _ in range(8):
            shape = draw.choice([*SHAPES])
            found, _ = messages_of(shape, tokenizer)
            first = int(bool(messages) and found[0]["role"] in ("system", "developer"))
            messages += found[first:]
        found = []
        for apart in (False, True):
            with monkeypatch.context() as patch:
                if apart:
                    patch.setattr(templates.Conversation, "sizes", lambda *_: (None, None))
                try:
                    found.append(encode_messages(messages, tokenizer, TOOLS))
                except ValueError as error:
                    found.append(str(error))
        assert found[0] == found[1], seed


# ---- flags


def test_another_template_and_its_variables(tmp_path):
    """Saved with the tokenizer; who serves the model may still give other values."""
    tokenizer = tokenizer_with()
    path = tmp_path / "mine.jinja"
    text = tokenizer.chat_template + "{{- '<think>' if enable_thinking else '' -}}"
    path.write_text(text)
    templates.use_template(tokenizer, str(path), '{"enable_thinking": true}')
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert templates.render([user("1")], loaded) == "<|user|>1<|assistant|><think>"
    how = dict(add_generation_prompt=True, tokenize=False)
    assert loaded.apply_chat_template([user("1")], enable_thinking=False, **how) == "<|user|>1<|assistant|>"
    for case in golden("template_flags"):
        file = tmp_path / case["file"]
        if "text" in case:
            file.write_text(case["text"])
        with pytest.raises(ValueError, match=rf"^--chat_template{case['line']}[^\n]*$"):
            templates.use_template(tokenizer, str(file), case["kwargs"])
    tokenizer.chat_template = dict(default="", tool_use=text)
    templates.use_template(tokenizer, None, '{"enable_thinking": true}')
    assert all("set enable_thinking = True" in x for x in tokenizer.chat_template.values())
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the model has no chat template; give one by --chat_template FILE"):
        templates.render([user()], tokenizer)


def test_flag_env(tiny, tmp_path):
    """Its tools are shown, or refused under a template that shows none."""
    (tmp_path / "env.py").write_text(
        f"class Env:\n    tools = {CALCULATE}\n    def step(self):\n        pass\n"
    )
    template, rows = tmp_path / "shows.jinja", tmp_path / "rows.parquet"
    template.write_text(TOOL_TEMPLATES["smollm2, with tools"]["template"])
    write_parquet([dict(messages=[user("1+2="), says("3")])], rows)
    model = shutil.copytree(
        tiny, tmp_path / "model"
    )  # its tokenizer, which the process keeps, gets a template
    given = dict(model=str(model), train_files=(str(rows),), messages_key="messages", train_batch_size=1)
    for name, line in (("Env", "the chat template shows none: leave out --env"), ("Other", "Other")):
        with pytest.raises(SystemExit, match=rf"^error: [^\n]*{line}[^\n]*$"):
            sft.load_data(make_args(sft, env=f"{tmp_path}/env.py:{name}", **given))
    for env in (None, f"{tmp_path}/env.py:Env"):
        args = make_args(sft, env=env, chat_template=str(template), **given)
        tokenizer, [row], *_ = sft.load_data(args)
        assert ("calculate" in tokenizer.decode(row["prompt_ids"])) == bool(env)


# ---- the benchmark and its page

FAULTS = {  # in what is trained of a turn
    "no token that stops a sampler ends it": lambda ids, trained: (ids, [*trained[1:], False]),
    "its prompt is not what a sampler is given": lambda ids, trained: (ids, [*trained[1:], True]),
    "it leaves out what it says": lambda ids, trained: (ids[:-13] + ids[-1:], trained[:-13] + trained[-1:]),
    "turns are missing": lambda ids, trained: (ids, [False] * len(ids)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(monkeypatch, fault):
    def faulty(*given):
        return [FAULTS[fault](*row) for row in encode_messages(*given)]

    monkeypatch.setattr(chat_templates, "encode_messages", faulty)
    monkeypatch.setattr(chat_templates, "SHAPES", ["one turn"])
    found = chat_templates.try_template("qwen3", TEMPLATES)["one turn"]
    differs = [what for what in found["wrong"] if what.startswith("it differs from its marks")]
    assert fault in found["wrong"]
    assert len(differs) == (fault != "turns are missing")


def test_the_page_has_the_tables_of_the_results():
    """And the results are those of this code."""
    found = json.loads(chat_templates.RESULTS.read_text())
    assert chat_templates.tables(found) in chat_templates.PAGE.read_text()
    rows = [row for shapes in found.values() for row in shapes.values()]
    assert not any(row.get("wrong") for row in rows)
    for name in ("qwen3", "glm4moe"):
        read = {chat_templates.READ: chat_templates.read_by(name, TEMPLATES)}
        assert found[name] == chat_templates.try_template(name, TEMPLATES) | read
