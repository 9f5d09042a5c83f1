"""Capacities of replicas: bytes of memory for activations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.accumulation.gradients import sum_dtype
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.owners import outside_scopes
from tfmultigpu.devices.discovery import list_devices, logical_to_physical
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.scopes import check_strategy
from tfmultigpu.strategies.topology import is_sharded, tf_variable
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import Model, Optimizer, Strategy

__all__ = ["memory_capacities"]


def memory_capacities(
    strategy: Strategy | None = None,
    *,
    model: Model | None = None,
    optimizer: Optimizer | None = None,
    memory: Mapping[str, float] | Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Returns the memory each replica has for activations, which grow with its share.

    Every replica holds all weights, gradients and optimizer slots, whatever its share; of a model
    made in ``sharded_variables`` or with layers placed by hand, those on its device::

        capacity = memory - weights - optimizer slots - 2 * gradients

    ``memory`` is the number given, or the limit of a split or limited device. Otherwise it is the
    free memory of the driver, from which weights and slots are missing already. Gradients count
    twice, at least in float32: a gradient and the sum it is added to. With Adam in float32 all
    this takes 5 times the bytes of the weights. A model of 100 million parameters (0.4 GB) then
    takes 2 GB of each replica: GPUs of 24 and 8 GB have 22 and 6 GB for examples, 3.7 to 1 and not
    3 to 1. With ``shard_update`` the slots take less than this function subtracts.

    Args:
        strategy: The strategy; None takes ``tf.distribute.get_strategy()``.
        model: The model, built in the scope; None subtracts nothing.
        optimizer: Its optimizer; built here if necessary.
        memory: Bytes of each replica of this process, by device name or in order. Devices that it
            leaves out are looked up. Workers may give different numbers.

    Returns:
        Bytes for each replica of the strategy, on all workers in the same order: capacities for
        ``plan_shares``. Divided by the bytes of an example they are its ``maximum``.

    Raises:
        DataError: On this worker or another, the memory of a device is unknown or does not hold
            the model. It is unknown for a CPU, for a GPU without the extra ``nvml``, and for a GPU
            whose memory TensorFlow has taken. Or ``memory`` does not fit the devices.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.memory_capacities(memory=[8 * 1024**3])
        (8589934592.0,)
        >>> tmg.plan_shares(64, (22e9, 6e9))
        (50, 14)
    """
    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    check_strategy(strategy)
    try:
        own = _local_capacities(strategy, model, optimizer, memory)
    except DataError:
        # The other workers wait for numbers, and NaN tells them of the error.
        _gather_from_workers([math.nan] * len(_local_devices(strategy)), strategy)
        raise
    capacities = _gather_from_workers(own, strategy)
    unknown = [replica for replica, left in enumerate(capacities) if math.isnan(left)]
    if unknown:
        raise DataError(
            f"Another worker could not determine the memory of its replicas {unknown}. It ends "
            "with an error that gives the reason: see its log."
        )
    return capacities


def _local_capacities(
    strategy: tf.distribute.Strategy, model: Any, optimizer: Any, memory: Any
) -> list[float]:
    """Returns the bytes for activations of each replica of this process."""
    names = [parse_device_name(name) for name in _local_devices(strategy)]
    given_memory = _check_memory(memory, names)
    taken = _model_bytes(model, optimizer, strategy, names)
    capacities = []
    for name, (state, gradients) in zip(names, taken, strict=True):
        given = given_memory.get(name)
        known, holds_state = (given, True) if given is not None else _device_memory(name)
        left = known - gradients - (state if holds_state else 0)
        if left <= 0:
            raise DataError(
                f"{name} does not hold the model. Received: {_text(known)}, and "
                f"weights and optimizer slots take {_text(state)}, gradients {_text(gradients)}. "
                "Leave the device out of the strategy: tmg.create_strategy(devices=[...])."
            )
        capacities.append(float(left))
    return capacities


def _model_bytes(
    model: Any, optimizer: Any, strategy: tf.distribute.Strategy, names: Sequence[str]
) -> list[tuple[int, int]]:
    """Returns bytes of weights and slots, and of gradients during a step, for each device."""
    if model is None:
        if optimizer is not None:
            raise DataError(
                "The slots of an optimizer depend on the variables of the model. "
                f"Received: optimizer={type(optimizer).__name__} without a model. Give both: "
                "memory_capacities(strategy, model=model, optimizer=optimizer)."
            )
        return [(0, 0)] * len(names)
    if not model.built:
        raise DataError(
            "The model has no variables yet, so their memory is unknown. Received: model "
            f"{model.name!r}. Build it first, inside the scope: model.build(input_shape)."
        )
    slots = 0 if optimizer is None else _slots_of_each_variable(optimizer)
    trained = {id(variable) for variable in model.trainable_variables}
    state, gradients = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    largest = 0
    for variable in model.variables:
        size = _bytes(variable.shape, variable.dtype)
        largest = max(largest, size if is_sharded(variable) else 0)
        for copy in strategy.experimental_local_results(tf_variable(variable)):
            place = parse_device_name(copy.device)
            if place in state:  # Layers placed by hand are on devices that are no replicas.
                is_trained = id(variable) in trained
                state[place] += size * (1 + slots * is_trained)
                gradients[place] += (
                    2 * is_trained * _bytes(variable.shape, sum_dtype(variable.dtype))
                )
    # A step copies a sharded variable to each replica, one while it uses the one before.
    return [(state[name], gradients[name] + 2 * largest) for name in names]


def _slots_of_each_variable(optimizer: Any) -> int:
    """Returns how many variables of the shape of a variable an optimizer keeps beside it."""
    import keras

    def count() -> int:
        inner = unwrap_optimizer(optimizer)
        trial = type(inner).from_config(inner.get_config())
        trial.build([keras.Variable("zeros", shape=(2, 3), name="trial")])
        return sum(tuple(variable.shape) == (2, 3) for variable in trial.variables)

    return outside_scopes(count)


def _bytes(shape: Any, dtype: Any) -> int:
    size: int = tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size
    return size


def _text(size: float) -> str:
    return f"{size / 1024**3:.2f} GiB" if size >= 1024**3 else f"{size / 1024**2:.2f} MiB"


def _local_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    try:
        return tuple(strategy.extended.worker_devices)
    except RuntimeError:  # The default strategy leaves the choice of a device to TensorFlow.
        return (tf.zeros([]).device,)


def _check_memory(memory: Any, names: Sequence[str]) -> dict[str, float]:
    """Returns the bytes given by the user, by device."""
    if memory is None:
        return {}
    if isinstance(memory, Mapping):
        given = {parse_device_name(key): value for key, value in memory.items()}
        unknown = [name for name in given if name not in names]
        if unknown:
            raise DataError(
                f"memory names {', '.join(unknown)}, but no replica of this process is there. "
                f"Received: memory={dict(memory)}; the replicas are on {', '.join(names)}."
            )
    elif np.ndim(memory) != 1 or len(memory) != len(names):
        raise DataError(
            "memory must be one number of bytes per replica of this process. Received: "
            f"memory={memory} for {len(names)} replica(s)."
        )
    else:
        given = dict(zip(names, memory, strict=True))
    for name, size in given.items():
        if not isinstance(size, Real) or not math.isfinite(size) or size <= 0:
            raise DataError(
                f"memory must be a positive number of bytes. Received: {size!r} for {name}. Write "
                "8 GB as 8 * 1024**3; a device left out of a mapping is looked up."
            )
    return {name: float(size) for name, size in given.items()}


def _device_memory(name: str) -> tuple[float, bool]:
    """Returns the bytes of a device, and whether they include weights and slots already there."""
    physical = logical_to_physical().get(name, name)
    parts = [part for part, owner in logical_to_physical().items() if owner == physical]
    config: Any = tf.config
    devices = {parse_device_name(d.name): d for d in config.list_physical_devices()}
    limits = config.get_logical_device_configuration(devices[physical]) or ()
    if len(limits) == len(parts) and limits[parts.index(name)].memory_limit:
        return float(limits[parts.index(name)].memory_limit) * 1024**2, True  # It is in MiB.
    free = next((d.memory_free for d in list_devices() if d.name == physical), None)
    if free is None:
        raise DataError(
            f"The memory of {name} is not known. "
            + (
                "TensorFlow does not limit that of a CPU. "
                if name.startswith("CPU")
                else 'Ask the driver with the extra nvml: pip install "tfmultigpu[nvml]". '
            )
            + f"Give it in bytes: memory_capacities(strategy, memory={{{name!r}: 8 * 1024**3}})."
        )
    if not config.experimental.get_memory_growth(devices[physical]):
        raise DataError(
            f"TensorFlow has taken all memory of {name}, so the free memory of the driver "
            f"({_text(free)}) has no meaning. Call tmg.enable_memory_growth() at the start, "
            f"or give bytes: memory_capacities(strategy, memory={{{name!r}: 8 * 1024**3}})."
        )
    return float(free), False


def _gather_from_workers(
    values: list[float], strategy: tf.distribute.Strategy
) -> tuple[float, ...]:
    """Returns the numbers of all replicas from those of each worker's replicas."""
    return tuple(WorkerExchange(strategy).floats("capacities", values).ravel().tolist())
