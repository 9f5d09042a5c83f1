"""More programs that users write: generative, contrastive, reinforced, with memories and queues."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from layers_of_users import (
    DropTokens,
    Numpy,
    Overwrites,
    PenalizesItsWeights,
    PythonCounter,
    SamplesLatent,
    VariableCounter,
    WeightNoise,
)
from programs import (
    IDS,
    AddsLoss,
    Case,
    L,
    Program,
    mse,
    sequential,
    with_layers,
)

import tfmultigpu as tmg


def summed(values: Any, model: Any = None, **options: Any) -> Any:
    """A program of ``forward``, which computes ``values(model, x, y)`` of each row."""

    def build() -> Program:
        made = (model or (lambda: sequential(L.Dense(5, "tanh"))))()

        def forward(model: Any, batch: Any, training: bool) -> Any:
            rows = values(model, *batch)
            return tmg.LossSum(tf.reduce_sum(rows), tf.size(rows))

        plain = lambda model, x, y: tf.reduce_mean(values(model, x, y))  # noqa: E731
        return Program(made, plain, {"loss": None, "forward": forward, **options})

    return build


def over_its_mean(model: Any, x: Any, y: Any) -> Any:
    values = tf.reduce_mean((y - model(x, training=True)) ** 2, 1)
    return values / tf.stop_gradient(tf.reduce_mean(values))


class GradientPenalty(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.body = sequential(L.Dense(5, "tanh"))
        self.seed_generator = keras.random.SeedGenerator(8)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.body(x)

    def penalty(self, x: Any) -> Any:
        alpha = keras.random.uniform((tf.shape(x)[0], 1), seed=self.seed_generator)
        between = alpha * x - (1 - alpha) * x
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = tf.reduce_sum(self.body(between))
        return (tf.norm(tape.gradient(score, between), axis=1) - 1) ** 2


def wgan_gp(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(model(x) * y, 1) + model.penalty(x)


def mean_teacher() -> Program:
    model, teacher = sequential(L.Dense(5, "tanh")), sequential(L.Dense(5, "tanh"))
    teacher.trainable = False

    def values(model: Any, x: Any, y: Any) -> Any:
        for old, new in zip(teacher.weights, model.weights, strict=True):
            old.assign(0.9 * old + 0.1 * new)
        return tf.reduce_mean((model(x, training=True) - teacher(x) - y) ** 2, 1)

    program = summed(values, lambda: model, micro_batches=2)()
    program.watched += teacher.weights
    return program


def masked_lstm() -> Program:
    model = sequential(
        L.Embedding(9, 4, mask_zero=True),
        L.LSTM(4, dropout=0.3, recurrent_dropout=0.3),
        inputs=(5,),
        dtype="int64",
    )
    return Program(model, mse, {"loss": "mse"})


def with_options(build: Any, **options: Any) -> Any:
    def changed() -> Program:
        program = build()
        program.options.update(options)
        return program

    return changed


def by_gradients(build: Any) -> Any:
    """The loss of the first step shows nothing, the gradients do."""
    return with_options(build, verify="gradients")


def adds(loss: Any) -> Any:
    return with_layers(lambda: L.Dense(4), lambda: AddsLoss(loss))


MORE_CASES = (
    Case(
        "VAE in micro-batches",
        with_options(with_layers(lambda: L.Dense(8), SamplesLatent), micro_batches=2),
        "same",
        sizes=(7, 3, 1, 7),
    ),
    Case("a loss over its mean", by_gradients(summed(over_its_mean)), "told", "the gradient"),
    Case("WGAN-GP in micro-batches", summed(wgan_gp, GradientPenalty, micro_batches=2), "same"),
    Case("a mean teacher in micro-batches", mean_teacher, "told", "micro_batches=1"),
    Case("a mean in a trained weight", with_layers(Overwrites), "told", "the state 'overwrites"),
    Case("a counter in Python", with_layers(PythonCounter), "told", "PythonCounter"),
    Case("a counter in a tf.Variable", with_layers(VariableCounter), "same"),
    Case("tf.numpy_function", with_layers(Numpy), "told", "Numpy"),
    Case("noise of four rows", with_layers(lambda: WeightNoise((4, 3))), "same"),
    Case(
        "dropout on the tokens of all rows",
        with_layers(DropTokens, inputs=(5,), dtype="int64"),
        "told",
        x=IDS,
    ),
    Case("LSTM with dropout behind a mask", masked_lstm, "same", x=IDS, sizes=(7, 1)),
    Case("add_loss of weights alone", with_layers(PenalizesItsWeights), "same", sizes=(8, 7, 5)),
    Case(
        "add_loss of a sum over a written number of rows",
        adds(lambda x: tf.reduce_sum(x**2) / 8.0),
        "told",
        "added loss",
        sizes=(8, 7, 5),
    ),
)
