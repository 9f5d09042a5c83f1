"""Strategies of TensorFlow: whether there are any, and how they add."""

from __future__ import annotations

import copy
from typing import Any

import tensorflow as tf

from tfmultigpu.types import Function


def strategies_were_made() -> bool:
    """Returns whether this process has made a strategy other than TensorFlow's default one.

    Private: ``tensorflow.python.distribute.distribute_lib.distribution_strategy_replica_gauge``,
    which the constructor of every strategy sets. Without it True is returned, and a search for
    strategies looks all objects of the process each time.
    """
    from tensorflow.python.distribute import distribute_lib

    gauge: Any = getattr(distribute_lib, "distribution_strategy_replica_gauge", None)
    return gauge is None or gauge.get_cell("num_replicas").value() > 0


def additions_over_workers(strategy: tf.distribute.Strategy) -> list[Function]:
    """Returns functions that add tensors over the workers of a strategy, one per local device.

    Each takes lists of tensors of one dtype on its device, and returns the sums in one list. A list
    is sent as one message. The workers must call them alike and in the same order.

    Private: ``strategy.extended._cross_device_ops``, its ``_launchers``, which add over all
    replicas, and their ``_collective_keys``, ``_group_key`` and ``_group_size``. Their copies keep
    the options, the order on a device, and keys that are new in each call. The public
    ``strategy.reduce`` adds over workers on the CPUs alone, and ``tf.raw_ops.CollectiveReduceV2``
    needs keys that the strategy does not use. Without them no step is traced whose replicas are on
    several workers.
    """
    devices = strategy.extended.worker_devices
    extended: Any = strategy.extended
    found = []
    for device, one in zip(devices, extended._cross_device_ops._launchers, strict=True):
        launcher = copy.copy(one)
        launcher._group_key = one._collective_keys.get_group_key([device])
        launcher._group_size = one._group_size // len(devices)
        found.append(launcher.batch_all_reduce)
    return found


def numbers_collectives(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a strategy adds by collectives, which TensorFlow numbers at each call.

    Private: ``strategy.extended._cross_device_ops``. No public name tells how a strategy adds, and
    one that TensorFlow made adds otherwise than the strategies of ``create_strategy``. Without it
    all strategies of several replicas are taken for such, whose steps wait for each other.
    """
    distribute: Any = tf.distribute
    others = (
        distribute.NcclAllReduce,
        distribute.HierarchicalCopyAllReduce,
        distribute.ReductionToOneDevice,
    )
    ways = getattr(strategy.extended, "_cross_device_ops", None)
    return strategy.num_replicas_in_sync > 1 and not isinstance(ways, others)
