"""What is decided about all gradients of a step together: their norm, clipping, finiteness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["all_finite", "clipped", "global_norm", "unscaled"]


def global_norm(gradients: Sequence[tf.Tensor], wanted: Any = True) -> Any:
    """Returns the norm of all gradients together, a scalar: of their dtype, or float64 for several.

    The sum of squares of each gradient is taken on the device that the gradient is on.

    Args:
        gradients: Tensors of any float dtypes.
        wanted: A bool scalar; where it is False the result is 0, and all these squares, which for
            a large model take as long as part of the step, are not computed.
    """
    if not gradients:
        return tf.zeros([])
    if len({gradient.dtype for gradient in gradients}) > 1:
        gradients = [tf.cast(gradient, tf.float64) for gradient in gradients]
    if wanted is not True:
        nothing = tf.zeros([], gradients[0].dtype)
        return tf.cond(wanted, lambda: tf.linalg.global_norm(list(gradients)), lambda: nothing)
    return tf.linalg.global_norm(list(gradients))


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
