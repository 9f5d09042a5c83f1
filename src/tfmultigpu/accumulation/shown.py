"""Numbers as a person reads them, in the one line by which an object says what it is."""

from __future__ import annotations

import tensorflow as tf

from tfmultigpu.types import Scalar


def shown(value: Scalar) -> str:
    """Returns a scalar or a vector by its numbers; inside a ``tf.function`` by its type."""
    if isinstance(value, tf.distribute.DistributedValues):
        # A replica of this process each: of another strategy than the one entered, too.
        return f"({', '.join(map(shown, getattr(value, 'values', ())))})"
    if tf.is_symbolic_tensor(value):
        return f"<{value.dtype.name} of a trace>"
    if isinstance(value, (tf.Tensor, tf.Variable)):
        value = value.numpy().tolist()
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
