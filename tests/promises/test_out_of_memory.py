"""A step that runs out of memory names the replica, the batch and what to try; nothing changed."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.pair import strategy_of

import tfmultigpu as tmg


class Hungry(keras.layers.Layer):
    """Asks for more memory than any machine has if more than four rows come at once."""

    def call(self, inputs: Any) -> Any:
        many = tf.shape(inputs)[0] > 4
        size = tf.where(many, tf.constant(2**50, tf.int64), 1)
        # A start that depends on the inputs, so that the values are not known before.
        return inputs + tf.reduce_max(tf.fill([size], tf.reduce_max(inputs) * 0.0))


# Fails if TensorFlow's own error comes through, or if another replica has trained meanwhile.
def test_the_replica_the_batch_and_the_way_out_are_named() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Hungry(), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    before = model.get_weights()
    x = np.random.default_rng(0).normal(size=(9, 3)).astype("float32")
    data = tmg.distribute_dataset((x, x[:, :1]), strategy, batch_size=9, shares=(1, 2))
    # TensorFlow waits for ten seconds before it says so.
    with pytest.raises(tmg.errors.OutOfMemoryError) as raised:
        step(next(iter(data)))
    for fact in ("CPU:1", "9 rows", "micro_batches", "find_batch_size"):
        assert fact in str(raised.value)
    assert int(optimizer.iterations.numpy()) == 0
    np.testing.assert_equal(model.get_weights(), before)
