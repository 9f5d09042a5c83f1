"""Layers frozen and thawed while training goes on: averages, constraints, penalties, evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest
from law.model import Training
from law.pair import assert_replicas_agree
from law.plain import train_once
from one_device import SEED, cut, difference, step_on
from problems import network, normal_rows

X, Y = normal_rows(16, 4, 2, seed=21)
BATCHES = cut((X, Y), (5, 1, 3, 7, 5))
LOSS = keras.losses.MeanSquaredError()
# Which layers are frozen in which steps. Six variables, so five replicas own one or two each.
FROZEN: dict[str, set[tuple[int, int]]] = {
    "one, later": {(0, 2), (0, 3)},
    "all but one, then others": {(0, 1), (1, 1), (0, 2), (1, 2), (2, 3), (1, 4)},
    "all": {(layer, step) for layer in range(3) for step in (2, 3)},
}


def constrained(frozen: set[tuple[int, int]]) -> keras.Model:
    limit = keras.constraints.MaxNorm(0.7)
    first, second = (
        keras.layers.Dense(3, "tanh", kernel_constraint=limit, kernel_regularizer="l2")
        for _ in range(2)
    )
    model = network(4, first, second, keras.layers.Dense(2))
    freeze(model, frozen, 0)
    return model


def freeze(model: keras.Model, frozen: set[tuple[int, int]], step: int) -> None:
    for i, layer in enumerate(model.layers):
        layer.trainable = (i, step) not in frozen


def train(training: Any, step: Callable[[Any], Any], frozen: set[tuple[int, int]]) -> list[Any]:
    """All variables of model and optimizer after each step."""
    after = []
    for i, batch in enumerate(BATCHES):
        freeze(training.model, frozen, i)
        step(batch)
        both = [*training.model.variables, *training.optimizer.variables]
        after.append([variable.numpy() for variable in both])
    return after


def on_one_device(make: Callable[[], Any], frozen: set[tuple[int, int]]) -> list[Any]:
    keras.utils.set_random_seed(SEED)
    alone = Training(constrained(frozen), make(), LOSS)
    alone.optimizer.build(alone.model.trainable_variables)

    def step(batch: Any) -> None:
        if alone.model.trainable_variables:  # As Keras' fit asks.
            train_once(alone, batch)

    return train(alone, step, frozen)


@pytest.mark.filterwarnings("ignore:The model has no trainable variables")
@pytest.mark.parametrize(
    ("frozen", "kind", "overwrite", "replicas", "shard"),
    [
        ("one, later", "Adam", 2, 5, True),
        ("all but one, then others", "SGD", 1, 2, False),
        ("all", "SGD", 2, 2, True),
    ],
)
def test_averages_go_on_and_overwrite(
    frozen: str, kind: str, overwrite: int | None, replicas: int, shard: bool
) -> None:
    """Of all that the optimizer knows; what is frozen is overwritten and not constrained."""

    def make() -> Any:
        average = {"use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": overwrite}
        return getattr(keras.optimizers, kind)(0.1, weight_decay=0.1, **average)

    when = FROZEN[frozen]
    expected = on_one_device(make, when)
    step = step_on(replicas, lambda: constrained(when), make, "mse", shard_update=shard)
    for i, (one, other) in enumerate(zip(train(step, step, when), expected, strict=True)):
        assert difference(one, other) <= 2e-6, f"step {i}"
    trained = [*step.model.trainable_variables, *step.optimizer.variables]
    assert_replicas_agree(step.strategy, trained)
    if frozen == "one, later" and overwrite:
        # The fourth update overwrites what was frozen before the third.
        assert difference(expected[3][:1], expected[2][:1]) > 1e-4


@pytest.mark.filterwarnings("ignore:The model has no trainable variables")
def test_all_frozen_from_the_first_step_trains_when_thawed() -> None:
    """Keras does not build an optimizer before it has something to train."""
    everything = {(layer, 0) for layer in range(3)}
    make = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    step = step_on(2, lambda: constrained(everything), make, "mse", shard_update=True)
    before = [variable.numpy() for variable in step.model.variables]
    assert float(step(BATCHES[0])["gradient_norm"]) == 0.0
    assert difference([variable.numpy() for variable in step.model.variables], before) == 0.0
    freeze(step.model, everything, 1)
    for batch in BATCHES:
        step(batch)
    expected = on_one_device(make, set())[-1]
    both = [*step.model.variables, *step.optimizer.variables]
    assert difference([variable.numpy() for variable in both], expected) <= 2e-6
    assert step.update.owned
