"""Many steps in one call: how they take the data, its end and its failures."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import as_dataset, cut, difference, strategy_of

import tfmultigpu as tmg
from tfmultigpu.steps import call_lengths

_random = np.random.default_rng(31)
X = _random.normal(size=(24, 5)).astype("float32")
Y = _random.normal(size=(24, 1)).astype("float32")
SIZES = (8, 6, 1, 5, 4)


@pytest.fixture
def cut_on_a_fast_machine(monkeypatch):
    """Has calls take one, four, sixteen steps, however busy the machine is."""
    monkeypatch.setattr(call_lengths, "_SECONDS", 3600.0)


def make_step(replicas, heads=1):
    strategy = strategy_of(replicas)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(4, "tanh")(inputs)
        outputs = [keras.layers.Dense(1, name=f"head{i}")(hidden) for i in range(heads)]
        model = keras.Model(inputs, outputs if heads > 1 else outputs[0])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return tmg.make_train_step(model, optimizer, ["mse"] * heads if heads > 1 else "mse", strategy)


def weights(step):
    return [variable.numpy() for variable in step.model.variables]


def one_by_one(step, batches):
    logs = [step(batch) for batch in batches]
    return [{name: float(value) for name, value in one.items()} for one in logs]


@pytest.mark.parametrize(("replicas", "heads"), [(1, 1), (2, 5)])
@pytest.mark.usefixtures("cut_on_a_fast_machine")
def test_as_one_call_for_each_batch(replicas, heads):
    """Five heads have more in their logs than there is room for from the start."""
    several = (lambda x, y: (x, (y,) * heads)) if heads > 1 else (lambda x, y: (x, y))
    data = as_dataset(cut((X, Y), SIZES)).map(several)
    expected, step = make_step(replicas, heads), make_step(replicas, heads)
    each = one_by_one(expected, data)
    iterator = iter(data)
    for began, ended in ((0, 3), (3, 5)):
        logs = step.run(iterator, 3)
        assert int(logs["steps"]) == ended - began
        rows = [one["weight"] for one in each[began:ended]]
        for name in {name for name in each[0] if name.endswith("loss")}:
            mean = np.average([one[name] for one in each[began:ended]], weights=rows)
            np.testing.assert_allclose(float(logs[name]), mean, rtol=1e-6)
        assert float(logs["gradient_norm"]) == pytest.approx(each[ended - 1]["gradient_norm"])
    assert difference(weights(step), weights(expected)) <= 1e-6
    nothing = step.run(iterator, 3)
    assert int(nothing["steps"]) == 0
    assert float(nothing["weight"]) == 0
    assert difference(weights(step), weights(expected)) <= 1e-6, "a step without data"


@pytest.mark.usefixtures("cut_on_a_fast_machine")
def test_no_element_is_taken_that_no_step_uses():
    step = make_step(1)
    iterator = iter(as_dataset(cut((X, Y), SIZES)))
    assert int(step.run(iterator, 2)["steps"]) == 2
    assert [len(x) for x, _ in iterator] == [1, 5, 4]


@pytest.mark.usefixtures("cut_on_a_fast_machine")
def test_data_that_fails_leaves_whole_steps():
    """After a failure the model has been trained on whole batches, the counter says on how many."""

    def batches():
        yield from cut((X, Y), (8, 6, 1))
        raise OSError("the disk is gone")

    spec = (tf.TensorSpec([None, 5], tf.float32), tf.TensorSpec([None, 1], tf.float32))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    step, expected = make_step(2), make_step(2)
    iterator = iter(tmg.distribute_dataset(data, step.strategy))
    with pytest.raises(tf.errors.OpError, match="the disk is gone"):
        step.run(iterator, 5)
    done = int(step.optimizer.iterations.numpy())
    assert done == 3
    one_by_one(expected, cut((X, Y), (8, 6, 1))[:done])
    assert difference(weights(step), weights(expected)) <= 1e-6


@pytest.mark.usefixtures("cut_on_a_fast_machine")
def test_data_that_fails_leaves_whole_what_layers_and_metrics_keep():
    steps, metrics = [], []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=1)]
        model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(1)])
        metrics.append(keras.metrics.MeanSquaredError())
        optimizer = keras.optimizers.SGD(0.1)
        steps.append(
            tmg.make_train_step(
                model, optimizer, "mse", metrics=[metrics[-1]], loss_scale="dynamic"
            )
        )

    def batches():
        yield from cut((X, Y), (8, 6, 1))
        raise OSError("the disk is gone")

    spec = (tf.TensorSpec([None, 5], tf.float32), tf.TensorSpec([None, 1], tf.float32))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    with pytest.raises(tf.errors.OpError, match="the disk is gone"):
        steps[0].run(iter(data), 5)
    assert int(steps[0].optimizer.iterations.numpy()) == 3
    one_by_one(steps[1], cut((X, Y), (8, 6, 1)))
    kept = [
        [v.numpy() for v in (*s.model.variables, *s.optimizer.variables, *m.variables)]
        + [s.loss_scale.good_steps.numpy()]
        for s, m in zip(steps, metrics, strict=True)
    ]
    for failed, whole in zip(*kept, strict=True):
        np.testing.assert_allclose(failed, whole, rtol=1e-6)


@pytest.mark.usefixtures("cut_on_a_fast_machine")
def test_calls_that_are_cut_add_up_to_one_call(monkeypatch):
    """To the bit, without another trace; and no batch is taken too many where one is cut."""
    whole, cut_up = make_step(2, heads=5), make_step(2, heads=5)
    data = as_dataset(cut((X, Y), SIZES)).map(lambda x, y: (x, (y,) * 5)).repeat()
    with monkeypatch.context() as uncut:
        uncut.setattr(call_lengths.CallLength, "most", lambda self, steps: steps)
        expected = whole.run(iter(data), 12)
    asked = []
    lengths = iter([1, 2, 4, 3])
    monkeypatch.setattr(
        call_lengths.CallLength,
        "most",
        lambda self, steps: asked.append(steps) or min(steps, next(lengths, 9)),
    )
    iterator = iter(data)
    found = cut_up.run(iterator, 12)
    # One step was verified by itself.
    assert asked == [1, 11, 9, 5, 2]
    assert {name: value.numpy() for name, value in found.items()} == {
        name: value.numpy() for name, value in expected.items()
    }
    for here, there in zip(weights(cut_up), weights(whole), strict=True):
        np.testing.assert_array_equal(here, there)
    assert len(next(iterator)[0]) == SIZES[12 % 5]
    assert len(cut_up.multistep._compiled) == 1
    # Where the data ends in the middle of a call, nothing more is asked for.
    asked.clear()
    assert int(cut_up.run(iter(data.take(5)), 100)["steps"]) == 5
    assert asked == [100]


def test_the_length_of_calls_follows_from_the_time_of_steps(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(call_lengths, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    length = call_lengths.CallLength(strategy_of(2))

    def call(seconds):
        asked = length.most(1000)
        with length.measuring() as note:
            clock[0] += asked * seconds
            note(asked)
        return asked

    assert [call(1 / 128) for _ in range(5)] == [1, 4, 16, 64, 64]
    assert length.most(7) == 7
    assert [call(1 / 8) for _ in range(3)] == [64, 4, 4]
    assert [call(4.0) for _ in range(3)] == [4, 1, 1]


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_heard_while_many_steps_run():
    step = make_step(1)
    data = as_dataset(cut((X, Y), SIZES)).map(slowly).repeat()
    step.run(iter(data), 2)
    before = int(step.optimizer.iterations)
    timer = threading.Timer(1.0, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        step.run(iter(data), 3000)
    timer.join()
    # Measured: within 50 to 60 steps of 20 milliseconds. Else all of them run.
    assert before < int(step.optimizer.iterations) < before + 1000


def slowly(x, y):
    wait = tf.numpy_function(lambda: time.sleep(0.02) or np.float32(0), [], tf.float32)
    return x + tf.ensure_shape(wait, []), y
