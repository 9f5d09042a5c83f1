"""What the old train step needs of gradients; it goes with that."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.clipping import clip_gradients, clipped
from tfmultigpu.accumulation.gradients import all_finite, combined, global_norm, sum_dtype

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


def unscaled(correction: Any, scale: Any) -> Any:
    """Returns what gradients are multiplied by: a correction, and the inverse of the loss scale."""
    if scale is None:
        return correction
    return 1.0 / scale if correction is None else tf.cast(correction, tf.float32) / scale


def is_overwritten(variable: Any) -> bool:
    """Returns whether the "gradient" of a variable is the value that it is to have (float8)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))
