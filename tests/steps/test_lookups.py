"""Lookups of rows: what a step makes of the size of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import step_on
from problems import networks

IDS, WIDTH = 4200, 16
BATCH = np.array([[1, 2], [2, 9], [4, 1]], "int32"), np.zeros((3, 1), "float32")


def trained(replicas: int, optimizer: Any, **options: Any) -> Any:
    """Returns a step of a table that has trained on one batch."""
    layers = keras.layers
    table, mean = (lambda: layers.Embedding(IDS, WIDTH)), layers.GlobalAveragePooling1D
    build, kind = (
        networks(2, table, mean, lambda: layers.Dense(1)),
        getattr(keras.optimizers, optimizer),
    )
    step = step_on(replicas, build, lambda: kind(0.1), "mse", verify=False, **options)
    step(BATCH)
    return step


def as_large_as_the_table(step: Any) -> Iterator[str]:
    """Yields the operations of the trace that give a tensor with a row for each id.

    Keras asks for the shape of a table, for which TensorFlow does not read it.
    """
    program, _ = step.runner.programs.of_batch(step.runner.batches.read(BATCH))
    for operation in program.run.graph.get_operations():
        for tensor in operation.outputs:
            is_large = tensor.shape.rank and tensor.shape[0] == IDS
            users = {user.type for user in tensor.consumers()}
            if tensor.dtype != tf.resource and is_large and not users <= {"Shape"}:
                yield operation.name


# Fails if a step reads, or makes a gradient of, all rows of a table of which it updates a few.
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_nothing_in_a_step_is_as_large_as_the_table(replicas: int, optimizer: str) -> None:
    step = trained(replicas, optimizer, clip_norm=1.0)
    assert list(as_large_as_the_table(step)) == []


# Fails if the test above would not see a table.
def test_an_update_of_all_rows_is_seen() -> None:
    assert list(as_large_as_the_table(trained(2, "Adam")))
