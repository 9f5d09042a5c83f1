"""Capacities of replicas: bytes of memory for activations."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.devices import list_devices, logical_to_physical
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.scopes import current_strategy
from tfmultigpu.strategies.topology import strategy_devices
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import Strategy


def memory_capacities(
    strategy: Strategy | None = None,
    *,
    memory: Mapping[str, float] | Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Returns the memory that each replica has left, in bytes.

    Call it once model and optimizer are built: every replica holds all weights and optimizer slots,
    and uses the rest of its memory for its shard. Leave room for gradients, which a
    step holds twice: with Adam in float32 a model of 100 million parameters (0.4 GB) takes 1.2 GB
    of each replica, and 0.8 GB more in a step.

    Args:
        strategy: The strategy; None takes ``tf.distribute.get_strategy()``.
        memory: Bytes that are left on each replica of this process, by device name or in order.
            Devices that it leaves out are looked up. Workers may give different numbers.

    Returns:
        Bytes for each replica of the strategy, on all workers in the same order: capacities for
        ``plan_shares``.

    Raises:
        DataError: The memory of a device of this worker or another is unknown: of a CPU, of a GPU
            without the extra ``nvml``, or of a GPU of which TensorFlow has taken all memory. Or
            ``memory`` does not fit the devices.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.tuning.memory_capacities(memory=[8 * 1024**3])
        (8589934592.0,)
        >>> tmg.data.plan_shares(64, (22e9, 6e9))
        (50, 14)
    """
    strategy = current_strategy(strategy, "memory_capacities")
    # The default strategy leaves the choice of a device to TensorFlow.
    devices = strategy_devices(strategy) or (parse_device_name(tf.zeros([]).device),)
    tell = functools.partial(WorkerExchange(strategy).floats, "capacities")
    try:
        given = _given_memory(memory, devices)
        left = []
        for name in devices:
            left.append(given[name] if name in given else _memory_left(name))
    except Exception:
        tell([math.nan] * len(devices))  # The other workers wait, and NaN tells them of the error.
        raise
    capacities = tuple(tell(left).ravel().tolist())
    unknown = [replica for replica, size in enumerate(capacities) if math.isnan(size)]
    if unknown:
        raise DataError(
            f"Another worker could not determine the memory of its replicas {unknown}.",
            "",
            "It ends with an error that gives the reason: see its log.",
        )
    return capacities


def _given_memory(
    memory: Mapping[str, float] | Sequence[float] | None, devices: Sequence[str]
) -> dict[str, float]:
    """Returns the bytes given by the user, by device."""
    if memory is None:
        return {}
    if not isinstance(memory, Mapping):
        memory = dict(zip(devices, memory, strict=True))
    given = {parse_device_name(name): float(size) for name, size in memory.items()}
    if not given.keys() <= {*devices} or not all(0 < size < math.inf for size in given.values()):
        raise DataError(
            "memory must be a positive number of bytes for replicas of this process.",
            f"memory={memory} for {', '.join(devices)}",
            f"Write memory={{{devices[0]!r}: 8 * 1024**3}}.",
        )
    return given


def _memory_left(name: str) -> float:
    """Returns the bytes of a device that nothing has taken yet."""
    config: Any = tf.config
    owners = logical_to_physical()
    physical = owners.get(name, name)
    parts = [part for part, owner in owners.items() if owner == physical]
    devices = {parse_device_name(d.name): d for d in config.list_physical_devices()}
    limits = config.get_logical_device_configuration(devices[physical]) or ()
    if len(limits) == len(parts) and limits[parts.index(name)].memory_limit:
        limit = limits[parts.index(name)].memory_limit * 1024**2  # It is in MiB.
        return float(limit - config.experimental.get_memory_info(name)["current"])
    free = None
    for device in list_devices():
        if device.name == physical:
            free = device.memory_free
    if free is None:
        reason = "is not known: TensorFlow does not limit a CPU's, and asking for a GPU's needs "
        reason += "pip install nvidia-ml-py"
    elif not config.experimental.get_memory_growth(devices[physical]):
        reason = f"is TensorFlow's already: the {free / 1024**3:.1f} GiB that the driver has left "
        reason += "have no meaning. Call tmg.enable_memory_growth() at the start"
    else:
        return float(free)
    raise DataError(
        f"The memory of {name} {reason}.",
        "",
        f"Or give it in bytes: memory_capacities(strategy, memory={{{name!r}: 8 * 1024**3}}).",
    )
