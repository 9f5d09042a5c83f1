"""Sample weights: zero here or everywhere, far apart, by token, by output, by class, with masks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
from case import SIZES, Case, cut, integers, normal

from tfmultigpu.addons.testing import Training

REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")
ROWS = sum(SIZES)
LENGTH = 4
X = normal(ROWS, 6)
Y = integers(4, ROWS)
TAGS = integers(3, ROWS, LENGTH, seed=1)
# Sequences of zero to four tokens, then padding: the first three have none at all.
TOKENS = np.where(
    np.arange(LENGTH) < np.r_[0, 0, 0, integers(LENGTH + 1, ROWS - 3, seed=2)][:, None],
    1 + integers(8, ROWS, LENGTH, seed=3),
    0,
)
UNIFORM = np.random.default_rng(4).uniform(0.2, 2.0, (ROWS, LENGTH)).astype("float32")


def crossentropy(reduction: str, **options: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction, **options
    )


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def mlp() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1)),
            keras.layers.Dense(4),
        ]
    )


def tagger(outputs: Sequence[str]) -> keras.Model:
    """Tags for the tokens of a text, by a layer of its own for each output."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    embedded = keras.layers.Embedding(9, 5, mask_zero=True)(inputs)
    regularizer = keras.regularizers.L2(0.1)
    tags = {
        name: keras.layers.Dense(3, kernel_regularizer=regularizer, name=name)(embedded)
        for name in outputs
    }
    return keras.Model(inputs, tags)


def rows() -> Training:
    accuracy = keras.metrics.SparseCategoricalAccuracy
    return Training(
        mlp(),
        sgd(),
        crossentropy("mean_with_sample_weight"),
        metrics=accuracy(),
        weighted_metrics=accuracy(),
    )


def tokens(**options: Any) -> Training:
    """One output for each reduction: a model of its own for each would be traced three times."""
    losses = {reduction: crossentropy(reduction, **options) for reduction in REDUCTIONS}
    accuracies = {one: [keras.metrics.SparseCategoricalAccuracy()] for one in REDUCTIONS}
    return Training(tagger(REDUCTIONS), sgd(), losses, weighted_metrics=accuracies)


def by_reduction(array: np.ndarray) -> dict[str, np.ndarray]:
    return dict.fromkeys(REDUCTIONS, array)


def two_outputs() -> Training:
    inputs = keras.Input((LENGTH,), dtype="int32")
    embedded = keras.layers.Embedding(9, 5, mask_zero=True)(inputs)
    pooled = keras.layers.Flatten()(keras.layers.Embedding(9, 5)(inputs))  # No mean of no token.
    outputs = {
        "tags": keras.layers.Dense(3, name="tags")(embedded),
        "kind": keras.layers.Dense(4, name="kind")(pooled),
        "size": keras.layers.Dense(1, name="size")(pooled),
    }
    losses = {
        "tags": crossentropy("mean_with_sample_weight"),
        "kind": crossentropy("sum"),
        "size": "mse",
    }
    return Training(keras.Model(inputs, outputs), sgd(), losses, loss_weights={"kind": 0.1})


# Zero for all that one replica gets, and for whole batches.
ROW_WEIGHTS = np.geomspace(1e-3, 2.0, ROWS).astype("float32")
ROW_WEIGHTS[[0, 1, 2, 3, *range(8, 17), 19, 20, 21]] = 0.0
# Of the batches with several rows the first tokens, and the whole third batch, weigh nothing.
TOKEN_WEIGHTS = UNIFORM * np.where(np.arange(ROWS)[:, None] % 4 == 1, [0, 0, 1, 1], 1)
TOKEN_WEIGHTS[8:17] = 0.0
TOKEN_WEIGHTS = TOKEN_WEIGHTS.astype("float32")


CASES = [
    Case(
        "weights by token with masks and an ignored class, every reduction",
        functools.partial(tokens, ignore_class=1),
        cut(TOKENS, by_reduction(TAGS), by_reduction(TOKEN_WEIGHTS)),
        replicas=(2,),
        options={"micro_batches": 2},
    ),
    Case(
        "weights of rows for all tokens of a row, every reduction",
        tokens,
        cut(TOKENS, by_reduction(TAGS), by_reduction(UNIFORM[:, :1])),
    ),
    Case(
        "weights by output, one of them without",
        two_outputs,
        cut(
            TOKENS,
            {"tags": TAGS, "kind": Y, "size": X[:, :1]},
            {"tags": TOKEN_WEIGHTS, "kind": ROW_WEIGHTS},
        ),
        options={"micro_batches": 2},
    ),
    Case(
        "weights that are whole numbers", rows, cut(X, Y, integers(4, ROWS, seed=5)), replicas=(2,)
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_give_what_one_device_gives(case: Case) -> None:
    case.hold()
