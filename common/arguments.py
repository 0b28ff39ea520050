"""Command lines: the fields of an `Args` dataclass are the flags, and their comments are the help."""

import atexit
import gc
import inspect
import math
import os
import re
import sys
import warnings
from dataclasses import MISSING, dataclass, fields, make_dataclass
from pathlib import Path

import tyro

# before torch is loaded: notes of libraries on NUMA nodes, Triton and their plans, on which nobody can act
os.environ |= dict(TORCH_CPP_LOG_LEVEL="ERROR", TORCH_LOGS="-torch._library") | os.environ
warnings.filterwarnings("ignore", category=FutureWarning)
gc.set_threshold(50_000)  # with 700 a sixth of the imports' time is a search for garbage in what stays
atexit.register(gc.freeze)  # the search at Python's end would take a second

MODELS = "model", "critic_model", "reward_model", "teacher"  # flags that name weights
RANGES = {  # smallest (1e-9: above 0) and largest value, always finite: flags, of a tuple each value
    (1, math.inf): "total_epochs total_steps train_batch_size ppo_mini_batch_size ppo_epochs group_size"
    " val_group_size n_samples batch_size max_prompt_length max_response_length max_length max_turns"
    " max_observation_length max_tokens_per_microbatch max_gen_batches hsdp_replicas tp_size sp_size k"
    " reward_workers calibration_rows value_quantiles",
    (0, math.inf): "seed save_freq test_freq keep_checkpoints max_staleness lora_rank critic_lr warmup_steps"
    " lr decay_steps critic_warmup weight_decay overlong_buffer temperature val_temperature clip_ratio_low"
    " clip_ratio_high kl_loss_coef kl_coef nll_coef positive_nll_coef center_rewards_coef simpo_gamma follow",
    (1e-9, math.inf): "lora_alpha grad_clip env_timeout_s reward_timeout_s rollout_is_threshold"
    " cliprange_value kl_target lam_alpha beta",
    (1e-9, 1): "top_p gpu_memory_utilization",
    (0, 1): "gamma lam critic_lam teacher_update_rate echo_coef uncertainty_bonus",
    (-math.inf, math.inf): "entropy_coeff reward_weights rollout_rs_threshold",
}
IDLE = {  # a flag and its value: flags that have no effect with it
    ("lora_rank", 0): "lora_alpha",
    ("use_kl_loss", False): "kl_loss_coef kl_kind",
    ("kl_coef", 0): "kl_target",
    ("value_quantiles", 1): "uncertainty_bonus",
    ("kl", "full"): "clip_ratio_low clip_ratio_high",
    ("rollout_is", None): "rollout_is_threshold",
    ("rollout_rs", None): "rollout_rs_threshold",
    ("loss", "sigmoid"): "simpo_gamma",
    ("loss", "ipo"): "simpo_gamma label_smoothing",
    ("lr_schedule", "constant"): "decay_steps",
    ("val_files", ()): "val_temperature val_group_size",
    ("reward_manager", "naive"): "reward_timeout_s",
}
HUB = {  # what an error of the hub's client means, or the first class above it that is here
    "HFValidationError": "and no name of the hub",
    "GatedRepoError": "and gated on the hub: accept the licence on its page there, then `hf auth login`",
    "RepositoryNotFoundError": "and none on the hub; a private one needs `hf auth login`",
    "HfHubHTTPError": "and the hub refuses ({error})",
    "Exception": "and the hub cannot be reached ({error})",
}
ALONE = dict(maxrl="group_size", reinforce_plus_plus_baseline="group_size train_batch_size")  # one above 1


def parse(args_class, words=None, unknown=None):
    """The command line (or `words`) -> {field of `args_class`: value}; what cannot be used is one line.

    unknown: a function of {flag: value}, which says what a script does not know, or None.
    """
    rank = int(os.environ.get("RANK", 0))
    groups = command_line(in_groups(args_class), words)
    flags = {name: value for group in vars(groups).values() for name, value in vars(group).items()}
    problem = unusable(flags, {field.name: field.default for field in fields(args_class)})
    problem = problem or (unknown and unknown(flags)) or no_model(flags)
    if problem:  # the first rank of each machine says what it lacks
        raise SystemExit(1 if int(os.environ.get("LOCAL_RANK", rank)) else f"error: {problem}")
    return flags


def command_line(program, words=None):
    """A dataclass that is made from the command line, or a function that is called with it."""
    about = sys.modules[program.__module__].__doc__.partition("\n\n")[0]  # --help begins with it
    options = dict(description=about, use_underscores=True, config=(tyro.conf.OmitArgPrefixes,))
    try:
        return tyro.cli(program, args=words, console_outputs=os.environ.get("RANK", "0") == "0", **options)
    except BrokenPipeError:  # PROGRAM --help | head
        os._exit(0)


def in_groups(args_class):
    """A class with a dataclass for each section of `args_class`, which a comment `# ---- NAME` begins.

    They only hold values: defaults that depend on the machine need torch, which is not loaded yet.
    """
    section, sections = Path(inspect.getfile(args_class)).stem, {}
    for line in inspect.getsource(args_class).splitlines():
        if found := re.match(r"    (?:# ---- (.+)|(\w+):)", line):
            section = found[1] or section
            if found[2]:
                sections.setdefault(section, []).append(found[2])
    groups = {}
    for section, names in sections.items():
        body = dict(__module__=args_class.__module__, __qualname__=args_class.__qualname__)  # for comments
        body["__init__"] = lambda self, **values: vars(self).update(values)
        group = dataclass(type(args_class.__name__, (args_class,), body), init=False)
        group.__dataclass_fields__ = {name: args_class.__dataclass_fields__[name] for name in names}
        groups[section] = group
    parts = make_dataclass("Groups", groups.items())
    parts.__module__ = args_class.__module__
    return parts


def unusable(values, defaults):
    """What is wrong with {flag: value}."""
    for name, value in values.items():
        if value == () and defaults[name] is MISSING:
            return f"{name} needs at least one value"
    for (low, high), names in RANGES.items():
        least, most = "at least" if low in (0, 1) else "above", f" and at most {high}" * (high < math.inf)
        for name in names.split():
            value = values.get(name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not math.isfinite(number):
                    return f"--{name} {number} must be finite"
                if number is not None and not low <= number <= high:
                    return f"--{name} {number} must be {least} {int(low)}{most}"
    for (other, value), names in IDLE.items():
        for name in names.split():
            if values.get(name) != defaults.get(name) and values.get(other) == value:
                return f"--{name} {values[name]} has no effect with --{other} {value}"
    alone = ALONE.get(values.get("adv_estimator"), "none").split()
    if all(values.get(name) == 1 for name in alone):
        return f"--adv_estimator {values['adv_estimator']} needs --{' or --'.join(alone)} above 1"


def no_model(values, flags=MODELS, file="config.json"):
    """What is wrong with the models of {flag: value}: directories, or names of the hub with this file."""
    for flag in flags:
        value = values.get(flag) or ()
        for name in (value,) if isinstance(value, str) else value:
            if Path(name, "adapter_config.json").is_file() and not Path(name, "config.json").is_file():
                return f"--{flag} {name}: adapters alone: merge them into their model, or name that model"
            if "data" not in values and os.path.isdir(f"{name}/checkpoints/latest/hf"):
                return f"--{flag} {name}: a run; its model is {name}/checkpoints/latest/hf"
            import huggingface_hub as hub  # takes 0.5 s

            try:  # one request: the hub's own downloads try for 20 s
                here = os.path.isdir(name) or isinstance(hub.try_to_load_from_cache(name, file), str)
                here or hub.get_hf_file_metadata(hub.hf_hub_url(name, file))
            except Exception as error:  # of its client, or of the network
                why = next(HUB[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in HUB)
                error = " ".join(f"{type(error).__name__}: {error}".split())
                return f"--{flag} {name}: no directory here, {why.format(error=error)}"
