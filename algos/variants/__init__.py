"""Policy losses and advantage estimators that a flag names.

`--policy_loss gspo` takes gspo of gspo.py in this folder, `--policy_loss FILE.py:NAME` a user's function:

def mine(logp_nt, old_logp_nt, adv_nt, mask_nt, clip_low=0.2, clip_high=0.2, loss_agg="token-mean"):
    return loss_nt, clipped_nt, lower_nt  # before weighting; where a clip and where the dual clip decided

The last three defaults are those of --clip_ratio_low, --clip_ratio_high and --loss_agg. A loss that has no
clip leaves out its parameters, and a loss without loss_agg has token-mean. With `--adv_estimator`:

def mine(score_n, group_n, length_n, parts):  # score, group number and trained tokens of each response
    return adv_n  # of each response; parts: a weight and the scores [N] for each --reward_fn
"""

import ast
import inspect
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

from rewards import load_from
from system.arguments import fail

HERE = Path(__file__).parent
TAKES = dict(policy_loss="logp_nt old_logp_nt adv_nt mask_nt", adv_estimator="score_n group_n length_n parts")
OF_SCRIPTS = dict(policy_loss=("clip",), adv_estimator=("grpo", "dr_grpo", "rloo"))
AVERAGES = "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
CLIPS = dict(clip_ratio_low="clip_low", clip_ratio_high="clip_high")  # flags, parameters of a loss


def known(flag):
    """Names of the variants in this folder; needs no torch. A file and its function have one name."""
    found = []
    for path in sorted(HERE.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == path.stem:
                takes = [x.arg for x in node.args.args[:4]]
                found += [path.stem] if takes == TAKES[flag].split() else []
    return found


def unknown(flags):
    """What is wrong with the names of variants in {flag: value}; needs no torch."""
    for flag, names in OF_SCRIPTS.items():
        names = *names, *known(flag)
        if flag in flags and flags[flag] not in names and ":" not in flags[flag]:
            return f"--{flag} {flags[flag]} is none of {', '.join(names)}, nor FILE.py:NAME"


@cache
def load_variant(flag, spec):
    """The function of that name, or of FILE.py:NAME. Raises ValueError, in one line."""
    if problem := unknown({flag: spec}):
        raise ValueError(problem)
    function = load_from(spec if ":" in spec else f"{HERE / spec}.py:{spec}", f"--{flag}")
    names = TAKES[flag].split()
    more = [*inspect.signature(function).parameters.values()] if callable(function) else []
    if [p.name for p in more[:4]] != names or any(p.default is p.empty for p in more[4:]):
        raise ValueError(f"--{flag} {spec} must be a function of {', '.join(names)}; more needs a default")
    return function


def named_loss(args, clip):
    """The function of --policy_loss, with the bounds that flags give it; clip: that of `clip`."""
    loss = clip if args.policy_loss == "clip" else load_variant("policy_loss", args.policy_loss)
    bounds = {name: getattr(args, flag) for flag, name in CLIPS.items()}
    return partial(loss, **{name: x for name, x in bounds.items() if x is not None})  # sapo has none


def check_loss(loss, spec):
    """ValueError if a loss of two responses of three tokens is not what scripts expect."""
    import torch  # here, because names are checked before it is loaded

    logp_nt, ones_nt = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3)
    try:
        loss_nt, *masks = loss(logp_nt, -ones_nt, ones_nt, ones_nt.bool())
        fits = loss_nt.requires_grad and [x.shape for x in (loss_nt, *masks)] == [ones_nt.shape] * 3
    except Exception as error:  # of a user's function
        raise ValueError(f"--policy_loss {spec} raises {type(error).__name__}: {error}") from error
    if not fits:
        what = f"--policy_loss {spec}"
        raise ValueError(f"{what} must return three tensors [N, T], first a loss with a gradient")


def with_defaults(args, clip):
    """The arguments with the defaults of --policy_loss, for flags that are None.

    clip: the function of --policy_loss clip. A variant that cannot be used stops the script with one line.
    """
    flags, spec = asdict(args), args.policy_loss
    try:
        if flags.get("adv_estimator", "grpo") not in OF_SCRIPTS["adv_estimator"]:
            load_variant("adv_estimator", flags["adv_estimator"])
        loss = clip if spec == "clip" else load_variant("policy_loss", spec)
        check_loss(loss, spec)
    except ValueError as error:
        fail(" ".join(str(error).split()))
    has = {name: p.default for name, p in inspect.signature(loss).parameters.items()}
    for flag, name in CLIPS.items():
        if name not in has and flags.get(flag) is not None:
            fail(f"--{flag} {flags[flag]} has no effect with --policy_loss {spec}")
    defaults = {flag: has.get(name) for flag, name in CLIPS.items()}
    defaults["loss_agg"] = average = has.get("loss_agg", "token-mean")
    if average not in AVERAGES or (average != "token-mean" and "loss_agg" not in flags):
        fail(f"--policy_loss {spec} averages by {average}, which this script does not know")
    return replace(args, **{flag: x for flag, x in defaults.items() if flags.get(flag, 0) is None})
