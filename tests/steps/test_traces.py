"""One compiled function per kind of batch: which numbers of rows share one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.steps import batch_function as batches_lib
from tfmultigpu.steps.traces import Traces


def seen_by(keep_rows: bool, *batches: Any) -> tuple[list[Any], list[float]]:
    """The shapes that were traced, and the sums of the batches."""
    shapes: list[Any] = []

    def total(copies: list[Any], further: list[Any]) -> Any:
        shapes.append([tuple(leaf.shape) for leaf in tf.nest.flatten(copies)])
        return tf.add_n([tf.reduce_sum(leaf) for leaf in tf.nest.flatten(copies)])

    traces = Traces(total, keep_rows=keep_rows)
    sums = [float(traces(batch, [tf.nest.flatten(batch)], [])) for batch in batches]
    return shapes, sums


def test_the_first_number_of_rows_is_kept_where_that_was_asked() -> None:
    batches = [tf.ones([rows, 2]) for rows in (4, 4, 3, 1, 4)]
    sums = [8.0, 8.0, 6.0, 2.0, 8.0]
    assert seen_by(False, *batches) == ([[(None, 2)]], sums)
    assert seen_by(True, *batches) == ([[(4, 2)], [(None, 2)]], sums)


def test_rows_that_do_not_agree_are_left_for_a_check_to_tell() -> None:
    shapes, _ = seen_by(True, (tf.ones([4, 2]), tf.ones([3])))
    assert shapes == [[(None, 2), (None,)]]
    shapes, _ = seen_by(True, tf.ones([0, 2]))
    assert shapes == [[(None, 2)]]


def test_an_inner_axis_is_opened_beside_the_rows() -> None:
    batches = [tf.ones(shape) for shape in ((4, 2), (4, 3), (3, 5), (2, 7))]
    shapes, sums = seen_by(True, *batches)
    assert shapes == [[(4, 2)], [(4, None)], [(None, None)]]
    assert sums == [8.0, 12.0, 15.0, 14.0]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_steps_of_known_rows_first_train_alike(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    """As on one GPU, where each shape that is open makes TensorFlow wait."""
    seen: list[Any] = []

    class Seeing(keras.layers.Dense):
        def call(self, inputs: Any) -> Any:
            seen.append(inputs.shape[0])
            return super().call(inputs)

    def trained() -> tuple[list[float], list[np.ndarray]]:
        keras.utils.set_random_seed(4)
        model = keras.Sequential([keras.Input((3,)), Seeing(4), keras.layers.Dropout(0.5)])
        optimizer = keras.optimizers.SGD(0.1)
        step = tmg.make_train_step(model, optimizer, "mse", micro_batches=micro_batches)
        x = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
        y = np.ones((8, 4), "float32")
        losses = [float(step((x[:rows], y[:rows]))["loss"]) for rows in (8, 8, 5, 3, 8)]
        return losses, [variable.numpy() for variable in model.variables]

    expected = trained()
    assert 8 not in seen
    monkeypatch.setattr(batches_lib, "_keeps_rows", lambda strategy: True)
    found = trained()
    assert (8 in seen) == (micro_batches == 1)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
