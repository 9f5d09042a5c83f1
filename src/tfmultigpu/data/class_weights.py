"""Conversion of class weights to sample weights."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import DataError


def weighting(class_weight: Any) -> Callable[..., tuple[Any, Any, Any]]:
    """Returns a function that adds sample weights to a batch ``(x, y)``; other classes weigh 1."""
    import keras

    try:
        weights = {operator.index(key): float(weight) for key, weight in class_weight.items()}
    except (AttributeError, TypeError, ValueError):
        raise DataError(
            "class_weight must be a dict from class number to weight.",
            f"class_weight={class_weight!r}",
            "Write class_weight={0: 1.0, 1: 5.0}.",
        ) from None
    keys, values = zip(*sorted({-1: 1.0, **weights}.items()), strict=True)  # Never empty.

    def weigh(*batch: Any) -> tuple[Any, Any, Any]:
        x, y, sample_weight = unpack_batch(batch)
        if sample_weight is not None or y is None or tf.nest.is_nested(y):
            raise DataError(
                "Class weights and sample weights cannot be combined, and class weights are for "
                "one output.",
                f"class_weight={weights!r}, labels of shape {_shapes_of(y)}, sample weights of "
                f"shape {_shapes_of(sample_weight)}",
                "Give sample weights for each output: (x, y, sample_weight).",
            )
        if y.shape.rank > 1 and y.shape[-1] > 1:  # One-hot.
            labels = tf.argmax(y, axis=-1, output_type=tf.int32)
        else:
            labels = tf.cast(tf.round(y if y.shape.rank == 1 else tf.squeeze(y, -1)), tf.int32)
        flat = tf.reshape(labels, [-1])
        places = tf.minimum(tf.searchsorted(keys, flat), len(keys) - 1)
        own = tf.gather(tf.constant(values, keras.config.floatx()), places)
        return x, y, tf.reshape(tf.where(tf.gather(keys, places) == flat, own, 1), tf.shape(labels))

    return weigh


def _shapes_of(tensors: Any) -> Any:
    """Returns the shapes of tensors in their structure: an error shows no value of a row."""
    return tf.nest.map_structure(lambda leaf: getattr(leaf, "shape", leaf), tensors)
