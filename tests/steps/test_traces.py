"""One compiled function per kind of batch: which numbers of rows share one."""

from __future__ import annotations

from typing import Any

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
