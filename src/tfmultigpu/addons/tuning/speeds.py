"""Speeds of replicas: examples per second, measured with real steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmultigpu.addons.tuning.one_device_trace import trace_one_device
from tfmultigpu.addons.tuning.undone import rows_of_whole, undoing
from tfmultigpu.arguments import check_count
from tfmultigpu.data import distribute_dataset
from tfmultigpu.errors import DataError
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import Shard


def measured_capacities(step: TrainStep, batch: Shard, *, repeats: int = 5) -> tuple[float, ...]:
    """Measures the examples per second of each replica with real steps.

    Gives each replica in turn nearly the whole batch, while the others compute one example. Then
    subtracts the fixed cost of a step, which it measures with one example per replica. Restores
    model, optimizer, metrics, loss scale and seeds afterwards. Under several workers all must call
    it::

        speeds = tmg.tuning.measured_capacities(step, batch)
        shares = tmg.data.plan_shares(1024, speeds)

    Args:
        step: The result of ``make_train_step``.
        batch: A global batch ``(x, y)`` that fits into the memory of each replica alone.
        repeats: Number of measurements, at least 1; the fastest counts.

    Returns:
        Examples per second for each replica, floats, the same on all workers.

    Raises:
        DataError: The batch is not a whole batch of tensors or arrays, has fewer than four examples
            per replica, or is too small to measure a difference.
        ValueError: ``repeats`` is not a whole number, at least 1.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
        >>> batch = np.ones((64, 3)), np.ones((64, 1))
        >>> tmg.tuning.measured_capacities(step, batch)  # one replica
        (1.0,)
    """
    repeats = check_count("repeats", repeats, error=ValueError)
    strategy = step.strategy
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return (1.0,)
    examples = rows_of_whole("measured_capacities", batch)
    if examples < 4 * replicas:
        raise DataError(
            "The batch is too small to measure speeds.",
            f"{examples} examples for {replicas} replicas",
            f"Give {4 * replicas} or more, best all that one replica holds.",
        )
    if not (step.model.built and step.optimizer.built):
        raise DataError(
            "Measuring trains and then restores the variables, so they must exist before.",
            f"a step whose model {step.model.name!r} has seen no batch",
            "Call step(batch) once.",
        )
    most = examples - replicas + 1
    # One example on each replica; then nearly all of them on one.
    cuts = [distribute_dataset(batch, strategy, batch_size=replicas)]
    for replica in range(replicas):
        shares = [1] * replicas
        shares[replica] = most
        cuts.append(distribute_dataset(batch, strategy, batch_size=examples, shares=shares))
    shards = [next(iter(cut)) for cut in cuts]
    like = tf.nest.map_structure(tf.convert_to_tensor, batch)
    with undoing(step, trace_one_device(step, like, examples)):
        times = _fastest_times(lambda shard: float(step(shard)["loss"]), shards, repeats)
    told = WorkerExchange(strategy).floats("seconds of capacities", times)
    least, *longest = told.mean(axis=0).tolist()
    # ``least`` is the fixed cost and one example of the slowest replica.
    slowest = (max(longest) - least) / (most - 1)
    seconds = [(long - least + slowest) / most for long in longest]
    if min(seconds) <= 0:
        raise DataError(
            "More examples did not take a replica longer, so its speed cannot be separated "
            "from the cost of a step.",
            f"{examples} examples, seconds per example {seconds}",
            f"Give a larger batch, or more repeats than {repeats}.",
        )
    return tuple(1.0 / each for each in seconds)


def _fastest_times(
    train: Callable[[Shard], float], shards: Sequence[Shard], repeats: int
) -> list[float]:
    """Returns the seconds of a step on each batch, the shortest of some repeats."""
    fastest = [math.inf] * len(shards)
    # In turn, so that a slow moment of the machine slows each of them.
    for turn in range(1 + repeats):
        for place, batch in enumerate(shards):
            start = time.perf_counter()
            train(batch)
            seconds = time.perf_counter() - start
            if turn > 0:  # The first compiles.
                fastest[place] = min(fastest[place], seconds)
    return fastest
