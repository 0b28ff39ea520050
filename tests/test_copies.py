"""Code that several scripts share stands in fenced regions, equal to the byte; so do the arguments.

`python tests/test_copies.py algos/grpo.py` carries the regions of that script over to the others.
"""

import ast
import re
import sys
from pathlib import Path

ALGOS = Path(__file__).resolve().parents[1] / "algos"
RL = "token_logps share_prefix distributed model rollout weight_sync balance micro_batches checkpoint logging"
MANIFEST = {
    "sft.py": "token_logps distributed model balance checkpoint logging",
    "grpo.py": RL,
    "dapo.py": RL,
    "ppo.py": RL,
}
REGION = re.compile(r"^# region (\w+)\n(.*?)^# endregion\n", re.M | re.S)


def regions(path):
    return {m[1]: m[0] for m in REGION.finditer(path.read_text())}


def test_scripts_have_their_regions():
    for name, wanted in MANIFEST.items():
        assert set(regions(ALGOS / name)) == set(wanted.split()), name


def test_regions_are_equal():
    seen = {}
    for name in MANIFEST:
        for region, text in regions(ALGOS / name).items():
            other, first = seen.setdefault(region, (name, text))
            assert text == first, (
                f"region {region} differs in {name} and {other}: make fix-copies FROM=algos/{other}"
            )


def test_the_sampler_stops_at_the_same_tokens():
    found = [re.search(r"^def stop_token_ids.*?\n\n\n", (ALGOS / f"{name}.py").read_text(), re.M | re.S)[0]
             for name in ("grpo", "generate")]  # fmt: skip
    assert found[0] == found[1], "stop_token_ids differs in grpo.py and generate.py"


def test_arguments_of_one_name_are_the_same():
    seen = {}
    for name in ("sft.py", "grpo.py", "dapo.py", "ppo.py"):
        for node in ast.parse((ALGOS / name).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == "Args":
                for field, text in zip(node.body[::2], node.body[1::2], strict=True):
                    key, value = field.target.id, (ast.unparse(field.annotation), text.value.value)
                    assert seen.setdefault(key, value) == value, f"--{key} of {name}"


def test_equations_are_tagged_in_code_and_docs():
    for name in ("sft", "grpo", "dapo", "ppo", "eval"):
        page = (ALGOS.parent / f"docs/{name}.md").read_text()
        tags = set(re.findall(r"# eq: ([\w.]+)", (ALGOS / f"{name}.py").read_text()))
        assert tags and tags == set(re.findall(rf"`(?:# eq: )?((?:{name}|grpo)\.(?!py)\w+)`", page)), name


if __name__ == "__main__":
    source = regions(Path(sys.argv[1]))
    for path in [ALGOS / name for name in MANIFEST]:
        new = REGION.sub(lambda m: source.get(m[1], m[0]), path.read_text())
        path.write_text(new)
