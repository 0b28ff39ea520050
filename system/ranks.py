"""The processes of torchrun: joining them, sums over all of them, and their common end."""

import atexit
import os
import sys
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from system.arguments import fail
from system.cpu import keep_freed_memory
from system.gpu import compute_device, unused_gpu
from system.plugins import let_go

TIMEOUT_S = 3600  # seconds that a rank waits for the others


def setup_distributed(hsdp_replicas=1):
    """Join the processes of torchrun, or run alone -> the device of this rank and the FSDP mesh."""
    if "RANK" not in os.environ:  # plain `python`: a world of one
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # CAREFUL: torchrun keeps its store over restarts, with addresses of dead ranks (pytorch 135712)
    new_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and not os.environ.get(new_store):
        fail(f"--max-restarts: set {new_store}=1 for torchrun on each node")
    cuda = torch.cuda.is_available()
    if cuda:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        gpus = torch.cuda.device_count()
        if here > gpus:
            fail(f"{here} ranks on a machine with {gpus} GPUs: --nproc_per_node {gpus}")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
    timeout = timedelta(seconds=TIMEOUT_S)
    c10d = dist.distributed_c10d
    c10d.default_pg_timeout = timeout  # for subgroups
    c10d.default_pg_nccl_timeout = timeout
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    shape = (hsdp_replicas, dist.get_world_size() // hsdp_replicas)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    if hsdp_replicas == 1:
        mesh = mesh["shard"]
    return device, mesh


def sum_over_ranks(sums):
    """{name: scalar tensor of this rank} -> {name: sum over all ranks}."""
    totals = all_reduce(torch.stack(list(sums.values())).tolist())
    return dict(zip(sums, totals))


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Reduce a list of numbers over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op)
    return total.tolist()


def of_first(value):
    """An object that the first rank has, on all ranks."""
    values = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def leave(code=0):
    """End the process together with the other ranks: the last call of a script."""
    # Python's own end would abort if a thread of gloo still has a tensor (pytorch PR 179291)
    dist.barrier()
    let_go()
    atexit._run_exitfuncs()  # of libraries: W&B sends its last metrics in one
    sys.stdout.flush()
    os._exit(code)


def ranks_on(lm):
    """A run's first lines: how many ranks on what, and what they train."""
    ranks = dist.get_world_size()
    device = compute_device().type
    text = f"{ranks} rank{'s' * (ranks > 1)} on {device}"
    here = ranks // int(os.environ.get("GROUP_WORLD_SIZE", 1))  # vLLM replaces LOCAL_WORLD_SIZE on a CPU
    busy = here * torch.get_num_threads()
    cores = psutil.cpu_count(logical=False) or busy  # unknown on some machines
    idle = cores - busy
    if device == "cpu" and idle > 0:
        remedy = f"OMP_NUM_THREADS={cores // here} or --nproc_per_node {cores}"
        text += f", {idle} of {cores} cores idle: {remedy}"
    if unused_gpu():
        text += f"\nwarning: {unused_gpu()}"

    weights = sum(p.numel() for p in lm.parameters())
    trained = 0
    layers = set()  # with LoRA
    for name, p in lm.named_parameters():
        if not p.requires_grad:
            continue
        trained += p.numel()
        layer, lora, _ = name.partition(".lora_")
        if lora:
            layers.add(layer.rpartition(".")[2])
    part = f"{trained / 1e6:.3g}M of {weights / 1e6:.4g}M"
    if layers:
        return f"{text}\nLoRA trains {part} weights: {' '.join(sorted(layers))}"
    return f"{text}\ntrains {part} weights"
