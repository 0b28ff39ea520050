"""Code that several scripts share is in fenced regions, equal to the byte; so are functions of one name.

`python tests/test_copies.py algos/grpo.py` carries the regions of that script over to the others.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ALGOS = Path(__file__).resolve().parents[1] / "algos"
DOCS = ALGOS.parent / "docs"
PAGES = {"eval": "guides/evaluate.md", "quantize": "guides/export-quantize.md"}  # not in docs/algorithms/
SYSTEM = ["layouts", "ranks", "model", "checkpoints"]
SAMPLING = ["data", "sampler", "rows", "sampler against trainer"]
MANIFEST = {
    "sft.py": ["log-probs", *SYSTEM, "sequence parallel"],
    "rm.py": SYSTEM,
    "dpo.py": ["log-probs", *SYSTEM],
    "grpo.py": ["losses", "log-probs", *SYSTEM, *SAMPLING],
    "dapo.py": ["losses", "log-probs", *SYSTEM, "sequence parallel", *SAMPLING],
    "ppo.py": ["log-probs", *SYSTEM, *SAMPLING],
    "agent.py": ["losses", "turns", "log-probs", *SYSTEM, *SAMPLING],
    "distill.py": ["log-probs", *SYSTEM, *SAMPLING],
    "generate.py": ["turns"],
}
# what an algorithm is, in its script alone; all other functions of one name are one function
OWN = {"main", "advantages", "actor_loss", "update_actor", "micro_batches", "check_args"}
OWN |= {"update", "evaluate", "load_policy", "load_data", "check_model", "check_layout"}
LIMITS = {  # of a trainer: lines above the banner "The system", lines in all, flags; limits do not rise
    "grpo.py": (391, 1351, 60),
    "dapo.py": (443, 1580, 60),
    "ppo.py": (473, 1527, 67),
    "sft.py": (308, 1336, 45),
    "rm.py": (300, 848, 45),
    "dpo.py": (385, 1102, 45),
    "agent.py": (464, 1519, 65),
    "distill.py": (431, 1423, 60),
}
REGION = re.compile(r"^# region ([\w -]+)\n(.*?)^# endregion\n", re.M | re.S)


def regions(path):
    return {m[1]: m[0] for m in REGION.finditer(path.read_text())}


def test_scripts_have_their_regions():
    for name, wanted in MANIFEST.items():
        assert list(regions(ALGOS / name)) == wanted, name


def test_the_map_of_regions():
    """CONTRIBUTING.md says which scripts have which region."""
    page = (ALGOS.parent / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `([\w -]+)` \| [^|]+ \| ([^|]+\.py`|all) \|$", page, re.M)
    for region, scripts in rows:
        named = set(re.findall(r"\w+\.py", scripts))
        found = {name for name, regions in MANIFEST.items() if region in regions}
        assert found == (set(LIMITS) - named if scripts.startswith("all") else named), region
    assert {region for region, _ in rows} == {x for regions in MANIFEST.values() for x in regions}


def test_regions_and_functions_are_equal():
    seen = {}
    for name in MANIFEST:
        text = (ALGOS / name).read_text()
        pieces = {f"region {region}": code for region, code in regions(ALGOS / name).items()}
        for node in ast.parse(REGION.sub("", text)).body if name in LIMITS else []:
            if isinstance(node, ast.FunctionDef) and node.name not in OWN:
                pieces[f"{node.name}()"] = ast.get_source_segment(REGION.sub("", text), node)
        for piece, code in pieces.items():
            other, first = seen.setdefault(piece, (name, code))
            assert code == first, f"{piece} differs in {name} and {other}: make fix-copies FROM=algos/{other}"


def test_agents_learn_as_grpo():
    """What grpo.py's tables and runs test is so in agent.py too, without ECHO."""
    for name in ("advantages", "actor_loss", "update_actor"):
        grpo, agent = (
            re.search(rf"^def {name}\(.*?(?=^def |^# )", (ALGOS / script).read_text(), re.M | re.S)[0]
            for script in ("grpo.py", "agent.py")
        )
        assert grpo == re.sub(r".*(?:echo|ECHO).*\n", "", agent), name


def test_a_hang_shows_in_every_trainer():
    """What tests/faults sees in sft.py: the stacks of the ranks in turn, for every step."""
    dump = "faulthandler.dump_traceback_later(0.9 * TIMEOUT_S + dist.get_node_local_rank() / 4)"
    for name in LIMITS:
        _, _, loop = (ALGOS / name).read_text().partition("    for step in range(")
        assert any(line.strip().startswith(dump) for line in loop.splitlines()[:3]), name


def test_arguments_of_one_name_have_one_type():
    seen = {}
    for name in LIMITS:
        for node in ast.parse((ALGOS / name).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == "Args":
                *flags, post_init = node.body
                assert len(flags) <= LIMITS[name][2], f"{name} has {len(flags)} flags"
                for flag in flags:
                    kind = ast.unparse(flag.annotation).removesuffix(" | None")
                    assert seen.setdefault(flag.target.id, kind) == kind, f"--{flag.target.id} of {name}"
                assert seen.setdefault("__post_init__", ast.unparse(post_init)) == ast.unparse(post_init)


@pytest.mark.parametrize("name", LIMITS)
def test_the_algorithm_comes_first_and_is_short(name):
    lines = (ALGOS / name).read_text().splitlines()
    above = next(i for i, line in enumerate(lines) if line == "# The system")
    assert above <= LIMITS[name][0] and len(lines) <= LIMITS[name][1]
    assert sum(map(len, lines)) / len(lines) <= 62  # mean characters
    assert sum(len(line) > 100 for line in lines) <= len(lines) / 10
    order = [line for line in lines if re.match(r"# ---- |# The system$|def main|class Args", line)]
    assert [re.sub(r"[^\w ]", "", x).strip() for x in order] == [
        "class Args", "The mathematics", "The step", "def mainargs", "The system"
    ]  # fmt: skip
    assert lines[-1] == "    main(Args(**flags))" and lines[above - 4] == "    leave()"


def test_equations_are_tagged_in_code_and_docs():
    for name in ("sft", "rm", "dpo", "grpo", "dapo", "ppo", "agent", "distill", "eval", "quantize"):
        page = (DOCS / PAGES.get(name, f"algorithms/{name}.md")).read_text()
        tags = set(re.findall(r"# eq: ((?!lora|sequence)[\w.]+)", (ALGOS / f"{name}.py").read_text()))
        assert tags and tags == set(re.findall(rf"`(?:# eq: )?((?:{name}|grpo)\.(?!py)\w+)`", page)), name
    tags = re.findall(r"# eq: (sequence\.\w+)", (ALGOS / "sft.py").read_text())
    assert tags == re.findall(r"# eq: (sequence\.\w+)", (DOCS / "guides/long-rows.md").read_text())
    page, *scripts = (DOCS / "guides/lora.md").read_text(), ALGOS / "grpo.py", ALGOS / "sft.py"
    tags = [tag for path in scripts for tag in re.findall(r"# eq: (lora\.\w+)", path.read_text())]
    assert len({*tags}) == 5 and sorted({*tags}) == sorted(re.findall(r"# eq: (lora\.\w+)", page))


if __name__ == "__main__":
    source = regions(Path(sys.argv[1]))
    for path in [ALGOS / name for name in MANIFEST]:
        new = REGION.sub(lambda m: source.get(m[1], m[0]), path.read_text())
        path.write_text(new)
