"""Measures what verification adds to a first step: ``python benchmarks/first_step.py``.

Prints a table: for each model the median time of a first step without and with verification, in
fresh steps taken in turns within one process, and the median of the ratios of the pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from speed.workloads import WORKLOADS, Workload, mlp

DEEP = Workload("MLP of 31 layers", (32,), mlp(32, 31))
MODELS = {"cnn": WORKLOADS["cnn"], "transformer": WORKLOADS["transformer"], "deep_mlp": DEEP}
MODELS["resnet"] = WORKLOADS["resnet"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=MODELS, nargs="+", default=list(MODELS))
    asked = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tfmultigpu as tmg

    devices = tmg.split_device("CPU:0", parts=max(asked.replicas))
    print("| model | replicas | without | with | ratio (quartiles) |\n|---|---|---|---|---|")
    for name in asked.only:
        for replicas in asked.replicas:
            strategy = tmg.create_strategy(devices=list(devices[:replicas]))
            first_step(MODELS[name], strategy, verify="first")  # Whatever is done once only.
            pairs = []
            for _ in range(asked.rounds):
                without = first_step(MODELS[name], strategy, verify=False)
                pairs.append((without, first_step(MODELS[name], strategy, verify="first")))
            print(_row(MODELS[name].title, replicas, pairs), flush=True)


def first_step(workload: Workload, strategy: Any, verify: bool | str) -> float:
    """Seconds from the call of a new step to its logs."""
    import keras

    import tfmultigpu as tmg

    with strategy.scope():
        model = workload.model()
        optimizer = keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(model, optimizer, loss, strategy, verify=verify)
    batch = next(iter(tmg.distribute_dataset(workload.arrays(64), strategy, batch_size=64)))
    began = time.perf_counter()
    float(step(batch)["loss"])
    seconds = time.perf_counter() - began
    assert not verify or step.verification.outcome == "same", step.verification
    return seconds


def _row(title: str, replicas: int, pairs: list[tuple[float, float]]) -> str:
    ratios = [after / before for before, after in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    without, with_it = (statistics.median(one) for one in zip(*pairs, strict=True))
    return (
        f"| {title} | {replicas} | {without:.2f} s | {with_it:.2f} s "
        f"| {middle:.2f} ({low:.2f} to {high:.2f}) |"
    )


if __name__ == "__main__":
    main()
