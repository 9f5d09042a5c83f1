"""Batches of arrays: one trace serves other arrays, and one iterator all validations."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.loops.array_batches import shard_arrays

ROWS = 23


def arrays(seed: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(rows, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)


def model_of(replicas: int) -> Any:
    keras.utils.set_random_seed(3)
    with strategy_of(replicas).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def values(batches: Any, count: int) -> list[list[float]]:
    iterator = iter(batches)
    found = []
    for _ in range(count):
        batch = next(iterator)
        local = batches.strategy.experimental_local_results(batch)
        found.append(np.concatenate([one.numpy() for one in local]).tolist())
    return found


def test_each_pass_has_every_row_once_and_its_own_order() -> None:
    model, strategy = model_of(3), strategy_of(3)

    def passes(x: Any, **options: Any) -> list[list[float]]:
        data = shard_arrays(model, "test", strategy, x, 5, shuffle=True, **options)
        per_pass = -(-len(x) // 5)
        rows = [row for batch in values(data, 3 * per_pass) for row in batch]
        return [rows[i * len(x) : (i + 1) * len(x)] for i in range(3)]

    x = tf.range(ROWS, dtype=tf.float32)
    found = passes(x, seed=7)
    assert [sorted(one) for one in found] == [list(range(ROWS))] * 3
    assert found[0] != found[1] != found[2]
    # By the seed and the number of the pass alone, whatever the trace was made for.
    assert passes(x, seed=7, first_pass=1)[0] == found[1]
    assert passes(x, seed=8)[0] != found[0]
    assert passes(10 * x, seed=7) == [[10 * row for row in one] for one in found]
    fewer = passes(x[:8], seed=7)
    assert [sorted(one) for one in fewer] == [list(range(8))] * 3


def test_another_call_trains_on_the_arrays_it_is_given() -> None:
    """Three calls: other numbers, other sizes, an array changed in place."""
    changed = arrays(2)
    ours, alone = model_of(3), model_of(1)
    for number, given in enumerate([arrays(0), arrays(1, 40), changed, changed]):
        if number == 3:
            changed[0][:] *= 0.5
        for weights in (None, {0: 1.0, 1: 3.0}):
            data = given if weights is None else (given[0], (given[1] > 0).astype("float32"))
            logs = []
            for one in (ours, alone):
                keras.utils.set_random_seed(number)
                options = {"batch_size": 8, "epochs": 2, "class_weight": weights, "verbose": 0}
                logs.append(tmg.fit(one, data, **options).history)
            for name in logs[0]:
                np.testing.assert_allclose(logs[0][name], logs[1][name], rtol=1e-5)
    for mine, its in zip(ours.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5)


def test_a_second_call_traces_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(2)
    options = {"batch_size": 8, "verbose": 0, "validation_data": arrays(1)}
    tmg.fit(model, arrays(0), **options)
    tmg.evaluate(model, arrays(0), verbose=0)
    traced = []
    traces_map = tf.data.Dataset.map
    monkeypatch.setattr(
        tf.data.Dataset,
        "map",
        lambda *given, **more: traced.append(1) or traces_map(*given, **more),
    )
    tmg.fit(model, arrays(2, 31), **options)
    tmg.evaluate(model, arrays(3, 9), verbose=0)
    assert not traced
    tmg.fit(model, arrays(0), **{**options, "batch_size": 9})
    assert traced


class StopEarly(keras.callbacks.Callback):
    """Ends the evaluation after its first batch, in the epochs given."""

    def __init__(self, epochs: set[int]) -> None:
        super().__init__()
        self.epochs, self.epoch = epochs, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_evaluating = self.epoch in self.epochs


def test_every_validation_begins_at_the_first_row() -> None:
    model = model_of(2)
    valid = arrays(1)
    with strategy_of(2).scope():
        model.optimizer.learning_rate = 0.0
    options = {"batch_size": 8, "epochs": 3, "verbose": 0, "validation_data": valid}
    for steps in (None, 1, 2, 9):
        rows = ROWS if steps is None else min(ROWS, 8 * steps)
        wanted = tmg.evaluate(model, (valid[0][:rows], valid[1][:rows]), batch_size=8, verbose=0)
        history = tmg.fit(model, arrays(0), validation_steps=steps, **options).history
        np.testing.assert_allclose(history["val_loss"], [wanted["loss"]] * 3, rtol=1e-6)
        np.testing.assert_allclose(history["val_mae"], [wanted["mae"]] * 3, rtol=1e-6)


def test_a_validation_that_ended_early_does_not_shift_the_next() -> None:
    model = model_of(2)
    valid = arrays(1)
    with strategy_of(2).scope():
        model.optimizer.learning_rate = 0.0
    whole = tmg.evaluate(model, valid, batch_size=8, verbose=0)["loss"]
    first = tmg.evaluate(model, (valid[0][:8], valid[1][:8]), batch_size=8, verbose=0)["loss"]
    history = tmg.fit(
        model,
        arrays(0),
        batch_size=8,
        epochs=4,
        verbose=0,
        validation_data=valid,
        callbacks=[StopEarly({1})],
    ).history
    np.testing.assert_allclose(history["val_loss"], [whole, first, whole, whole], rtol=1e-6)


def test_arrays_without_rows_are_an_error_and_do_not_hang() -> None:
    empty = np.zeros((0, 3), "float32"), np.zeros((0, 1), "float32")
    for call in (
        lambda: tmg.fit(model_of(2), arrays(0), validation_data=empty, verbose=0),
        lambda: tmg.fit(model_of(2), empty, verbose=0),
        lambda: tmg.evaluate(model_of(2), empty, verbose=0),
    ):
        with pytest.raises(tmg.errors.DataError, match="The data has no batches"):
            call()


class AB(NamedTuple):
    a: Any
    b: Any


class BA(NamedTuple):
    b: Any
    a: Any


class Fields(keras.Model):
    """Reads its inputs by name."""

    def call(self, inputs: Any) -> Any:
        return 10 * inputs.a + inputs.b


def test_named_tuples_with_other_fields_are_other_data() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = Fields()
        model.compile(loss="mse")
    one, two = np.ones((4, 1), "float32"), np.full((4, 1), 2, "float32")
    step = tmg.make_eval_step(model, "mse", strategy)
    for kind in (AB, BA, AB):
        x = kind(a=one, b=two)
        np.testing.assert_array_equal(tmg.predict(model, (x,), verbose=0), 12 * one)
        assert tmg.evaluate(model, (x, one), verbose=0)["loss"] == 121
        dataset = tf.data.Dataset.from_tensors((x, one)).repeat()
        assert float(step.run(iter(tmg.distribute_dataset(dataset, strategy)), 1)["loss"]) == 121
        assert float(step.run(iter(dataset), 1)["loss"]) == 121
