"""Every loss of Keras, with every reduction, by its class and by its name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from case import Case, cut, integers, normal
from one_device import ByHand, Replicated, assert_same, strategy_of

import tfmultigpu as tmg
from tfmultigpu.losses.loss_sum import as_loss
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
# Its value for one example depends on the others, so that shards cannot be added.
COUPLED = {"Circle"}
REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")


def classes_of_keras() -> set[str]:
    return {
        name
        for name, value in vars(keras.losses).items()
        if inspect.isclass(value) and issubclass(value, keras.losses.Loss)
        if value is not keras.losses.Loss
    }


def class_of(name: str) -> str:
    """The class that a name stands for: of a function, short, or its own."""
    function = getattr(keras.losses, name, None) or keras.losses.get(name)
    joined = function.__name__.replace("_", "").lower()
    return next(one for one in [*HEADS, *COUPLED] if one.lower() == joined)


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


# Each class with each reduction -------------------------------------------------------------------

WITHOUT = {loss: loss for loss in HEADS}
WEIGHTED = {f"{loss}_weighted": loss for loss in HEADS}
BOTH = {**WITHOUT, **WEIGHTED}
# Without weights every loss is trained on its sum, and on its mean where a name gives that, below:
# beside the weighted ones the other reductions have those losses whose name does not, and one more.
NAMELESS = ("CategoricalGeneralizedCrossEntropy", "Dice", "Tversky")
MOST = {**WEIGHTED, "Huber": "Huber", **{loss: loss for loss in NAMELESS}}


def losses_of(heads: dict[str, str], reduction: str | None) -> dict[str, keras.losses.Loss]:
    return {
        name: getattr(keras.losses, loss)(reduction=reduction, **HEADS[loss].arguments)
        for name, loss in heads.items()
    }


def by_class(reduction: str, heads: dict[str, str] = BOTH) -> Training:
    return Training(model_of(heads), sgd(), losses_of(heads, reduction))


def batches_by_class(heads: dict[str, str] = BOTH) -> list[Any]:
    return cut(X, labels_of(heads), dict.fromkeys(WEIGHTED, WEIGHTS))


# By name ------------------------------------------------------------------------------------------

SHORT = {"mse", "MSE", "mae", "MAE", "mape", "MAPE", "msle", "MSLE", "bce", "BCE", "kld", "KLD"}
# These are one number for a whole batch unless an axis is given, which a name cannot.
WHOLE_BATCH = {"Dice", "Tversky", "dice", "tversky"}
# Keras has a class and a function, but knows neither by its name.
WITHOUT_A_NAME = {"CategoricalGeneralizedCrossEntropy", "categorical_generalized_cross_entropy"}
FUNCTIONS = {
    name
    for name, value in vars(keras.losses).items()
    if inspect.isfunction(value) and name not in ("get", "serialize", "deserialize")
}
REFUSED = WHOLE_BATCH | WITHOUT_A_NAME | COUPLED | {"circle"}
NAMES = {f"by_{name}": name for name in sorted({*FUNCTIONS, *SHORT} - REFUSED)}


def classes_of(names: dict[str, str]) -> dict[str, str]:
    return {head: class_of(name) for head, name in names.items()}


def by_name(names: dict[str, str]) -> Training:
    return Training(model_of(classes_of(names)), sgd(), names)


def batches_by_name(names: dict[str, str]) -> list[Any]:
    return cut(X, labels_of(classes_of(names)))


# A case has dozens of losses, which take seconds to trace for each replica and for each kind of
# step: not every number of replicas is tried with every reduction.
FAST = {"predict": False}
CASES = [
    Case(
        "every loss, mean over the batch",
        functools.partial(by_class, "sum_over_batch_size", MOST),
        batches_by_class(MOST),
        replicas=(2,),
        workers=False,  # All other cases of this folder have losses of this kind.
        options=FAST,
    ),
    Case(
        "every loss, mean, in micro-batches",
        functools.partial(by_class, "mean", MOST),
        batches_by_class(MOST),
        replicas=(2,),
        workers=False,  # The mean over the batch by another name.
        options={**FAST, "micro_batches": 2},
    ),
    Case(
        "every loss, mean with sample weights",
        functools.partial(by_class, "mean_with_sample_weight", MOST),
        batches_by_class(MOST),
        replicas=(2,),
        options=FAST,
    ),
    Case(
        "every loss, sum",
        functools.partial(by_class, "sum"),
        batches_by_class(),
        replicas=(2,),
        options=FAST,
    ),
    Case(
        "every loss by the name of its function",
        functools.partial(by_name, NAMES),
        batches_by_name(NAMES),
        replicas=(2,),
        workers=False,  # A name is looked up before anything is distributed.
        options=FAST,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_give_what_one_device_gives(case: Case) -> None:
    case.hold()


@pytest.mark.parametrize(
    ("reduction", "heads"),
    [("none", WEIGHTED), ("none", {"CTC": "CTC", "Huber": "Huber"}), (None, {"Huber": "Huber"})],
    ids=["none, weighted", "none", "None"],
)
def test_without_a_reduction_a_loss_is_the_mean_of_its_values(
    reduction: str | None, heads: dict[str, str]
) -> None:
    """Keras by itself would train on the sum of the values, which grows with the batch."""
    losses = losses_of(heads, reduction)

    def by_hand(y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        values = [
            loss(y_true[head], y_pred[head], sample_weight=sample_weight.get(head))
            for head, loss in losses.items()
        ]
        return tf.add_n([tf.reduce_mean(one) for one in values])

    weights = {head: WEIGHTS for head in heads if head in WEIGHTED}
    batches = cut(X, labels_of(heads), weights)
    expected = ByHand(lambda: model_of(heads), sgd, by_hand).train(batches)
    result = Replicated(2, lambda: model_of(heads), sgd, losses).train(batches)
    assert_same(result, expected)


@pytest.mark.parametrize("name", sorted({*HEADS} - REFUSED))
def test_a_class_by_its_name_is_the_class(name: str) -> None:
    """So that what holds for the one, above, holds for the other."""
    made, by_hand = as_loss(name), getattr(keras.losses, name)()
    assert type(made) is type(by_hand)
    assert made.get_config() == by_hand.get_config()


# What is refused, and what is missing -------------------------------------------------------------


def test_every_loss_of_keras_is_here() -> None:
    assert {*NAMELESS} == {class_of(name) for name in REFUSED} - COUPLED
    assert classes_of_keras() == set(HEADS) | COUPLED
    assert {class_of(name) for name in FUNCTIONS} == set(HEADS) | COUPLED
    assert {class_of(name) for name in NAMES.values()} == set(HEADS) - WHOLE_BATCH - WITHOUT_A_NAME


@pytest.mark.parametrize("heads", [BOTH, classes_of(NAMES)], ids=["by class", "by name"])
def test_every_head_learns(heads: dict[str, str]) -> None:
    """A loss without gradient would be equal on any number of replicas."""
    model = model_of(heads)
    with tf.GradientTape() as tape:
        outputs = model(X)
        losses = losses_of(heads, "mean")
        total = tf.add_n([losses[h](HEADS[heads[h]].labels, outputs[h]) for h in heads])
    for variable, gradient in zip(
        model.trainable_variables, tape.gradient(total, model.trainable_variables), strict=True
    ):
        assert float(tf.reduce_max(tf.abs(gradient))) > 1e-3, variable.path


@pytest.mark.parametrize("name", ["Circle", "circle"])
def test_a_loss_that_couples_examples_is_refused(name: str) -> None:
    with pytest.raises(tmg.LossError, match="compares its examples with each other"):
        one_step(name)


@pytest.mark.parametrize("name", sorted(WHOLE_BATCH))
def test_a_loss_over_the_whole_batch_is_refused(name: str) -> None:
    with pytest.raises(tmg.LossError, match=r"'(dice|tversky)' is one number for a batch"):
        one_step(name, np.eye(3, dtype="float32")[CLASSES])


@pytest.mark.parametrize("name", sorted(WITHOUT_A_NAME))
def test_a_loss_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(tmg.LossError, match=f"Keras has no loss of this name. Received: .*{name}"):
        one_step(name)


def one_step(loss: str, labels: Any = CLASSES) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        optimizer = sgd()
    tmg.make_train_step(model, optimizer, loss, strategy)((X, labels))
