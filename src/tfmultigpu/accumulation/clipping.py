"""Clipping of the global gradient: by the norm of all gradients together, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.gradients import global_norm, on_each_replica

__all__ = ["clip_gradients", "clipped"]


def clip_gradients(gradients: Sequence[Any], limit: float) -> tuple[list[Any], Any]:
    """Scales gradients down so that their norm together is at most a limit, as on one device.

    Args:
        gradients: Those of the global batch, of any float dtypes, as ``GradientAccumulator.reduce``
            returns them: tensors, or per-replica values. None stays None.
        limit: The largest norm, positive.

    Returns:
        The gradients, and their norm before, a scalar.

    Raises:
        TypeError: ``limit`` is not a number.
        ValueError: ``limit`` is not positive.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> gradients, norm = tmg.clip_gradients([tf.constant([3.0, 4.0]), None], 1.0)
        >>> [round(x, 6) for x in gradients[0].numpy().tolist()], float(norm)
        ([0.6, 0.8], 5.0)
    """
    if limit is None or isinstance(limit, Sequence):
        raise TypeError(
            "clip_gradients takes the gradients first. Received: limit is a "
            f"{type(limit).__name__}. Write tmg.clip_gradients(gradients, 1.0)."
        )
    if not limit > 0:
        raise ValueError(f"limit must be positive. Received: limit={limit}.")

    def clip(tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
        norm = global_norm(tensors)
        return clipped(tensors, limit, norm), norm

    return on_each_replica(clip, gradients)


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
