"""Decisions about all gradients of a step together: their norm and finiteness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

__all__ = ["all_finite", "combined", "global_norm", "on_each_replica", "sum_dtype"]


def global_norm(gradients: Sequence[tf.Tensor]) -> Any:
    """Returns the norm of all gradients together, a scalar: of their dtype, or float64 for several.

    The sum of squares of each gradient is taken on the device that the gradient is on.

    Args:
        gradients: Tensors of any float dtypes.
    """
    if not gradients:
        return tf.zeros([])
    if len({gradient.dtype for gradient in gradients}) > 1:
        gradients = [tf.cast(gradient, tf.float64) for gradient in gradients]
    return tf.linalg.global_norm(list(gradients))


def all_finite(gradients: Sequence[tf.Tensor]) -> Any:
    """Returns whether every number in every gradient is finite, a bool scalar."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])


def combined(
    summed: Sequence[tf.Tensor],
    present: Sequence[Sequence[bool]],
    factors: Sequence[Any],
    penalties: Sequence[Any],
    places: Sequence[Callable[[], AbstractContextManager[Any]]],
) -> list[Any]:
    """Turns what was added over the replicas into the gradients of the global batch.

    Args:
        summed: The gradients of each backward pass, one after the other.
        present: For each backward pass, which variables have a gradient.
        factors: For each backward pass what its gradients are multiplied by, None for 1.
        penalties: For each variable the gradient of its regularisation, or None.
        places: For each variable what places its gradient.

    Returns:
        For each variable its gradient, at least float32, or None.
    """
    total: list[Any] = [None] * len(places)

    def add(index: int, part: tf.Tensor) -> None:
        total[index] = part if total[index] is None else total[index] + part

    remaining = iter(summed)
    for factor, has_gradient in zip(factors, present, strict=True):
        for index in [i for i, has in enumerate(has_gradient) if has]:
            with places[index]():
                part = tf.identity(next(remaining))
                add(index, part if factor is None else part * tf.cast(factor, part.dtype))
    for index, part in enumerate(penalties):
        if part is not None:
            with places[index]():
                add(index, tf.cast(part, sum_dtype(part.dtype)))
    return total


def on_each_replica(
    function: Callable[[Sequence[tf.Tensor]], tuple[list[tf.Tensor], Any]], gradients: Sequence[Any]
) -> tuple[list[Any], Any]:
    """Calls a function of the global gradient: once, or where the copy of each replica is.

    Args:
        function: ``f(tensors)`` returns as many tensors, and a scalar.
        gradients: Tensors, or per-replica values of equal copies. None stays None.

    Returns:
        Gradients as they came, and the scalar, which is the same for all replicas.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    spread = bool(present) and isinstance(present[0], tf.distribute.DistributedValues)
    if not spread:
        changed, scalar = function(present)
    else:
        results = []
        parts = [tf.nest.flatten(gradient, expand_composites=True) for gradient in present]
        for tensors in zip(*parts, strict=True):
            with tf.device(tensors[0].device):
                results.append(function(tensors))
        copies = zip(*(tensors for tensors, _ in results), strict=True)
        changed = [
            tf.nest.pack_sequence_as(gradient, tensors, expand_composites=True)
            for gradient, tensors in zip(present, copies, strict=True)
        ]
        scalar = results[0][1]
    remaining = iter(changed)
    return [None if gradient is None else next(remaining) for gradient in gradients], scalar


def sum_dtype(dtype: Any) -> tf.DType:
    """Returns the dtype sums of gradients are kept in: at least float32."""
    dtype = tf.as_dtype(dtype)
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
