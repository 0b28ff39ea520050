"""Does it fit? What GRPO takes of a GPU, computed; no GPU is needed.

python benchmarks/gpu_memory.py --model Qwen/Qwen3-8B --gpu_gib 24 48 --max_response_length 4096
python benchmarks/gpu_memory.py    # the tables of docs/guides/memory.md and docs/guides/recipes.md
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from system.arguments import parse, refuse

# sizes of Qwen2.5: width, MLP, layers, heads, KV heads, vocabulary
SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "3B": (2048, 11008, 36, 16, 2, 151936),
    "7B": (3584, 18944, 28, 28, 4, 152064),
    "14B": (5120, 13824, 48, 40, 8, 152064),
    "32B": (5120, 27648, 64, 40, 8, 152064),
}
TIED = ("0.5B", "1.5B", "3B")  # their output layer is the embedding
GIB = 2**30
RANK = 16  # of LoRA
CHUNK = 1024  # tokens of system/log_probs.py
USABLE = 0.95  # of a GPU
SHARE = 0.5  # --gpu_memory_utilization
ASLEEP = 3.0  # GiB that a sleeping vLLM keeps
CACHE = 4.0  # GiB of KV cache, at least


@dataclass
class Args:
    model: str | None = None
    """Directory or hub name of a model, of which its configuration is read; None: the tables of the pages."""
    gpus: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of GPUs."""
    gpu_gib: tuple[int, ...] = (24, 48, 80)
    """Memory of a GPU, as its name has it."""
    max_prompt_length: int = 512
    """As in grpo.py."""
    max_response_length: int = 1024
    """As in grpo.py."""


@dataclass
class Model:
    """Sizes of a model, and numbers of its parameters."""

    width: int
    mlp: int  # of all experts that a token meets
    layers: int
    vocabulary: int
    block: int  # parameters of the largest block
    root: int  # of the output layer, which is gathered apart from an embedding of its own
    total: int  # of the language model
    adapters: int  # of LoRA of rank 16
    tower: int = 0  # of a vision tower, which text leaves frozen and out of the sampler
    eager_heads: int = 0  # heads of eager attention, whose scores exist


def qwen2(size):
    """Qwen2.5 by its formula."""
    h, mlp, layers, heads, kv_heads, vocabulary = SIZES[size]
    kv = h // heads * kv_heads
    block = 2 * h * h + 2 * h * kv + h + 2 * kv + 3 * h * mlp + 2 * h
    root = vocabulary * h + h
    total = layers * block + root
    if size not in TIED:
        total += vocabulary * h
    adapters = RANK * layers * (2 * (h + h) + 2 * (h + kv) + 3 * (h + mlp))
    return Model(h, mlp, layers, vocabulary, block, root, total, adapters)


QWEN = {size: qwen2(size) for size in SIZES}
# counted by `published`
RECIPES = {
    "Qwen3.5-0.8B": Model(1024, 3584, 24, 248320, 21555360, 254280704, 752393024, 10822656, tower=100592896),
    "Qwen3.5-4B": Model(2560, 9216, 32, 248320, 112923840, 635701760, 4205751296, 32464896, tower=333514240),
    "Qwen3-8B": Model(4096, 12288, 36, 151936, 192946432, 622333952, 8190735360, 43646976),
    "Gemma 3 4B": Model(2560, 10240, 34, 262208, 94382592, 671255040, 3880263168, 29802496, tower=419816304),
    "Llama 3.1 8B": Model(4096, 14336, 32, 128256, 218112000, 525340672, 8030261248, 41943040),
    "gpt-oss-20b": Model(2880, 11520, 24, 201088, 823186976, 579136320, 20914757184, 7962624, eager_heads=64),
}


def published(name):
    """A published model, its parameters counted by transformers without memory for them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    def count(module):
        return sum(p.numel() for p in module.parameters())

    config = AutoConfig.from_pretrained(name)
    text = config.get_text_config()
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(text)
    total = count(lm)
    blocks = [layer for layer in lm.modules() if type(layer).__name__ in lm._no_split_modules]
    root = total - sum(count(block) for block in blocks)
    if not text.tie_word_embeddings:
        root -= count(lm.get_input_embeddings())
    adapters = 0
    for block in blocks:
        for layer in block.modules():
            if type(layer) is torch.nn.Linear:
                adapters += RANK * (layer.in_features + layer.out_features)
    model = Model(
        width=text.hidden_size,
        mlp=text.intermediate_size * (getattr(text, "num_experts_per_tok", None) or 1),
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        block=max(count(block) for block in blocks),
        root=root,
        total=total,
        adapters=adapters,
    )
    if text is not config:
        with torch.device("meta"):
            model.tower = count(AutoModelForImageTextToText.from_config(config)) - total
    if text.model_type == "gpt_oss":
        model.eager_heads = text.num_attention_heads
    return model


def at_rest(m, gpus, lora=False):
    """Bytes of shards."""
    if lora:  # frozen weights have neither gradients nor moments, and the dtype of their files: bf16
        return (2 * m.total + 12 * m.adapters + 2 * m.tower) / gpus
    return (12 * m.total + 2 * m.tower) / gpus  # float32 weights 4, Adam's moments 8


def in_update(m, gpus, lora=False, tokens=8192, row=1536, hosted=False):
    """Bytes at the peak of an update with `tokens` a micro-batch.

    hosted: with --offload always, shards are in host memory.
    """
    largest = max(m.root, m.block)
    if lora:
        gradients = 4 * m.adapters / gpus
        peak = 2 * largest
    else:
        gradients = 4 * m.total / gpus
        # the largest unit whole: its bf16 copy 2, its gradient 2, the same in float32 to be reduced 4
        peak = 8 * largest
    if not hosted:
        peak += at_rest(m, gpus, lora) + gradients
    peak += 2 * 2 * m.block  # copies of two blocks, one gathered ahead
    # bf16 inputs of all layers, the inside of one (an estimate), its gradients
    peak += 2 * tokens * (m.layers * m.width + 12 * m.width + 6 * m.mlp)
    peak += 10 * m.eager_heads * tokens * row  # scores of a layer: bf16, and in float32 for the softmax
    peak += 2 * 4 * CHUNK * m.vocabulary  # two buffers of logits
    return peak


def verdict(m, gpus, lora=False, gpu=79.6, row=1536):
    """Flags with which GRPO fits GPUs of `gpu` GiB.

    row: tokens of the longest row, which a micro-batch must hold.
    """
    rest = at_rest(m, gpus, lora) / GIB
    usable = USABLE * gpu

    def fits(tokens, hosted):
        return in_update(m, gpus, lora, tokens, row, hosted) / GIB + ASLEEP <= usable

    hosted = not fits(max(2048, row), hosted=False)
    # a rank's part of the sampler's weights must fit its share with the cache, and the GPU at the sync
    room = usable - ASLEEP
    if not hosted:
        room -= rest
    room = min(room, SHARE * gpu - CACHE)
    ranks = [tp for tp in (1, 2, 4, 8) if tp <= gpus and 2 * m.total / GIB / tp <= room]
    budgets = [n for n in (8192, 4096, 2048) if n >= row] or [row]
    budgets = [n for n in budgets if fits(n, hosted)]
    if not ranks or not budgets:
        return "no"
    flags = []
    if ranks[0] > 1:
        flags.append(f"`--tp_size {ranks[0]}`")
    if rest + SHARE * gpu + ASLEEP > usable:
        flags.append("`--offload always`" if hosted else "`--offload sampling`")
    if budgets[0] != 8192:
        flags.append(f"`--max_tokens_per_microbatch {budgets[0]}`")
    return " ".join(flags) or "yes"


def table(models, gpus):
    """Markdown: what fits GPUs of 80 GB, for models by name.

    Numbers of GPUs above the first on which everything fits are left out, except 8.
    """
    lines = ["| Model | GPUs | At rest | In an update | On 80 GB | With LoRA |", "|---|---|---|---|---|---|"]
    for name, m in models.items():
        all_fit = False
        for n in gpus:
            if all_fit and n != 8:
                continue
            whole = verdict(m, n)
            lora = verdict(m, n, lora=True)
            rest = at_rest(m, n) / GIB
            update = in_update(m, n) / GIB
            lines.append(f"| {name} | {n} | {rest:.1f} | {update:.1f} | {whole} | {lora} |")
            all_fit = whole == lora == "yes"
    return "\n".join(lines)


def fits(args):
    """Markdown: the flags with which one model fits, for all weights and with LoRA."""
    m = published(args.model)
    row = args.max_prompt_length + args.max_response_length
    lines = [f"| GPUs | GiB each | All weights | `--lora_rank {RANK}` |", "|---|---|---|---|"]
    for n in args.gpus:
        for gib in args.gpu_gib:
            whole = verdict(m, n, False, 0.995 * gib, row)
            lora = verdict(m, n, True, 0.995 * gib, row)
            lines.append(f"| {n} | {gib} | {whole} | {lora} |")
    return "\n".join(lines)


def main(args):
    refuse((min(1, *args.gpus, *args.gpu_gib) < 1, "--gpus and --gpu_gib are numbers of at least 1"))
    if args.model:
        print(fits(args))
    else:
        print(table(QWEN, gpus=(1, 2, 4, 8, 16)), "\n")
        print(table(RECIPES, gpus=(1, 2, 4, 8)))


if __name__ == "__main__":
    main(Args(**parse(Args)))
