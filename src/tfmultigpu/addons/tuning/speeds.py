"""Speeds of replicas: examples per second, measured with real steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.arguments import check_count
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.data.sharded_dataset import distribute_dataset
from tfmultigpu.errors import DataError
from tfmultigpu.steps.batches import as_tensors
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.topology import tf_variable
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["measured_capacities"]


class Step(Protocol):
    """A train step to measure."""

    model: Any
    optimizer: Any
    metrics: Sequence[Any]
    strategy: tf.distribute.Strategy
    features: Sequence[Any]

    def changed_variables(self) -> list[Any]:
        """Returns the variables of model, optimizer, closures and features."""

    def __call__(self, batch: Any) -> Mapping[str, Any]:
        """Trains on one batch."""


def measured_capacities(step: Step, batch: Any, *, repeats: int = 5) -> tuple[float, ...]:
    """Measures the examples per second of each replica with real steps.

    Gives each replica in turn nearly the whole batch, while the others compute one example. The
    fixed cost of a step is subtracted, measured with one example per replica. Restores model,
    optimizer, metrics, loss scale and seeds afterwards.

    Give the result to ``plan_shares``, with a ``maximum`` if memory limits the shares::

        speeds = tmg.measured_capacities(step, batch)
        shares = tmg.plan_shares(1024, speeds, maximum=rows_in_memory)

    Under several workers all must call it.

    Args:
        step: The result of ``make_train_step``.
        batch: A global batch ``(x, y)`` that fits into the memory of each replica alone.
        repeats: Number of measurements, at least 1; the fastest counts. Give more if other programs
            run.

    Returns:
        Examples per second for each replica, the same on all workers.

    Raises:
        DataError: The batch is not a whole batch of tensors or arrays.
        DataError: The batch has fewer than four examples per replica, or is too small to measure a
            difference.
        TypeError: ``step`` is not a train step, or ``repeats`` not a whole number.
        ValueError: ``repeats`` is less than 1.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
        >>> tmg.measured_capacities(step, (np.ones((64, 3)), np.ones((64, 1))))  # one replica
        (1.0,)
    """
    if not hasattr(step, "features"):
        raise TypeError(
            f"step must be a train step. Received: step={step!r}. Make it with "
            "step = tmg.make_train_step(model, optimizer, loss, strategy)."
        )
    repeats = check_count("repeats", repeats)
    strategy = step.strategy
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return (1.0,)
    batch = _as_tensors(batch)
    examples = int(count_rows(batch))
    if examples < 4 * replicas:
        raise DataError(
            f"The batch is too small to measure speeds. Received: a batch of {examples} examples "
            f"for {replicas} replicas. Give at least {4 * replicas}, better a batch as large as "
            "one replica can hold."
        )
    if not (step.model.built and step.optimizer.built):
        raise DataError(
            "Measuring trains and then restores the variables, so they must exist before. "
            f"Received: a step whose model {step.model.name!r} has not been trained on any batch "
            "yet. Call step(batch) once."
        )
    # Each copy by itself: replicas may have statistics of their own.
    copies = [
        copy
        for variable in _changed_by(step)
        for copy in strategy.experimental_local_results(tf_variable(variable))
    ]
    before = [copy.numpy() for copy in copies]
    try:
        times = _fastest_times(step, batch, repeats, strategy)
    finally:
        for copy, value in zip(copies, before, strict=True):
            copy.assign(value)
    seconds = _seconds_per_example(examples, *_mean_of_workers(times, strategy))
    if min(seconds) <= 0:
        raise DataError(
            "More examples did not take a replica longer, so its speed cannot be told from the "
            f"cost of a step. Received: {examples} examples, seconds per example {seconds}. Give a "
            f"larger batch, or more repeats than {repeats}."
        )
    return tuple(1.0 / one for one in seconds)


def _seconds_per_example(examples: int, least: float, *most: float) -> list[float]:
    """Solves for the seconds of an example on each replica.

    Args:
        examples: Number of examples in the batch.
        least: Seconds with one example each: the fixed cost, and an example of the slowest replica.
        most: Seconds with nearly all examples on replica i: the fixed cost and those examples.
    """
    many = examples - len(most) + 1
    slowest = (max(most) - least) / (many - 1)
    return [(one - least + slowest) / many for one in most]


def _as_tensors(batch: Any) -> Any:
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(batch)):
        raise DataError(
            "The batch is divided already, and measuring divides it in several ways. "
            "Give a batch before tmg.distribute_dataset, such as (x[:256], y[:256])."
        )
    return as_tensors(batch)


def _fastest_times(
    step: Step, batch: Any, repeats: int, strategy: tf.distribute.Strategy
) -> list[float]:
    """Measures a step with one example per replica, then one for each replica with the rest."""
    replicas = strategy.num_replicas_in_sync
    examples = int(count_rows(batch))
    cuts = [(partition.slice_rows(batch, 0, replicas), [1] * replicas)]
    for replica in range(replicas):
        shares = [1] * replicas
        shares[replica] = examples - replicas + 1
        cuts.append((batch, shares))
    batches = []
    for part, shares in cuts:
        (shards,) = distribute_dataset(tf.data.Dataset.from_tensors(part), strategy, shares=shares)
        float(step(shards)["loss"])
        batches.append(shards)
    times: list[list[float]] = [[] for _ in batches]
    # In turn, so that a slow moment of the machine slows each of them.
    for _ in range(repeats):
        for shards, taken in zip(batches, times, strict=True):
            start = time.perf_counter()
            float(step(shards)["loss"])
            taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]


def _changed_by(step: Step) -> list[Any]:
    """Returns the variables that a step may change, those of TensorFlow in layers included."""
    metrics = [variable for metric in step.metrics for variable in metric.variables]
    plain = [
        value
        for layer in all_layers(step.model)
        for value in vars(layer).values()
        if isinstance(value, tf.Variable)
    ]
    seeds = _compat.global_seeds()
    return [*step.changed_variables(), *metrics, *plain, *([] if seeds is None else [seeds.state])]


def _mean_of_workers(values: list[float], strategy: tf.distribute.Strategy) -> tuple[float, ...]:
    """Returns the mean over the workers, the same on each."""
    told = WorkerExchange(strategy).floats("seconds of capacities", values)
    return tuple(told.mean(axis=0).tolist())
