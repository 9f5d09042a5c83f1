"""Optimizers in steps: gradients of embeddings, whose repeated rows are summed, and wrappers.

Every optimizer of Keras with what is set on it is in accumulation/test_update.py.
"""

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
from case import Case, cut
from one_device import ByHand, Replicated, difference
from problems import integers, network

import tfmultigpu as tmg
from tfmultigpu.addons.testing import Training

optimizers = keras.optimizers
# Five of eight tokens are the same one, and some of the others repeat too; id 5 never comes.
TOKENS = integers(4, 24, 8, seed=3)
TOKENS[:, :5] = 1
LABELS = integers(4, 24, seed=4)
BATCHES = cut(TOKENS, LABELS)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Clipping, decay, averages and their overwriting all act in these five steps.
EVERYTHING = {
    "global_clipnorm": 0.3,
    "weight_decay": 0.1,
    "use_ema": True,
    "ema_momentum": 0.8,
    "ema_overwrite_frequency": 2,
}


def sgd(**options: Any) -> Any:
    return optimizers.SGD(0.1, momentum=0.9, **options)


def scaled() -> Any:
    """The scale doubles every second step."""
    inner = optimizers.Adam(0.01, **EVERYTHING)
    return optimizers.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=2)


def several(**options: Any) -> Any:
    """One optimizer for kernels and another for biases."""
    kernels, biases = optimizers.Adam(0.01, **options), sgd(**options)
    return optimizers.MultiOptimizer(lambda v: biases if v.name == "bias" else kernels)


ALL: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optimizers.SGD(0.1),
    "SGD, clipnorm": lambda: sgd(clipnorm=0.05),
    "SGD, global_clipnorm": lambda: sgd(global_clipnorm=0.05),
    "SGD, clipvalue": lambda: sgd(clipvalue=0.005),
    "Adam": lambda: optimizers.Adam(0.01),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "RMSprop": lambda: optimizers.RMSprop(0.01),
    # Keras by itself fails here: indices[0] = 118 is not in [0, 57).
    "RMSprop, centered": lambda: optimizers.RMSprop(0.01, centered=True),
    "Ftrl": lambda: optimizers.Ftrl(0.05),
    "LossScaleOptimizer": scaled,
    "MultiOptimizer": lambda: several(**EVERYTHING),
    "Muon": lambda: optimizers.Muon(0.01, **EVERYTHING),
}


class OneHot(keras.layers.Embedding):
    """The same table, looked up by a matrix product, whose gradient is dense."""

    def call(self, tokens: Any) -> Any:
        return tf.one_hot(tokens, self.input_dim) @ tf.convert_to_tensor(self.embeddings)


def bag(lookup: type = keras.layers.Embedding) -> keras.Model:
    layers = [lookup(6, 3), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(4)]
    return network(8, *layers, dtype="int32")


def case(name: str, replicas: tuple[int, ...], **options: Any) -> Case:
    build = lambda: Training(bag(), ALL[name](), LOSS)  # noqa: E731
    return Case(f"embedding, {name}", build, BATCHES, replicas=replicas, options=options)


CASES = [
    case("SGD", (1, 3)),
    case("RMSprop, centered", (2,), micro_batches=3),
    # What a trace may change: scaled losses, the averages and clipping of micro-batches.
    case("LossScaleOptimizer", (2,), micro_batches=2),
    case("MultiOptimizer", (2,), micro_batches=2),
    case("Muon", (2,), micro_batches=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_give_the_dense_result_of_one_device(case: Case) -> None:
    case.hold()


def test_accumulation_inside_an_optimizer_is_refused(subtests: pytest.Subtests) -> None:
    for make in (
        lambda: optimizers.SGD(0.1, gradient_accumulation_steps=4),
        lambda: optimizers.LossScaleOptimizer(sgd(gradient_accumulation_steps=4)),
        lambda: several(gradient_accumulation_steps=4),
    ):
        with (
            subtests.test(make=make),
            pytest.raises(tmg.TfMultiGpuError, match=r"make_train_step\(\.\.\., micro_batches=4\)"),
        ):
            Replicated(2, bag, make, LOSS)


# What this means, beside plain Keras on one device ------------------------------------------------


def after(name: str, *, dense: bool, lookup: type = keras.layers.Embedding) -> list[np.ndarray]:
    """The weights one device gives; ``dense`` as here, otherwise as plain Keras does it."""
    build = functools.partial(bag, lookup)
    return ByHand(build, ALL[name], LOSS, dense=dense).train(BATCHES).weights


@pytest.mark.parametrize("name", ["SGD, global_clipnorm", "Adam", "RMSprop, centered"], ids=str)
def test_the_result_is_that_of_a_matrix_product(name: Any) -> None:
    """The truth of the cases above is no invention: plain Keras gives it for a dense lookup."""
    one_hot = after(name, dense=False, lookup=OneHot)
    assert difference(after(name, dense=True), one_hot) <= 1e-6, name


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
        make = name if name in ALL else f"SGD, {name}"
        start = ByHand(bag, ALL[make], LOSS).model.variables[0].numpy()
        ours, plain = (after(make, dense=dense)[0] for dense in (True, False))
        assert np.abs(ours - start).max() == pytest.approx(moved, rel=0.02, abs=6e-4), name
        assert np.abs(ours - plain).max() == pytest.approx(off, rel=0.02, abs=6e-4), name
