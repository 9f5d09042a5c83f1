"""Rows are paired with rows: as one device gives, or an error, whatever a shard's size."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg

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


def one_device(loss, tensors):
    """What Keras gives; None where it raises."""
    try:
        return float(loss(*tensors))
    except (ValueError, tf.errors.InvalidArgumentError):
        return None


@pytest.mark.parametrize("name", LOSSES)
def test_equal_to_one_device_or_refused(name):
    """No weight counts along another axis than on one device, for no number of rows and shards."""
    loss, outcomes = LOSSES[name], {"equal": 0, "refused by both": 0, "refused": 0}
    dtypes = ["int32" if name == "classes" else "float32", "float32", "float32"]
    for y, p, w, length in itertools.product(LABELS, PREDICTIONS, WEIGHTS, (2, 3)):
        if name != "classes" and len(y.rstrip("1")) != len(p.rstrip("1")):
            continue  # An error on one device, and on most shards.
        kinds = [kind for kind in (y, p, w) if kind is not None]
        specs = [
            tf.TensorSpec([None, *shape_of(kind, 0, length)[1:]], dtype)
            for kind, dtype in zip(kinds, dtypes, strict=False)
        ]
        function = tf.function(lambda *args: tmg.loss_sum(loss, *args), specs, autograph=False)
        try:
            traced = function.get_concrete_function()
        except ValueError:
            traced = None
        for rows, shards in itertools.product((2, 3, 4, 5, 6), (2, 3)):
            # As integers they are the one class that predictions of any length have.
            tensors = [
                tf.cast(_random.uniform(0.1, 0.9, shape_of(kind, rows, length)), dtype)
                for kind, dtype in zip(kinds, dtypes, strict=False)
            ]
            expected, what = one_device(loss, tensors), (name, y, p, w, length, rows, shards)
            if traced is None:
                outcomes["refused by both" if expected is None else "refused"] += 1
                continue
            ends = [rows * i // shards for i in range(shards + 1)]
            pairs = [traced(*[t[i:j] for t in tensors]) for i, j in itertools.pairwise(ends)]
            result = float(sum(pair.sum for pair in pairs) / sum(pair.weight for pair in pairs))
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
