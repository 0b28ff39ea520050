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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.workload import command, markdown, read_metrics

RANKS = torch.cuda.device_count() or min(2, os.cpu_count())  # one on each GPU
DEVICE = "GPUs" if torch.cuda.is_available() else "a CPU"
SHOWN = {"train/loss": "loss", "critic/score/mean": "score", "response_length/mean": "tokens"}
BAR = "{desc:<29}{bar:8}{n_fmt:>4}/{total_fmt} {elapsed}<{remaining}{postfix}"  # 80 columns


class Stages:
    """The `total` stages of a demo in OUT; stages.json names those that are done, with their seconds."""

    def __init__(self, out, total):
        self.out = out
        self.total = total
        self.number = 0
        self.file = out / "stages.json"
        (out / "logs").mkdir(parents=True, exist_ok=True)
        self.seconds = {}
        if self.file.exists():
            self.seconds = json.loads(self.file.read_text())

    def run(self, name, title, words, ranks=1, threads=1, steps=1):
        """Run a script, the first of the words, unless its stage is done; threads=0: torch's own number."""
        self.number += 1
        title = f"[{self.number}/{self.total}] {title}"
        if name in self.seconds:
            print(f"{title:<29}done before")
            return
        env = dict(os.environ)
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        log = self.out / f"logs/{name}.log"
        begin = time.perf_counter()
        with log.open("w") as output, tqdm(total=steps, desc=title, bar_format=BAR, ncols=80) as bar:
            process = subprocess.Popen(
                command(words[0], words[1:], ranks),
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which asks the script to save
            )
            try:
                while process.poll() is None:
                    time.sleep(0.5)
                    self.show(bar, name)
            except KeyboardInterrupt:
                process.send_signal(signal.SIGTERM)
                process.wait()
                bar.close()
                raise SystemExit("\nstopped; the same command resumes the demo here") from None
            if process.returncode:
                bar.close()
                print("\n".join(log.read_text(errors="replace").splitlines()[-20:]))
                raise SystemExit(f"error: {name} failed; all that it printed is in {log}")
            self.show(bar, name)
            bar.update(steps - bar.n)
        self.seconds[name] = time.perf_counter() - begin
        self.file.write_text(json.dumps(self.seconds, indent=2))

    def train(self, name, title, words, steps, **how):
        """Run a trainer in OUT/NAME."""
        words = words + ["--output_dir", self.out / name, "--total_steps", steps]
        self.run(name, title, words, steps=steps, **how)

    def show(self, bar, name):
        """Move a bar to the last step of a run."""
        metrics = self.out / name / "metrics.jsonl"
        if not metrics.is_file():
            return
        for line in read_metrics(metrics.parent)[-1:]:
            shown = {short: f"{line[key]:.2g}" for key, short in SHOWN.items() if key in line}
            bar.set_postfix(shown, refresh=False)
            bar.update(int(line["training/global_step"]) - bar.n)

    def answer(self, name, run, words):
        """Let the model of a run answer the held-out questions."""
        files = ["--model", self.out / run, "--data", self.out / "data/test.parquet"]
        files += ["--output", self.out / run / "test.parquet"]
        self.run(f"answers_{run}", f"answers {name}", ["algos/generate.py"] + files + words)

    def scores(self, runs):
        """The accuracy of the answers of each run."""
        files = [self.out / run / "test.parquet" for run in runs]
        self.run("eval", "score", ["algos/eval.py", "--output", self.out / "eval", "--data"] + files)
        results = json.loads((self.out / "eval/results.json").read_text())
        return [file["all"]["mean@1"] for file in results.values()]

    def finish(self, title, results):
        """Show and save {name: {column: share}}."""
        (self.out / "summary.json").write_text(json.dumps(results, indent=2) + "\n")
        rows = []
        for name, shares in results.items():
            rows.append([name] + [f"{share:.1%}" for share in shares.values()])
        print(f"\n{markdown([title] + list(shares), rows)}\n")
        print(f"all in {self.out}: summary.json, a picture, logs")


def curve(out, key):
    """(steps, values) of the lines of a run that have a metric."""
    lines = [line for line in read_metrics(out) if key in line]
    return [line["training/global_step"] for line in lines], [line[key] for line in lines]


def draw(axes, out, key, label, style):
    """A metric over the steps of a run."""
    axes.plot(*curve(out, key), style, label=label, markersize=4)
    axes.grid(alpha=0.3)
    axes.legend()
