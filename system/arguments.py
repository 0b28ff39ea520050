"""Command lines: the fields of an `Args` dataclass are the flags, and their comments are the help."""

import atexit
import gc
import inspect
import math
import os
import re
import sys
import warnings
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, make_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro
from tyro._docstrings import get_field_docstring

from system.elsewhere import hint

INF = math.inf
COUNT = (1, INF, "at least 1")
NOT_NEGATIVE = (0, INF, "at least 0")
POSITIVE = (1e-9, INF, "above 0")
SHARE = (0, 1, "at least 0 and at most 1")
PART = (1e-9, 1, "above 0 and at most 1")
OFF = None, False, 0, "none", ()  # values of a flag that is off
CONDITION = re.compile("(with|without) (--.+?): ", re.IGNORECASE)  # the beginning of a help, see `unread`


class Known(NamedTuple):
    """What is known of a flag. Its numbers are finite, and a resumed run has the value of its start, or:"""

    range: tuple = (-INF, INF, "")  # smallest and largest value, of a tuple each; these in words
    resume: str = ""  # may change; may begin: it may differ where --resume PATH begins another run
    content: str = ""  # weights or file: what it names must have the content of the start; or json
    gpu: bool = False  # it needs a GPU


FLAGS = {
    Known(content="weights"): "model critic_model reward_model teacher",
    Known(resume="may begin", content="file"): "train_files reward_fn env",
    Known(content="file"): "chat_template policy_loss adv_estimator",
    Known(content="json"): "chat_template_kwargs",
    Known(resume="may begin"): "prompt_key response_key messages_key text_key chosen_key rejected_key"
    " reward_weights",
    Known(NOT_NEGATIVE, resume="may begin"): "seed",
    Known(resume="may change"): "output_dir resume lr_schedule tracker val_files rollout_dump sp_attention"
    " packing gradient_checkpointing attn_implementation",
    Known(resume="may change", gpu=True): "offload compile liger",
    Known(COUNT, resume="may change"): "total_epochs total_steps max_tokens_per_microbatch max_gen_batches"
    " hsdp_replicas tp_size sp_size val_group_size",
    Known(NOT_NEGATIVE, resume="may change"): "lr critic_lr warmup_steps decay_steps save_freq test_freq"
    " keep_checkpoints val_temperature",
    Known(PART, resume="may change", gpu=True): "gpu_memory_utilization",
    Known(POSITIVE, resume="may change"): "env_timeout_s reward_timeout_s",
    Known(COUNT): "train_batch_size ppo_mini_batch_size ppo_epochs group_size n_samples batch_size max_length"
    " max_prompt_length max_response_length max_turns max_observation_length k reward_workers"
    " calibration_rows value_quantiles",
    Known(NOT_NEGATIVE): "max_staleness lora_rank critic_warmup weight_decay overlong_buffer temperature"
    " clip_ratio_low clip_ratio_high kl_coef kl_loss_coef nll_coef positive_nll_coef simpo_gamma"
    " desirable_weight undesirable_weight center_rewards_coef follow",
    Known(POSITIVE): "grad_clip cliprange_value lam_alpha lora_alpha beta kl_target rollout_is_threshold",
    Known(PART): "top_p",
    Known(SHARE): "gamma lam gkd_beta critic_lam uncertainty_bonus teacher_update_rate echo_coef",
    Known((0, 0.5 - 1e-9, "at least 0 and below 0.5")): "label_smoothing",
}
KNOWN = {flag: known for known, flags in FLAGS.items() for flag in flags.split()}
MODELS = [flag for flag, known in KNOWN.items() if known.content == "weights"]
HUB = {  # what an error of the hub's client means, or the first class above it that is here
    "HFValidationError": "and no name of the hub",
    "GatedRepoError": "and gated on the hub: accept the licence on its page there, then `hf auth login`",
    "RepositoryNotFoundError": "and none on the hub; a private one needs `hf auth login`",
    "HfHubHTTPError": "and the hub refuses ({error})",
    "Exception": "and the hub cannot be reached ({error})",
}


def parse(args_class, words=None, unknown=None):
    """The command line (or `words`) -> {field of `args_class`: value}; what cannot be used is one line.

    unknown: a function of {flag: value}, which says what a script does not know, or None.
    """
    words = sys.argv[1:] if words is None else words
    problem = foreign(fields(args_class), words)
    if not problem:
        flags = {}
        for group in vars(command_line(args_class, words, in_groups(args_class))).values():
            flags |= vars(group)
        idle = unread(flags, args_class)
        defaults = {field.name: field.default for field in fields(args_class)}
        problem = unusable(flags, defaults, idle)
        problem = problem or impossible({name: flags[name] for name in flags if name not in idle})
        problem = problem or (unknown and unknown(flags)) or no_model(flags)
    if problem:  # the first rank of each machine says what it lacks
        rank = os.environ.get("RANK", 0)
        raise SystemExit(1 if int(os.environ.get("LOCAL_RANK", rank)) else f"error: {problem}")
    return flags


def before_torch():
    """Keep libraries quiet, and imports quick: to be called before torch is loaded."""
    # notes on NUMA nodes, Triton and plans, on which nobody can act
    os.environ |= dict(TORCH_CPP_LOG_LEVEL="ERROR", TORCH_LOGS="-torch._library") | os.environ
    warnings.filterwarnings("ignore", category=FutureWarning)
    gc.set_threshold(50_000)  # with 700 a sixth of the imports' time is a search for garbage in what stays
    atexit.register(gc.freeze)  # the search at Python's end would take a second


def foreign(flags, words):
    """What is wrong with words of a command line that TRL or verl would read otherwise."""
    named = {field.name: field for field in flags}
    for before, word, after in zip(["", *words], words, [*words[1:], ""]):
        name, given, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        value = (value if given else after).lower()
        if name in named and named[name].default is False and value in ("true", "false"):
            extra = value.title() if value == "true" else f"--{name}"
            return f"--{name} takes no value: leave {extra} out"
        verl = re.match(r"[\w.]+=", word) and not before.startswith("--") and not Path(word).exists()
        if name in named or not (verl or word.startswith("--")):
            continue
        here = hint(name, named.keys())
        if here:
            joint = "; it is: " if here.startswith("--") else ": "
            return f"{word} is not a flag of this script{joint}{here}"


def command_line(args_class, words=None, groups=None):
    """An object of `args_class`, or of its `groups`, that is made from the command line."""
    before_torch()
    words = joined(sys.argv[1:] if words is None else words, fields(args_class))
    about = (sys.modules[args_class.__module__].__doc__ or "").partition("\n\n")[0]  # --help begins with it
    options = dict(description=about, use_underscores=True, config=(tyro.conf.OmitArgPrefixes,))
    options["console_outputs"] = os.environ.get("RANK", "0") == "0"
    try:
        return tyro.cli(groups or args_class, args=words, **options)
    except BrokenPipeError:  # PROGRAM --help | head
        os._exit(0)


def joined(words, flags):
    """The words of a command line; what follows a flag of several values is all behind its first place."""
    several = {flag.name for flag in flags if "tuple" in str(flag.type)}
    parts = {}  # words, by the flag that they follow; a flag of one value may have several parts
    part = ""
    for place, word in enumerate(words):
        name, _, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if word.startswith("--") and name in several:
            part = name
            parts.setdefault(part, [f"--{name}"])
            word = value
            if not value:
                continue
        elif word.startswith("--"):
            part = place
        parts.setdefault(part, []).append(word)
    return [word for part in parts.values() for word in part]


def in_groups(args_class):
    """A class with a dataclass for each section of `args_class`, which a comment `# ---- NAME` begins.

    They only hold values: defaults that depend on the machine need torch, which is not loaded yet.
    """
    section = Path(inspect.getfile(args_class)).stem
    sections = {}
    for line in inspect.getsource(args_class).splitlines():
        heading = re.match(r"    # ---- (.+)", line)
        flag = re.match(r"    (\w+):", line)
        if heading:
            section = heading[1]
        if flag:
            sections.setdefault(section, []).append(flag[1])
    groups = []
    for section, names in sections.items():
        body = dict(__module__=args_class.__module__, __qualname__=args_class.__qualname__)  # for comments
        body["__init__"] = lambda self, **values: vars(self).update(values)
        group = dataclass(type(args_class.__name__, (args_class,), body), init=False)
        group.__dataclass_fields__ = {name: args_class.__dataclass_fields__[name] for name in names}
        title = tyro.conf.arg(name=section)  # which may have spaces, as no field may
        groups.append((f"group_{len(groups)}", Annotated[group, title]))
    parts = make_dataclass("Groups", groups)
    parts.__module__ = args_class.__module__
    return parts


def fail(message):
    """Stop with one line. Every rank calls this at the same place; rank 0 speaks."""
    from tqdm import tqdm

    for bar in [*getattr(tqdm, "_instances", ())]:
        bar.close()  # the line is below it
    raise SystemExit(1 if int(os.environ.get("RANK", 0)) else f"error: {message}")


@contextmanager
def one_line_errors(start=""):
    """Make what libraries and users' files raise in the block one line, which ends the script."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        fail(start + " ".join(str(error).split()))


def refuse(*problems):
    """Stop at the first pair of a condition that is true and a message."""
    for wrong, message in problems:
        if wrong:
            fail(message)


def unread(values, args_class):
    """Flags of {flag: value} that have no effect, and why. A help that begins with a condition says when:

    `with --env: `, `without --text_key: `, `with --loss sigmoid or simpo: `, `with --sp_size above 1: `.
    """
    found = {}
    for name in values:
        said = CONDITION.match(get_field_docstring(args_class, name, ()) or "")
        if not said:
            continue
        word, condition = said[1].lower(), said[2]
        if holds(condition, values) != (word == "with"):
            other = "without" if word == "with" else "with"
            found[name] = f"has no effect {other} {condition}"
    return found


def holds(condition, values):
    """Whether a condition is true of {flag: value}: terms joined by `or`, and these by `and`."""
    for alternatives in condition.split(" and "):
        found = []
        for term in alternatives.split(" or "):
            if term.startswith("--"):
                flag, _, term = term.removeprefix("--").partition(" ")
            found.append(flag not in values or is_so(values[flag], term))  # a copy may lack a flag
        if not any(found):
            return False
    return True


def is_so(value, term):
    """Whether a value is on, above a number, a user's function, or this one."""
    if not term:
        return value not in OFF
    if term.startswith("above "):
        return value > float(term.removeprefix("above "))
    if term == "FILE.py:NAME":
        return any(":" in name for name in value)
    return str(value) == term


def unusable(values, defaults, idle):
    """What is wrong with a value of {flag: value}; idle: of `unread`."""
    for name, value in values.items():
        if value == () and defaults[name] is MISSING:
            return f"{name} needs at least one value"
        known = KNOWN.get(name, Known())
        low, high, words = known.range
        numbers = value if isinstance(value, tuple) else (value,)
        for number in [x for x in numbers if isinstance(x, int | float)]:
            if not math.isfinite(number):
                return f"--{name} {number} must be finite"
            if not low <= number <= high:
                return f"--{name} {number} must be {words}"
        is_off = value in OFF and known.range != SHARE  # 0 of a share is a value
        if name in idle and value != defaults[name] and not is_off:
            return f"--{name} {value} {idle[name]}"


def impossible(flags):
    """What is wrong with {flag: value} together; a rule applies where a script has all its flags."""
    return wrong_sizes(flags) or wrong_sampling(flags) or wrong_training(flags)


def wrong_sizes(flags):
    get = flags.get
    world = int(os.environ.get("WORLD_SIZE", 1))
    if "n_samples" in flags and world % get("tp_size", 1):
        return f"{world} ranks: use a multiple of --tp_size {get('tp_size')}"
    for name in ("tp_size", "hsdp_replicas", "sp_size"):
        if world % get(name, 1):
            return f"{world} ranks are not a multiple of --{name} {get(name)}"
    prompts = get("train_batch_size", 0)
    size = get("ppo_mini_batch_size") or 1
    if prompts % size:
        fits = max(n for n in range(1, size + 1) if prompts % n == 0)
        return f"--train_batch_size {prompts} is not a multiple of --ppo_mini_batch_size {size}: pass {fits}"
    budget = get("max_tokens_per_microbatch", INF)
    length = get("max_length", 2)
    ranks = get("sp_size", 1)
    row = math.ceil((get("max_prompt_length", 0) + get("max_response_length", 0)) / ranks)  # of it on a rank
    short = f"--max_tokens_per_microbatch {budget}"
    if budget < row:
        return f"{short} is less than a row, {row} tokens"
    if "chosen_key" in flags and get("loss") != "kto" and budget < 2 * length:
        return f"{short} is less than {2 * length}, twice --max_length"
    if budget * ranks < length:
        return f"{short} times --sp_size {ranks} is less than --max_length {length}"
    if length < 2:
        return f"--max_length {length} is less than two tokens"


def wrong_sampling(flags):
    get = flags.get
    schedule = get("lr_schedule", "constant")
    drops_groups = "max_gen_batches" in flags
    group_size = get("group_size", 2)
    estimator = get("adv_estimator")
    top_p = get("top_p", 1)
    if "train_batch_size" in flags and get("temperature", 1) < 0.01:
        return f"--temperature {get('temperature')}: vLLM samples at 0.01 or above"
    if top_p < 1 and (get("rollout_is") or get("rollout_rs")):
        return f"--top_p {top_p}: pass --rollout_is None and no --rollout_rs"
    if get("top_k", -1) < -1:
        return f"--top_k {get('top_k')}: use -1 (off) or a number of tokens"
    level = get("rollout_rs")
    bounds = get("rollout_rs_threshold", (1,))
    one = len(bounds) == 1 and bounds[0] >= (0 if level == "off_policy" else 1)
    two = len(bounds) == 2 and level != "off_policy" and 0 <= bounds[0] <= bounds[1]
    if level and not (one or two):
        needed = "HIGH, at least 1, or 0 <= LOW <= HIGH; with off_policy one value, at least 0"
        return f"--rollout_rs needs --rollout_rs_threshold {needed}"
    if drops_groups and group_size < 2:
        return f"--group_size {group_size}: one response has no spread, so its group would be dropped"
    if estimator in ("grpo", "dr_grpo", "rloo", "maxrl") and group_size < 2:
        return f"--adv_estimator {estimator} needs --group_size above 1: one response has no baseline"
    if estimator in ("gdpo", "reinforce_plus_plus_baseline") and group_size * get("train_batch_size", 2) < 2:
        return f"--adv_estimator {estimator} needs --group_size or --train_batch_size above 1"
    if (get("overlong_buffer") or 0) > get("max_response_length", INF):
        return f"--overlong_buffer {get('overlong_buffer')} is not within --max_response_length"
    if get("partial_rollout") and not get("max_staleness", 1):
        return "--partial_rollout needs --max_staleness of at least 1: an unfinished response is a step old"
    if drops_groups and schedule != "constant" and not get("total_steps", 1):
        return f"--lr_schedule {schedule} needs --total_steps: dropped groups make epochs end sooner"


def wrong_training(flags):
    get = flags.get
    kernel = get("attn_implementation", "sdpa")
    sp_size = get("sp_size", 1)
    if sp_size > 1 and "packing" in flags and not (get("packing") and kernel == "sdpa"):
        return f"--sp_size {sp_size} needs --packing, and --attn_implementation sdpa"
    if kernel == "flash_attention_2" and get("compute_dtype") == "float32":
        return "--attn_implementation flash_attention_2 needs --compute_dtype bfloat16"
    if get("qlora") and not find_spec("bitsandbytes"):
        return "--qlora needs bitsandbytes: pip install bitsandbytes"
    if get("liger") and not find_spec("liger_kernel"):
        return "--liger needs a GPU and Liger's kernels: pip install liger-kernel"


def no_model(values, flags=MODELS, file="config.json"):
    """What is wrong with the models of {flag: value}: directories, or names of the hub with this file."""
    for flag in flags:
        value = values.get(flag) or ()
        for name in (value,) if isinstance(value, str) else value:
            if Path(name, "adapter_config.json").is_file() and not Path(name, "config.json").is_file():
                return f"--{flag} {name}: adapters alone: merge them first, see docs/guides/lora.md"
            if "data" not in values and os.path.isdir(f"{name}/checkpoints/latest/hf"):
                return f"--{flag} {name}: a run; its model is {name}/checkpoints/latest/hf"
            from system.files import cut_file  # it imports this module

            if os.path.isdir(name) and (cut := cut_file(Path(name))):
                return f"--{flag} {name}: {cut} cannot be read whole: copy or download it again"
            import huggingface_hub as hub  # takes 0.5 s

            try:  # one request: the hub's own downloads try for 20 s
                here = os.path.isdir(name) or isinstance(hub.try_to_load_from_cache(name, file), str)
                here or hub.get_hf_file_metadata(hub.hf_hub_url(name, file))
            except Exception as error:  # of its client, or of the network
                why = next(HUB[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in HUB)
                error = " ".join(f"{type(error).__name__}: {error}".split())
                return f"--{flag} {name}: no directory here, {why.format(error=error)}"
