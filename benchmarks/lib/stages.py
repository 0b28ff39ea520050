"""What the demos share: stages, each a script that runs as a user would run it, in one line of the terminal.

What a script prints goes to OUT/logs. Ctrl-C stops; the same command then resumes that stage.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = dict(OMP_NUM_THREADS="1")
RANKS = torch.cuda.device_count() or min(2, os.cpu_count())  # one on each GPU
DEVICE = "GPUs" if torch.cuda.is_available() else "a CPU"
SHOWN = {"train/loss": "loss", "critic/score/mean": "score", "response_length/mean": "tokens"}
BAR = "{desc:<29}{bar:8}{n_fmt:>4}/{total_fmt} {elapsed}<{remaining}{postfix}"  # 80 columns


def command(script, *flags, ranks=0):
    """The words of a command line; one rank needs no torchrun, which would kill it 30 s after Ctrl-C."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else []), str(ROOT / script), *map(str, flags)]


def run(name, seconds, script, *flags, ranks=0, threads=ONE_THREAD, **options):
    """Run a script with its output in the terminal, and add to seconds[name] how long it took."""
    print("$", "torchrun" if ranks > 1 else "python", script, *flags, flush=True)
    begin, words = time.perf_counter(), command(script, *flags, ranks=ranks)
    if subprocess.run(words, env=os.environ | threads, **options).returncode:
        raise SystemExit(f"error: the stage {name} failed")
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin


class Stages:
    """The `total` stages of a demo in OUT; stages.json names those that are done, with their seconds."""

    def __init__(self, out, total):
        self.out, self.total, self.number, self.file = out, total, 0, out / "stages.json"
        (out / "logs").mkdir(parents=True, exist_ok=True)
        self.seconds = json.loads(self.file.read_text()) if self.file.exists() else {}

    def run(self, name, what, script, *flags, ranks=0, threads=ONE_THREAD):
        """Run a script unless its stage is done. A trainer's bar counts the steps in its metrics.jsonl."""
        self.number += 1
        title = f"[{self.number}/{self.total}] {what}"
        if name in self.seconds:
            print(f"{title:<29}done before")
            return
        flags = list(map(str, flags))
        value = lambda flag: flags[flags.index(flag) + 1] if flag in flags else None
        steps, metrics = int(value("--total_steps") or 1), Path(value("--output_dir") or "", "metrics.jsonl")
        log, begin = self.out / f"logs/{name}.log", time.perf_counter()
        with log.open("w") as output, tqdm(total=steps, desc=title, bar_format=BAR, ncols=80) as bar:
            process = subprocess.Popen(
                command(script, *flags, ranks=ranks),
                env=os.environ | threads,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which asks the script to save
            )
            try:
                while process.poll() is None:
                    time.sleep(0.5)
                    show(bar, metrics)
            except KeyboardInterrupt:
                process.send_signal(signal.SIGTERM)
                process.wait()
                bar.close()
                raise SystemExit("\nstopped; the same command resumes the demo here") from None
            if process.returncode:
                bar.close()
                print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-20:]))
                raise SystemExit(f"error: {what} failed; all that it printed is in {log}")
            show(bar, metrics)
            bar.update(steps - bar.n)
        self.seconds[name] = time.perf_counter() - begin
        self.file.write_text(json.dumps(self.seconds, indent=2))


def show(bar, metrics):
    """Move a bar to the last step in metrics.jsonl."""
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    if lines and lines[-1].endswith("}"):
        line = json.loads(lines[-1])
        bar.set_postfix({SHOWN[key]: f"{line[key]:.2g}" for key in SHOWN if key in line}, refresh=False)
        bar.update(int(line["training/global_step"]) - bar.n)
