"""What repeated rows of a table mean: the answer of a matrix product, which plain Keras misses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases.optimizers import BATCHES, OF_TABLES, bag_under
from law.plain import PlainLoop
from one_device import difference

EMBEDDING = keras.layers.Embedding


class OneHot(keras.layers.Embedding):
    """The same table, looked up by a matrix product, whose gradient is dense."""

    def call(self, tokens: Any) -> Any:
        return tf.one_hot(tokens, self.input_dim) @ tf.convert_to_tensor(self.embeddings)


def trained(name: str, *, dense: bool, lookup: type = EMBEDDING) -> tuple[list[Any], list[Any]]:
    """Returns the weights before and after one device; ``dense`` as here, else as Keras does it."""
    keras.utils.set_random_seed(7)
    training = bag_under(name, lookup)
    start = training.model.get_weights()
    PlainLoop(training, BATCHES[0], dense).train(BATCHES)
    return start, training.model.get_weights()


@pytest.mark.parametrize("name", ["SGD, global_clipnorm", "Adam", "RMSprop, centered"], ids=str)
def test_the_result_is_that_of_a_matrix_product(name: Any) -> None:
    """The truth of the cases of tables is no invention: plain Keras gives it for a dense lookup."""
    _, one_hot = trained(name, dense=False, lookup=OneHot)
    assert difference(trained(name, dense=True)[1], one_hot) <= 1e-6, name


def documented() -> dict[str, tuple[float, float]]:
    """For each optimizer, how far plain Keras is off, and how far training moved anything."""
    text = (Path(__file__).parents[2] / "docs" / "contributing" / "steps.md").read_text()
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
        make = name if name in OF_TABLES else f"SGD, {name}"
        (start, *_), (ours, *_) = trained(make, dense=True)
        _, (plain, *_) = trained(make, dense=False)
        assert np.abs(ours - start).max() == pytest.approx(moved, rel=0.02, abs=6e-4), name
        assert np.abs(ours - plain).max() == pytest.approx(off, rel=0.02, abs=6e-4), name
