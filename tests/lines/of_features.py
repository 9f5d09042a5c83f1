"""What a step does by itself: loss scales, rematerialization, traces."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import tfmultigpu as tmg
from lines.messages import Told, example
from lines.parts import X, Y, dense, made, optimizer_of, step, strategy_of

BATCH = X, Y
layers = keras.layers


@example("The model computes in float16 without a loss scale")
def float16_without_a_loss_scale(told: Told) -> None:
    def train(dtype: str, **options: Any) -> None:
        step(made(lambda: dense(dtype=dtype)), **options)(BATCH)

    with told():
        train("mixed_float16")
    train("mixed_float16", loss_scale="dynamic")
    train("mixed_bfloat16")


def built(model: Any, *shape: int) -> Any:
    model.build((None, *shape))
    return model


class Around(keras.Model):
    """Multiplies by what a function of the model gives, in a function that is rematerialized."""

    def __init__(self, function: Any, outside: bool) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(4), layers.Dense(2)
        self.function, self.outside = function, outside
        self.draws = tf.random.Generator.from_seed(1)
        self.seeds = keras.random.SeedGenerator(1)

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        x = self.first(x)
        if self.outside:
            result = self.function(self, x)
            return keras.remat(lambda y, z: self.second(y) * z)(x, result)
        return keras.remat(lambda y: self.second(y) * self.function(self, x))(x)


def around(function: Any, outside: bool = False) -> None:
    step(made(lambda: built(Around(function, outside), 4)))(BATCH)


@example("keras.remat calls a function once more in the backward pass, and this one does what")
def draws_that_cannot_be_repeated(told: Told) -> None:
    def drawn(model: Any, x: Any) -> Any:
        return model.draws.normal([2])

    def drawn_by_keras(model: Any, x: Any) -> Any:
        return keras.random.normal((2,), seed=model.seeds)

    with told():
        around(drawn)
    around(drawn_by_keras)
    around(lambda model, x: keras.random.normal((2,), seed=model.seeds), outside=True)


@example("A function in keras.remat uses a tensor that it does not get as an argument")
def a_captured_tensor(told: Told) -> None:
    def mean(model: Any, x: Any) -> Any:
        return tf.reduce_mean(x, -1, keepdims=True)

    with told():
        around(mean)
    around(mean, outside=True)


@example("keras.remat calls a function once more in the backward pass, and then this one does")
def a_rematerialized_cell(told: Told) -> None:
    class Unrolled(keras.Model):
        def __init__(self, whole: bool) -> None:
            super().__init__()
            self.cell, self.whole = layers.GRUCell(2, dropout=0.5), whole
            self.layer = layers.RNN(self.cell)

        def build(self, shape: Any) -> None:
            self.layer.build(shape)
            self.built = True

        def call(self, x: Any, training: bool = False) -> Any:
            if self.whole:
                return keras.remat(self.layer)(x, training=training)
            state = [tf.zeros([tf.shape(x)[0], 2])]
            for time in range(2):
                output, state = keras.remat(self.cell)(x[:, time], state, training=training)
            return output

    def train(whole: bool) -> None:
        model = made(lambda: built(Unrolled(whole), 2, 4))
        step(model)((tf.stack([X, X], 1), Y))

    with told():
        train(whole=False)
    train(whole=True)


@example("The last {} calls of the step each traced it once more")
def traced_at_each_call(told: Told) -> None:
    strategy = strategy_of(2)

    # A setting of the optimizer: keras.Variable, and then assign.
    def train(is_variable: bool = False) -> None:
        optimizer = optimizer_of(kind=keras.optimizers.Adam)
        if is_variable:
            with strategy.scope():
                optimizer.beta_1 = keras.Variable(0.9, trainable=False)
        trained = step(optimizer=optimizer)
        for number in range(6):
            value = 0.9 - 0.01 * number
            if is_variable:
                optimizer.beta_1.assign(value)
            else:
                optimizer.beta_1 = value
            trained(BATCH)

    with told():
        train()
    train(is_variable=True)

    # The same of an optimizer in a LossScaleOptimizer, which has no beta_1 that acts.
    def train_inside(is_variable: bool = False) -> None:
        with strategy.scope():
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))
            if is_variable:
                optimizer.inner_optimizer.beta_1 = keras.Variable(0.9, trainable=False)
        trained = step(optimizer=optimizer)
        for number in range(6):
            value = 0.9 - 0.01 * number
            if is_variable:
                optimizer.inner_optimizer.beta_1.assign(value)
            else:
                optimizer.inner_optimizer.beta_1 = value
            trained(BATCH)

    with told(UserWarning, r"scope\(\): optimizer\.inner_optimizer\.beta_1 = keras\.Variable\("):
        train_inside()
    train_inside(is_variable=True)

    # Batches: of one structure.
    predict = tmg.make_predict_step(made(), strategy, verify=False)
    others = [(X, {f"of_{number}": Y}) for number in range(6)]
    with told():
        for batch in others:
            predict(batch)
    for x, of_batch in others:
        predict((x, *of_batch.values()))
