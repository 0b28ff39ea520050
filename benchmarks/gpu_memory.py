"""GiB that GRPO takes of a GPU, by size of the model and number of GPUs: the table of docs/guides/memory.md.

python benchmarks/gpu_memory.py
"""

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


def parameters(size):
    """Of a block, of what is in no block (embedding, output layer), and of all."""
    h, mlp, layers, heads, kv_heads, vocabulary = SIZES[size]
    kv = h // heads * kv_heads
    block = 2 * h * h + 2 * h * kv + h + 2 * kv + 3 * h * mlp + 2 * h
    root = (1 if size in TIED else 2) * vocabulary * h + h
    return block, root, layers * block + root


def memory(size, gpus, tokens=8192, chunk=1024):
    """At rest; at the peak of an update with `tokens` a micro-batch; the sampler's weights, all of them."""
    h, mlp, layers, *_, vocabulary = SIZES[size]
    block, root, total = parameters(size)
    rest = 12 * total / gpus  # float32 weights 4, Adam's moments 8
    update = rest + 4 * total / gpus  # gradients
    # the largest unit whole: its bf16 copy 2, its gradient 2, the same in float32 to be reduced 4
    update += 8 * max(root, block)
    update += 2 * 2 * block  # copies of two blocks, one gathered ahead
    # bf16 inputs of all layers, the inside of one (an estimate), its gradients
    update += 2 * tokens * (layers * h + 12 * h + 6 * mlp)
    update += 2 * 4 * chunk * vocabulary  # two buffers of logits
    return rest / GIB, update / GIB, 2 * total / GIB


def table(gpu=79.6, share=0.5, asleep=3.0, cache=4.0):
    """Markdown: what fits a GPU of `gpu` GiB, 5 % of it spare, if a sleeping vLLM keeps `asleep`."""
    lines = ["| Model | GPUs | At rest | In an update | On 80 GB |", "|---|---|---|---|---|"]
    for size in SIZES:
        for gpus in (1, 8, 16):
            rest, update, sampler = memory(size, gpus)
            # a rank's part of the sampler's weights and at least `cache` must fit the sampler's share
            fitting = [tp for tp in (1, 2, 4, 8) if tp <= gpus and sampler / tp + cache <= share * gpu]
            flags = [f"`--tp_size {tp}`" for tp in fitting[:1] if tp > 1]
            flags += ["`--offload`"] if rest + share * gpu + asleep > 0.95 * gpu else []
            fits = fitting and update + asleep <= 0.95 * gpu
            verdict = (" ".join(flags) or "yes") if fits else "no"
            lines.append(f"| {size} | {gpus} | {rest:.1f} | {update:.1f} | {verdict} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
