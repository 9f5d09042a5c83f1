"""Adding what replicas computed, once per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.strategies.topology import all_on_local_cpus, per_replica

__all__ = ["all_reduce_sum", "sum_on_devices", "sum_over_replicas"]


def sum_over_replicas(
    strategy: tf.distribute.Strategy,
    values: list[list[tf.Tensor]],
    reduce_dtype: tf.DType | None = None,
) -> list[list[tf.Tensor]]:
    """Adds tensors over all replicas; call in a cross-replica context.

    Replicas on the CPUs of one process share its memory, so their tensors are added in place of a
    collective: that is the cheapest way there, and it leaves TensorFlow's collective groups alone,
    which a second strategy in one process would break. Everything else goes through one
    ``all_reduce`` per dtype, packed by the strategy.

    Args:
        strategy: The strategy.
        values: One list of tensors for each replica of this process, alike in shapes and dtypes.
        reduce_dtype: A narrower dtype that float32 tensors are sent in, without the last one of
            each list, which holds sums and weights.

    Returns:
        The sums, of the dtypes that came: one list for all replicas of this process where they
        share it, else one list for each.
    """
    if strategy.num_replicas_in_sync == 1:
        return values
    if all_on_local_cpus(strategy):
        devices = strategy.extended.worker_devices
        return [sum_on_devices(values, [devices[0]] * len(values[0]), reduce_dtype)]

    def reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        # A tensor captured by a branch or a loop has no device of its own, which some strategies
        # need to know where to reduce to.
        placed = _narrow([tf.identity(tensor) for tensor in tensors], reduce_dtype)
        summed = all_reduce_sum(tf.distribute.get_replica_context(), placed)
        return [tf.cast(one, tensor.dtype) for one, tensor in zip(summed, tensors, strict=True)]

    results = strategy.run(reduce, args=(per_replica(strategy, values),))
    local = [strategy.experimental_local_results(result) for result in results]
    return [[result[r] for result in local] for r in range(len(values))]


def sum_on_devices(
    values: list[list[tf.Tensor]], devices: Sequence[str], reduce_dtype: tf.DType | None = None
) -> list[tf.Tensor]:
    """Adds tensors over the replicas of one process, each on a device of its own.

    Args:
        values: One list of tensors for each replica, alike in shapes and dtypes.
        devices: Where each sum is to be, one for each tensor of a list.
        reduce_dtype: As for ``sum_over_replicas``.
    """
    sent = [_narrow(tensors, reduce_dtype) for tensors in values]
    totals = []
    for device, tensor, *parts in zip(devices, values[0], *sent, strict=True):
        with tf.device(device):
            totals.append(tf.add_n([tf.cast(part, tensor.dtype) for part in parts]))
    return totals


def _narrow(tensors: list[tf.Tensor], dtype: tf.DType | None) -> list[tf.Tensor]:
    """Rounds all but the last, each where it is."""
    if dtype is None:
        return tensors
    narrow = []
    for tensor in tensors[:-1]:
        with tf.device(tensor.device):
            narrow.append(tf.cast(tensor, dtype) if tensor.dtype == tf.float32 else tensor)
    return [*narrow, tensors[-1]]


def all_reduce_sum(context: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Adds tensors over all replicas in a replica context: one ``all_reduce`` for each dtype."""
    reduced: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # It takes one dtype a call.
        chosen = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [tensors[i] for i in chosen])
        reduced.update(zip(chosen, sums, strict=True))
    return [reduced[i] for i in range(len(tensors))]
