"""Rows are paired with rows: as one device gives, or an error, whatever a shard's size."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.accumulation.loss_sum import FixedLossSum

_random = np.random.default_rng(2)
LABELS = ("B", "B1", "BT")
PREDICTIONS = ("B", "B1", "BT", "BT1")
WEIGHTS = (None, "B", "B1", "BT")


class Elementwise(keras.losses.Loss):
    """What people write, without bringing its arguments to one rank as Keras' own losses do."""

    def call(self, y_true, y_pred):
        return tf.square(y_true - y_pred)


LOSSES = {
    "weighted mean": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    "classes": keras.losses.SparseCategoricalCrossentropy(),
}


def shape_of(kind, rows, length):
    return [{"B": rows, "T": length, "1": 1}[axis] for axis in kind]


def made(kind, rows, length, *, classes=False):
    shape = shape_of(kind, rows, length)
    if classes:
        return np.zeros(shape, "int32")  # The one class that predictions of any length have.
    return _random.uniform(0.1, 0.9, shape).astype("float32")


def one_device(loss, tensors):
    """What Keras gives; None where it raises."""
    try:
        return float(loss(*[tf.constant(tensor) for tensor in tensors]))
    except (ValueError, tf.errors.InvalidArgumentError):
        return None


def shard_sum(loss, specs):
    """The sum and weight of a shard as a graph, None where that is refused; whether it is fixed."""
    fixed = []

    def compute(*tensors):
        pair = tmg.loss_sum(loss, *tensors)
        fixed.append(isinstance(pair, FixedLossSum))
        return pair

    try:
        return tf.function(compute, specs, autograph=False).get_concrete_function(), fixed
    except (tmg.errors.LossError, ValueError):
        return None, fixed


@pytest.mark.parametrize("name", ["weighted mean", "classes"])
def test_equal_to_one_device_or_refused(name):
    """No weight counts along another axis than on one device, for no number of rows and shards."""
    loss, outcomes = LOSSES[name], {"equal": 0, "refused by both": 0, "refused": 0}
    for y, p, w, length in itertools.product(LABELS, PREDICTIONS, WEIGHTS, (2, 3)):
        if name != "classes" and len(y.rstrip("1")) != len(p.rstrip("1")):
            continue  # An error on one device, and on most shards.
        kinds = [kind for kind in (y, p, w) if kind is not None]
        integers = name == "classes"
        specs = [
            tf.TensorSpec([None, *shape_of(kind, 0, length)[1:]], "int32" if own else "float32")
            for kind, own in zip(kinds, (integers, False, False), strict=False)
        ]
        traced, fixed = shard_sum(loss, specs)
        for rows, shards in itertools.product((2, 3, 4, 5, 6), (2, 3)):
            if shards > rows:
                continue
            flags = (integers, False, False)
            tensors = [
                made(kind, rows, length, classes=own)
                for kind, own in zip(kinds, flags, strict=False)
            ]
            expected, what = one_device(loss, tensors), (name, y, p, w, length, rows, shards)
            if traced is None:
                outcomes["refused by both" if expected is None else "refused"] += 1
                continue
            ends = [rows * i // shards for i in range(shards + 1)]
            pairs = [
                traced(*[tf.constant(tensor[i:j]) for tensor in tensors])
                for i, j in itertools.pairwise(ends)
            ]
            weights = [float(pair.weight) for pair in pairs]
            weight = weights[0] if fixed[0] else sum(weights)
            result = sum(float(pair.sum) for pair in pairs) / weight
            assert expected is not None, f"{what}: an error on one device, {result} on replicas"
            assert result == pytest.approx(expected, rel=1e-5), what
            outcomes["equal"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_rows_that_are_compared_by_accident():
    """[rows] - [rows, 1] is [rows, rows]: on one device it is trained without a word."""
    labels, predictions = tf.TensorSpec([None]), tf.TensorSpec([None, 1])
    function = tf.function(lambda t, p: tmg.loss_sum(Elementwise(), t, p), autograph=False)
    with pytest.raises(tmg.errors.LossError, match="pairs each row with every row"):
        function.get_concrete_function(labels, predictions)
