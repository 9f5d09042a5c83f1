"""Measures what a changed number of workers costs: the save, the restart, the first step.

``python benchmarks/elastic.py`` loses a worker of two, with the launcher, and starts again with two
and with one. Each number is in seconds, of a model of 10 million parameters with AdamW.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import tempfile
import time


def train(folder: str) -> None:
    """Trains as a worker, which prints when it has come where."""
    print("AT program", time.time(), flush=True)
    import keras
    import numpy as np

    import tfmultigpu as tmg

    strategy = tmg.create_strategy()
    print("AT joined", time.time(), flush=True)
    keras.utils.set_random_seed(1)
    with strategy.scope(), tmg.strategies.explaining_lost_workers():
        dense = keras.layers.Dense
        layers = [dense(1600, "relu"), *[dense(1600, "relu") for _ in range(3)], dense(10)]
        model = keras.Sequential([keras.Input((1000,)), *layers])
        optimizer = keras.optimizers.AdamW(1e-4)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, logical_replicas=4)
    x = np.random.default_rng(0).normal(size=(512, 1000)).astype("float32")
    data = tmg.distribute_dataset((x, x[:, :10]), strategy, batch_size=32)
    checkpoints = tmg.Checkpoints(folder, train_step=step, data=data)
    restored = checkpoints.restore()
    print("AT restored", time.time(), flush=True)
    first = True
    for _ in checkpoints.epochs(1):
        for batch in checkpoints.data:
            float(step(batch)["loss"])
            checkpoints.after_step()
            if first:
                print("AT stepped", time.time(), flush=True)
                first = False
            if checkpoints.step == 4:
                began = time.time()
                checkpoints.save()
                print("SAVE", time.time() - began, flush=True)
            if checkpoints.step == 6 and restored is None and not tmg.workers.is_first():
                print("AT killed", time.time(), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    from tfmultigpu.addons.workers.launcher import launch

    for numbers in ("2", "1:2"):
        printed = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
            code = launch(__file__, ["worker", folder], workers=numbers, restarts=1, grace=40.0)
        assert code == 0, printed.getvalue()
        text = printed.getvalue()
        at = {name: float(t) for name, t in re.findall(r"AT (\w+) ([\d.]+)", text)}
        parts = [("killed", "program"), ("program", "joined"), ("joined", "restored")]
        parts.append(("restored", "stepped"))
        costs = [f"{a} to {b} {at[b] - at[a]:.1f}" for a, b in parts]
        saved = re.findall(r"SAVE ([\d.]+)", text)
        print(f"2 workers, then --workers {numbers}: save {float(saved[0]):.2f};", "; ".join(costs))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        train(sys.argv[2])
    else:
        main()
