"""Losses as sums and weights, added over shards and divided once."""

from __future__ import annotations

import contextlib
import inspect
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.accumulation.losses import FixedLossSum

REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")
SHARDS = ((0, 4), (4, 5), (5, 7))
ROWS = 7

_random = np.random.default_rng(11)
REAL = _random.normal(size=(ROWS, 3)).astype("float32")
OTHER = _random.normal(size=(ROWS, 3)).astype("float32")
UNIT = _random.uniform(0.05, 0.95, size=(ROWS, 3)).astype("float32")
SIMPLEX = (UNIT / UNIT.sum(axis=1, keepdims=True)).astype("float32")
BINARY = _random.integers(0, 2, (ROWS, 3)).astype("float32")
CLASSES = _random.integers(0, 3, ROWS)
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]
IMAGES = _random.uniform(0.1, 0.9, (ROWS, 2, 2, 1)).astype("float32")
MASKS = _random.integers(0, 2, (ROWS, 2, 2, 1)).astype("float32")
WEIGHTS = np.array([0.5, 2.0, 0.0, 1.0, 3.0, 0.25, 1.5], "float32")

# For each loss of Keras: labels, predictions and arguments.
LOSSES = {
    "BinaryCrossentropy": (BINARY, UNIT, {}),
    "BinaryFocalCrossentropy": (BINARY, UNIT, {}),
    "CTC": (_random.integers(1, 3, (ROWS, 2)), _random.normal(size=(ROWS, 6, 4)), {}),
    "CategoricalCrossentropy": (ONE_HOT, SIMPLEX, {"label_smoothing": 0.1}),
    "CategoricalFocalCrossentropy": (ONE_HOT, SIMPLEX, {}),
    "CategoricalGeneralizedCrossEntropy": (CLASSES, SIMPLEX, {}),
    "CategoricalHinge": (ONE_HOT, SIMPLEX, {}),
    "CosineSimilarity": (OTHER, REAL, {}),
    "Dice": (MASKS, IMAGES, {"axis": (1, 2, 3)}),
    "Hinge": (BINARY, REAL, {}),
    "Huber": (OTHER, REAL, {}),
    "KLDivergence": (SIMPLEX[::-1].copy(), SIMPLEX, {}),
    "LogCosh": (OTHER, REAL, {}),
    "MeanAbsoluteError": (OTHER, REAL, {}),
    "MeanAbsolutePercentageError": (OTHER, REAL, {}),
    "MeanSquaredError": (OTHER, REAL, {}),
    "MeanSquaredLogarithmicError": (SIMPLEX[::-1].copy(), UNIT, {}),
    "Poisson": (BINARY, UNIT, {}),
    "SparseCategoricalCrossentropy": (CLASSES, SIMPLEX, {}),
    "SquaredHinge": (BINARY, REAL, {}),
    "Tversky": (MASKS, IMAGES, {"axis": (1, 2, 3)}),
}
# Their value for one example depends on the others, so that shards cannot be added.
COUPLED = {"Circle"}


def classes_of_keras() -> dict[str, type]:
    return {
        name: value
        for name, value in vars(keras.losses).items()
        if inspect.isclass(value) and issubclass(value, keras.losses.Loss)
        if value is not keras.losses.Loss
    }


def add_shards(loss, y_true, y_pred, sample_weight=None, shards=SHARDS):
    """Sums and weights of the shards, added; a FixedLossSum keeps its weight."""
    pairs = [
        tmg.loss_sum(
            loss, y_true[i:j], y_pred[i:j], None if sample_weight is None else sample_weight[i:j]
        )
        for i, j in shards
    ]
    total = tf.add_n([pair.sum for pair in pairs])
    weights = [pair.weight for pair in pairs]
    return total, weights[0] if isinstance(pairs[0], FixedLossSum) else tf.add_n(weights)


def test_every_loss_of_keras_is_here():
    assert set(classes_of_keras()) == set(LOSSES) | COUPLED


def wrong_sum(name, reduction, weighted):
    """Says where value or gradient of the shards differ from Keras'; nothing if they do not."""
    y_true, y_pred, arguments = LOSSES[name]
    loss = getattr(keras.losses, name)(reduction=reduction, **arguments)
    predictions = tf.Variable(y_pred.astype("float32"))
    weights = WEIGHTS if weighted else None
    if weighted and loss(y_true, predictions).shape.rank == 0:
        per_example = getattr(keras.losses, name)(reduction="none", **arguments)
        if per_example(y_true, predictions).shape.rank > 1:
            weights = WEIGHTS.reshape([ROWS] + [1] * 2)
    with tf.GradientTape() as tape:
        truth = loss(y_true, predictions, sample_weight=weights)
    truth_gradient = tf.convert_to_tensor(tape.gradient(truth, predictions))
    with tf.GradientTape() as tape:
        total, weight = add_shards(loss, y_true, predictions, weights)
    gradient = tf.convert_to_tensor(tape.gradient(total, predictions)) / weight
    scale = max(float(tf.reduce_max(tf.abs(truth_gradient))), 1.0)
    same = float(total / weight) == pytest.approx(float(truth), rel=1e-6, abs=1e-6)
    near = np.allclose(gradient, truth_gradient, rtol=1e-5, atol=1e-6 * scale)
    return not (same and near and loss.reduction == reduction)


def test_every_loss_and_reduction_adds_up_to_what_keras_gives():
    cases = itertools.product(sorted(LOSSES), REDUCTIONS, (False, True))
    assert [case for case in cases if wrong_sum(*case)] == []


@pytest.mark.parametrize("name", ["mse", "MeanSquaredError", "mean_squared_error"], ids=str)
def test_names(name):
    total, weight = add_shards(name, OTHER, REAL)
    assert float(total / weight) == pytest.approx(np.mean((OTHER - REAL) ** 2), rel=1e-6)


def test_labels_and_predictions_that_differ_by_an_axis_of_one(subtests: pytest.Subtests):
    """[rows] against [rows, 1] must not broadcast to [rows, rows]."""

    def squared(y_true, y_pred):
        return tf.square(y_true - y_pred)

    for loss in ("mse", squared, keras.losses.MeanSquaredError()):
        with subtests.test(loss=loss):
            total, weight = add_shards(loss, OTHER[:, 0], REAL[:, :1])
            truth = np.mean((OTHER[:, 0] - REAL[:, 0]) ** 2)
            assert float(total / weight) == pytest.approx(truth, rel=1e-6), loss


# Masks that a layer computed: tests/promises/test_weights.py.
def test_a_loss_that_masks_its_own_values(subtests: pytest.Subtests):
    assert len({(CLASSES[i:j] == 0).mean() for i, j in SHARDS}) > 1, "shards must differ"
    for reduction in REDUCTIONS:
        with subtests.test(reduction=reduction):
            loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0, reduction=reduction)
            total, weight = add_shards(loss, CLASSES, SIMPLEX)
            expected = float(loss(CLASSES, SIMPLEX))
            assert float(total / weight) == pytest.approx(expected, rel=1e-6), reduction


def test_a_loss_that_flattens_or_drops_rows_is_counted_as_it_is():
    labels, predictions = _random.integers(0, 3, (ROWS, 5)), _random.normal(size=(ROWS, 5, 3))

    def flat(y, p, sample_weight=None):
        y, p = tf.reshape(y, [-1]), tf.reshape(p, [-1, 3])
        y, p = tf.boolean_mask(y, y > 0), tf.boolean_mask(p, y > 0)
        return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)

    total, weight = add_shards(flat, labels, predictions)
    assert float(weight) == (labels > 0).sum()
    assert float(total) == pytest.approx(float(tf.reduce_sum(flat(labels, predictions))), rel=1e-6)


def test_without_a_reduction_a_loss_is_the_mean_of_its_values():
    """Keras by itself would train on the sum of the values, which grows with the batch."""
    for (name, (y_true, y_pred, arguments)), reduction in zip(
        LOSSES.items(), itertools.cycle(("none", None)), strict=False
    ):
        loss = getattr(keras.losses, name)(reduction=reduction, **arguments)
        y_pred = tf.constant(y_pred, tf.float32)
        for weights in (None, WEIGHTS):
            if weights is not None and loss(y_true, y_pred).shape.rank > 1:
                weights = WEIGHTS[:, None, None]
            total, weight = add_shards(loss, y_true, y_pred, weights)
            mean = float(tf.reduce_mean(loss(y_true, y_pred, sample_weight=weights)))
            assert float(total / weight) == pytest.approx(mean, rel=1e-5), (name, reduction)


# Rows are paired with rows: as one device gives, or an error, whatever a shard's size -------------

LABEL_AXES = ("B", "B1", "BT")
PREDICTION_AXES = ("B", "B1", "BT", "BT1")
WEIGHT_AXES = (None, "B", "B1", "BT")


PAIRED = {
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


@pytest.mark.parametrize("name", PAIRED)
def test_equal_to_one_device_or_refused(name):
    """No weight counts along another axis than on one device, for no number of rows and shards."""
    loss, outcomes = PAIRED[name], {"equal": 0, "refused by both": 0, "refused": 0}
    dtypes = ["int32" if name == "classes" else "float32", "float32", "float32"]
    for y, p, w, length in itertools.product(LABEL_AXES, PREDICTION_AXES, WEIGHT_AXES, (2, 3)):
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


# What is refused ---------------------------------------------------------------------------------


def of_a_batch(y_true, y_pred):
    return 1.0 - 2.0 * tf.reduce_sum(y_true * y_pred) / tf.reduce_sum(y_true + y_pred)


WEIGHTED_MEAN = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
AXES, FILL = r"y_true\[:, None\] and y_pred\[:, None\]", r"tf\.fill\(tf\.shape\(y_pred\)\[:1\]"
ONE_NUMBER = r"'of_a_batch' is one number for a batch.*shape \(\).*reduce_mean\(tf\.square"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("circle", CLASSES, REAL), "couples the examples of a batch"),
        (("dice", OTHER, REAL), "is one number for a batch"),  # By default it is over all rows.
        ((of_a_batch, OTHER, REAL), ONE_NUMBER),
        ((keras.losses.Dice(), MASKS, IMAGES), "is one number for a batch"),
        # Predictions without a last axis.
        (("mse", OTHER[:, 0], REAL[:, 0], WEIGHTS), AXES),
        ((keras.losses.KLDivergence(), OTHER[:, 0], REAL[:, 0]), AXES),
        # Weights without rows have no sum that divides.
        ((WEIGHTED_MEAN, OTHER, REAL, np.ones((1,), "float32")), FILL),
    ],
)
def test_what_is_no_sum_over_rows(arguments, said):
    with pytest.raises(tmg.errors.LossError, match=said):
        tmg.loss_sum(*arguments)


def weight_of_all(pair):
    return tf.distribute.get_replica_context().all_reduce("SUM", pair.weight)


LOSSES_OF_PAIRS = {
    "own": lambda pair: pair.sum / tf.maximum(pair.weight, 1.0),
    "own, by another operation": lambda pair: pair.sum * tf.math.reciprocal(pair.weight),
    "of all": lambda pair: pair.sum / tf.stop_gradient(weight_of_all(pair)),
    "of all, whose gradient nobody needs": lambda pair: pair.sum / weight_of_all(pair),
    "global_mean": tmg.global_mean,
}


# Fails if a mean of the rows of a replica, or a part of a gradient, trains untold, whatever
# operation divides; or if the line that the warning says is told as well.
@pytest.mark.parametrize("target", LOSSES_OF_PAIRS)
def test_a_mean_of_means_is_told(target):
    def replica(prediction):
        with tf.GradientTape() as tape:
            tape.watch(prediction)
            loss = LOSSES_OF_PAIRS[target](tmg.loss_sum("mse", tf.zeros([2, 1]), prediction))
        return tape.gradient(loss, prediction)

    if target == "of all":
        tells = contextlib.nullcontext()
    elif target == "global_mean":
        tells = pytest.raises(tmg.errors.LossError, match=r"for logs.*window\.reduce")
    else:
        line = r"for logs.*window\.reduce.*tf\.stop_gradient\(context\.all_reduce"
        tells = pytest.warns(tmg.errors.ReplicaDependenceWarning, match=line)
    assert replica(tf.ones([2, 1])).shape == (2, 1)  # One device is told nothing.
    with tells:
        tf.function(lambda: strategy_of(2).run(replica, [tf.ones([2, 1])]), autograph=False)()
