"""Variables are put back bit by bit, tables some rows at a time."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.addons.verification.putting_back import Kept, contents_of
from tfmultigpu.steps.other_states import Touched

SHAPE = 70_000, 8  # Three pieces.


def step_of(*by_rows: Any) -> Any:
    """Returns what is asked of a step whose traces read and write rows of some variables."""
    touched = Touched()
    for variable in by_rows:
        touched.by_rows[id(variable.handle)] = variable.handle
    return types.SimpleNamespace(runner=types.SimpleNamespace(touched=touched))


def values_of(kind: str, dtype: tf.DType) -> tf.Tensor:
    """Returns numbers of which some are -0.0, or all."""
    values = np.random.default_rng(0).normal(size=SHAPE)
    values[::7] = -0.0
    if kind == "alike":
        values = np.full(SHAPE, -0.0)
    return tf.cast(values, dtype)


@pytest.mark.parametrize("is_table", [True, False])
@pytest.mark.parametrize("kind", ["unlike", "alike"])
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float32, tf.int32])
def test_all_bits_are_put_back(kind: str, dtype: tf.DType, is_table: bool) -> None:
    variable = tf.Variable(values_of(kind, dtype))
    step = step_of(variable) if is_table else step_of()
    bits = variable.numpy().tobytes()
    pieces = list(contents_of(step, variable.handle, dtype).pieces())
    assert len(pieces) == 3
    assert tf.concat(pieces, 0).numpy().tobytes() == bits

    @tf.function
    def change() -> Any:
        variable.assign(variable + 1)

    with Kept(step).putting_back(change.get_concrete_function()) as (before,):
        change()
        assert variable.numpy().tobytes() != bits
        assert before.value.numpy().tobytes() == bits
        assert (before.kept.shape.rank == 0) == (kind == "alike")
    assert variable.numpy().tobytes() == bits


@pytest.mark.parametrize("is_table", [True, False])
def test_equal_copies_are_kept_as_one(is_table: bool) -> None:
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = tf.Variable(values_of("unlike", tf.float32))
        other = tf.Variable(values_of("unlike", tf.float32))
    copies = strategy.experimental_local_results(variable)
    others = strategy.experimental_local_results(other)
    others[1].scatter_nd_update([[69_999, 7]], [0.5])  # The last number of one copy.
    step = step_of(*copies, *others) if is_table else step_of()

    @tf.function
    def change() -> None:
        strategy.run(lambda: [each.assign(each * 2.0) for each in (variable, other)])

    bits = [each.numpy().tobytes() for each in (*copies, *others)]
    with Kept(step).putting_back(change.get_concrete_function()) as before:
        change()
        kept = {id(each.handle): each.kept for each in before}
        assert kept[id(copies[0].handle)] is kept[id(copies[1].handle)]
        assert kept[id(others[0].handle)] is not kept[id(others[1].handle)]
    assert [each.numpy().tobytes() for each in (*copies, *others)] == bits
