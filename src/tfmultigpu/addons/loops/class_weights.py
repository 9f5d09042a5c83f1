"""Conversion of class weights to sample weights."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import keras
import tensorflow as tf

from tfmultigpu.arguments import brief
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import DataError
from tfmultigpu.types import Scalar, Shard


def weighting(class_weight: Mapping[int, float]) -> Callable[..., tuple[Shard, Shard, Scalar]]:
    """Returns a function that adds sample weights to a batch ``(x, y)``; other classes weigh 1."""
    try:
        weights = {operator.index(key): float(weight) for key, weight in class_weight.items()}
    except (AttributeError, TypeError, ValueError):
        raise DataError(
            "class_weight must be a dict from class number to weight.",
            f"class_weight={brief(class_weight)}",
            "Write class_weight={0: 1.0, 1: 5.0}.",
        ) from None
    classes = sorted({-1, *weights})  # Never empty.
    of_classes = [weights.get(number, 1.0) for number in classes]

    def weigh(*batch: Shard) -> tuple[Shard, Shard, Scalar]:
        x, y, sample_weight = unpack_batch(batch)
        if sample_weight is not None or y is None or tf.nest.is_nested(y):
            raise DataError(
                "Class weights and sample weights cannot be combined, and class weights are for "
                "one output.",
                f"class_weight={brief(weights)}, labels of shape {_shapes_of(y)}, sample weights "
                f"of shape {_shapes_of(sample_weight)}",
                "Give sample weights for each output: (x, y, sample_weight).",
            )
        if y.shape.rank > 1 and y.shape[-1] > 1:
            labels = tf.argmax(y, axis=-1, output_type=tf.int32)  # One-hot.
        elif y.shape.rank > 1:
            labels = tf.cast(tf.round(tf.squeeze(y, -1)), tf.int32)
        else:
            labels = tf.cast(tf.round(y), tf.int32)
        flat = tf.reshape(labels, [-1])
        places = tf.minimum(tf.searchsorted(classes, flat), len(classes) - 1)
        weight = tf.gather(tf.constant(of_classes, keras.config.floatx()), places)
        of_rows = tf.where(tf.gather(classes, places) == flat, weight, 1)
        return x, y, tf.reshape(of_rows, tf.shape(labels))

    return weigh


def _shapes_of(tensors: Shard) -> Shard:
    """Returns the shapes of tensors in their structure: an error shows no value of a row."""
    return tf.nest.map_structure(lambda leaf: getattr(leaf, "shape", leaf), tensors)
