"""Calls as published templates write them, read by the parser that is found for each; without the model."""

import json
from types import SimpleNamespace

import pytest
from conftest import ROOT, golden
from test_envs import hermes

from data_prep.lib.templates import TOOLS as SCHEMAS
from envs.calls import find_reader, learn_calls, reader, written_call
from envs.pool import EnvPool
from envs.tools import UNREADABLE
from tests.conversations import make_tokenizer

TEMPLATES = ROOT / "tests/fixtures/chat_templates"
FUNCTION = '''
def {}:
    """It does.

    Args:
        {}
    """
'''
TOOLS = FUNCTION.format(
    "get_weather(city: str, days: int = 1, tags: list[str] = ())", "city: c\n        days: d\n        tags: t"
)
TOOLS += FUNCTION.format("add(a: float, b: float)", "a: a\n        b: b") + "TOOLS = [get_weather, add]"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
# template: what ends its turns besides EOS, and how a call begins
FAMILIES = {case["template"]: (case["end"], case["begin"]) for case in golden("calls_of_templates")}
NAMED = dict(diffusion_gemma="gemma4", lfm2_2_5="lfm2", lfm2_2_5_vl="lfm2", llama3_1="llama3_json")
NAMED |= dict(muse_glimmer="muse_glimmer", qwen3_8="qwen3_coder")  # whose templates are not here
NAMED |= dict(nemotron_3_nano="qwen3_coder", nemotron_3_ultra="qwen3_coder")
ROWS = [*map(json.loads, (TEMPLATES / "toolcalls.jsonl").open(encoding="utf-8"))]


assert {row["template"] for row in ROWS} <= FAMILIES.keys() | NAMED.keys()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "mine.py"
    path.write_text(TOOLS)
    return path


def opened(file, template, parser=None):
    """An environment pool that knows the calls of a model with this template, or one of this name."""
    path = TEMPLATES / f"{template[:30]}.jinja"
    tokenizer = make_tokenizer(*(template, path.read_text()) if path.exists() else ("qwen3", template))
    pool = EnvPool(f"{file}:TOOLS", 1, 9, parser)
    learn_calls(pool, tokenizer)
    return pool, tokenizer


@pytest.mark.parametrize("name", [*FAMILIES, *NAMED])
def test_calls_of_a_family(name, file):
    """benchmarks/chat_templates.py finds the parsers of NAMED, too."""
    parser = NAMED.get(name, "deepseek_v3" if "deepseek" in name else None)  # it shows no tools
    pool, tokenizer = opened(file, SAYS if name in NAMED else name, parser)
    end, begin = FAMILIES.get(name, ("", None))
    assert pool.ends == tokenizer.convert_tokens_to_ids([tokenizer.eos_token, *[end] * bool(end)])
    found = [[*map(list, pool.read_calls(row["text"]))] for row in ROWS if row["template"] == name]
    assert found == [row["calls"] for row in ROWS if row["template"] == name]
    assert pool.read_calls("Paris is sunny; 3 < 4, {so} it is.") == []
    assert begin is None or pool.read_calls(f"{begin}no call")


SHOWS = "{%- for tool in tools or () -%}{{- tool | tojson -}}{%- endfor -%}"
SAYS = "{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>' ~ m.content -}}{%- endfor -%}"
WRITES = SAYS.replace("m.content", "m.content ~ (m.tool_calls or '')")


@pytest.mark.parametrize(
    ("template", "parser", "says"),
    [
        ("phi3", None, "--env has tools, and the chat template shows none: take another by --chat_template"),
        (SHOWS + SAYS, None, "the chat template writes no calls: say by --tool_parser"),
        (SHOWS + WRITES, None, "is not read by gptoss, apertus, "),
        (SHOWS + WRITES, "hermes", "is not read by hermes: pass another --tool_parser"),
        ("glm4moe", "hermes", "is not read by hermes: pass another --tool_parser"),
        (SAYS, "herms", "--tool_parser herms: there are gptoss, apertus, "),
        (SAYS, "openai", "--tool_parser openai: vLLM's parser of this name reads no text"),
    ],
)
def test_what_is_refused_before_anything_slow(template, parser, says, file):
    with pytest.raises(ValueError) as error:
        opened(file, template, parser)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_parser_that_raises_is_told_to_the_model():
    """Unless it reads the turn with the token that ended it."""

    class Parser:
        def __init__(self, *_):
            pass

        def extract_tool_calls(self, text, request):
            raise ValueError(text)

    class Ended(Parser):
        def extract_tool_calls(self, text, request):
            if not text.endswith("<end>"):
                raise ValueError(text)
            function = SimpleNamespace(name="f", arguments="")
            return SimpleNamespace(tool_calls=[SimpleNamespace(function=function)])

    tools = [dict(type="function", function=dict(name="f"))]
    assert reader(Parser, None, tools)("x") == [UNREADABLE]
    assert reader(Ended, None, tools, end="<end>")("x") == [("f", {})]


@pytest.mark.parametrize("template", (SAYS, SHOWS + SAYS))
def test_a_prompt_that_explains_the_tools_says_how_they_are_called(template, file):
    pool, _ = opened(file, template, "hermes")
    assert (pool.tools is None) == (template == SAYS)
    assert pool.read_calls(hermes("add", a=1)) == [("add", {"a": 1})]
    pool.step(0, hermes("gone"), {})
    [answer] = pool.answers(wait=True)
    assert "no tool 'gone'" in answer["messages"][0]["content"]
    pool.close()


@pytest.mark.parametrize(
    "name", ["deepseekv3", "gemma4_v2", "gemma4_v4", "glm4moe", "qwen2_5", "qwen3_5_think"]
)
def test_a_call_is_whole_or_none(name):
    """Cut anywhere, it is not run; what an argument says ends neither a thought nor a call."""
    tokenizer = make_tokenizer(name, (TEMPLATES / f"{name}.jinja").read_text())
    _, read, _ = find_reader(tokenizer, SCHEMAS)
    one = [("zqtool", dict(number=12, text="print('</think>') or </think> <tool_call>"))]
    for calls in (one, [("zqtool", {})], one * 2):
        text, _ = written_call("", calls, tokenizer)
        assert read(text) == calls
        for end in range(len(text.rstrip())):
            assert set(map(str, read(text[:end]))) <= {str(calls[0]), str(UNREADABLE)}
            assert read(text[:end]).count(calls[0]) < len(calls)
