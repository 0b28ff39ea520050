"""Policy losses and advantage estimators that a flag names.

`--policy_loss gspo` takes gspo of gspo.py in this folder, `--policy_loss FILE.py:NAME` a user's function:

def mine(logp_nt, old_logp_nt, adv_nt, mask_nt, clip_low=0.2, clip_high=0.2, loss_agg="token-mean"):
    return loss_nt, clipped_nt, lower_nt  # before weighting; where a clip and where the dual clip decided

The last three defaults are those of --clip_ratio_low, --clip_ratio_high and --loss_agg. A loss that has no
clip leaves out its parameters, and a loss without loss_agg has token-mean. With `--adv_estimator`:

def mine(score_n, group_n, length_n, parts):  # score, group number and trained tokens of each response
    return adv_n  # of each response; parts: a weight and the scores [N] for each --reward_fn

What both return is looked at: finite tensors of one shape, and no argument changed in place. Both are
tried on made-up rows before the run, an estimator also at each step, and the shape of a loss at each call.
"""

import ast
import inspect
from collections import defaultdict
from dataclasses import asdict, replace
from functools import cache, partial, wraps
from pathlib import Path

from system.arguments import fail, one_line_errors
from system.plugins import check_shapes, guest, load_from, looked_at

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
    return as_guest(function, f"--{flag} {spec}") if ":" in spec else function


def as_guest(function, what):
    """A user's function of tensors, which changes nothing of the run."""

    @wraps(function)
    def call(*given, **more):
        with guest(what, lasting=False):
            return function(*given, **more)

    return call


def load_loss(args, clip):
    """-> the arguments with the defaults of --policy_loss, for flags that are None, and its function.

    clip: the function of --policy_loss clip. A variant that cannot be used stops the script with one line.
    """
    flags = asdict(args)
    spec = args.policy_loss
    with one_line_errors():
        if flags.get("adv_estimator", "grpo") not in OF_SCRIPTS["adv_estimator"]:
            check_estimator(flags["adv_estimator"])
        loss = clip if spec == "clip" else load_variant("policy_loss", spec)
        check_loss(loss, spec)
    has = {name: p.default for name, p in inspect.signature(loss).parameters.items()}
    defaults = dict(loss_agg=has.get("loss_agg", "token-mean"))
    bounds = {}
    for flag, name in CLIPS.items():
        value = flags.get(flag)
        if value is not None and name not in has:
            fail(f"--{flag} {value} has no effect with --policy_loss {spec}")
        defaults[flag] = has.get(name)
        if name in has:
            bounds[name] = defaults[flag] if value is None else value
    average = defaults["loss_agg"]
    if average not in AVERAGES or (average != "token-mean" and "loss_agg" not in flags):
        fail(f"--policy_loss {spec} averages by {average}, which this script does not know")
    missing = {flag: x for flag, x in defaults.items() if flags.get(flag, 0) is None}
    loss = partial(loss, **bounds)

    def shaped(*given):
        """The loss, if it keeps to its promise in each call: another shape would be broadcast."""
        found = loss(*given)
        with one_line_errors():
            check_shapes(f"--policy_loss {spec}", found, given[0].shape)
        return found

    return replace(args, **missing), shaped if ":" in spec else loss


def members(group_n):
    """The places of the responses of each group, one tensor for each group. group_n: [N], in any order."""
    sizes = group_n.unique(return_counts=True)[1]
    return group_n.argsort(stable=True).split(sizes.tolist())


def estimated(spec, score_n, group_n, length_n, parts):
    """The advantages of --adv_estimator; a result that cannot be used stops the script with one line."""
    what = f"--adv_estimator {spec}"
    with one_line_errors():
        adv_n, *more = looked_at(what, load_variant("adv_estimator", spec), score_n, group_n, length_n, parts)
        if more or not adv_n.is_floating_point():
            raise ValueError(f"{what} must return one tensor of floats")
    return adv_n


def check_estimator(spec):
    """Try it on two groups of four, before a model is loaded."""
    import torch

    scores = [1.0, 0.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0]
    group_n = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    estimated(spec, torch.tensor(scores), group_n, 1 + group_n, [(1.0, scores)])


def check_loss(loss, spec):
    """ValueError if a loss of two responses of three tokens is not what scripts expect."""
    import torch  # here, because names are checked before it is loaded

    what = f"--policy_loss {spec}"
    logp_nt = torch.tensor([[-0.1, -2, -5], [-1, -0.5, -3]], requires_grad=True)
    old_nt = torch.tensor([[-0.2, -1, -3], [-1, -4, -0.1]])
    adv_nt = torch.tensor([[2.0], [-3]]) * torch.ones(2, 3)
    mask_nt = torch.tensor([[True, True, True], [True, True, False]])
    found = looked_at(what, loss, logp_nt, old_nt, adv_nt, mask_nt)
    if len(found) != 3 or not found[0].requires_grad:
        raise ValueError(f"{what} must return three tensors [N, T], first a loss with a gradient")


class Columns(defaultdict):
    """A batch in which each column is there: one that is not known is drawn."""

    def __contains__(self, name):
        return True

    def get(self, name, default=None):
        return self[name]


def is_zero_without_advantage(loss, length):
    """Whether rows with advantage 0 have no gradient and need not be run: the loss decides.

    loss: of log-probs, entropies and a batch -> loss of each token first. length: of the longest response.
    It is tried on made-up rows. A loss that cannot be tried is taken to have a gradient.
    """
    import torch

    random = torch.Generator().manual_seed(1)

    def share():
        return torch.rand(8, length, generator=random)

    kinds = share, lambda: torch.ones(8, length), lambda: share() > 0.5  # of columns that are not known
    for draw, sampler_differs in zip(kinds, (0.0, 0.5, 2.0)):
        logp_nt = (-30 * share() ** 4).requires_grad_()
        entropy_nt = (12 * share()).requires_grad_()
        adv_nt = torch.tensor([0.0, 0, 0, 0, 1, -1, 0.5, -2])[:, None].expand(8, length)
        lengths = [1, 2, length // 2, length] * 2
        batch = Columns(draw)
        batch["adv_nt"] = adv_nt
        batch["mask_nt"] = torch.arange(length) < torch.tensor(lengths)[:, None].clamp(min=1)
        for name in ("old_logp_nt", "ref_logp_nt"):
            batch[name] = logp_nt.detach() + 160 * (share() - 0.5) ** 3
        batch["rollout_logp_nt"] = batch["old_logp_nt"] + sampler_differs * (share() - 0.5)
        try:
            total = loss(logp_nt, entropy_nt, batch)[0].sum()
            inputs = logp_nt, entropy_nt
            grads = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
        except Exception:  # of a user's loss: its rows run, and what is wrong with it is raised there
            return False
        if any(grad[:4].any() for grad in grads):
            return False
    return True
