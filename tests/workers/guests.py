"""Each trainer with a plain reward and with one that changes its process: MODEL DATA OUT NAME...

Samplers are made up, as in statements.py; paths of runs are relative to OUT.
"""

import os
import signal
import sys

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from envs.pool import EnvPool
from tests.workers import statements

REWARD = f"{sys.path[0]}/tests/guest_reward.py"
KINDS = dict(calm="before calm calm_too also_calm after", bad="before score score_async score_group after")


def main(model, data, out, *names):
    statements.alone(model)
    os.chdir(out)
    for name in names:
        script = statements.without_sampler(name)
        if name == "agent":
            script.EnvPool = EnvPool
        for kind, rewards in KINDS.items():
            words = f"--model {model} --train_files {data} --val_files {data} --output_dir {name}/{kind}"
            words += (
                f" --train_batch_size 4 --total_steps 3 --save_freq 1 --test_freq 1 {statements.FLAGS[name]}"
            )
            words = words.replace("MODEL", model)
            words += f" --reward_fn {' '.join(f'{REWARD}:{x}' for x in rewards.split())}"
            if name in ("grpo", "agent"):
                words += f" --policy_loss {REWARD}:{kind}_loss --adv_estimator {REWARD}:{kind}_adv"
            if name == "agent":
                words = words.replace("--env none", f"--env {REWARD}:Env")
            script.main(script.Args(**script.parse(script.Args, words.split())))
            assert signal.getsignal(signal.SIGTERM).__name__ == "on_signal"
    print("same process", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
