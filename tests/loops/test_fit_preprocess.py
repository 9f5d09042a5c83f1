"""fit with preprocess, held to one device, interrupted and resumed."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg

RNG = np.random.default_rng(0)
X = RNG.normal(size=(11, 2)).astype("float32")
Y = (X.sum(1) > 0).astype("int64")
EPOCHS = 3


def noisy(example: Any, seed: Any) -> Any:
    x, y = example
    return x + tf.random.stateless_uniform([2], seed), y


class Indexed:
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        return X[number], Y[number]


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(11, seed=1)


SOURCES: dict[str, Any] = {"indexed": Indexed, "dataset": shuffled}


class Interrupt(keras.callbacks.Callback):
    def __init__(self, checkpoints: tmg.Checkpoints, step: int) -> None:
        super().__init__()
        self.checkpoints, self.step = checkpoints, step

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.checkpoints.step >= self.step:
            raise KeyboardInterrupt


def train(replicas: int, source: Any, directory: Any = None, interrupt: int | None = None) -> Any:
    strategy = strategy_of(replicas)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"])
    callbacks: list[Any] = []
    if directory is not None:
        checkpoints = tmg.Checkpoints(directory, model, model.optimizer)
        checkpoints.restore()
        callbacks = [checkpoints.callback(every_steps=2)]
        callbacks += [] if interrupt is None else [Interrupt(checkpoints, interrupt)]
    history = tmg.fit(
        model,
        source,
        batch_size=4,
        preprocess=noisy,
        epochs=EPOCHS,
        class_weight={0: 1.0, 1: 3.0},
        callbacks=callbacks,
        verbose=0,
    )
    return history.history, [one.numpy() for one in model.weights]


@pytest.mark.parametrize("source", SOURCES)
def test_as_on_one_device_also_if_interrupted(source: str, tmp_path: Any) -> None:
    history, weights = train(1, SOURCES[source]())
    found, here = train(3, SOURCES[source]())
    for one, other in zip(weights, here, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)
    for name, values in history.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)
    with pytest.raises(KeyboardInterrupt):
        train(2, SOURCES[source](), tmp_path, interrupt=5)
    data = SOURCES[source]()
    found, here = train(2, data, tmp_path)
    for one, other in zip(weights, here, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)
    np.testing.assert_allclose(found["loss"][-1], history["loss"][-1], rtol=1e-5)


def test_what_was_trained_on_is_not_preprocessed_again(tmp_path: Any) -> None:
    def run(epochs: int) -> int:
        strategy = strategy_of(2)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.1), loss)
        checkpoints = tmg.Checkpoints(tmp_path, model, model.optimizer)
        checkpoints.restore()
        callbacks = [checkpoints.callback(every_epochs=40)]
        data = Indexed()
        options = {"batch_size": 4, "preprocess": noisy, "verbose": 0}
        tmg.fit(model, data, epochs=epochs, callbacks=callbacks, **options)
        return len(data.read)

    assert run(40) > 40 * len(X)
    assert run(41) < 20 * len(X)  # One epoch, and what tf.data reads ahead.


def test_the_batches_of_a_hand_written_loop_resume(tmp_path: Any) -> None:
    def run(directory: Any, most: int) -> list[np.ndarray]:
        strategy = strategy_of(2)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1)
        data = tmg.distribute_dataset(shuffled(), strategy, batch_size=4, preprocess=noisy, seed=5)
        checkpoints = tmg.Checkpoints(directory, model, optimizer, data, every_steps=1)
        checkpoints.restore()
        seen: list[np.ndarray] = []
        for _ in checkpoints.epochs(EPOCHS):
            for batch in checkpoints.data:
                parts = strategy.experimental_local_results(batch[0])
                seen.append(np.concatenate([np.asarray(part) for part in parts]))
                checkpoints.after_step()
                if len(seen) == most:
                    return seen
        return seen

    whole = run(tmp_path / "whole", 100)
    assert len(whole) == 9
    parts = [*run(tmp_path / "parts", 4), *run(tmp_path / "parts", 100)]
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(other, one)


def test_what_does_not_go_with_preprocess() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(tmg.errors.DataError, match="validation_split divides arrays"):
        tmg.fit(model, (X, X), preprocess=noisy, validation_split=0.5)
    data = tmg.distribute_dataset((X, X), batch_size=4)
    with pytest.raises(tmg.errors.DataError, match="already distributed, so preprocess cannot"):
        tmg.fit(model, data, preprocess=noisy)
