"""``fit`` on two workers: what one device gives, callbacks of one of them alone, and errors."""

from __future__ import annotations

import contextlib
import io
import random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import this_worker
from problems import labelled, network

import tfmultigpu as tmg

pytestmark = pytest.mark.slow
layers = keras.layers
# 31 rows in batches of 6: the last batch of one row goes to every worker whole.
X, Y, WEIGHTS = labelled(31, 6, 3)


class StopAfter(keras.callbacks.Callback):
    """Wants to stop after the second epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.stop_training = True


class Watching(keras.callbacks.Callback):
    """Looks at some batches, and stops after one in the middle of an epoch."""

    def __init__(self, every_batches: int, stop_after: int | None = None) -> None:
        super().__init__()
        self.every_batches, self.stop_after = every_batches, stop_after
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)
        if batch == self.stop_after:
            self.model.stop_training = True

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("test", batch))


def compiled() -> Any:
    keras.utils.set_random_seed(1)
    with this_worker.strategy().scope():
        hidden = [layers.Dense(4, "tanh", kernel_regularizer="l2"), layers.Dropout(0.2)]
        model = network(6, *hidden, layers.Dense(3, "softmax"))
        metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
        model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", **metrics)
    return model


def fit() -> dict[str, Any]:
    """Fits one model several times; returns what came out, and what was this worker's own."""
    worker, model, found = this_worker.index(), compiled(), {}
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)

    def train(name: str, *data: Any, verbose: int = 0, **options: Any) -> None:
        history = tmg.fit(model, *data, verbose=verbose, **options)
        steps = int(model.optimizer.iterations.numpy())
        found[name] = history.history, model.get_weights(), steps, history.epoch

    bar = io.StringIO()
    arrays = {"batch_size": 6, "sample_weight": WEIGHTS, "validation_split": 0.2}
    with contextlib.redirect_stdout(bar):
        train("shuffled", X, Y, epochs=6, verbose=1, **arrays)
    # The first worker alone wants to stop.
    train("stopped", dataset, epochs=4, callbacks=[StopAfter()][worker:])
    # The batches after which any callback is called are those of all workers.
    watching = Watching(every_batches=2 + worker)
    callbacks = [watching, keras.callbacks.History()][: 2 - worker]
    train("watched", dataset, validation_data=dataset, callbacks=callbacks)
    stopping = Watching(every_batches=1, stop_after=3)
    train("stopped in an epoch", dataset, epochs=2, callbacks=[stopping][:worker])
    return {**found, "own": (bar.getvalue(), watching.seen, stopping.seen)}


def assert_same(found: Any, expected: Any) -> None:
    history, weights, *counts = found
    assert history.keys() == expected[0].keys()
    for name, values in expected[0].items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    for weight, other in zip(weights, expected[1], strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=1e-6)
    assert counts == list(expected[2:])


def test_two_workers_give_what_one_device_gives(both: Any) -> None:
    one, (first, second) = fit(), both(fit)
    (bar, watched, stopping), (no_bar, *seen) = first.pop("own"), second.pop("own")
    assert "Epoch 6/6" in bar
    assert "Epoch" not in no_bar
    # One asks for each second batch, the other for each third.
    batches = [1, 2, 3, 5]
    assert watched == seen[0] == [*batches, *[("test", batch) for batch in batches]]
    assert (stopping, seen[1]) == ([], [0, 1, 2, 3])
    for name in first:
        assert_same(second[name], first[name])
    for name in ("shuffled", "stopped"):
        assert_same(first[name], one[name])
    assert first["stopped"][3] == [0, 1]
    # The second worker alone asked to stop, after the fourth batch.
    assert first["stopped in an epoch"][2] == first["watched"][2] + 4


def fit_differently() -> dict[str, str]:
    """Returns what workers are told whose callbacks or arguments are not those of all."""
    worker, model, errors = this_worker.index(), compiled(), {}
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)

    best = keras.callbacks.EarlyStopping("loss", 10.0, patience=0, restore_best_weights=True)
    run = tmg.Checkpoints("unused", model, model.optimizer)
    weights = model.get_weights()
    for name, options in {
        "weights": {"callbacks": [best][:worker], "epochs": 3},
        "checkpoints": {"callbacks": [run.callback()][:worker]},
    }.items():
        with pytest.raises(tmg.errors.ClusterError) as error:
            tmg.fit(model, dataset, verbose=0, **options)
        errors[name] = str(error.value)
        model.set_weights(weights)
    random.seed(worker)  # Without a seed the order is any, but one for all.
    tmg.fit(model, X, Y, batch_size=6, verbose=0)
    return errors


def test_workers_that_fit_differently_are_told(both: Any) -> None:
    for worker, told in enumerate(both(fit_differently)):
        assert "Received: weights of this worker" in told["weights"]
        assert f"callbacks of tmg.Checkpoints={worker} on worker" in told["checkpoints"]
