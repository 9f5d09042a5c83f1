"""Decisions that all workers must make alike, because the next step is a collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import ClusterError
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import KerasModel, Nested


def union(strategy: tf.distribute.Strategy, numbers: Iterable[int]) -> list[int]:
    """Returns the sorted union of the workers' numbers, from 0 up; all workers must call it."""
    asked = sorted(set(numbers))
    exchange = WorkerExchange(strategy)
    if exchange.workers == 1:
        return asked
    most = int(exchange("how many numbers", [len(asked)]).max())
    padded = exchange("a union of numbers", [*asked, *[-1] * (most - len(asked))])
    return sorted({int(number) for number in padded.ravel()} - {-1})


def check_alike(strategy: tf.distribute.Strategy, arguments: Mapping[str, Nested]) -> None:
    """Checks that all workers call ``fit`` with the same arguments; all must call it."""
    exchange = WorkerExchange(strategy)
    if (difference := exchange.find_difference("fit", arguments)) is not None:
        name, other = difference
        raise ClusterError(
            "The workers call fit with different arguments, so some would wait for the others "
            "forever.",
            f"{name}={arguments[name]!r} on worker {exchange.worker}, and another value on worker "
            f"{other}",
            "Run the same program on every worker.",
        )


def check_same_training(
    exchange: WorkerExchange,
    model: KerasModel,
    trained: Sequence[TrainStep],
    with_weights: bool,
) -> None:
    """Checks that all workers have the same learning rate, and if asked the same weights.

    If a callback of any worker has asked to stop, all of them stop. All must call it.
    """
    if exchange.workers == 1:
        return
    rates: list[float] = []
    sums: list[float] = []
    for step in trained:
        rates.append(float(tf.convert_to_tensor(step.optimizer.learning_rate)))
        for variable in step.variables if with_weights else ():
            sums.append(float(np.sum(np.asarray(variable.numpy()), dtype="float64")))
    # One exchange for both: each waits for the slowest worker.
    told = exchange.floats("an epoch of fit", [*rates, *sums, float(bool(model.stop_training))])
    model.stop_training = bool(told[:, -1].any())
    near = np.isclose(told, told[:1], rtol=1e-4, atol=1e-7, equal_nan=True)[:, :-1].all(axis=0)
    if not near.all():
        first = int(np.flatnonzero(~near)[0])
        value = f"learning rate {rates[first]:g}" if first < len(rates) else "weights"
        raise ClusterError(
            "Only some workers changed their learning rate or weights, so the replicas no longer "
            "have one model.",
            f"{value} of this worker, and others elsewhere",
            "Give callbacks that change training (ReduceLROnPlateau, LearningRateScheduler, "
            "EarlyStopping, your own) to every worker. Only callbacks that just log may run on "
            "one worker.",
        )
