"""Updates of listed rows: of which optimizers they are those of the dense gradient."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmultigpu.accumulation.replicated import Replicated
from tfmultigpu.accumulation.table_rows import how_taken, leaves_other_rows

optimizers = keras.optimizers
NEED_ARGUMENTS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer", "OptimizerMap")
BY_ROWS = {"SGD", "Adagrad"}
EVERY = [
    name
    for name in dir(optimizers)
    if isinstance(getattr(optimizers, name), type) and name not in NEED_ARGUMENTS
]


def trained(optimizer: Any, *, by_rows: bool, lists: bool = False) -> list[Any]:
    """Returns a table and its slots after steps from lists, or from dense gradients of them."""
    random = np.random.default_rng(3)
    table = keras.Variable(random.normal(size=(50, 4)).astype("float32"), name="table")
    optimizer.build([table])
    for _ in range(4):
        ids = random.choice(50, size=7, replace=False)
        values = random.normal(size=(7, 4)).astype("float32")
        if by_rows:
            update = Replicated(optimizer, tf.distribute.get_strategy(), "")
            update.apply([tf.IndexedSlices(values, tf.constant(ids))], [table])
            continue
        if lists:
            optimizer.apply([tf.IndexedSlices(values, ids, tf.constant([50, 4]))], [table])
            continue
        gradient = np.zeros((50, 4), "float32")
        gradient[ids] = values
        optimizer.apply([tf.constant(gradient)], [table])
    return [variable.numpy() for variable in (table, *optimizer.variables)]


# Fails if an optimizer is said to leave other rows that does not, or Keras has one more of them.
@pytest.mark.parametrize("name", EVERY)
def test_only_what_updates_rows_alone_is_given_rows(name: str, subtests: pytest.Subtests) -> None:
    kind = getattr(optimizers, name)
    assert leaves_other_rows(kind(0.1)) == (name in BY_ROWS)
    if name not in BY_ROWS:
        return
    for clip in ({}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.1}):
        with subtests.test(clip=clip):
            whole, rows = (trained(kind(0.1, **clip), by_rows=by_rows) for by_rows in (False, True))
            for one, other in zip(whole, rows, strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-7)


# Fails if Keras makes another update of a list than of the dense gradient, for any optimizer.
@pytest.mark.parametrize("name", EVERY)
def test_keras_updates_all_rows_from_a_list(name: str, subtests: pytest.Subtests) -> None:
    kind = getattr(optimizers, name)
    options = [{}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"weight_decay": 0.1}]
    for chosen in options:
        with subtests.test(**chosen):
            whole, lists = (
                trained(kind(0.1, **chosen), by_rows=False, lists=lists) for lists in (False, True)
            )
            for one, other in zip(whole, lists, strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-7)


# Fails if settings that change every row in each step go unnoticed, or code of a user is trusted.
@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}, {"use_ema": 1}],
)
def test_settings_that_change_all_rows_are_noticed(options: dict[str, Any]) -> None:
    assert not leaves_other_rows(optimizers.SGD(0.1, **options))


def test_code_of_a_user_gets_dense_gradients() -> None:
    class Own(optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(gradient + 1.0, variable, learning_rate)

    assert not leaves_other_rows(Own(0.1))
    table = keras.Variable(np.ones((3, 2)), name="table")
    assert how_taken(Own(0.1), table) == "tensor"
    assert how_taken(optimizers.Adam(0.1), table) == "list"


def test_a_penalty_or_a_constraint_changes_all_rows() -> None:
    optimizer = optimizers.SGD(0.1)
    table = keras.Variable(np.ones((3, 2)), name="table")
    optimizer.build([table])
    assert how_taken(optimizer, table) == "rows"
    table.constraint = keras.constraints.UnitNorm()
    assert how_taken(optimizer, table) == "list"
    table.constraint, table.regularizer = None, keras.regularizers.L2(0.1)
    assert how_taken(optimizer, table) == "list"
