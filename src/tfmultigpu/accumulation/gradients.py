"""Decisions about the global gradient, all of it together: its norm, its finiteness, clipping."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import TfMultiGpuError

BY_HAND = (
    "Write in the function given to strategy.run: pair = tmg.loss_sum(loss, y, outputs); "
    "window.add(tape.gradient(pair.sum, variables), pair.weight); and after strategy.run: "
    "gradients, weight = window.reduce(); tmg.apply_reduced_gradients(optimizer, gradients, "
    "variables). window is a tmg.GradientAccumulator(variables), made in strategy.scope()."
)
_in_global_phase: ContextVar[bool] = ContextVar("in_global_phase", default=False)


def clip_gradients(gradients: Sequence[Any], limit: float) -> tuple[list[Any], Any]:
    """Scales gradients down so that their norm together is at most a limit, as on one device.

    Args:
        gradients: Those of the global batch, of any float dtypes, as ``GradientAccumulator.reduce``
            returns them. None stays None.
        limit: The largest norm, positive and finite.

    Returns:
        The gradients, and their norm before, a scalar.

    Raises:
        TfMultiGpuError: Called by one of several replicas, inside ``strategy.run``.
        ValueError: ``limit`` is not a positive, finite number.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> gradients, norm = tmg.clip_gradients([tf.constant([3.0, 4.0]), None], 1.0)
        >>> [round(x, 6) for x in gradients[0].numpy().tolist()], float(norm)
        ([0.6, 0.8], 5.0)
    """
    if limit is None or isinstance(limit, Sequence) or not 0 < limit < math.inf:
        raise ValueError(
            f"limit must be a positive number. Received: limit={limit!r}. Write "
            "tmg.clip_gradients(gradients, 1.0), or for the norm alone "
            "tf.linalg.global_norm(gradients)."
        )
    check_reduced("clip_gradients", gradients)
    present = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    norm = global_norm(present)
    remaining = iter(clipped(present, limit, norm))
    return [None if gradient is None else next(remaining) for gradient in gradients], norm


def clipped(gradients: Sequence[tf.Tensor], limit: float, norm: Any) -> list[tf.Tensor]:
    """Returns gradients of any float dtypes scaled down to a largest norm, given their norm."""
    alike: dict[Any, Iterator[tf.Tensor]] = {}
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):  # One dtype a call.
        chosen = [gradient for gradient in gradients if gradient.dtype == dtype]
        alike[dtype] = iter(tf.clip_by_global_norm(chosen, limit, tf.cast(norm, dtype))[0])
    return [next(alike[gradient.dtype]) for gradient in gradients]


def global_norm(gradients: Sequence[tf.Tensor]) -> Any:
    """Returns the norm of all gradients together, a scalar: of their dtype, or float64 for several.

    The sum of squares of each gradient is taken on the device that the gradient is on.
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
    """Returns for each variable its gradient of the global batch, at least float32, or None."""
    parts: list[list[tf.Tensor]] = [[] for _ in places]
    remaining = iter(summed)
    for factor, has_gradient in zip(factors, present, strict=True):
        for index in [i for i, has in enumerate(has_gradient) if has]:
            with places[index]():
                part = tf.identity(next(remaining))
                parts[index].append(part if factor is None else part * tf.cast(factor, part.dtype))
    totals: list[Any] = []
    for place, penalty, own in zip(places, penalties, parts, strict=True):
        with place():
            if penalty is not None:
                own.append(tf.cast(penalty, sum_dtype(penalty.dtype)))
            totals.append(functools.reduce(operator.add, own) if own else None)
    return totals


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
    received = ""
    if any(isinstance(gradient, tf.distribute.DistributedValues) for gradient in gradients):
        received = f"{name} of per-replica values, as strategy.run returns them"
    elif not (context is None or context.num_replicas_in_sync == 1 or _in_global_phase.get()):
        received = f"{name} in a replica, inside strategy.run, which has only its own part"
    if received:
        raise TfMultiGpuError(
            "What follows the addition over the replicas is done once, for all of them together. "
            f"Received: {received}. {BY_HAND}"
        )


def sum_dtype(dtype: Any) -> tf.DType:
    """Returns the dtype sums of gradients are kept in: at least float32."""
    dtype = tf.as_dtype(dtype)
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
