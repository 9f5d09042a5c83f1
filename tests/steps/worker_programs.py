"""What two workers call in the tests of steps; each function begins on both (law/processes.py)."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from law.model import FLOAT, Training, regression
from law.pair import Pair
from problems import network

import tfmultigpu as tmg

X, Y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
strategy = functools.cache(lambda: tmg.create_strategy("multi_worker", fallback=False))


class AgainstAll(keras.losses.Loss):
    """Each row against all rows of the batch; on replicas they are gathered."""

    def call(self, y: Any, z: Any) -> Any:
        every = tmg.gather_rows(z) if tf.distribute.has_strategy() else z
        alike = tf.matmul(z, every, transpose_b=True)
        places = tf.cast(y[:, 0], tf.int32)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(places, alike)


def hold_a_loss_over_all_rows() -> None:
    """Also many steps in one call, whose gathered rows differ in number from step to step."""

    def build() -> Training:
        layers = [keras.layers.Dense(5, "tanh", **FLOAT), keras.layers.Dense(4, **FLOAT)]
        model = network(4, *layers, dtype="float64")
        return Training(model, keras.optimizers.SGD(0.1), AgainstAll(**FLOAT))

    batches = [(x, np.arange(len(x))[:, None]) for x, _ in regression([7, 2, 1, 5])]
    Pair(build, batches[0], strategy(), shares=(3, 1)).hold(batches, steps=3)


def made(activation: Any = "relu", loss: Any = "mse", optimizer: Any = None) -> Any:
    with strategy().scope():
        layers = [keras.layers.Dense(3, activation), keras.layers.Dense(1)]
        model = network(2, *layers)
        model.compile(optimizer or keras.optimizers.SGD(0.1), loss)
    return model


def step(loss: Any, model: Any = None) -> None:
    model = model or made()
    one = tmg.make_train_step(model, model.optimizer, loss, strategy())
    for batch in tmg.distribute_dataset((X, Y), strategy(), batch_size=4):
        one(batch)


def fit(model: Any) -> None:
    tmg.fit(model, (X, Y), batch_size=4, verbose=0)


def told_of_other_programs(folder: str) -> dict[str, str]:
    """Returns what each attempt to train another program than the other worker ends with."""
    number = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy()
    if number == 0:
        # A model that one worker alone makes, outside of the scope: names count up from here.
        network(2, keras.layers.Dense(1))
    losses = [lambda a, b: (a - b) ** 2, lambda a, b: 2 * (a - b) ** 2]

    def loaded_by_the_first() -> Any:
        model = made()
        if number == 0:
            model.layers[1].bias.assign([0.5])
        return model

    def moments_of_the_second() -> None:
        with strategy().scope():
            model = made(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
        fit(model)
        if number == 1:
            model.optimizer.variables[-1].assign([7.0])
        fit(model)

    def calls_something_else() -> None:
        model = made()
        checkpoints = tmg.Checkpoints(folder, model, model.optimizer)
        [lambda: step("mse", model), checkpoints.save][number]()

    attempts: dict[str, Callable[[], Any]] = {
        "alike": lambda: fit(made(lambda v: v * 2.0, lambda a, b: (a - b) ** 2)),
        "activation": lambda: fit(made(["relu", "tanh"][number])),
        "function": lambda: step(losses[number]),
        "alike again": lambda: step("mse"),
        "weights in fit": lambda: fit(loaded_by_the_first()),
        "weights in evaluate": lambda: tmg.evaluate(loaded_by_the_first(), (X, Y), batch_size=4),
        "moments": moments_of_the_second,
        "calls": calls_something_else,  # The last one: TensorFlow adds nothing more after it.
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "trained"
        except tmg.errors.ClusterError as error:
            found[name] = str(error)
    return found
