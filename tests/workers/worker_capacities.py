"""What unequal workers do with each other: functions that ``run_workers`` calls in each of them."""

from __future__ import annotations

import time

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

SECONDS_PER_ROW = (0.0005, 0.002, 0.008)
GIB = 1024**3

rng = np.random.default_rng(0)
X = rng.normal(size=(64, 6)).astype("float32")
Y = rng.integers(0, 3, 64)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Slow(keras.layers.Layer):
    """Takes a time for each row that depends on the worker."""

    # No argument, because workers compare those: they must train the same model.
    seconds_per_row = 0.0

    def call(self, inputs):
        def wait(values):
            time.sleep(self.seconds_per_row * len(values))
            return values

        return tf.ensure_shape(tf.numpy_function(wait, [inputs], tf.float32), inputs.shape)

    def compute_output_shape(self, input_shape):
        return input_shape


def speeds(strategy, worker):
    with strategy.scope():
        # Before the first weight, so that no gradient has to pass it.
        slow = Slow()
        slow.seconds_per_row = SECONDS_PER_ROW[worker]
        layers = [keras.Input((6,)), slow, keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        optimizer = keras.optimizers.Adam()
    step = tmg.make_train_step(model, optimizer, crossentropy(), strategy, metrics=[accuracy])
    step((X[:6], Y[:6]))
    before = [v.numpy() for v in [*model.variables, *optimizer.variables, *accuracy.variables]]
    measured = tmg.measured_capacities(step, (X, Y), repeats=3)
    after = [v.numpy() for v in [*model.variables, *optimizer.variables, *accuracy.variables]]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    return measured


def memory(strategy, worker):
    return tmg.memory_capacities(strategy, memory=[(worker + 2) * GIB + 1])


def unknown(strategy, worker):
    """What each worker is told where one of them gives no memory: an error, not a wait."""
    try:
        tmg.memory_capacities(strategy, memory=[GIB if worker != 1 else -1])
    except tmg.errors.DataError as error:
        return str(error)
    return "known"


def everything():
    """Runs as each worker and returns what it saw."""
    strategy = tmg.create_strategy(prefer="multi_worker", fallback=False)
    worker = strategy.cluster_resolver.task_id
    return {
        "speeds": speeds(strategy, worker),
        "memory": memory(strategy, worker),
        "unknown": unknown(strategy, worker),
    }
