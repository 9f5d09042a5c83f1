"""Decisions about the global gradient, all of it together: its norm, its finiteness, clipping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_positive
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.strategies.collectives import REDUCED
from tfmultigpu.strategies.row_lists import Gradient, values_of, with_values
from tfmultigpu.types import KerasVariable

BY_HAND = (
    "Write in strategy.scope(): window = tmg.GradientAccumulator(variables); in the function given "
    "to strategy.run: window.add(tape.gradient(pair.sum, variables), pair), with pair = "
    "tmg.loss_sum(loss, y, outputs); and after strategy.run: gradients, weight = window.reduce(); "
    "tmg.apply_reduced_gradients(optimizer, gradients, variables)."
)
_in_global_phase: ContextVar[bool] = ContextVar("in_global_phase", default=False)


def clip_gradients(gradients: Sequence[Gradient], limit: float) -> tuple[list[Gradient], tf.Tensor]:
    """Scales gradients down so that their norm together is at most a limit, as on one device.

    Args:
        gradients: The gradients of the global batch, from ``GradientAccumulator.reduce``. None
            stays None.
        limit: The largest norm, positive and finite.

    Returns:
        The gradients, and their norm before, a scalar.

    Raises:
        TfMultiGpuError: Called by one of several replicas, inside ``strategy.run``.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> gradients, norm = tmg.clip_gradients([tf.constant([3.0, 4.0]), None], 1.0)
        >>> [round(x, 6) for x in gradients[0].numpy().tolist()], float(norm)
        ([0.6, 0.8], 5.0)
    """
    limit = check_positive("limit", limit, "To clip nothing, leave the call out.")
    check_reduced("clip_gradients", gradients)
    reduced: list[Gradient] = []
    for gradient in gradients:
        if gradient is None or getattr(gradient, REDUCED, False):
            reduced.append(gradient)  # A list has each row once.
        else:
            reduced.append(tf.convert_to_tensor(gradient))
    norm = global_norm([gradient for gradient in reduced if gradient is not None])
    return clipped(reduced, limit, norm), norm


def clipped(gradients: Sequence[Gradient], limit: float, norm: tf.Tensor) -> list[Gradient]:
    """Returns gradients of any float dtypes scaled down to a largest norm, given their norm."""
    scale = tf.clip_by_global_norm([tf.ones_like(norm)], limit, norm)[0][0]
    return [each if each is None else scaled(each, scale) for each in gradients]


def scaled(gradient: Gradient, factor: Gradient) -> Gradient:
    """Returns a gradient, a tensor or a list of rows, times a factor."""
    values = values_of(gradient)
    return with_values(gradient, values * tf.cast(factor, values.dtype))


def global_norm(gradients: Sequence[Gradient]) -> Gradient:
    """Returns the norm of all gradients together, of their dtype, or float64 for several.

    The rows that a list leaves out are zero; it must have each row once.
    """
    numbers = [values_of(gradient) for gradient in gradients]
    if len({tensor.dtype for tensor in numbers}) > 1:
        numbers = [tf.cast(tensor, tf.float64) for tensor in numbers]
    return tf.linalg.global_norm(numbers) if numbers else tf.zeros([])


def all_finite(gradients: Sequence[Gradient]) -> Gradient:
    """Returns whether every number in every gradient is finite, a bool scalar."""
    finite = [tf.reduce_all(tf.math.is_finite(values_of(gradient))) for gradient in gradients]
    return tf.reduce_all(finite)


@contextmanager
def in_global_phase() -> Iterator[None]:
    """Marks what a replica computes of the gradient of the global batch, after the addition."""
    token = _in_global_phase.set(True)
    try:
        yield
    finally:
        _in_global_phase.reset(token)


def check_reduced(name: str, gradients: Sequence[Any] = ()) -> None:
    """Checks that a function of the global gradient gets that, once for all replicas."""
    context = tf.distribute.get_replica_context()
    parts = any(isinstance(gradient, tf.distribute.DistributedValues) for gradient in gradients)
    in_replica = context is not None and context.num_replicas_in_sync > 1
    if parts or (in_replica and not _in_global_phase.get()):
        raise TfMultiGpuError(
            "What follows the addition over the replicas is done once, for all of them together.",
            f"{name} in a replica, or with parts, as strategy.run returns them",
            BY_HAND,
        )


def sum_dtype(dtype: Any) -> tf.DType:
    """Returns the dtype sums of gradients are kept in: at least float32."""
    dtype = tf.as_dtype(dtype)
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def refuse_float8(variables: Sequence[KerasVariable]) -> None:
    """Raises an error for trained float8 layers, whose scales replicas cannot add."""
    new = [v.path for v in variables if getattr(v, "overwrite_with_gradient", False)]
    if new:
        raise TfMultiGpuError(
            "A float8 layer computes its scales from a whole batch; scales of replicas cannot be "
            "added.",
            f"{new[:3]}",
            'Leave out layer.quantize("float8").',
        )
