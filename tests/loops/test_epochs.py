"""Epochs and passes of fit, held to Keras' fit on one device: which batch is next or last."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit_pairs import BATCHES, FIT, SIZE, X, assert_same, hold, known, pair, regression
from one_device import as_dataset, cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu.data.array_batches import shard_arrays


@pytest.fixture(scope="module")
def two_lines() -> tuple[Any, Any]:
    return pair(2)


@pytest.fixture
def lines(two_lines: tuple[Any, Any]) -> tuple[Any, Any]:
    """A model on two replicas and on one device, as if never trained."""
    weights = [np.linspace(-0.5, 0.5, 5, dtype="float32")[:, None], np.zeros(1, "float32")]
    for model in two_lines:
        model.set_weights(weights)
        model.optimizer.iterations.assign(0)
    return two_lines


def test_an_epoch_continues_the_pass_of_the_one_before(lines: Any) -> None:
    (told,) = hold(lines, known, epochs=5, steps_per_epoch=3)
    assert "an epoch of 3 batches ends after 1, and the next one starts a new pass" in told
    assert not hold(lines, lambda: as_dataset(BATCHES).repeat(), epochs=3, steps_per_epoch=4)
    assert not hold(lines, known, epochs=2)


@pytest.mark.filterwarnings("error")
def test_data_of_unknown_length(lines: Any) -> None:
    """Keras alone would count one step more, or begin a pass too late."""
    model, truth = lines
    seen: list[int] = []
    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    expected = truth.fit(known(), epochs=2, shuffle=False, verbose=0)
    history = tmg.fit(model, as_dataset(BATCHES), epochs=2, verbose=0, callbacks=[each])
    assert_same(model, truth, history, expected)
    assert seen == list(range(len(BATCHES))) * 2
    assert history.params["steps"] is None
    # Each pass ends exactly with an epoch, which nobody knows before.
    options = {"steps_per_epoch": 7, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = truth.fit(as_dataset(BATCHES).repeat(), **options)
    history = tmg.fit(model, as_dataset(BATCHES), **options)
    assert_same(model, truth, history, expected)


def test_data_of_unknown_length_that_ends_within_an_epoch(lines: Any) -> None:
    told = hold(lines, lambda: as_dataset(BATCHES), known, epochs=5, steps_per_epoch=3)
    assert len(told) == 1


# Arrays -------------------------------------------------------------------------------------------


def order_of(x: Any, passes: int = 3, replicas: int = 2, **options: Any) -> list[list[float]]:
    """Returns the rows of each pass as the replicas see them."""
    strategy = strategy_of(replicas)
    keep: Any = lambda key, make: make()  # noqa: E731
    data = shard_arrays(x, 5, strategy, keep, shuffle=True, **options)
    iterator, rows = iter(data), []
    for _ in range(passes * -(-len(x) // 5)):
        local = strategy.experimental_local_results(next(iterator))
        rows += np.concatenate([shard.numpy() for shard in local]).tolist()
    return [rows[i * len(x) : (i + 1) * len(x)] for i in range(passes)]


def test_each_pass_has_every_row_once_in_an_order_of_the_seed_and_its_number() -> None:
    x = tf.range(23, dtype=tf.float32)
    found = order_of(x, seed=7)
    assert [sorted(rows) for rows in found] == [list(range(23))] * 3
    assert found[0] != found[1] != found[2]
    assert order_of(x, seed=7, first_batch=5)[0] == found[1]
    assert order_of(x, seed=7, replicas=3) == found
    assert order_of(x, seed=8)[0] != found[0]


def test_every_validation_begins_at_the_first_row(lines: Any) -> None:
    """Also after one that a callback ended: all validations of arrays read one iterator."""
    model, _ = lines
    valid = X[:23], SIZE[:23]

    class StopSecond(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_evaluating = self.epoch == 1

    rate = float(model.optimizer.learning_rate.numpy())
    model.optimizer.learning_rate = 0.0
    options = {**FIT, "epochs": 3, "validation_data": valid}
    for steps, callbacks in ((None, [StopSecond()]), (1, []), (9, [])):
        rows = 8 if steps == 1 else 23
        whole = tmg.evaluate(model, (valid[0][:rows], valid[1][:rows]), verbose=0)
        first = tmg.evaluate(model, (valid[0][:8], valid[1][:8]), verbose=0)
        wanted = [whole, first if callbacks else whole, whole]
        history = tmg.fit(
            model, (X, SIZE), validation_steps=steps, callbacks=callbacks, **options
        ).history
        for name in ("loss", "mae"):
            values = [logs[name] for logs in wanted]
            np.testing.assert_allclose(history[f"val_{name}"], values, rtol=1e-6)
    model.optimizer.learning_rate = rate


# Fails if the counts of an epoch stay in the next: such metrics make their variables in a step.
def test_metrics_that_make_variables_late_begin_anew_in_each_epoch() -> None:
    def compiled() -> dict[str, Any]:
        return regression(metrics=[keras.metrics.F1Score(threshold=0.5)])

    batches = cut((X, (SIZE > 0).astype("float32")), (8, 8, 8, 8, 5))
    hold(pair(2, compiled=compiled), lambda: known(batches), epochs=3)
