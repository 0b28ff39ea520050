"""The benchmarks still run with the trainers as they are: the smallest sizes of some of them."""

import json
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run

from benchmarks import peer, race
from benchmarks.experiments import off_policy, off_policy_worker
from benchmarks.lib import driver_worker
from benchmarks.lib.stages import Stages


def test_throughput(tiny, tmp_path):
    """A step has its parts, and the raw forward and backward as the limit of its update."""
    sizes = "--algo sft --prompts 2 --prompt_length 16 --response_length 8 --rounds 1 --steps 1".split()
    script = ROOT / "benchmarks/throughput.py"
    out = tmp_path / "x.json"
    run(script, "--model", tiny, *sizes, "--output", out)
    [result] = json.loads(out.read_text())["rounds"]
    assert set(result["limits_s"]) == {"update_actor"} and result["overhead"] > 0


def test_startup(tmp_path):
    """A trainer's first step comes before its end; with a tool both are the same."""
    script = ROOT / "benchmarks/startup.py"
    out = tmp_path / "x.json"
    run(script, "--scripts", "algos/sft", "algos/report", "--rounds", 1, "--output", out)
    seconds = json.loads(out.read_text())["seconds"]
    [sft], [report] = (seconds[f"algos/{name}"]["now"] for name in ("sft", "report"))
    assert 0 < sft["first_cpu_s"] <= sft["end_cpu_s"]
    assert 0 < report["first_cpu_s"] == report["end_cpu_s"]


def test_stages(tmp_path, capfd):
    """A stage is a line, what it prints is in a file, and a stage that is done is not run again."""
    data = "data_prep/arithmetic.py", "--local_save_dir", tmp_path / "data", "--train_size", 20
    Stages(tmp_path, 1).run("data", "the data", *data)
    out, err = capfd.readouterr()
    assert out == "" and "[1/1] the data" in err and "1/1" in err
    assert "train.parquet: 20 rows" in (tmp_path / "logs/data.log").read_text()
    assert list(json.loads((tmp_path / "stages.json").read_text())) == ["data"]
    written = (tmp_path / "data/train.parquet").stat().st_mtime_ns
    again = Stages(tmp_path, 2)
    again.run("data", "the data", *data)
    assert capfd.readouterr().out.split() == ["[1/2]", "the", "data", "done", "before"]
    assert (tmp_path / "data/train.parquet").stat().st_mtime_ns == written
    with pytest.raises(SystemExit, match=r"error: more failed; all that it printed is in .*more\.log"):
        again.run("more", "more", *data, "--digits", 99)
    assert "--digits is 99" in capfd.readouterr().out


STOPPED = """
import os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from benchmarks.lib.stages import Stages
out, script = Path(sys.argv[1]), sys.argv[2]
def stop():
    while not (out / "run/metrics.jsonl").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
threading.Thread(target=stop, daemon=True).start()
Stages(out, 1).run("train", "train", script, "--output_dir", out / "run", "--total_steps", 3)
"""
TRAINER = """
import signal, sys, time
from pathlib import Path
out, stop = Path(sys.argv[2]), []
signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
out.mkdir()
(out / "metrics.jsonl").write_text('{"training/global_step": 1}\\n')
while not stop:
    time.sleep(0.05)
(out / "saved").touch()
"""


def test_a_stage_saves_at_control_c(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    done = run("-c", STOPPED, tmp_path, tmp_path / "trainer.py", ROOT, check=False)
    assert "stopped; the same command resumes the demo here" in done.stderr
    assert (tmp_path / "run/saved").exists() and not (tmp_path / "stages.json").exists()


def test_driver_on_two_ranks(tiny, tmp_path):
    """A step has its parts, a start its rows; both take time, and a step's sum is that of its parts."""
    script = ROOT / "benchmarks/driver.py"
    out = tmp_path / "x.json"
    sizes = "--sizes 4 2 50 --ranks 2 --prompts 50 --dialogues".split()
    run(script, "--model", tiny, *sizes, "--output", out)
    result = json.loads(out.read_text())
    [parts], [start] = (step["parts"] for step in result["steps"]), result["starts"]
    assert {"gen", "gen to reward", "reward", "adv", "old_log_prob", "update_actor"} < parts.keys()
    (wall, cpu, _), (device, *_) = parts.pop("step"), parts.pop("of it on the device")
    assert cpu > 0 and 0 < device < wall
    for total, end in ((wall, ""), (device, "on the device")):  # the longest of each part over the ranks
        assert total <= sum(w for name, (w, _, _) in parts.items() if name.endswith(end))
    assert all(start[cache]["peak"][0] > 0 < start[cache]["held"][2] for cache in ("cold", "warm"))


def test_driver_sampler():
    """The same slice of the text for a seed, within its limit."""
    engine = driver_worker.Engine(driver_worker.Clock(), range(9), barrier=None)
    params = [SimpleNamespace(seed=seed, max_tokens=40) for seed in range(30)]
    at_once = [engine.answer(str(i), {}, p) for i, p in enumerate(params)]
    for i, p in enumerate(params):
        engine.add_request(str(i), {}, p)
    one_by_one = {}
    while engine.has_unfinished_requests():
        one_by_one |= {int(done.request_id): done for done in engine.step()}
    assert [one_by_one[i].outputs for i in range(30)] == [done.outputs for done in at_once]
    ids = [done.outputs[0].token_ids for done in at_once]
    assert all(b == (a + 1) % 9 for part in ids for a, b in pairwise(part)) and len({x[0] for x in ids}) > 3
    lengths = [len(done.outputs[0].token_ids) for done in at_once]
    assert 5 < sum(lengths) / 30 < 15 and max(lengths) <= 40


def test_rounded():
    rows = torch.tensor([[127, -63.6, 0.4], [0, 0, 0], [-2.54, 0.03, 0.011]])
    expected = torch.tensor([[127, -64, 0], [0, 0, 0], [-2.54, 0.04, 0.02]])
    assert torch.allclose(off_policy_worker.rounded(rows, "int8"), expected)
    rows = torch.tensor([[448.0, 17.2, -0.0011], [0, 0, 0]])  # steps of 2 at 16, of 2^-9 at 0
    expected = torch.tensor([[448, 18, -0.001953125], [0, 0, 0]])
    assert torch.allclose(off_policy_worker.rounded(rows, "fp8"), expected)
    assert off_policy_worker.rounded(rows.bfloat16(), "int8").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("lag", "noise", "expected"),
    [(2, None, [0.3, 0.3, 0.3, 2.3, 0.3, 1.3, 4.3, 2.3]), (0, "int8", [0.3, 0, 1, 2.3, 2, 3, 4.3, 4])],
)
def test_off_policy_samples_with_older_or_rounded_weights(lag, noise, expected):
    """Validation, which comes first in steps 0, 2 and 4, has the current weights."""
    lm = torch.nn.Linear(2, 1, bias=False)
    synced = []
    run = type("Run", (), dict(log=lambda self, *args, **shown: None))
    sync = lambda engine, lm, args: synced.append(lm.weight[0, 1].item())
    algo = SimpleNamespace(sync_weights=sync, Run=run, families=SimpleNamespace())
    off_policy_worker.change_sampler(algo, lag, noise, training=False)
    for step in range(5):
        lm.weight.data.copy_(torch.tensor([[127.0, step + 0.3]]))
        if step % 2 == 0:
            algo.sync_weights(None, lm, None)
        algo.Run().log({})
        algo.sync_weights(None, lm, None)
        assert lm.weight[0, 1].item() == pytest.approx(step + 0.3)
    assert synced == pytest.approx(expected)


def test_off_policy_reports_the_runs_that_are_there(tmp_path, capsys):
    line = {off_policy.ACCURACY: 0.5, "critic/score/mean": 0.25, "training/rollout_logp_diff_mean": 0.125}
    runs = dict(clip_token_IS_4_int8_1=0.5, clip_token_IS_4_int8_2=0.75, cispo_none_0_None_1=0)
    for name, accuracy in runs.items():
        (folder := tmp_path / "out" / name).mkdir(parents=True)
        text = json.dumps(line | {off_policy.ACCURACY: accuracy})
        (folder / "metrics.jsonl").write_text("{}\n" + text)
        if accuracy:  # the third was killed
            (folder / "done").touch()
    (tmp_path / "summary.json").write_text(json.dumps(dict(accuracy_before=0.4)))
    args = off_policy.Args(demo=tmp_path, output_dir=tmp_path / "out", dry=True)
    off_policy.main(args)
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert [x["accuracy"] for x in found["clip token IS 4 int8"]] == [0.5, 0.75] and len(found) == 3
    assert "62.5% (50% to 75%), 2" in capsys.readouterr().out and (tmp_path / "out/off_policy.png").exists()


def test_time_to_an_accuracy():
    """Between two points time goes as accuracy does; what is never reached or was there before has none."""
    curve = [(10, 60.0, 1e3, 0.4), (20, 120.0, 2e3, 0.3), (30, 180.0, 3e3, 0.6)]
    assert race.until(curve, 0.3, start=0.2) == pytest.approx(30)
    assert race.until(curve, 0.5, start=0.2) == pytest.approx(160)
    assert race.until(curve, 0.7, start=0.2) is race.until(curve, 0.2, start=0.2) is None


def test_race_is_of_equal_work():
    """Both sides sample --prompts groups a step, also with two processes; what cannot be so is refused."""
    value = lambda flags, name: int(flags[len(flags) - 1 - flags[::-1].index(f"--{name}") + 1])
    for size, group in (("tiny", 16), ("smollm2", 8)):
        for ranks in (1, 2):
            args = race.Args(size=size, prompts=8, ranks=(ranks,))
            race.check(args)
            ours, trl = (race.command(args, x, ranks, 1e-5, 1, 2, 2, "out")[1] for x in (race.OURS, "TRL"))
            assert value(ours, "train_batch_size") == value(ours, "ppo_mini_batch_size") == 8
            rows = ranks * value(trl, "per_device_batch") * value(trl, "accumulation")
            assert rows == 8 * group and value(trl, "group_size") == group
    for wrong in (dict(prompts=5), dict(tune_steps=5), dict(steps=15)):
        with pytest.raises(SystemExit, match=r"^error: "):
            race.check(race.Args(size="smollm2", **wrong))


def test_rates_of_a_race(tmp_path, monkeypatch):
    """Each side takes the best of --lrs by its mean; trials of another race stand in, and need no steps."""
    right = {(race.OURS, 1e-5): (0.5, 0.1), (race.OURS, 2e-5): (0.3, 0.5)}
    right |= {("TRL", 1e-5): (0.2, 0.4), ("TRL", 2e-5): (0.3, 0.1)}
    runs = []

    def trial(args, name, ranks, lr, seed, steps, save_freq):
        runs.append((name, ranks, lr, seed, steps))
        return [(5, 1.0, 1.0, 0.0), (10, 2.0, 2.0, right[name, lr][seed - 3])]

    monkeypatch.setattr(race, "race", trial)
    names = (race.OURS, "TRL", "TRL, vLLM")
    file = tmp_path / "race.json"
    trials, best = race.tune(race.Args(lrs=(1e-5, 2e-5), seeds=(3, 4)), names)
    assert runs == [(name, 2, lr, seed, 10) for name, lr in right for seed in (3, 4)]
    assert trials == {race.OURS: {1e-5: 0.3, 2e-5: 0.4}, "TRL": {1e-5: pytest.approx(0.3), 2e-5: 0.2}}
    assert best == {race.OURS: 2e-5, "TRL": 1e-5, "TRL, vLLM": 1e-5}
    file.write_text(json.dumps(dict(trials=trials)))
    args = race.Args(trials=file, tune_steps=7)
    race.check(args)
    assert race.tune(args, names) == (trials, best) and len(runs) == 8
    file.write_text(json.dumps(dict(trials={race.OURS: trials[race.OURS]})))
    with pytest.raises(SystemExit, match=r"^error: --trials .* has none of TRL: "):
        race.tune(args, names)


def test_steps_of_a_race(tmp_path, monkeypatch):
    """GRPO here runs --longer times the steps of the others."""

    def launch(script, *flags, ranks):
        started[script] = flags[flags.index("--total_steps") + 1]
        out = flags[flags.index("--output_dir") + 1]
        out.mkdir()
        (out / "curve.json").write_text("[]")

    started = {}
    monkeypatch.setattr(race, "launch", launch)
    args = race.Args(output_dir=tmp_path, longer=3)
    for name in (race.OURS, "TRL"):
        race.race(args, name, 1, 1e-5, 1, 10, 5)
    assert started == {"algos/grpo.py": 30, "benchmarks/lib/peer_trl.py": 10}


def test_table_of_peers(tmp_path, monkeypatch, capsys):
    """Ratios are of one round each; a trainer that logs no loss has none in the table."""
    seconds = iter((1.0, 2.0, 3.0, 2.0, 3.0, 5.0))
    names = "step_s", "step_cpu_s", "ms_per_token", "cpu_ms_per_token", "peak_memory_gb"
    measure = lambda *_: dict.fromkeys(names, next(seconds)) | dict(first_loss=None)
    for name in ("make_model", "make_rows", "trl"):
        monkeypatch.setattr(peer, name, lambda *_: None)
    monkeypatch.setattr(peer, "ours", lambda *_: (None, []))
    monkeypatch.setattr(peer, "measure", measure)
    words = "peer.py --model tiny --rounds 2 --output"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(out := tmp_path / "x.json")])
    peer.main()
    ratios = json.loads(out.read_text())["ratios"]
    assert ratios["TRL, 1 rank"] == [[2.0, 1.5]] * 2 and ratios["TRL, vLLM, 1 rank"] == [[3.0, 2.5]] * 2
    assert "1.75" in capsys.readouterr().out


def test_exact_compares_each_part(tiny):
    """Sampler and trainer, part by part: in float32 they are as near as rounding, and the norms are equal."""
    sizes = "--model", tiny, "--dtype", "float32", "--tokens", 40
    lines = run(ROOT / "benchmarks/exact.py", *sizes).stdout.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {part for part, compared, *_ in rows if compared == "sampler, trainer"} == {
        *("linear", "RMSNorm", "addition", "addition and RMSNorm", "rotary embedding", "SwiGLU"),
        *("output layer", "log-probs", "attention"),
    }
    assert all((equal == "yes") == (float(gap) == 0) and float(gap) < 1e-4 for *_, equal, gap, _ in rows)
    assert {row[2] for row in rows if row[:2] == ["SwiGLU", "sampler, trainer"]} == {"yes"}
