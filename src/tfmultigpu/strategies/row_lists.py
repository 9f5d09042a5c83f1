"""Lists of table rows: a gradient as the ids of the rows that it changes, with their values.

A list is a ``tf.IndexedSlices`` of int64 ids ``[n]`` and values ``[n, ...]``. It stands for a
tensor of the shape of the table, in which the rows of an id that is listed twice are added. So
lists are added by writing one after the other, and nothing of the size of the table is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import tensorflow as tf

from tfmultigpu.types import Tensor


def is_list(gradient: Tensor) -> TypeGuard[tf.IndexedSlices]:
    """Returns whether a gradient is a list of rows, and not a tensor."""
    return isinstance(gradient, tf.IndexedSlices)


def row_list(gradient: tf.IndexedSlices, shape: Any, dtype: tf.DType) -> tf.IndexedSlices:
    """Returns a gradient of TensorFlow as a list.

    Args:
        gradient: The gradient, whose static shapes may be unknown.
        shape: The shape of the table.
        dtype: The dtype of the values.
    """
    values = tf.cast(gradient.values, dtype)
    values = tf.ensure_shape(values, [None, *shape[1:]])
    return tf.IndexedSlices(values, tf.cast(gradient.indices, tf.int64))


def joined(lists: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Returns the sum of lists: one after the other."""
    values = tf.concat([each.values for each in lists], 0)
    return tf.IndexedSlices(values, tf.concat([each.indices for each in lists], 0))


def added(before: Tensor, addend: Tensor) -> Tensor:
    """Returns the sum of two gradients: two tensors, or two lists, then a list with each id once.

    So the sum of any number of lists is never longer than the table.
    """
    if is_list(addend):
        return unique(joined([before, addend]))
    return before + addend


def unique(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the list with each id once, its rows added; not more rows than the table has."""
    ids, places = tf.unique(rows.indices)
    values = tf.math.unsorted_segment_sum(rows.values, places, tf.size(ids))
    values.set_shape([None, *rows.values.shape[1:]])
    return tf.IndexedSlices(values, ids)


def as_tensor(gradient: Tensor, shape: Any) -> tf.Tensor:
    """Returns a gradient, which may be a list, as a tensor of the shape of its variable."""
    if is_list(gradient):
        gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])
    tensor: tf.Tensor = tf.convert_to_tensor(gradient)
    tensor.set_shape(shape)  # A backward pass through a reshape forgets it.
    return tensor


def values_of(gradient: Tensor) -> tf.Tensor:
    """Returns the numbers of a gradient: of the rows of a list, or the tensor."""
    return gradient.values if is_list(gradient) else gradient


def with_values(gradient: Tensor, values: tf.Tensor, shape: Any = None) -> Tensor:
    """Returns a gradient with other numbers in place of ``values_of`` it.

    With the shape of the table, a list can be made a tensor by ``tf.convert_to_tensor``.
    """
    if not is_list(gradient):
        return values
    whole = gradient.dense_shape if shape is None else tf.constant(list(shape), tf.int64)
    return tf.IndexedSlices(values, gradient.indices, whole)
