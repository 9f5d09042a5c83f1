"""Adding what replicas computed, once per step."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfmultigpu.accumulation import all_reduce_sum
from tfmultigpu.batches import per_replica

__all__ = ["sum_on_devices", "sum_over_replicas"]


def sum_over_replicas(
    strategy: tf.distribute.Strategy, values: list[list[tf.Tensor]]
) -> list[list[tf.Tensor]]:
    """Adds tensors over all replicas; call in a cross-replica context.

    Replicas on the CPUs of one process share its memory, so their tensors are added in place of a
    collective: that is the cheapest way there, and it leaves TensorFlow's collective groups alone,
    which a second strategy in one process would break. Everything else goes through one
    ``all_reduce`` per dtype, packed by the strategy.

    Args:
        strategy: The strategy.
        values: One list of tensors for each replica of this process, alike in shapes and dtypes.

    Returns:
        The sums: one list for all replicas of this process where they share it, else one list for
        each.
    """
    if strategy.num_replicas_in_sync == 1:
        return values
    devices = strategy.extended.worker_devices
    if len(devices) == strategy.num_replicas_in_sync and _all_on_cpu(devices):
        with tf.device(devices[0]):
            return [[tf.add_n(list(parts)) for parts in zip(*values, strict=True)]]

    def reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        # A tensor captured by a branch or a loop has no device of its own, which some strategies
        # need to know where to reduce to.
        placed = [tf.identity(tensor) for tensor in tensors]
        return all_reduce_sum(tf.distribute.get_replica_context(), placed)

    results = strategy.run(reduce, args=(per_replica(strategy, values),))
    local = [strategy.experimental_local_results(result) for result in results]
    return [[result[r] for result in local] for r in range(len(values))]


def sum_on_devices(values: list[list[tf.Tensor]], devices: Sequence[str]) -> list[tf.Tensor]:
    """Adds tensors over the replicas of one process, each on a device of its own.

    Args:
        values: One list of tensors for each replica, alike in shapes and dtypes.
        devices: Where each sum is to be, one for each tensor of a list.
    """
    totals = []
    for device, *parts in zip(devices, *values, strict=True):
        with tf.device(device):
            totals.append(tf.add_n(parts))
    return totals


def _all_on_cpu(devices: tuple[str, ...]) -> bool:
    return all("CPU" in device.upper() for device in devices)
