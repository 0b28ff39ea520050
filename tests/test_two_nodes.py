"""Two agents of torchrun on this machine, a rank each, find each other and compute what one with two does."""

import socket
import subprocess
import sys

import psutil
import pytest
from conftest import ROOT, environment, metrics, python, run

FILES = "--train_files {0}/train.parquet --total_steps 1 --save_freq 0 --train_batch_size 8"
RL = " --ppo_mini_batch_size 4 --max_prompt_length 16 --max_response_length 12"
RL += " --reward_fn {1}/tests/digit_reward.py:digits"


def two_nodes(*command):
    """Run a script under two agents with a rendezvous -> both ended well."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    agent = [*python(), "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    agent += f"--rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:{port} --rdzv_id=two".split()
    command = [*agent, "--local_addr=127.0.0.1", *map(str, command)]
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    nodes = [subprocess.Popen(command, env=environment(), **output) for _ in "ab"]
    texts = [node.communicate()[0].decode() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(texts)[-8000:]
    return "".join(texts)


# with and without a sampler; what knows of nodes is in regions that all trainers have
@pytest.mark.parametrize(("algo", "flags"), [("sft", " --max_length 32"), ("grpo", RL)])
def test_two_nodes_equal_one_with_two_ranks(algo, flags, tiny, arithmetic, tmp_path):
    words = (FILES + flags).format(arithmetic, ROOT).split()
    script = ROOT / f"algos/{algo}.py"
    done = run(script, "--model", tiny, "--output_dir", tmp_path / "one", *words, ranks=2)
    texts = two_nodes(script, "--model", tiny, "--output_dir", tmp_path / "two", *words)
    one, two = (metrics(tmp_path / name)[1] for name in ("one", "two"))
    kept = {k: v for k, v in one.items() if not k.startswith(("timing", "perf"))}
    assert {k: two[k] for k in kept} == pytest.approx(kept, rel=1e-6, abs=1e-6)
    cores = psutil.cpu_count(logical=False) or 0  # each rank has one thread
    assert ("cores idle" in done.stdout, "cores idle" in texts) == (cores > 2, cores > 1)


LEAVES = """
import atexit, sys
sys.path.insert(0, sys.argv[1])
from algos import sft
from system import ranks
class AtTheEndOfPython:
    def __del__(self):
        print("Python ends")
kept = AtTheEndOfPython()
atexit.register(print, "libraries end")
sft.setup_distributed(1)
print("trained")
ranks.leave()
"""


def test_leave_skips_the_end_of_python():
    """There a thread of gloo that still held a tensor took a node down, after all was saved."""
    done = subprocess.run([sys.executable, "-c", LEAVES, ROOT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "trained\nlibraries end\n"), done.stderr
