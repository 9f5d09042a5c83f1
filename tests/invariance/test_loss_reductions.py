"""Every loss of Keras in a step, and losses without a reduction."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from case import Case, cut, integers, normal
from one_device import ByHand, Replicated, assert_same

from tfmultigpu.testing import Training

ROWS = 24
X = normal(ROWS, 4)
CLASSES = integers(3, ROWS, seed=1)
REAL = normal(ROWS, 3, seed=2)
BINARY = integers(2, ROWS, 3, seed=3).astype("float32")
SIMPLEX = np.exp(REAL) / np.exp(REAL).sum(axis=1, keepdims=True)
# The first two batches of several rows begin with zeros, so that one replica has nothing but
# zeros; the last batch is zeros alone.
WEIGHTS = np.random.default_rng(4).uniform(0.2, 3.0, ROWS).astype("float32")
WEIGHTS[[0, 1, 2, 3, 8, 9, 10, 11, 12, *range(19, 24)]] = 0.0


@dataclasses.dataclass(frozen=True)
class Head:
    """What a loss is tried on: labels, and how predictions look."""

    labels: np.ndarray
    activation: str | None = None
    shape: tuple[int, ...] = (3,)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


IMAGES = Head(
    integers(2, ROWS, 2, 2, 1, seed=5).astype("float32"),
    "sigmoid",
    (2, 2, 1),
    {"axis": (1, 2, 3)},  # By default they are one number for the whole batch, and refused.
)
HEADS = {
    "BinaryCrossentropy": Head(BINARY, "sigmoid"),
    "BinaryFocalCrossentropy": Head(BINARY, "sigmoid"),
    "CTC": Head(integers(2, ROWS, 2, seed=6) + 1, None, (6, 4)),
    "CategoricalCrossentropy": Head(
        np.eye(3, dtype="float32")[CLASSES], "softmax", arguments={"label_smoothing": 0.1}
    ),
    "CategoricalFocalCrossentropy": Head(np.eye(3, dtype="float32")[CLASSES], "softmax"),
    "CategoricalGeneralizedCrossEntropy": Head(CLASSES, "softmax"),
    "CategoricalHinge": Head(np.eye(3, dtype="float32")[CLASSES]),
    "CosineSimilarity": Head(REAL),
    "Dice": IMAGES,
    "Hinge": Head(BINARY),
    "Huber": Head(REAL),
    "KLDivergence": Head(SIMPLEX, "softmax"),
    "LogCosh": Head(REAL),
    "MeanAbsoluteError": Head(REAL),
    # Of labels near zero it is huge, and near-by batches are then compared at its scale.
    "MeanAbsolutePercentageError": Head(50.0 + 10.0 * REAL),
    "MeanSquaredError": Head(REAL),
    "MeanSquaredLogarithmicError": Head(SIMPLEX, "sigmoid"),
    "Poisson": Head(BINARY, "softplus"),
    "SparseCategoricalCrossentropy": Head(CLASSES, "softmax"),
    "SquaredHinge": Head(BINARY),
    "Tversky": IMAGES,
}


def model_of(heads: dict[str, str]) -> keras.Model:
    """A model with a head of its own for each loss; ``heads`` has the class of each."""
    inputs = keras.Input((4,))
    outputs = {}
    for name, loss in heads.items():
        head = HEADS[loss]
        size = int(np.prod(head.shape))
        values = keras.layers.Dense(size, head.activation, use_bias=False, name=name)(inputs)
        outputs[name] = keras.layers.Reshape(head.shape)(values) if head.shape != (3,) else values
    return keras.Model(inputs, outputs)


def labels_of(heads: dict[str, str]) -> dict[str, np.ndarray]:
    return {name: HEADS[loss].labels for name, loss in heads.items()}


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.02, momentum=0.9)


HEADED = {f"{loss}_weighted": loss for loss in HEADS}
ALL_WEIGHTS = dict.fromkeys(HEADED, WEIGHTS)


def losses_of(heads: dict[str, str], reduction: str | None) -> dict[str, keras.losses.Loss]:
    return {
        name: getattr(keras.losses, loss)(reduction=reduction, **HEADS[loss].arguments)
        for name, loss in heads.items()
    }


def test_every_loss_in_a_step_with_weights_and_micro_batches() -> None:
    """With each reduction their sums are held in losses/test_loss_sum.py."""

    def build() -> Training:
        return Training(model_of(HEADED), sgd(), losses_of(HEADED, "mean_with_sample_weight"))

    batches = cut(X, labels_of(HEADED), ALL_WEIGHTS)
    Case("all", build, batches, replicas=(2,), options={"micro_batches": 2}).hold()


def test_without_a_reduction_a_loss_is_the_mean_of_its_values() -> None:
    """Keras by itself would train on the sum of the values, which grows with the batch."""
    heads = {"CTC": "CTC", "Huber": "Huber", "Huber_weighted": "Huber"}
    losses = {**losses_of(heads, "none"), **losses_of({"Huber": "Huber"}, None)}

    def by_hand(y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        values = [
            loss(y_true[head], y_pred[head], sample_weight=sample_weight.get(head))
            for head, loss in losses.items()
        ]
        return tf.add_n([tf.reduce_mean(one) for one in values])

    weights = {"Huber_weighted": WEIGHTS}
    batches = cut(X, labels_of(heads), weights)
    expected = ByHand(lambda: model_of(heads), sgd, by_hand).train(batches)
    result = Replicated(2, lambda: model_of(heads), sgd, losses).train(batches)
    assert_same(result, expected)


def test_every_head_learns() -> None:
    """A loss without gradient would be equal on any number of replicas."""
    model, losses = model_of(HEADED), losses_of(HEADED, "mean")
    with tf.GradientTape() as tape:
        outputs = model(X)
        total = tf.add_n([losses[h](HEADS[HEADED[h]].labels, outputs[h]) for h in HEADED])
    gradients = tape.gradient(total, model.trainable_variables)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        assert float(tf.reduce_max(tf.abs(gradient))) > 1e-3, variable.path
