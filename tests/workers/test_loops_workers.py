"""Two workers predict what one device does, verify first steps, and agree on capacities."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import this_worker
from problems import network, normal_rows

import tfmultigpu as tmg
from tfmultigpu.strategies.worker_exchange import ElsewhereError, WorkerExchange

pytestmark = pytest.mark.slow
X, Y = normal_rows(31, 6, 2)
GIB = 1024**3


class EveryType(keras.Model):
    """An output of each type that workers must send each other in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        number = tf.cast(tf.round(10.0 * inputs[:, 0]), tf.int32)
        count = tf.math.floormod(number, 3)
        words = tf.strings.join([tf.strings.as_string(number), "\xff|é"])
        parts = tf.strings.substr(words, tf.zeros_like(count), count)
        values = {
            "float32": self.dense(inputs),
            "text": tf.stack([words, parts], axis=1),
            "no text": tf.fill(tf.shape(number), ""),
            "ragged": tf.RaggedTensor.from_row_lengths(tf.repeat(inputs, count, axis=0), count),
            "ragged text": tf.strings.bytes_split(words),
            "empty rows": tf.RaggedTensor.from_row_lengths(inputs[:0, 0], tf.zeros_like(number)),
            "nothing": inputs[:, :0],
            "bool": inputs > 0,
        }
        for dtype in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
            values[dtype] = tf.cast(number, dtype)
        for dtype in ("bfloat16", "float16", "float64", "complex64", "complex128"):
            values[dtype] = tf.cast(inputs[:, :2], dtype)
        return {"deep": [values]}


def readable(leaf: Any) -> list[Any]:
    if isinstance(leaf, tf.RaggedTensor):
        return ["ragged", leaf.dtype.name, repr(leaf.to_list())]
    return [list(leaf.shape), leaf.dtype.name, repr(leaf.tolist())]


def predict(rows: int) -> dict[str, list[Any]]:
    keras.utils.set_random_seed(1)
    with this_worker.strategy().scope():
        model = EveryType()
    predicted = tmg.predict(model, X[:rows], batch_size=6, verbose=0)["deep"][0]
    return {name: readable(leaf) for name, leaf in predicted.items()}


@pytest.mark.parametrize("rows", [31, 1])
def test_predictions_of_every_type_are_those_of_one_device(both: Any, rows: int) -> None:
    one, (first, second) = predict(rows), both(predict, rows)
    assert first == second
    expected, computed = (np.array(json.loads(p.pop("float32")[2])) for p in (one, first))
    assert expected.shape == (rows, 2)
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-6)
    assert first == one  # What is not computed but passed on comes through to the bit.


# Verification -------------------------------------------------------------------------------------


def verified(*layers: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    strategy = this_worker.strategy()
    with strategy.scope():
        model = network(6, *[make() for make in layers])
        model.add(keras.layers.Dense(2))
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    iterator = iter(tmg.distribute_dataset((X[:24], Y[:24]), strategy, batch_size=12))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = step.run(iterator, 5)
    return {
        "outcome": step.verification.outcome,
        "culprit": step.verification.culprit.split(" ")[0],
        "warnings": sum(issubclass(one.category, tmg.ReplicaDependenceWarning) for one in caught),
        "steps": int(logs["steps"]),
    }


def verify_first_steps() -> list[dict[str, Any]]:
    def synchronized() -> Any:
        return keras.layers.BatchNormalization(synchronized=True)

    def minus_mean() -> Any:
        return keras.layers.Lambda(lambda x: x - tf.reduce_mean(x, 0))

    return [verified(synchronized, lambda: keras.layers.Dropout(0.5)), verified(minus_mean)]


def test_first_steps_are_verified(both: Any) -> None:
    expected = [
        {"outcome": "same", "culprit": "", "warnings": 0, "steps": 2},
        {"outcome": "different", "culprit": "Lambda", "warnings": 1, "steps": 2},
    ]
    assert both(verify_first_steps) == [expected] * 2


# What one worker alone knows ----------------------------------------------------------------------


class Stops(keras.callbacks.Callback):
    """Counts batches, and on the first worker ends an evaluation in a hook."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.seen = 0
        if this_worker.index() == 0:
            setattr(self, hook, lambda *_: setattr(self.model, "stop_evaluating", True))

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen += 1


def stop_evaluation() -> tuple[int, float]:
    """Evaluates while a hook of one worker stops it; returns the batches and the loss."""
    keras.utils.set_random_seed(1)
    with this_worker.strategy().scope():
        model = network(6, keras.layers.Dense(2))
        model.compile("sgd", "mse")
    stops = Stops("on_test_begin")
    logs = tmg.evaluate(model, (X, Y), batch_size=4, callbacks=[stops], verbose=0, return_dict=True)
    return stops.seen, float(logs["loss"])


def fail_on_one() -> list[Any]:
    """Runs functions that fail on all, one or no worker; then an exchange still meets."""
    exchange, said = WorkerExchange(this_worker.strategy()), []
    for failing in ((0, 1), (1,), ()):

        def run(failing: tuple[int, ...] = failing) -> str:
            if this_worker.index() in failing:
                raise ValueError("Of this worker.")
            return "result"

        try:
            said.append(exchange.together("a test", run))
        except (ValueError, ElsewhereError) as error:
            said.append(type(error).__name__)
    return [*said, exchange("a sum", [1]).sum()]


def verify_where_one_fails() -> tuple[str, int]:
    """Verifies a step that on one device fails on the second worker alone, and trains."""
    strategy = this_worker.strategy()

    class Fails(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            if this_worker.index() and tf.distribute.get_strategy() is not strategy:
                raise ValueError("Only here.")
            return inputs

    with strategy.scope():
        model = network(6, keras.layers.Dense(2))
        layer, sgd = Fails(), keras.optimizers.SGD(0.1)

    def forward(model: Any, batch: Any, training: bool) -> Any:
        x, y = batch
        return tmg.loss_sum(keras.losses.MeanSquaredError(), y, layer(model(x)))

    step = tmg.make_train_step(model, sgd, None, strategy, forward=forward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step((X[:7], Y[:7]))
        step((X[7:15], Y[7:15]))
    return step.verification.outcome, int(sgd.iterations.numpy())


def test_no_worker_leaves_out_what_the_others_wait_for(both: Any, subtests: Any) -> None:
    with subtests.test("a hook of one worker stops an evaluation before its first batch"):
        first, second = both(stop_evaluation)
        assert first == second
        assert first[0] == 1
    with subtests.test("one fails"):
        first, second = both(fail_on_one)
        assert first == ["ValueError", "ElsewhereError", "result", 2]
        assert second == ["ValueError", "ValueError", "result", 2]
    with subtests.test("the check fails on one"):
        assert both(verify_where_one_fails) == [("not verified", 2)] * 2


# Capacities ---------------------------------------------------------------------------------------


class Slow(keras.layers.Layer):
    """Takes four times as long for each row on the second worker."""

    def call(self, inputs: Any) -> Any:
        def wait(values: np.ndarray) -> np.ndarray:
            time.sleep(0.002 * 4 ** this_worker.index() * len(values))
            return values

        return tf.ensure_shape(
            tf.numpy_function(wait, [inputs], tf.float32, stateful=False), inputs.shape
        )

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


def capacities() -> tuple[Any, Any, str]:
    """Returns memories, speeds, and what a worker is told if one of them gives no memory."""
    strategy, worker = this_worker.strategy(), this_worker.index()
    memory = tmg.memory_capacities(strategy, memory=[(worker + 2) * GIB + 1])
    with pytest.raises(tmg.errors.DataError) as error:
        tmg.memory_capacities(strategy, memory=[-1 if worker == 1 else GIB])
    with strategy.scope():
        # Before the first weight, so that no gradient has to pass it.
        model = network(6, Slow(), keras.layers.Dense(2))
        optimizer = keras.optimizers.Adam()
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    step((X[:6], Y[:6]))
    before = [variable.numpy() for variable in [*model.variables, *optimizer.variables]]
    speeds = tmg.measured_capacities(step, (X, Y), repeats=3)
    for variable, value in zip([*model.variables, *optimizer.variables], before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    return memory, speeds, str(error.value)


def test_workers_of_unequal_memory_and_speed(both: Any) -> None:
    (memory, speeds, told), second = both(capacities)
    assert memory == second[0] == (2 * GIB + 1, 3 * GIB + 1)  # to the byte
    assert speeds == second[1]
    assert speeds[0] > speeds[1]
    assert "memory of its replicas [1]" in told
    assert "memory={'CPU:0': -1}" in second[2]
