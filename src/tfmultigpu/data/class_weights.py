"""Conversion of class weights to sample weights."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import DataError


def weighting(class_weight: Any) -> Callable[..., tuple[Any, Any, Any]]:
    """Returns a function that adds sample weights to a batch ``(x, y)``."""
    try:
        weights = {operator.index(key): float(weight) for key, weight in class_weight.items()}
        is_right = min(weights) >= 0
    except (AttributeError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise DataError(
            "class_weight must be a dict from class number to weight. Received: "
            f"class_weight={class_weight!r}. Write class_weight={{0: 1.0, 1: 5.0}}."
        )
    import keras

    classes = max(weights) + 1
    table = [weights.get(number, 1.0) for number in range(classes)]
    dtype = keras.config.floatx()

    def weigh(*batch: Any) -> tuple[Any, Any, Any]:
        x, y, sample_weight = unpack_batch(batch)
        if sample_weight is not None:
            raise DataError(
                "Class weights and sample weights cannot be combined. Received: "
                f"class_weight={dict(class_weight)!r} beside the sample weights of the data. "
                "Multiply them, and give the product as sample weights."
            )
        if y is None or tf.nest.is_nested(y):
            raise DataError(
                "class_weight works only for one output with class numbers or one-hot labels. "
                f"Received: labels {y!r}. Give sample weights for each output: "
                "(x, y, sample_weight)."
            )
        number = _classes_of(y)
        known = (number >= 0) & (number < classes)
        weight = tf.gather(tf.constant(table, dtype), tf.clip_by_value(number, 0, classes - 1))
        return x, y, tf.where(known, weight, tf.ones([], dtype))

    return weigh


def _classes_of(y: Any) -> Any:
    """Returns the class numbers of labels of shape ``[batch]``, ``[batch, 1]`` or one-hot."""
    if y.shape.rank == 1:
        return _rounded(y)
    if y.shape[-1] == 1:
        return _rounded(tf.squeeze(y, axis=-1))
    return tf.argmax(y, axis=-1, output_type=tf.int32)


def _rounded(y: Any) -> Any:
    return tf.cast(tf.round(y) if y.dtype.is_floating else y, tf.int32)
