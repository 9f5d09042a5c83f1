"""Strategies of TensorFlow: whether there are any, and how they add."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
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


def additions_over_workers(
    strategy: tf.distribute.Strategy, groups: Sequence[Sequence[int]], worker: int
) -> list[Function]:
    """Returns functions that add tensors over the workers of a group, one per local device.

    Each takes a list of tensors of one dtype on its device, which are sent as one message, or of
    one ``IndexedSlices``; it returns the sums in a list. All workers must ask for the same groups
    and call the functions alike, in the same order.

    Private: ``strategy.extended._cross_device_ops``, its ``_launchers``, which add over all
    replicas, and their ``_collective_keys``, ``_group_key`` and ``_group_size``. Their copies keep
    the options, the order on a device, and keys that are new in each call. The public
    ``strategy.reduce`` adds over all workers on the CPUs alone, and
    ``tf.raw_ops.CollectiveReduceV2`` needs keys that the strategy does not use. Without them no
    step is traced whose replicas are on several workers.

    Args:
        strategy: The strategy.
        groups: The numbers of the workers of each group, at most one of which has this worker.
        worker: The number of this worker.
    """
    devices = strategy.extended.worker_devices
    extended: Any = strategy.extended
    found: list[Function] = []
    for device, one in zip(devices, extended._cross_device_ops._launchers, strict=True):
        for group in groups:
            # Keys are numbered as they are asked for, so all workers ask for all groups.
            key = one._collective_keys.get_group_key([device, f"workers {group}"])
            if worker in group:
                launcher = copy.copy(one)
                launcher._group_key, launcher._group_size = key, len(group)
                found.append(functools.partial(_add_by, launcher))
    return found


def _add_by(launcher: Any, tensors: Sequence[Any]) -> list[Any]:
    if isinstance(tensors[0], tf.IndexedSlices):
        return [launcher.all_reduce_indexed_slices(tensors[0])]
    return list(launcher.batch_all_reduce([tensors]))


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
