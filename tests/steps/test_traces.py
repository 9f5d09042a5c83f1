"""One compiled function per kind of batch: which numbers of rows share one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.steps import batches as batches_module
from tfmultigpu.steps.batches import BatchFunction


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has steps of one replica believe that it is a GPU."""
    listed = batches_module.tf.config.list_logical_devices

    def devices(kind: str | None = None) -> Any:
        return ["GPU:0"] if kind == "GPU" else listed(kind)

    monkeypatch.setattr(batches_module.tf.config, "list_logical_devices", devices)


def seen_by(*batches: Any) -> tuple[list[Any], list[float]]:
    """The shapes that were traced, and the sums of the batches."""
    shapes: list[Any] = []

    def total(shards: Any) -> Any:
        leaves = tf.nest.flatten(shards.local)
        shapes.append([tuple(leaf.shape) for leaf in leaves])
        return tf.add_n([tf.reduce_sum(leaf) for leaf in leaves])

    function = BatchFunction(total, tf.distribute.get_strategy())
    return shapes, [float(function(batch)) for batch in batches]


BATCHES = [tf.ones([rows, 2]) for rows in (4, 4, 3, 1, 4)]
SUMS = [8.0, 8.0, 6.0, 2.0, 8.0]


def test_one_trace_for_any_number_of_rows() -> None:
    assert seen_by(*BATCHES) == ([[(None, 2)]], SUMS)
    inner = [tf.ones(shape) for shape in ((4, 2), (4, 3), (3, 5))]
    assert seen_by(*inner)[0] == [[(None, 2)], [(None, None)]]


@pytest.mark.usefixtures("on_a_gpu")
def test_the_first_number_of_rows_is_kept_on_one_gpu() -> None:
    """Where each shape that is open makes TensorFlow wait."""
    assert seen_by(*BATCHES) == ([[(4, 2)], [(None, 2)]], SUMS)
    # Where rows do not agree, or there are none, a check tells.
    for batch in ((tf.ones([4, 2]), tf.ones([3])), tf.ones([0, 2])):
        with pytest.raises(tmg.errors.DataError, match=r"differ in their number of rows|no rows"):
            seen_by(batch)
    batches = [tf.ones(shape) for shape in ((4, 2), (4, 3), (3, 5), (2, 7))]
    shapes, sums = seen_by(*batches)
    assert shapes == [[(4, 2)], [(None, None)]]
    assert sums == [8.0, 12.0, 15.0, 14.0]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_steps_of_known_rows_first_train_alike(
    request: pytest.FixtureRequest, micro_batches: int
) -> None:
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
    request.getfixturevalue("on_a_gpu")
    found = trained()
    assert (8 in seen) == (micro_batches == 1)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
