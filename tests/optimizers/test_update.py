"""How often an update reads what all variables share."""

from __future__ import annotations

import keras
import tensorflow as tf

import tfmultigpu as tmg


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule with a state of its own, which asking it advances."""

    def __init__(self) -> None:
        self.rate = keras.Variable(1.0)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        self.rate.assign(self.rate * 0.5)
        return tf.convert_to_tensor(self.rate)


def test_a_learning_rate_with_a_state_is_asked_once_per_update():
    for as_function in (False, True):
        weight, rate = keras.Variable([1.0]), Halving()
        optimizer = keras.optimizers.SGD((lambda rate=rate: rate(None)) if as_function else rate)
        optimizer.build([weight])
        for _ in range(2):
            tmg.apply_reduced_gradients(optimizer, [tf.constant([0.5])], [weight])
        assert float(rate.rate.numpy()) == 0.25
        assert float(weight.numpy()[0]) == 1.0 - 0.5 * (0.5 + 0.25)
