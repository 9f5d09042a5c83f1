"""Gradients of embeddings: repeated rows are summed, for every optimizer and number of parts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from case import Case, cut, integers
from one_device import ByHand, difference
from test_optimizers import OPTIMIZERS, sgd

from tfmultigpu.addons.testing import Training

# Five of eight tokens are the same one, and some of the others repeat too; id 5 never comes.
TOKENS = integers(4, 24, 8, seed=3)
TOKENS[:, :5] = 1
LABELS = integers(4, 24, seed=4)
BATCHES = cut(TOKENS, LABELS)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

SETTINGS: dict[str, Callable[[], Any]] = {
    "SGD, momentum": sgd,
    "SGD, clipnorm": lambda: sgd(clipnorm=0.05),
    "SGD, global_clipnorm": lambda: sgd(global_clipnorm=0.05),
    "SGD, clipvalue": lambda: sgd(clipvalue=0.005),
    "SGD, weight decay": lambda: sgd(weight_decay=0.5),
    "Adam, amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "Adam, global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.01),
    "RMSprop, momentum": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
    # Keras by itself fails here: indices[0] = 118 is not in [0, 57).
    "RMSprop, centered": lambda: keras.optimizers.RMSprop(0.01, centered=True),
}
ALL: dict[str, Callable[[], Any]] = {**OPTIMIZERS, **SETTINGS}


class OneHot(keras.layers.Embedding):
    """The same table, looked up by a matrix product, whose gradient is dense."""

    def call(self, tokens: Any) -> Any:
        return tf.one_hot(tokens, self.input_dim) @ tf.convert_to_tensor(self.embeddings)


class Backwards(keras.layers.Layer):
    """From vectors back to tokens, by the table of an embedding."""

    def __init__(self, embedding: keras.layers.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def call(self, vectors: Any) -> Any:
        return vectors @ tf.transpose(tf.convert_to_tensor(self.embedding.embeddings))


def bag(lookup: type = keras.layers.Embedding, length: int = 8) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((length,), dtype="int32"),
            lookup(6, 3),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(4),
        ]
    )


def shared() -> keras.Model:
    """One table for two inputs, of which one has padding, and for the output."""
    embedding = keras.layers.Embedding(6, 3, mask_zero=True)
    tokens = keras.Input((8,), dtype="int32")
    first, last = embedding(tokens[:, :4]), embedding(tokens[:, 4:])
    pooled = keras.layers.GlobalAveragePooling1D()
    hidden = keras.layers.Dense(3, "tanh")(pooled(first) + pooled(last))
    return keras.Model(tokens, Backwards(embedding)(hidden))


def train(make: Callable[[], Any], build: Callable[[], Any] = bag) -> Training:
    return Training(build(), make(), LOSS)


CASES = [
    Case(
        f"embedding, {name}",
        functools.partial(train, ALL[name]),
        BATCHES,
        replicas=replicas,
        options={"micro_batches": parts},
    )
    for name, parts, replicas in (
        ("SGD", 1, (1, 3)),
        ("Adam", 2, (2,)),
        ("RMSprop, centered", 3, (2,)),
    )
]
CASES.append(
    Case(
        "embedding for two inputs and the output",
        functools.partial(train, ALL["Adam"], shared),
        BATCHES,
    )
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_give_the_dense_result_of_one_device(case: Case) -> None:
    case.hold()


# What this means, beside plain Keras on one device ------------------------------------------------


def after(name: str, *, dense: bool, lookup: type = keras.layers.Embedding) -> list[np.ndarray]:
    """The weights one device gives; ``dense`` as here, otherwise as plain Keras does it."""
    build = functools.partial(bag, lookup)
    return ByHand(build, ALL[name], LOSS, dense=dense).train(BATCHES).weights


def test_the_result_is_that_of_a_matrix_product() -> None:
    """The truth of the cases above is no invention: plain Keras gives it for a dense lookup."""
    for name in ("SGD, global_clipnorm", "Adam", "RMSprop, centered"):
        one_hot = after(name, dense=False, lookup=OneHot)
        assert difference(after(name, dense=True), one_hot) <= 1e-6, name


def documented() -> dict[str, tuple[float, float]]:
    """For each optimizer, how far plain Keras is off, and how far training moved anything."""
    text = (Path(__file__).parents[2] / "docs" / "steps.md").read_text()
    table = text.partition("## Gradients of embeddings")[2].partition("\n## ")[0]
    names, _, values = (re.findall(r"[^|]+", line) for line in re.findall(r"^\|.+", table, re.M))
    numbers = [tuple(map(float, re.findall(r"[\d.]+", value))) for value in values]
    return {n.strip(): (off, moved) for n, (off, moved) in zip(names, numbers, strict=True)}


def test_how_far_plain_keras_is_off() -> None:
    """The numbers of the documentation, measured again."""
    rows = documented()
    assert len(rows) > 5
    assert {name for name, (off, _) in rows.items() if not off} == {"SGD"}
    for name, (off, moved) in rows.items():
        make = name if name in ALL else f"SGD, {name}"
        start = ByHand(bag, ALL[make], LOSS).model.variables[0].numpy()
        ours, plain = (after(make, dense=dense)[0] for dense in (True, False))
        assert np.abs(ours - start).max() == pytest.approx(moved, rel=0.02, abs=6e-4), name
        assert np.abs(ours - plain).max() == pytest.approx(off, rel=0.02, abs=6e-4), name
