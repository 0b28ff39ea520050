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
    lora_rank: int = 16
    """As in grpo.py, for the last column."""


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
    adapters: int  # of LoRA, of rank 16 if nothing else is said
    tower: int = 0  # of a vision tower, which text leaves frozen and out of the sampler
    eager_heads: int = 0  # heads of eager attention, whose scores exist


def qwen2(size):
    """Qwen2.5 by its formula."""
    h, mlp, layers, heads, kv_heads, vocabulary = SIZES[size]
    kv = h // heads * kv_heads
    block = 2 * h * h + 2 * h * kv + h + 2 * kv + 3 * h * mlp + 2 * h
    root = vocabulary * h + h
    total = layers * block + root + (size not in TIED) * vocabulary * h
    adapters = 16 * layers * (2 * (h + h) + 2 * (h + kv) + 3 * (h + mlp))
    return Model(h, mlp, layers, vocabulary, block, root, total, adapters)


# counted by `published`
RECIPES = {
    "Qwen3.5-0.8B": Model(1024, 3584, 24, 248320, 21555360, 254280704, 752393024, 10822656, tower=100592896),
    "Qwen3.5-4B": Model(2560, 9216, 32, 248320, 112923840, 635701760, 4205751296, 32464896, tower=333514240),
    "Qwen3-8B": Model(4096, 12288, 36, 151936, 192946432, 622333952, 8190735360, 43646976),
    "Gemma 3 4B": Model(2560, 10240, 34, 262208, 94382592, 671255040, 3880263168, 29802496, tower=419816304),
    "Llama 3.1 8B": Model(4096, 14336, 32, 128256, 218112000, 525340672, 8030261248, 41943040),
    "gpt-oss-20b": Model(2880, 11520, 24, 201088, 823186976, 579136320, 20914757184, 7962624, eager_heads=64),
}


def published(name, lora_rank=16):
    """A published model, its parameters counted by transformers without memory for them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    def count(module):
        return sum(p.numel() for p in module.parameters())

    config = AutoConfig.from_pretrained(name)
    text = config.get_text_config()
    whole = None
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(text)
        if text is not config:
            whole = AutoModelForImageTextToText.from_config(config)
    blocks = [layer for layer in lm.modules() if type(layer).__name__ in lm._no_split_modules]
    total, inside = count(lm), sum(map(count, blocks))
    linear = [layer for block in blocks for layer in block.modules() if type(layer) is torch.nn.Linear]
    return Model(
        width=text.hidden_size,
        mlp=text.intermediate_size * (getattr(text, "num_experts_per_tok", None) or 1),
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        block=max(map(count, blocks)),
        root=total - inside - (not text.tie_word_embeddings) * count(lm.get_input_embeddings()),
        total=total,
        adapters=lora_rank * sum(layer.in_features + layer.out_features for layer in linear),
        tower=count(whole) - total if whole else 0,
        eager_heads=text.num_attention_heads if text.model_type == "gpt_oss" else 0,
    )


def memory(m, gpus, lora=False, tokens=8192, row=1536, chunk=1024, hosted=False):
    """GiB at rest, at the peak of an update with `tokens` a micro-batch, and of the sampler's weights.

    hosted: with --offload always, shards are in host memory.
    """
    rest = 12 * m.total / gpus  # float32 weights 4, Adam's moments 8
    gradients = 4 * m.total / gpus
    # the largest unit whole: its bf16 copy 2, its gradient 2, the same in float32 to be reduced 4
    update = 8 * max(m.root, m.block)
    if lora:  # frozen weights have neither gradients nor moments, and the dtype of their files: bf16
        rest, gradients = (2 * m.total + 12 * m.adapters) / gpus, 4 * m.adapters / gpus
        update = 2 * max(m.root, m.block)
    rest += 2 * m.tower / gpus
    if hosted:
        rest = gradients = 0
    update += rest + gradients
    update += 2 * 2 * m.block  # copies of two blocks, one gathered ahead
    # bf16 inputs of all layers, the inside of one (an estimate), its gradients
    update += 2 * tokens * (m.layers * m.width + 12 * m.width + 6 * m.mlp)
    update += 10 * m.eager_heads * tokens * row  # scores of a layer: bf16, and in float32 for the softmax
    update += 2 * 4 * chunk * m.vocabulary  # two buffers of logits
    return rest / GIB, update / GIB, 2 * m.total / GIB


def verdict(m, gpus, lora=False, gpu=79.6, row=1536, share=0.5, asleep=3.0, cache=4.0):
    """Flags with which GRPO fits GPUs of `gpu` GiB, 5 % of it spare, if a sleeping vLLM keeps `asleep`.

    row: tokens of the longest row, which a micro-batch must hold.
    """
    rest, _, sampler = memory(m, gpus, lora)
    hosted = memory(m, gpus, lora, max(2048, row), row)[1] + asleep > 0.95 * gpu
    # a rank's part of the sampler's weights must fit its share with `cache`, and the GPU at the sync
    room = min(share * gpu - cache, 0.95 * gpu - asleep - (not hosted) * rest)
    fitting = [tp for tp in (1, 2, 4, 8) if tp <= gpus and sampler / tp <= room]
    budgets = [n for n in (8192, 4096, 2048) if n >= row] or [row]
    budgets = [n for n in budgets if memory(m, gpus, lora, n, row, hosted=hosted)[1] + asleep <= 0.95 * gpu]
    flags = [f"`--tp_size {tp}`" for tp in fitting[:1] if tp > 1]
    if rest + share * gpu + asleep > 0.95 * gpu:
        flags += [f"`--offload {'always' if hosted else 'sampling'}`"]
    flags += [f"`--max_tokens_per_microbatch {n}`" for n in budgets[:1] if n != 8192]
    return (" ".join(flags) or "yes") if fitting and budgets else "no"


def table(models=None, gpus=(1, 2, 4, 8, 16)):
    """Markdown: what fits GPUs of 80 GB, for models by name; None: the sizes of Qwen2.5.

    Numbers of GPUs above the first on which everything fits are left out, except 8.
    """
    lines = ["| Model | GPUs | At rest | In an update | On 80 GB | With LoRA |", "|---|---|---|---|---|---|"]
    for name, m in (models or {size: qwen2(size) for size in SIZES}).items():
        all_fit = False
        for n in gpus:
            if all_fit and n != 8:
                continue
            rest, update, _ = memory(m, n)
            whole, lora = verdict(m, n), verdict(m, n, True)
            lines.append(f"| {name} | {n} | {rest:.1f} | {update:.1f} | {whole} | {lora} |")
            all_fit = whole == lora == "yes"
    return "\n".join(lines)


def fits(args):
    """Markdown: the flags with which one model fits, for all weights and with LoRA."""
    m, row = published(args.model, args.lora_rank), args.max_prompt_length + args.max_response_length
    lines = [f"| GPUs | GiB each | All weights | `--lora_rank {args.lora_rank}` |", "|---|---|---|---|"]
    for n in args.gpus:
        for gib in args.gpu_gib:
            both = (verdict(m, n, lora, 0.995 * gib, row) for lora in (False, True))
            lines.append(f"| {n} | {gib} | {' | '.join(both)} |")
    return "\n".join(lines)


def main(args):
    refuse((min(1, *args.gpus, *args.gpu_gib) < 1, "--gpus and --gpu_gib are numbers of at least 1"))
    if args.model:
        print(fits(args))
    else:
        print(table(), "\n")
        print(table(RECIPES, gpus=(1, 2, 4, 8)))


if __name__ == "__main__":
    main(Args(**parse(Args)))
