"""Functions that tests call in worker processes (law/processes.py). Each begins on every worker."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from law.model import FLOAT, Training, batches_of, regression, small
from law.pair import Pair, Row

SIZES = [7, 1, 2, 5]  # an odd one, one row, as many rows as workers, and odd again
# Synchronized normalisation leaves no micro-batches; everything else is on.
EVERYTHING = Row(2, norm=True, options=(("loss_scale", 1024.0),))
joined: dict[str, Any] = {}


def join(startup_timeout: float = 60.0) -> int:
    """Joins the cluster and returns the number of replicas."""
    strategy = tmg.create_strategy("multi_worker", fallback=False, startup_timeout=startup_timeout)
    joined["strategy"] = strategy
    return strategy.num_replicas_in_sync


def everything_at_once() -> list[np.ndarray]:
    """Holds to one device the model that has every feature; returns its values."""
    pair = EVERYTHING.pair(joined["strategy"])
    pair.hold(batches_of(SIZES, [0.0, 1.0, 3.0], [1]), 3)
    return pair.ours.values()


def clipping_set_on_the_optimizer() -> list[np.ndarray]:
    """Holds to one device a limit of the norm that is set on the optimizer, and shares."""
    batches = regression(SIZES)

    def build() -> Any:
        return small(keras.optimizers.SGD(0.5, global_clipnorm=0.1))

    pair = Pair(build, batches[0], joined["strategy"], shares=(3, 1))
    pair.hold(batches)
    return pair.ours.values()


IDS = np.random.default_rng(3).integers(0, 4100, (10, 3)).astype("int32")
IDS[::2, 1] = 7  # Repeated within and across workers.


def table(optimizer: str) -> list[np.ndarray]:
    """Holds to one device a table so large that lists of its rows are added."""
    targets = np.random.default_rng(4).normal(size=(10, 2))
    cuts = [slice(0, 7), slice(7, 8), slice(8, 10)]
    batches = [(IDS[rows], targets[rows]) for rows in cuts]

    def build() -> Any:
        rows = keras.layers.Embedding(4100, 16, **FLOAT)
        stack = [rows, keras.layers.Flatten(), keras.layers.Dense(2, **FLOAT)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *stack])
        loss = keras.losses.MeanSquaredError(**FLOAT)
        return Training(model, keras.optimizers.get(optimizer), loss, clip_norm=0.05)

    pair = Pair(build, batches[0], joined["strategy"], micro_batches=2)
    pair.hold(batches, 3)
    assert pair.step.verification.outcome == "same"
    return pair.ours.values()


def table_in_fit() -> list[np.ndarray]:
    """Fits a table from batches with more and with fewer ids; Keras does it on one device."""
    random = np.random.default_rng(5)
    x = random.integers(0, 20, (203, 3)).astype("int32")  # Of which a batch has more or fewer.
    y = random.normal(size=(203, 2)).astype("float32")

    def compiled() -> Any:
        keras.utils.set_random_seed(1)
        stack = [keras.layers.Embedding(4100, 16), keras.layers.Flatten(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *stack])
        model.compile(keras.optimizers.SGD(0.5), "mse")
        return model

    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    plain = compiled()
    expected = plain.fit(x, y, **options).history["loss"]
    with joined["strategy"].scope():
        model = compiled()
    try:
        history = tmg.fit(model, x, y, **options).history["loss"]
    except (tmg.TfMultiGpuError, tf.errors.OpError) as error:
        raise AssertionError("the workers do not agree on the length of a list") from error
    np.testing.assert_allclose(history, expected, rtol=1e-5)
    weights = [weight.numpy() for weight in model.weights]
    for weight, truth in zip(weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight, truth.numpy(), rtol=1e-5, atol=1e-6)
    return weights


def preprocessed(strategy: Any = None) -> list[float]:
    """Returns this worker's rows with the random numbers that its preprocessing has drawn."""

    def noisy(example: Any, seed: Any) -> Any:
        return example + tf.random.stateless_uniform([], seed, dtype=tf.float64)

    keras.utils.set_random_seed(5)
    strategy = strategy or joined["strategy"]
    data = tmg.distribute_dataset(np.arange(16.0), strategy, batch_size=7, preprocess=noisy)
    parts = []
    for _ in range(2):
        for shards in data:
            rows = strategy.run(tf.identity, args=(shards,))
            parts += [r.numpy() for r in strategy.experimental_local_results(rows)]
    return [float(row) for row in np.concatenate(parts)]


def loops(folder: str, scope: Any = None) -> dict[str, Any]:
    """Fits, evaluates, predicts and restores on the workers; Keras does it on one device."""
    x, y = (np.concatenate(part) for part in zip(*regression([7, 7, 1]), strict=True))

    def compiled() -> Any:
        keras.utils.set_random_seed(1)
        training = small()
        training.model.compile(training.optimizer, training.loss, metrics=["mae"])
        return training.model

    plain = compiled()
    expected = plain.fit(x, y, batch_size=7, epochs=2, shuffle=False, verbose=0).history
    with scope or joined["strategy"].scope():
        model = compiled()
    history = tmg.fit(model, x, y, batch_size=7, epochs=2, shuffle=False, verbose=0).history
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6, err_msg=name)
    for variable, truth in zip(model.weights, plain.weights, strict=True):
        # The losses of `compile` are float32, so gradients are rounded to it.
        np.testing.assert_allclose(variable.numpy(), truth.numpy(), rtol=1e-6, atol=1e-8)
    evaluated = tmg.evaluate(model, x, y, batch_size=7, return_dict=True)
    truth = plain.evaluate(x, y, batch_size=7, return_dict=True, verbose=0)
    np.testing.assert_allclose(evaluated["mae"], truth["mae"], rtol=1e-6)
    np.testing.assert_allclose(
        tmg.predict(model, x, batch_size=7), plain.predict(x, batch_size=7, verbose=0), rtol=1e-6
    )
    trained = [weight.numpy() for weight in model.weights]
    checkpoints = tmg.Checkpoints(folder, model=model, optimizer=model.optimizer)
    checkpoints.save()
    for weight in model.weights:
        weight.assign(tf.zeros_like(weight.value))
    checkpoints.restore()
    for weight, value in zip(model.weights, trained, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    return {"history": history, "weights": trained}


def train_until_alone() -> str:
    """Trains without an end; a worker that is lost ends it. The last one of them is killed."""
    batches = regression([6])
    with joined["strategy"].scope():
        training = small()
    step = tmg.make_train_step(
        training.model, training.optimizer, training.loss, joined["strategy"]
    )
    data = tmg.distribute_dataset(batches[0], joined["strategy"], batch_size=6)
    (shards,) = list(data)
    for number in itertools.count():
        step(shards)
        if number == 2:
            print("trains", flush=True)
        time.sleep(0.001)
    raise AssertionError("unreachable")


def errors_of_configurations(configurations: list[str]) -> list[tuple[str, str]]:
    """Returns which error each TF_CONFIG is; they are raised before TensorFlow starts."""
    errors = []
    for configuration in configurations:
        os.environ["TF_CONFIG"] = configuration
        try:
            strategy = tmg.create_strategy("multi_worker", fallback=False, startup_timeout=1.0)
            errors.append(("", str(strategy)))
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
    return errors
