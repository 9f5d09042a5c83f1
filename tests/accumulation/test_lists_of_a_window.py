"""Windows by hand over a large table: lists of rows are added, as dense gradients are."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg

IDS, WIDTH = 4100, 16
_random = np.random.default_rng(3)
WINDOW = [_random.integers(0, IDS, (2, 2, 3)) for _ in range(3)]  # By micro-batch and replica.
WINDOW[1][0, 0] = WINDOW[0][1, 1] = 7  # On both replicas, and twice in one.


def train(optimizer: Any, dense_at: int | None) -> tuple[Any, Any, list[Any]]:
    """Trains for two windows on two replicas; returns the gradients of the last one as well."""
    strategy = strategy_of(2)
    with strategy.scope():
        table = keras.Variable(np.linspace(-1, 1, IDS * WIDTH).reshape(IDS, WIDTH), dtype="float32")
        window = tmg.GradientAccumulator([table])
        update = optimizer()

    @tf.function
    def add(micro_batch: int) -> Any:
        def replica() -> None:
            number = tf.get_static_value(
                tf.distribute.get_replica_context().replica_id_in_sync_group
            )
            with tf.GradientTape() as tape:
                rows = tf.gather(table.value, WINDOW[micro_batch][number])
                loss = tf.reduce_sum(tf.square(rows))
                if micro_batch == dense_at:
                    loss += tf.reduce_sum(table.value)
            window.add(tape.gradient(loss, [table.value]), 2.0)

        strategy.run(replica)

    gradients: list[Any] = []
    for _ in range(2):
        for micro_batch in range(3):
            add(micro_batch)
        gradients, _ = window.reduce()
        gradients, _ = tmg.clip_gradients(gradients, 0.5)
        tmg.apply_reduced_gradients(update, gradients, [table])
    return table, update, gradients


def expected(kind: Any, dense_at: int | None) -> Any:
    """The same windows from dense gradients, by plain Keras."""
    table = keras.Variable(np.linspace(-1, 1, IDS * WIDTH).reshape(IDS, WIDTH), dtype="float32")
    optimizer = kind()
    for _ in range(2):
        gradient = np.zeros((IDS, WIDTH), "float64")
        for ids in WINDOW:
            np.add.at(gradient, ids.ravel(), 2 * table.numpy()[ids.ravel()])
        gradient += 2.0 if dense_at is not None else 0.0
        gradient /= 12.0
        (clipped,), _ = tf.clip_by_global_norm([tf.constant(gradient, tf.float32)], 0.5)
        optimizer.apply([clipped], [table])
    return table


# Fails if a row is lost over micro-batches, replicas or windows, or the lists grow to the table.
@pytest.mark.parametrize("dense_at", [None, 0, 1])
@pytest.mark.parametrize("name", ["Adagrad", "Adam"])
def test_a_window_of_lists_is_a_window_of_tensors(name: str, dense_at: int | None) -> None:
    def optimizer() -> Any:
        return getattr(keras.optimizers, name)(0.1)

    table, _, (gradient,) = train(optimizer, dense_at)
    assert isinstance(gradient, tf.IndexedSlices)
    ids = gradient.indices.numpy()
    assert len(ids) == len(set(ids)) == (len(np.unique(WINDOW)) if dense_at is None else IDS)
    assert tf.convert_to_tensor(gradient).shape == (IDS, WIDTH)
    np.testing.assert_allclose(table.numpy(), expected(optimizer, dense_at).numpy(), atol=2e-6)


# Fails if an optimizer squares a repeated row before it is added.
def test_a_list_of_a_tape_is_made_unique_before_an_update() -> None:
    table = keras.Variable(np.ones((IDS, WIDTH), "float32"))
    rows = tf.IndexedSlices(tf.ones((2, WIDTH)), tf.constant([3, 3]), tf.constant([IDS, WIDTH]))
    tmg.apply_reduced_gradients(keras.optimizers.Adagrad(0.5, 0.0), [rows], [table])
    other = keras.Variable(np.ones((IDS, WIDTH), "float32"))
    keras.optimizers.Adagrad(0.5, 0.0).apply([tf.convert_to_tensor(rows)], [other])
    np.testing.assert_array_equal(table.numpy(), other.numpy())
