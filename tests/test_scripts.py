"""The trainers side by side: formulas of one name are equal, flags of one name mean the same, one order."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALGOS = ROOT / "algos"
DOCS = ROOT / "docs"
TRAINERS = "sft rm dpo grpo_nano grpo dapo ppo agent distill".split()
# a script has its own: the terms of its loss, and what an advantage is made of
OWN = {"actor_loss", "advantages"}
SECTIONS = ["class Args", "# ---- The mathematics", "# ---- The step", "def main", "# ---- The system"]
PAGES = {"eval": "guides/evaluate.md", "quantize": "guides/export-quantize.md"}  # not in docs/algorithms/


def source(name):
    return (ALGOS / f"{name}.py").read_text()


def formulas(name):
    """{name: source} of the functions in a script's section "The mathematics"."""
    text = source(name)
    section = text[text.index("# ---- The mathematics") : text.index("# ---- The step")]
    functions = [node for node in ast.parse(section).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.unparse(node) for node in functions}


def test_formulas_are_equal():
    found = defaultdict(dict)
    for script in TRAINERS:
        for name, text in formulas(script).items():
            if name not in OWN:
                found[name].setdefault(text, []).append(script)
    different = {name: list(texts.values()) for name, texts in found.items() if len(texts) > 1}
    assert not different, different


def test_each_formula_has_a_test():
    """By its name, or by that of a formula that calls it."""
    tests = "".join(path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py")))
    for script in TRAINERS:
        found = formulas(script)
        for name in found:
            callers = [other for other, text in found.items() if f"{name}(" in text]
            tested = [caller for caller in callers if re.search(rf"\b{caller}\b", tests)]
            assert tested, f"{name} of {script}.py is in no test"


def test_flags_of_one_name_have_one_type():
    types = defaultdict(dict)
    for script in TRAINERS:
        [args] = [node for node in ast.parse(source(script)).body if getattr(node, "name", "") == "Args"]
        for node in args.body:
            if isinstance(node, ast.AnnAssign):
                kind = ast.unparse(node.annotation).removesuffix(" | None")
                types[node.target.id].setdefault(kind, []).append(script)
    different = {flag: kinds for flag, kinds in types.items() if len(kinds) > 1}
    assert not different, different


@pytest.mark.parametrize("name", TRAINERS)
def test_the_algorithm_comes_first(name):
    lines = source(name).splitlines()
    starts = tuple(SECTIONS)
    order = [line for line in lines if line.startswith(starts)]
    assert len(order) == len(SECTIONS), order
    for line, section in zip(order, SECTIONS):
        assert line.startswith(section), order
    assert lines[-2:] == ['if __name__ == "__main__":', "    main(Args(**flags))"]


def test_equations_are_tagged_in_code_and_docs():
    for name in ("sft", "rm", "dpo", "grpo", "dapo", "ppo", "agent", "distill", "eval"):
        page = DOCS / PAGES.get(name, f"algorithms/{name}.md")
        code = source(name)
        if name in ("grpo", "agent"):
            code += "".join(path.read_text() for path in (ALGOS / "variants").glob("*.py"))
        tags = set(re.findall(r"# eq: ((?!lora|sequence)[\w.]+)", code))
        said = set(re.findall(rf"`(?:# eq: )?((?:{name}|grpo)\.(?!py)\w+)`", page.read_text()))
        assert tags and tags == said, f"add or remove in {name}.py or {page}: {', '.join(tags ^ said)}"
    shared = {"sequence": ("guides/long-rows.md", "system/sequence.py")}
    shared["lora"] = "guides/lora.md", "system/model.py", "algos/sft.py"
    for kind, (page, *files) in shared.items():
        tag = re.compile(rf"# eq: ({kind}\.\w+)")
        tags = {found for file in files for found in tag.findall((ROOT / file).read_text())}
        assert tags == set(tag.findall((DOCS / page).read_text()))
