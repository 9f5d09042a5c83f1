"""How the cost of a step grows, and that of tracing it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from speed.contenders import STEPS_PER_CALL, Contender
from speed.measure import take_turns, virtual_cpus
from speed.workloads import WORKLOADS, Workload, mlp

__all__ = ["SERIES", "measure_series", "measure_tracing"]

_MOST_REPLICAS = 8
_DEEP = (4, 16, 31)
_MANY_ROWS = 2048


def _series() -> dict[str, list[tuple[int, Workload, int, dict[str, Any]]]]:
    """For each series: the value on the axis, the workload, replicas, options of the step."""
    middle = Workload("MLP", (256,), mlp(256))
    cnn = WORKLOADS["cnn"]
    return {
        "replicas": [(n, middle, n, {}) for n in (1, 2, 4, 8)],
        "parameters": [
            (width, dataclasses.replace(middle, layers=mlp(width)), 2, {})
            for width in (64, 256, 1024)
        ],
        "batch": [
            (rows, dataclasses.replace(cnn, batch_size=rows), 2, {}) for rows in (16, 64, 256, 1024)
        ],
        "micro_batches": [
            (count, dataclasses.replace(cnn, batch_size=_MANY_ROWS), 2, {"micro_batches": count})
            for count in (1, 2, 4, 8, 16)
        ],
        "micro_batches_of_few_rows": [
            (count, cnn, 2, {"micro_batches": count}) for count in (1, 2, 4, 8)
        ],
    }


SERIES = tuple(_series())


def measure_series(name: str, rounds: int, steps: int = 20) -> dict[str, Any]:
    """Times steps of this library and of the loop by hand along one series, ten in a call.

    Call it in a new process. The loop by hand, on ``ReductionToOneDevice`` (two strategies with
    TensorFlow's default do not get on in one process), has no micro-batches: there one call takes
    one step, and only this library is measured.

    Args:
        name: One of ``SERIES``.
        rounds: Turns of each contender.
        steps: Steps of a turn, a multiple of ten.

    Returns:
        ``"milliseconds"`` of a step: by ``"ours"`` and ``"hand"``, then by the value on the axis;
        ``"parameters"`` of the models.
    """
    virtual_cpus(_MOST_REPLICAS)
    import tensorflow as tf

    from speed import by_hand, ours

    contenders: list[Contender] = []
    parameters = []
    for value, workload, replicas, options in _series()[name]:
        devices = [f"CPU:{i}" for i in range(replicas)]
        strategy = ours.default_strategy(devices)
        made = list(ours.with_library("ours", workload, strategy, **options))
        contenders.append(dataclasses.replace(made[not options], name=f"ours {value}"))
        parameters.append(made[0].model.count_params())
        if not options:
            by = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
            (hand,) = by_hand.under_strategy("hand", workload, by, "ten")
            contenders.append(dataclasses.replace(hand, name=f"hand {value}"))
    for contender in contenders:
        contender.train(STEPS_PER_CALL)
    steps = steps // 2 if name == "micro_batches" else steps
    milliseconds, _ = take_turns(contenders, rounds, steps)
    grouped: dict[str, dict[str, list[float]]] = {}
    for key, values in milliseconds.items():
        who, value = key.split()
        grouped.setdefault(who, {})[value] = values
    return {"milliseconds": grouped, "parameters": parameters}


def measure_tracing() -> dict[str, Any]:
    """Times the first step of deep models, by hand and here; call it in a new process.

    Returns:
        Seconds by ``"ours"`` and ``"hand"``, then by ``"replicas layers"``.
    """
    virtual_cpus(4)
    import keras
    import tensorflow as tf

    import tfmultigpu as tmg
    from speed import by_hand, ours

    seconds: dict[str, dict[str, float]] = {"ours": {}, "hand": {}}

    def timed(call: Callable[[], Any]) -> float:
        began = time.perf_counter()
        call()
        return round(time.perf_counter() - began, 3)

    for layers in (1, *_DEEP):  # The first is for what only the first trace of a process costs.
        workload = Workload(f"{layers} layers", (32,), mlp(64, layers))
        for replicas in (1, 2, 4):
            devices = [f"CPU:{i}" for i in range(replicas)]
            by = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
            hand, _ = by_hand.under_strategy("hand", workload, by, "iterator")
            strategy = ours.default_strategy(devices)
            with strategy.scope():
                model, optimizer = workload.model(), keras.optimizers.Adam(1e-3)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            batch = next(iter(tmg.distribute_dataset(workload.dataset(), strategy)))

            def first_step(
                model: Any, optimizer: Any, loss: Any, strategy: Any, batch: Any
            ) -> None:
                step = tmg.make_train_step(model, optimizer, loss, strategy)
                float(step(batch)["loss"])

            args = (model, optimizer, loss, strategy, batch)
            here = timed(lambda args=args: first_step(*args))
            theirs = timed(lambda hand=hand: hand.train(1))
            if layers in _DEEP:
                seconds["ours"][f"{replicas} {layers}"] = here
                seconds["hand"][f"{replicas} {layers}"] = theirs
    return {"seconds": seconds}
