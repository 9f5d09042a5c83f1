"""Rows are paired with rows: as one device gives, or an error, whatever a shard's size."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import Replicated, strategy_of

import tfmultigpu as tmg
from tfmultigpu.accumulation import row_axes
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
    "mse": keras.losses.MeanSquaredError(),
    "weighted mean": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    "own": Elementwise(),
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


@pytest.mark.parametrize("name", LOSSES)
def test_equal_to_one_device_or_refused(name):
    """No shape trains along another axis than on one device, for no number of rows and shards."""
    loss, outcomes = LOSSES[name], {"equal": 0, "refused by both": 0, "refused": 0}
    for y, p, w, length in itertools.product(LABELS, PREDICTIONS, WEIGHTS, (2, 3)):
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


@pytest.mark.parametrize(("replicas", "rows"), [(1, 1), (2, 6)])
def test_labels_without_the_axis_of_the_predictions_are_refused_by_a_step(replicas, rows):
    """Predictions of 3 numbers: a batch of 6 makes shards of 3 rows."""

    def build():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])

    run = Replicated(replicas, build, lambda: keras.optimizers.SGD(0.1), "mse")
    batch = np.ones((rows, 2), "float32"), np.ones(rows, "float32")
    with pytest.raises(tmg.errors.LossError) as caught:
        run.step(batch)
    message = str(caught.value)
    assert "The loss 'mean_squared_error' does not pair rows with rows" in message
    assert "Received: labels, predictions and weights of shapes (None,), (None, 3)" in message
    assert "y[:, None]" in message
    assert int(run.optimizer.iterations.numpy()) == 0


def test_weights_of_rows_against_a_loss_for_each_step_of_a_sequence():
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2, 1)), keras.layers.Dense(1)])
    step = tmg.make_eval_step(model, "mse", strategy)
    batch = np.ones((4, 2, 1), "float32"), np.ones((4, 2, 1), "float32")
    with pytest.raises(tmg.errors.LossError, match=r"sample_weight\[:, None\]"):
        step((*batch, np.arange(4.0)))  # Two shards of two rows, and two steps.
    assert float(step((*batch, np.ones((4, 1))))["weight"]) == 8.0


def test_rows_that_are_compared_by_accident():
    """[rows] - [rows, 1] is [rows, rows]: on one device it is trained without a word."""
    labels, predictions = tf.TensorSpec([None]), tf.TensorSpec([None, 1])
    function = tf.function(lambda t, p: tmg.loss_sum(Elementwise(), t, p), autograph=False)
    with pytest.raises(tmg.errors.LossError, match="each row is paired with every row"):
        function.get_concrete_function(labels, predictions)


def test_weights_without_rows_divide_once():
    """One weight for each position of a sequence, the same in every row."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    y_true, y_pred = made("BTT", 5, 3), made("BTT", 5, 3)
    for shape in ((3,), (1, 3)):
        weight = np.array([0.5, 2.0, 1.0], "float32").reshape(shape)
        expected = float(loss(y_true, y_pred, weight))
        pairs = [tmg.loss_sum(loss, y_true[i:j], y_pred[i:j], weight) for i, j in ((0, 2), (2, 5))]
        assert all(isinstance(pair, FixedLossSum) for pair in pairs)
        assert sum(float(pair.sum) for pair in pairs) == pytest.approx(expected, rel=1e-6)


def test_weights_do_not_hide_a_loss_that_has_lost_its_rows():
    """Keras' mse of predictions of shape [rows] is one number, times a weight for each row."""
    with pytest.raises(tmg.errors.LossError, match="is one number for a batch"):
        tmg.loss_sum("mse", made("B", 4, 0), made("B", 4, 0), np.ones(4, "float32"))


def test_a_loss_is_tried_once(monkeypatch):
    tried = []
    original = row_axes.run_in_thread
    monkeypatch.setattr(row_axes, "run_in_thread", lambda f: tried.append(f) or original(f))

    def squares(y_true, y_pred):
        return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)

    def build():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])

    run = Replicated(3, build, lambda: keras.optimizers.SGD(0.1), squares, micro_batches=2)
    run.train([(np.ones((n, 2), "float32"), np.ones((n, 3), "float32")) for n in (5, 2)])
    assert len(tried) == 1
    Replicated(2, build, lambda: keras.optimizers.SGD(0.1), "mse").train(
        [(np.ones((4, 2), "float32"), np.ones((4, 3), "float32"))]
    )
    assert len(tried) == 1, "a loss of Keras where ranks agree"


def test_a_function_that_cannot_be_tried_is_left_to_the_step():
    """An error for other reasons than the number of rows is not called one of rows."""

    def broken(y_true, y_pred):
        raise ZeroDivisionError("of the user's own")

    function = tf.function(lambda t, p: tmg.loss_sum(broken, t, p), autograph=False)
    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        function.get_concrete_function(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3]))
