"""What a GPU's time and memory need: layers that are recomputed or compiled, and a move to the host."""

from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

OPS = torch.ops.aten
KEPT = [  # with --gradient_checkpointing selective: 6.1 FLOPs a weight and token in place of 7.4
    OPS.mm.default,
    OPS.addmm.default,
    OPS._grouped_mm.default,  # experts
    OPS._scaled_dot_product_flash_attention.default,
    OPS._scaled_dot_product_efficient_attention.default,
    OPS._scaled_dot_product_cudnn_attention.default,
    OPS._scaled_dot_product_flash_attention_for_cpu.default,
]


def kept_products():
    """Contexts of a layer's forward pass and of the second one: products and attention are kept."""
    from torch.nn.attention import varlen  # noqa: F401 - registers its operator

    return create_selective_checkpoint_contexts([*KEPT, torch.ops.torch_attn._varlen_attn.default])


def prepare_layers(lm, recompute, compiled=False, eager=(), **compiler):
    """Replace the forward of each layer by one that recomputes, and compiles; compiler: of torch.compile.

    recompute: full, selective or none, as --gradient_checkpointing says. eager: layers that are not compiled.

    It is inside FSDP's hooks: weights are gathered before a layer and before its backward pass, not for
    the second forward pass in that. A compiled layer contains its checkpoint, as in torchtitan:
    the compiler must see what is kept. All layers of a kind share one graph.
    """
    options = dict(use_reentrant=False, preserve_rng_state=False)  # there is no dropout
    if recompute == "selective":
        options["context_fn"] = kept_products
    for layer in lm.modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        run = layer.forward
        if recompute != "none":
            run = checkpointed(run, options)
        if compiled and layer not in eager:
            run = torch.compile(run, fullgraph=True, dynamic=True, **compiler)
        layer.forward = run


def checkpointed(run, options):
    def forward(*inputs, **named):
        return checkpoint(run, *inputs, **options, **named)

    return forward


def compute_device():
    """Where this process computes; with --offload always its weights are in host memory."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def unused_gpu():
    """A line about a GPU of this machine that torch does not use; empty: there is none, or it does."""
    if torch.cuda.is_available() or not any(Path("/dev").glob("nvidia[0-9]*")):
        return ""
    return f"this machine has a GPU, which torch {torch.__version__} cannot use: see docs/start/install.md"


def send(x, device=None):
    """A tensor on a device, or on `compute_device`; from pinned memory, which waits for no GPU."""
    if not torch.is_tensor(x):
        return x
    device = torch.device(device) if device else compute_device()
    if device.type == "cpu" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def move(device, models, optimizer):
    """Move shards and optimizer state between GPU and pinned host memory."""

    def moved(x):
        x = x.to(device, non_blocking=True)
        if torch.cuda.is_available():  # CAREFUL: FSDP copies a shard of another size at once, on the host
            torch.cuda.synchronize()
        return x

    for model in models:
        model._apply(moved)
    for state in optimizer.state.values():
        state |= {k: moved(x) for k, x in state.items() if x.dim()}
    torch.cuda.empty_cache()
