"""A function, class or constant of several scripts is one: each copy is an ordered subset of the longest.

It may leave lines out, and has none of its own. Indentation and blank lines do not count.
`python tests/test_copies.py algos/grpo.py` carries what has changed in that script since HEAD to the others.
"""

import ast
import re
import sys
from itertools import combinations
from pathlib import Path

import pytest
from copies import check, copies, fix_copies, strange, stripped, units

ALGOS = Path(__file__).resolve().parents[1] / "algos"
DOCS = ALGOS.parent / "docs"
PAGES = {"eval": "guides/evaluate.md", "quantize": "guides/export-quantize.md"}  # not in docs/algorithms/
SYSTEM = ["ranks", "model"]
SAMPLING = ["data", "sampler", "rows", "sampler against trainer"]
MANIFEST = {
    "sft.py": ["log-probs", *SYSTEM, "sequence parallel"],
    "rm.py": SYSTEM,
    "dpo.py": ["log-probs", *SYSTEM],
    "grpo.py": ["log-probs", *SYSTEM, *SAMPLING],
    "dapo.py": ["log-probs", *SYSTEM, "sequence parallel", *SAMPLING],
    "ppo.py": ["log-probs", *SYSTEM, *SAMPLING],
    "agent.py": ["turns", "log-probs", *SYSTEM, *SAMPLING],
    "distill.py": ["log-probs", *SYSTEM, *SAMPLING],
    "generate.py": ["turns"],
    "grpo_nano.py": ["log-probs", *SYSTEM, *SAMPLING[:-1]],
}
NANO = {  # lines of grpo_nano.py that a script with options has not, by function
    "TokenLogps": ["options = dict(scale=self.scale, softcap=self.softcap)"],
    "load_model": [
        "def load_model(args, mesh, device):",
        '"""The model in float32 in its root module, sharded by FSDP2. Rank 0 reads the weights for all."""',
        "lm.config.dtype = config.dtype or torch.float32  # the dtype of hf/",
        "prepare_layers(lm, args.gradient_checkpointing, eager=states_apart(lm))",
        'policy = TokenLogps(lm, attention == "packed")',
    ],
    "read_config": [
        "for name in config.to_dict():",
        "setattr(config, name, 0.0)  # CAREFUL: else the first ratio is not 1",
        "if families.wrapped(config):",
        'fail(f"--model {args.model} has more than a language model: take algos/grpo.py")',
        'attention = "sdpa"',
        "if not families.special_layers(config, one_row=True):",
    ],
    "whole_weights": [
        '"""Names and weights of the sharded model as its files have them, one whole weight at a time."""',
        "if name in lm.all_tied_weights_keys:",
        "if isinstance(x, DTensor):",
        "yield from to_files({name: x}).items()",
    ],
    "load_data": [
        "tokenizer = load_processor(args.model)",
        'manager = RewardManager("naive", load_rewards(args.reward_fn, (), args.group_size))',
    ],
    "build_engine": ["**families.vllm_options(config, False),"],
    "awake": [
        "def awake(engine, policy, args, timing):",
        '"""While the block lasts, the sampler is awake, with the weights of the policy."""',
        "sync_weights(engine, policy.lm)",
    ],
    "sync_weights": [
        "def sync_weights(engine, lm):",
        "weights = whole_weights(lm, engine.model_config.dtype)",
        "weights = families.vllm_names(weights, lm.config, engine.model_config.hf_config)",
    ],
    "rollout": [
        '"""Let the sampler answer this rank\'s share of the prompts of all ranks -> its rows."""',
        "rows = [dict(p, sample=g, rank=rank) for p in prompts[rank::world] for g in range(group_size)]",
        "for i, row in enumerate(rows):",
        "while engine.has_unfinished_requests():",
        "return rows",
    ],
}
LIMITS = {  # of a trainer: lines above the banner "The system", lines in all, flags; limits do not rise
    "grpo_nano.py": (240, 570, 30),
    "grpo.py": (390, 940, 59),
    "dapo.py": (430, 1190, 60),
    "ppo.py": (460, 1200, 68),
    "sft.py": (310, 1040, 42),
    "rm.py": (303, 620, 35),
    "dpo.py": (385, 780, 42),
    "agent.py": (455, 1065, 65),
    "distill.py": (415, 1070, 58),
}
COPIES = 2800  # lines in regions that several scripts have
OFFLINE = {"sft.py", "rm.py", "dpo.py"}
OWN = {  # scripts that define a name in their own way; all others have copies of one definition
    "Args": {*MANIFEST},
    "main": {*MANIFEST},
    "advantages": {"ppo.py"},
    "actor_loss": {"ppo.py", "distill.py"},
    "update_actor": {"grpo_nano.py"},
    "check_sampler": {"grpo_nano.py"},
    "update": OFFLINE | {"ppo.py"},
    "evaluate": OFFLINE,
    "micro_batches": OFFLINE,
    "check_model": OFFLINE,
    "check_layout": {"dpo.py", "dapo.py"},
    "load_data": OFFLINE,
    "load_policy": {"rm.py", "dapo.py"},
    "build_engine": {"generate.py"},
}
TEXT_ONLY = [  # grpo.py takes images, if without adapters
    "if args.sees_images:",
    'raise ValueError(f"{name} takes images, which only grpo.py and sft.py do")',
]
ALL_RUN = [  # no group without an advantage is left out
    "totals = all_reduce(torch.stack([*sums.values()]).tolist())",
    'metrics = {f"actor/{name}": total / len(norms) for name, total in zip(sums, totals)}',
]
WITHOUT_SAMPLER = ["options = dict(scale=self.scale, softcap=self.softcap, entropy=False)"]
SKIPS = [  # encoders that the sampler has not, of a model that is trained on text alone
    "def whole_weights(lm, dtype, skipped=()):",
    'if name in lm.all_tied_weights_keys or name in skipped or ".lora_" in name:',
]
VARIANTS = {  # lines of a copy that the longest has not
    ("TokenLogps", "sft.py"): WITHOUT_SAMPLER,
    ("TokenLogps", "dpo.py"): WITHOUT_SAMPLER,
    ("load_model", "rm.py"): [
        "auto = families.auto_class(config, scores=True)",
        "full = None if dist.get_rank() else families.from_files(auto, args.model, num_labels=1)",
    ],
    ("load_model", "ppo.py"): [  # a critic has a head for its values
        "def load_model(args, mesh, device, set_trained, root, **changes):",
        "config, attention = read_config(args, **changes)",
        'auto = families.auto_class(config, scores="num_labels" in changes)  # with a head for scores',
        "full = None if dist.get_rank() else families.from_files(auto, args.model, **changes)",
        "if full and lm.can_generate():  # saved with the weights: it may name more EOS tokens",
    ],
    ("read_config", "rm.py"): ["config = AutoConfig.from_pretrained(args.model, num_labels=1)"],
    ("read_config", "ppo.py"): [
        "def read_config(args, **changes):",
        "config = AutoConfig.from_pretrained(args.model, **changes)",
    ],
    ("read_config", "distill.py"): [
        "for name in args.teacher:  # it reads the same rows",
        "special += families.special_layers(AutoConfig.from_pretrained(name), one_row=True)",
    ],
    ("load_policy", "dpo.py"): ["return load(args, mesh, device, add_adapters, TokenLogps)"],
    ("own_logps", "dpo.py"): ["def own_logps(policy, rows):"],
    ("whole_weights", "grpo.py"): SKIPS,
    ("whole_weights", "dapo.py"): SKIPS,
    ("whole_weights", "ppo.py"): SKIPS,
    ("whole_weights", "agent.py"): SKIPS,
    ("whole_weights", "distill.py"): SKIPS,
    ("actor_loss", "dapo.py"): [
        "# difference 2 of the header: the sampler rounds differently, and may have had older weights",
    ],
    ("update_actor", "dapo.py"): [
        ALL_RUN[0],
        "totals = [total / args.sp_size for total in totals]  # ranks that share a row have all counted it",
        ALL_RUN[1],
    ],
    ("update_actor", "distill.py"): [
        "for sequences, totals in mini_batches:",
        "policy.rows = rows  # for `Student`: its teacher may read other prompts",
        "logp_nt, other_nt = token_logps(policy, rows, args)",
        "loss_nt, losses, means = actor_loss(args, logp_nt, other_nt, batch)",
        *ALL_RUN,
    ],
    ("load_data", "agent.py"): [
        "def load_data(args, pool):",
        "data = args.train_files, args.val_files, args.max_prompt_length, learn_calls(pool, tokenizer)",
    ],
    ("check_model", "dapo.py"): TEXT_ONLY,
    ("check_model", "ppo.py"): TEXT_ONLY,
    ("check_model", "agent.py"): TEXT_ONLY,
    ("check_model", "distill.py"): TEXT_ONLY,
    ("distribute", "dapo.py"): [
        "rank, ranks = rank // args.sp_size, ranks // args.sp_size  # ranks that share rows count as one",
    ],
    ("micro_batches", "dapo.py"): [
        "batches = split_micro_batches(lengths, args.max_tokens_per_microbatch * args.sp_size, "
        "policy.packed)",
    ],
    ("split", "dpo.py"): ['"""A row whose prompt ends where training begins. Nothing predicts ids[0]."""'],
}
VARIANTS |= {(name, "grpo_nano.py"): lines for name, lines in NANO.items()}
REGION = re.compile(r"^# region ([\w -]+)\n(.*?)^# endregion\n", re.M | re.S)


def regions(path):
    return {m[1]: m[0] for m in REGION.finditer(path.read_text())}


def within(script, found, what, limit):
    over, advice = found - limit, "shorten something, or move what only an experiment needs to benchmarks/"
    assert over <= 0, f"{script} has {found:.4g} {what}, {over:.3g} over the limit of {limit}: {advice}"


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


def test_copies_are_ordered_subsets():
    check({script: (ALGOS / script).read_text() for script in MANIFEST}, OWN, VARIANTS)


def test_formulas_are_equal():
    """A formula without one of its lines is another formula; actor_loss may leave out terms of the sum."""
    formulas = re.compile(r"^# ---- The mathematics.*?(?=^# ---- The step)", re.M | re.S)
    found = copies({name: formulas.search((ALGOS / name).read_text())[0] for name in LIMITS}, OWN)
    for name in found.keys() - {"actor_loss"}:
        first, *others = found[name]
        for script in others:
            says = f"{name} of {script} differs from {first}: make fix-copies FROM=algos/{first}"
            assert found[name][script] == found[name][first], says


def test_a_subset_of_another_definition_is_a_copy():
    """OWN has no more than it needs."""
    scripts = {script: units((ALGOS / script).read_text()) for script in MANIFEST}
    for name, owners in OWN.items():
        texts = {script: stripped(found[name]) for script, found in scripts.items() if name in found}
        for script in owners:
            others = [lines for other, lines in texts.items() if other != script]
            assert all(strange(texts[script], lines) for lines in others), f"{name} of {script}"


def test_regions_have_one_order():
    """Two scripts have the regions and units that both have in the same order."""
    orders = {}
    for script in MANIFEST:
        found = regions(ALGOS / script).items()
        orders[script] = [name for region, text in found for name in (f"region {region}", *units(text))]
    for one, other in combinations(MANIFEST, 2):
        order = [name for name in orders[one] if name in orders[other]]
        assert order == [name for name in orders[other] if name in orders[one]], f"{one} and {other}"


def test_copies_are_few():
    found = copies({script: "".join(regions(ALGOS / script).values()) for script in MANIFEST}, {})
    lines = sum(len(lines) for shared in found.values() for lines in shared.values())
    within("algos/", lines, "lines in copies", COPIES)


def test_arguments_of_one_name_have_one_type():
    seen = {}
    for name in LIMITS:
        for node in ast.parse((ALGOS / name).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == "Args":
                *flags, post_init = node.body
                within(name, len(flags), "flags", LIMITS[name][2])
                for flag in flags:
                    kind = ast.unparse(flag.annotation).removesuffix(" | None")
                    other = seen.setdefault(flag.target.id, kind)
                    assert other == kind, f"--{flag.target.id} of {name} takes {kind}, elsewhere {other}"
                first = ast.unparse(post_init.body[0])
                assert seen.setdefault("__post_init__", first) == first


@pytest.mark.parametrize("name", LIMITS)
def test_the_algorithm_comes_first_and_is_short(name):
    lines = (ALGOS / name).read_text().splitlines()
    above = next(i for i, line in enumerate(lines) if line == "# The system")
    within(name, above, "lines above the banner", LIMITS[name][0])
    within(name, len(lines), "lines", LIMITS[name][1])
    order = [line for line in lines if re.match(r"# ---- |# The system$|def main|class Args", line)]
    assert [re.sub(r"[^\w ]", "", x).strip() for x in order] == [
        "class Args", "The mathematics", "The step", "def mainargs", "The system"
    ]  # fmt: skip
    assert lines[-1] == "    main(Args(**flags))" and lines[above - 4] == "    run.close()"


@pytest.mark.parametrize("name", LIMITS)
def test_lines_are_short(name):
    lengths = [len(line) for line in (ALGOS / name).read_text().splitlines() if line]
    within(name, sum(lengths) / len(lengths), "characters in a mean line", 61)
    within(name, 100 * sum(n > 100 for n in lengths) / len(lengths), "% of its lines over 100 characters", 8)


def test_equations_are_tagged_in_code_and_docs():
    for name in ("sft", "rm", "dpo", "grpo", "dapo", "ppo", "agent", "distill", "eval", "quantize"):
        page = DOCS / PAGES.get(name, f"algorithms/{name}.md")
        variants = (ALGOS / "variants").glob("*.py") if name in ("grpo", "agent") else ()
        files = [ALGOS / f"{name}.py", *variants]
        code = "".join(path.read_text() for path in files)
        tags = set(re.findall(r"# eq: ((?!lora|sequence)[\w.]+)", code))
        said = set(re.findall(rf"`(?:# eq: )?((?:{name}|grpo)\.(?!py)\w+)`", page.read_text()))
        assert tags and tags == said, f"add or remove in {name}.py or {page}: {', '.join(tags ^ said)}"
    tags = re.findall(r"# eq: (sequence\.\w+)", (ALGOS / "sft.py").read_text())
    assert tags == re.findall(r"# eq: (sequence\.\w+)", (DOCS / "guides/long-rows.md").read_text())
    page, *scripts = (DOCS / "guides/lora.md").read_text(), ALGOS / "grpo.py", ALGOS / "sft.py"
    tags = [tag for path in scripts for tag in re.findall(r"# eq: (lora\.\w+)", path.read_text())]
    assert len({*tags}) == 5 and sorted({*tags}) == sorted(re.findall(r"# eq: (lora\.\w+)", page))


if __name__ == "__main__":
    sys.exit(fix_copies(Path(sys.argv[1]), MANIFEST, OWN))
