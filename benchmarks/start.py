"""Measures the start of training: ``python benchmarks/start.py``.

Prints tables: for each model and number of replicas the seconds of processor time of the first two
steps, without verification, and the ratio to the first row of the table. The rows of a table are
fresh models that take turns in one process. It is processor time, because other programs on the
machine change that less than the time on the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from speed.workloads import Workload


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        workload: What is trained.
        replicas: On how many replicas.
    """

    workload: Workload
    replicas: int


def normalized(depth: int, *, synchronized: bool) -> Callable[[Any], Any]:
    """Returns dense layers with batch normalization, one after the other."""

    def stack(x: Any) -> Any:
        from keras import layers

        for _ in range(depth):
            x = layers.Dense(16, use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization(synchronized=synchronized)(x))
        return x

    return stack


def transformer(blocks: int) -> Callable[[Any], Any]:
    """Returns blocks of attention and dense layers, 64 wide."""

    def stack(x: Any) -> Any:
        from keras import layers

        for _ in range(blocks):
            y = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(4, 16)(y, y)
            y = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
            x = x + layers.Dense(64)(y)
        return layers.GlobalAveragePooling1D()(x)

    return stack


def resnet50(*, synchronized: bool) -> Callable[[Any], Any]:
    """Returns the ResNet50V2 of Keras without its last layer."""

    def whole(x: Any) -> Any:
        import keras

        import tfmultigpu as tmg

        model = keras.applications.ResNet50V2(
            include_top=False, weights=None, input_shape=(32, 32, 3), pooling="avg"
        )
        return (tmg.synchronize_batch_norm(model) if synchronized else model)(x)

    return whole


def _tables() -> dict[str, list[Row]]:
    depths = [
        Row(
            Workload(f"{depth} layers, {_word(both)}", (16,), normalized(depth, synchronized=both)),
            2,
        )
        for both in (False, True)
        for depth in (10, 20, 40)
    ]
    deep = Workload("transformer of 12 blocks", (16, 64), transformer(12))
    images = [
        Row(Workload(f"ResNet50V2, {_word(both)}", (32, 32, 3), resnet50(synchronized=both)), 2)
        for both in (False, True)
    ]
    return {
        "depth": depths,
        "transformer": [Row(deep, replicas) for replicas in (1, 2, 4, 8)],
        "resnet": images,
    }


def _word(synchronized: bool) -> str:
    return "synchronized" if synchronized else "not synchronized"


def main() -> None:
    tables = _tables()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=tables, nargs="+", default=list(tables))
    asked = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tfmultigpu as tmg

    chosen = [tables[name] for name in asked.only]
    devices = tmg.split_device("CPU:0", parts=max(r.replicas for rows in chosen for r in rows))
    strategies = {
        replicas: tmg.create_strategy(devices=list(devices[:replicas]))
        for replicas in sorted({row.replicas for rows in chosen for row in rows})
    }
    seconds_of_start(Workload("warm-up", (16,), normalized(1, synchronized=False)), strategies[2])
    for rows in chosen:
        print("| model | replicas | processor time | beside the first row |\n|---|---|---|---|")
        found: list[list[float]] = [[] for _ in rows]
        for _ in range(asked.rounds):
            for row, times in zip(rows, found, strict=True):
                times.append(seconds_of_start(row.workload, strategies[row.replicas]))
        for row, times in zip(rows, found, strict=True):
            ratio = statistics.median(a / b for a, b in zip(times, found[0], strict=True))
            middle = statistics.median(times)
            title = row.workload.title
            print(f"| {title} | {row.replicas} | {middle:.1f} s | {ratio:.2f} |", flush=True)


def seconds_of_start(workload: Workload, strategy: Any) -> float:
    """Returns the processor time of the first two steps of a new model."""
    import keras

    import tfmultigpu as tmg

    with strategy.scope():
        model = workload.model()
        optimizer = keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(model, optimizer, loss, strategy, verify=False)
    batches = list(tmg.distribute_dataset(workload.arrays(64), strategy, batch_size=32))
    began = time.process_time()
    for batch in batches:
        float(step(batch)["loss"])
    return time.process_time() - began


if __name__ == "__main__":
    main()
