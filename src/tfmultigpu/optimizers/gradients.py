"""Decisions about all gradients of a step together: their norm, clipping, finiteness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

__all__ = [
    "all_finite",
    "clip_gradients",
    "clipped",
    "combined",
    "global_norm",
    "is_overwritten",
    "sum_dtype",
    "unscaled",
]


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


def clip_gradients(gradients: Sequence[Any], limit: float) -> tuple[list[Any], Any]:
    """Scales gradients down so that their norm together is at most a limit, as on one device.

    Args:
        gradients: Tensors of any float dtypes that are already added over the replicas, such as
            those of ``GradientAccumulator.reduce``. None stays None.
        limit: The largest norm, positive.

    Returns:
        The gradients, and their norm before, a scalar.

    Raises:
        TypeError: ``limit`` is a list.
        ValueError: ``limit`` is not positive.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> gradients, norm = tmg.clip_gradients([tf.constant([3.0, 4.0]), None], 1.0)
        >>> [round(x, 6) for x in gradients[0].numpy().tolist()], float(norm)
        ([0.6, 0.8], 5.0)
    """
    if isinstance(limit, Sequence):
        raise TypeError(
            "clip_gradients takes the gradients first. Received: limit is a "
            f"{type(limit).__name__}. Write tmg.clip_gradients(gradients, 1.0)."
        )
    if not limit > 0:
        raise ValueError(f"limit must be positive. Received: limit={limit}.")
    present = [gradient for gradient in gradients if gradient is not None]
    norm = global_norm(present)
    scaled = iter(clipped(present, limit, norm))
    return [None if gradient is None else next(scaled) for gradient in gradients], norm


def clipped(gradients: Sequence[tf.Tensor], limit: float, norm: Any) -> list[tf.Tensor]:
    """Returns gradients scaled down to a largest norm.

    Args:
        gradients: Tensors of any float dtypes.
        limit: The largest norm, positive.
        norm: Their norm, as ``global_norm`` returns it.
    """
    clipped: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):  # One dtype a call.
        chosen = [i for i, gradient in enumerate(gradients) if gradient.dtype == dtype]
        alike = [gradients[i] for i in chosen]
        scaled, _ = tf.clip_by_global_norm(alike, limit, use_norm=tf.cast(norm, dtype))
        clipped.update(zip(chosen, scaled, strict=True))
    return [clipped[i] for i in range(len(gradients))]


def all_finite(gradients: Sequence[tf.Tensor]) -> Any:
    """Returns whether every number in every gradient is finite, a bool scalar."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])


def unscaled(correction: Any, scale: Any) -> Any:
    """Returns what gradients are multiplied by: a correction, and the inverse of the loss scale.

    Args:
        correction: A scalar, None for 1.
        scale: What the losses were multiplied by, a float32 scalar, None for 1.

    Returns:
        A scalar, None for 1.
    """
    if scale is None:
        return correction
    return 1.0 / scale if correction is None else tf.cast(correction, tf.float32) / scale


def is_overwritten(variable: Any) -> bool:
    """Returns whether the "gradient" of a variable is the value that it is to have.

    Layers quantized to float8 keep scales, and the largest absolute values of the last batches,
    that Keras computes in the backward pass. They can be neither added nor scaled nor clipped.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


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
    taken = iter(summed)
    for factor, one in zip(factors, present, strict=True):
        for i, here in enumerate(one):
            if here:
                with places[i]():
                    part = tf.identity(next(taken))
                    part = part if factor is None else part * tf.cast(factor, part.dtype)
                    total[i] = part if total[i] is None else total[i] + part
    for i, part in enumerate(penalties):
        if part is not None:
            with places[i]():
                part = tf.cast(part, tf.float32) if part.dtype.size < 4 else part
                total[i] = part if total[i] is None else total[i] + part
    return total


def sum_dtype(dtype: Any) -> tf.DType:
    """Returns the dtype sums of gradients are kept in: at least float32."""
    dtype = tf.as_dtype(dtype)
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
