"""What each replica can take: bytes of memory, or rows per second."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.arguments import check_count
from tfmultigpu.data import partition
from tfmultigpu.data.sharded_dataset import distribute_dataset
from tfmultigpu.devices.discovery import list_devices, logical_to_physical
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import DataError, ShareError
from tfmultigpu.optimizers.accumulation import sum_dtype
from tfmultigpu.optimizers.update import build_optimizer
from tfmultigpu.steps.batch_function import as_tensor
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["measured_capacities", "memory_capacities"]


def memory_capacities(
    strategy: tf.distribute.Strategy | None = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    memory: Mapping[str, float] | Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Returns the memory each replica has for activations, the part that grows with its share.

    Weights, their gradients and the state of the optimizer are on every replica whole, whatever its
    share; what they take is not available for rows::

        capacity = memory - weights - optimizer state - 2 * gradients

    ``memory`` is the limit of a split or limited device, or the number given; otherwise what the
    driver calls free now, where weights and optimizer state are taken already and are not
    subtracted again. Gradients count twice, at least in float32: a gradient and the sum it is added
    to. With Adam in float32 that makes 5 times the bytes of the weights: a model of 100 million
    parameters (0.4 GB) takes 2 GB off each replica, so that cards of 24 and 8 GB have 22 and 6 GB
    for rows, which is 3.7 to 1 and not 3 to 1. Where each variable is updated by one replica
    (``shard_update``), the state of the optimizer takes less than is subtracted here.

    Args:
        strategy: The strategy; ``tf.distribute.get_strategy()`` where None.
        model: The model that is trained, built in the scope. None: nothing is subtracted.
        optimizer: Its optimizer; built here if it is not yet.
        memory: Bytes of each replica of this process, by device name or in order. Devices that it
            leaves out are looked up. Workers may give different numbers.

    Returns:
        Bytes for each replica of the strategy, on all workers in their order: capacities for
        ``plan_shares``, or divided by the bytes a row takes its ``maximum``.

    Raises:
        ShareError: The memory of a device is not known (a CPU; a GPU without the extra ``nvml`` or
            whose memory TensorFlow has taken whole), or does not hold the model; on this worker or
            on another one. Or what was given is no memory of these devices.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.memory_capacities(memory=[8 * 1024**3])
        (8589934592.0,)
        >>> tmg.plan_shares(64, (22e9, 6e9))
        (50, 14)
    """
    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    try:
        own = _left_here(strategy, model, optimizer, memory)
    except ShareError:
        # The other workers wait for numbers, so they are told that there are none.
        _of_all_workers([math.nan] * len(_devices_of(strategy)), strategy)
        raise
    everywhere = _of_all_workers(own, strategy)
    unknown = [replica for replica, left in enumerate(everywhere) if math.isnan(left)]
    if unknown:
        raise ShareError(
            f"Another worker has no number for its replicas {unknown}. It ends with an error that "
            "says why: see its log."
        )
    return everywhere


def _left_here(
    strategy: tf.distribute.Strategy, model: Any, optimizer: Any, memory: Any
) -> list[float]:
    """Bytes for activations of each replica of this process."""
    names = [parse_device_name(name) for name in _devices_of(strategy)]
    known_memory = _given(memory, names)
    held, passing = _taken_by(model, optimizer, strategy)
    capacities = []
    for name in names:
        given = known_memory.get(name)
        known, everything = (given, True) if given is not None else _known(name)
        left = known - passing - (held if everything else 0)
        if left <= 0:
            raise ShareError(
                f"{name} does not hold the model, let alone rows. Received: {_text(known)}, and "
                f"weights and optimizer state take {_text(held)}, gradients {_text(passing)}. "
                "Leave the device out of the strategy: tmg.create_strategy(devices=[...])."
            )
        capacities.append(float(left))
    return capacities


class Step(Protocol):
    """What is timed: a train step."""

    model: Any
    optimizer: Any
    metrics: Sequence[Any]
    strategy: tf.distribute.Strategy
    loss_scale: Any

    def __call__(self, batch: Any) -> Mapping[str, Any]:
        """Trains on one batch."""


def measured_capacities(step: Step, batch: Any, *, repeats: int = 5) -> tuple[float, ...]:
    """Returns the rows per second of each replica, measured with real steps.

    Each replica in turn is given nearly the whole batch, while the others compute one row: the time
    of the step is then its own. The difference to a step in which all compute one row is what its
    rows took, without what every step costs. Model, optimizer, metrics, loss scale and seeds are
    set back afterwards.

    Give the result to ``plan_shares``, together with what memory holds::

        speeds = tmg.measured_capacities(step, batch)
        shares = tmg.plan_shares(1024, speeds, maximum=rows_in_memory)

    Under several workers all must call it; what takes part in the step, such as the network, is
    measured along.

    Args:
        step: What ``make_train_step`` returned.
        batch: A whole global batch ``(x, y)`` that fits into the memory of each single replica.
        repeats: How often each is timed, at least 1; the fastest counts. More where other programs
            run.

    Returns:
        Rows per second for each replica, the same on all workers.

    Raises:
        DataError: The batch is not a whole batch of tensors or arrays.
        ShareError: The batch has fewer than four rows per replica, or no difference of time could
            be measured: give a larger batch.
        TypeError: ``step`` is no train step, or ``repeats`` is not a whole number.
        ValueError: ``repeats`` is less than 1.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
        >>> tmg.measured_capacities(step, (np.ones((64, 3)), np.ones((64, 1))))  # one replica
        (1.0,)
    """
    if not hasattr(step, "loss_scale"):
        raise TypeError(
            f"What is timed is a train step. Received: step={step!r}. Make it with "
            "step = tmg.make_train_step(model, optimizer, loss, strategy)."
        )
    repeats = check_count("repeats", repeats)
    strategy = step.strategy
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return (1.0,)
    batch = _whole(batch)
    rows = int(partition.count_rows(batch))
    if rows < 4 * replicas:
        raise ShareError(
            "Rows are timed by giving one replica all but a few of them. Received: a batch of "
            f"{rows} rows for {replicas} replicas. Give at least {4 * replicas}, better a batch "
            "as large as one replica can hold."
        )
    if not (step.model.built and step.optimizer.built):
        raise ShareError(
            "Timing a step trains, and is undone afterwards, so everything must be there before. "
            f"Received: a step whose model {step.model.name!r} has not been trained on any batch "
            "yet. Call step(batch) once."
        )
    state = _variables_of(step)
    before = [variable.numpy() for variable in state]
    try:
        times = _fastest(step, batch, repeats, strategy)
    finally:
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)
    agreed = _seconds_per_row(rows, *_mean_of_workers(times, strategy))
    if min(agreed) <= 0:
        raise ShareError(
            "More rows did not take a replica longer, so its speed cannot be told from the cost "
            f"of a step. Received: {rows} rows, seconds per row {agreed}. Give a larger batch, or "
            f"more repeats than {repeats}."
        )
    return tuple(1.0 / second for second in agreed)


def _seconds_per_row(rows: int, least: float, *most: float) -> list[float]:
    """Solves for the seconds of a row on each replica.

    A step takes what every step costs, and the time of the replica that takes longest. So
    ``least``, with one row each, is that cost and a row of the slowest; ``most[i]`` that cost and
    nearly all rows on replica i.
    """
    many = rows - len(most) + 1
    slowest = (max(most) - least) / (many - 1)
    return [(one - least + slowest) / many for one in most]


def _whole(batch: Any) -> Any:
    """A global batch as tensors."""
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(batch)):
        raise DataError(
            "Rows are timed by dividing a batch in several ways, and this one is divided already. "
            "Give a batch before tmg.distribute_dataset, such as (x[:256], y[:256])."
        )
    return tf.nest.map_structure(as_tensor, batch)


def _fastest(step: Step, batch: Any, repeats: int, strategy: tf.distribute.Strategy) -> list[float]:
    """Seconds of a step with one row for each replica; then with all but those, for each."""
    replicas = strategy.num_replicas_in_sync
    rows = int(partition.count_rows(batch))
    few = (partition.slice_rows(batch, 0, replicas), [1] * replicas)
    cuts = [few, *((batch, _mostly(i, replicas, rows)) for i in range(replicas))]
    cut = []
    for part, shares in cuts:
        (shards,) = distribute_dataset(tf.data.Dataset.from_tensors(part), strategy, shares=shares)
        float(step(shards)["loss"])
        cut.append(shards)
    times: list[list[float]] = [[] for _ in cut]
    # In turn, so that a slow moment of the machine slows each of them.
    for _ in range(repeats):
        for shards, taken in zip(cut, times, strict=True):
            start = time.perf_counter()
            float(step(shards)["loss"])
            taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]


def _mostly(replica: int, replicas: int, rows: int) -> list[int]:
    return [rows - replicas + 1 if i == replica else 1 for i in range(replicas)]


def _variables_of(step: Step) -> list[Any]:
    metrics = [variable for metric in step.metrics for variable in metric.variables]
    scale = vars(step.loss_scale).values() if step.loss_scale is not None else ()
    scale = [value for value in scale if isinstance(value, tf.Variable)]
    seeds = _compat.global_seeds()
    drawn = [] if seeds is None else [seeds.state]
    return [*step.model.variables, *step.optimizer.variables, *metrics, *scale, *drawn]


def _taken_by(model: Any, optimizer: Any, strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """Bytes of what stays, weights and optimizer state, and of gradients while a step runs."""
    if model is None:
        if optimizer is not None:
            raise ShareError(
                "What the state of an optimizer takes depends on the variables it is for. "
                f"Received: optimizer={type(optimizer).__name__} without a model. Give both: "
                "memory_capacities(strategy, model=model, optimizer=optimizer)."
            )
        return 0, 0
    if not model.built:
        raise ShareError(
            "The model has no variables yet, so what they take is not known. Received: model "
            f"{model.name!r}. Build it first, inside the scope: model.build(input_shape)."
        )
    variables = list(model.variables)
    if optimizer is not None:
        build_optimizer(optimizer, model.trainable_variables, strategy)
        variables += optimizer.variables
    held = sum(_bytes(variable.shape, variable.dtype) for variable in variables)
    gradients = sum(_bytes(v.shape, sum_dtype(v.dtype)) for v in model.trainable_variables)
    return held, 2 * gradients


def _bytes(shape: Any, dtype: Any) -> int:
    size: int = tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size
    return size


def _text(size: float) -> str:
    return f"{size / 1024**3:.2f} GiB" if size >= 1024**3 else f"{size / 1024**2:.2f} MiB"


def _devices_of(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    try:
        return tuple(strategy.extended.worker_devices)
    except RuntimeError:  # The default strategy runs where TensorFlow puts a tensor.
        return (tf.zeros([]).device,)


def _given(memory: Any, names: Sequence[str]) -> dict[str, float]:
    """Bytes by device, of those devices for which they were given."""
    if memory is None:
        return {}
    if isinstance(memory, Mapping):
        given = {parse_device_name(key): value for key, value in memory.items()}
        strange = [name for name in given if name not in names]
        if strange:
            raise ShareError(
                f"Memory is given of {', '.join(strange)}, where no replica of this process is. "
                f"Received: memory={dict(memory)}; the replicas are on {', '.join(names)}."
            )
    elif np.ndim(memory) != 1 or len(memory) != len(names):
        raise ShareError(
            f"There must be one number of bytes per replica of this process. Received: {memory} "
            f"for {len(names)} replica(s)."
        )
    else:
        given = dict(zip(names, memory, strict=True))
    for name, size in given.items():
        if not isinstance(size, Real) or not math.isfinite(size) or size <= 0:
            raise ShareError(
                f"Memory is a positive number of bytes. Received: {size!r} for {name}. Write 8 GB "
                "as 8 * 1024**3; leave a device out of a mapping to have it looked up."
            )
    return {name: float(size) for name, size in given.items()}


def _known(name: str) -> tuple[float, bool]:
    """Bytes of a device, and whether what it holds already is among them."""
    physical = logical_to_physical().get(name, name)
    parts = [part for part, owner in logical_to_physical().items() if owner == physical]
    config: Any = tf.config
    devices = {parse_device_name(d.name): d for d in config.list_physical_devices()}
    limits = config.get_logical_device_configuration(devices[physical]) or ()
    if len(limits) == len(parts) and limits[parts.index(name)].memory_limit:
        return float(limits[parts.index(name)].memory_limit) * 1024**2, True  # It is in MiB.
    free = next((d.memory_free for d in list_devices() if d.name == physical), None)
    if free is None:
        raise ShareError(
            f"The memory of {name} is not known. "
            + (
                "TensorFlow does not limit that of a CPU. "
                if name.startswith("CPU")
                else "The driver tells with the extra nvml: pip install 'tfmultigpu[nvml]'. "
            )
            + f"Give it in bytes: memory_capacities(strategy, memory={{{name!r}: 8 * 1024**3}})."
        )
    if not config.experimental.get_memory_growth(devices[physical]):
        raise ShareError(
            f"TensorFlow has taken all memory of {name} for itself, so what the driver calls free "
            f"({_text(free)}) says nothing. Call tmg.enable_memory_growth() at the start, "
            f"or give it in bytes: memory_capacities(strategy, memory={{{name!r}: 8 * 1024**3}})."
        )
    return float(free), False


def _of_all_workers(values: list[float], strategy: tf.distribute.Strategy) -> tuple[float, ...]:
    """Puts together what each worker knows of its own replicas."""
    return tuple(WorkerExchange(strategy).floats(values).ravel().tolist())


def _mean_of_workers(values: list[float], strategy: tf.distribute.Strategy) -> tuple[float, ...]:
    """One verdict for all workers, whose clocks never agree."""
    return tuple(WorkerExchange(strategy).floats(values).mean(axis=0).tolist())
