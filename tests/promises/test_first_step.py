"""What the first step costs: one trace for all replicas, and a check of a few rows."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg

L = keras.layers
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X[:, :1]


def step_of(*layers: Callable[[], Any], loss: Any = "mse", **options: Any) -> Any:
    strategy = tmg.create_strategy(devices=4)
    with strategy.scope():
        made = [make() for make in layers]
        model = keras.Sequential([keras.Input((4,)), *made, L.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    return tmg.make_train_step(
        model, optimizer, loss, strategy, features=[tmg.steps.OneTrace()], **options
    )


def told(step: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step((X, Y))
    kind = tmg.ReplicaDependenceWarning
    return [str(each.message) for each in caught if issubclass(each.category, kind)]


# Fails if each replica, or the check, has the Python code of a model run again.
@pytest.mark.parametrize("verify", [False, "first"])
def test_the_code_of_a_model_runs_once_for_all_replicas(verify: Any) -> None:
    calls: list[None] = []

    def counted(x: Any) -> Any:
        calls.append(None)
        return x

    step = step_of(lambda: L.Lambda(counted), verify=verify)
    calls.clear()  # Keras has built the model.
    step((X, Y))
    assert len(calls) == 1


# Fails if the check has one device compute more rows than a replica computes.
def test_the_check_takes_as_many_rows_as_a_replica_holds() -> None:
    sizes: list[int] = []

    def note(rows: Any) -> Any:
        sizes.append(int(rows))
        return rows

    def loss(labels: Any, predictions: Any) -> Any:
        rows = tf.numpy_function(note, [tf.shape(labels)[0]], tf.int32, stateful=False)
        rows = tf.ensure_shape(rows, [])
        return tf.square(labels - predictions) + 0.0 * tf.cast(rows, tf.float32)

    step = step_of(loss=loss)
    assert told(step) == []
    assert step.verification.outcome == "same"
    assert max(sizes) == len(X) // 4


# Fails if BatchNormalization that is not synchronized hides what else is wrong.
def test_a_second_fault_is_found_beside_batch_normalization() -> None:
    step = step_of(
        L.BatchNormalization, lambda: L.Lambda(lambda x: x - tf.reduce_mean(x, 0), name="centred")
    )
    said = told(step)
    assert len(said) == 2
    norm, other = said
    assert "tmg.synchronize_batch_norm(model)" in norm
    assert "centred'" in other
    (alone,) = told(step_of(L.BatchNormalization))
    assert "tmg.synchronize_batch_norm(model)" in alone


# Fails if the statistics that each replica has kept by itself are taken for a second fault.
def test_a_model_that_was_trained_before_has_no_second_fault() -> None:
    trained = step_of(L.BatchNormalization, verify=False)
    for _ in range(2):
        trained((X, Y))
    model, optimizer = trained.model, trained.optimizer
    step = tmg.make_train_step(model, optimizer, "mse", trained.strategy, verify=True)
    assert [len(told(step)) for _ in range(2)] == [1, 1]


class AddsOneAfterTheOther(L.Layer):
    """Adds a weight, whose gradient is one long sum, as kernels for a bias on CPUs may make it."""

    def build(self, shape: Any) -> None:
        self.bias = self.add_weight(shape=shape[-1:])

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def add(x: Any, bias: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                rows = tf.reshape(upstream, [-1, tf.shape(upstream)[-1]])
                return upstream, tf.cumsum(rows)[-1]

            return x + bias, gradient

        return add(x, tf.convert_to_tensor(self.bias))


# Fails if equal numbers, which each addition rounds in the same direction, raise an alarm.
def test_a_long_sum_of_equal_numbers_raises_no_alarm() -> None:
    repeated = functools.partial(L.RepeatVector, 60_000)
    step = step_of(repeated, AddsOneAfterTheOther, L.GlobalAveragePooling1D)
    assert told(step) == []
    assert step.verification.outcome == "same"


class Clips(L.Layer):
    """Clips the gradient of the rows of its replica: it depends on the cut, and on the scale."""

    def call(self, x: Any) -> Any:
        def identity(x: Any) -> Any:
            return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.05)

        return tf.custom_gradient(identity)(x)


# Fails if a gradient that depends on the scale of the loss as well is taken for rounding.
def test_a_gradient_clipped_on_each_replica_is_told() -> None:
    step = step_of(functools.partial(L.Dense, 16, "tanh"), Clips)
    assert told(step)
    assert step.verification.outcome == "different"


# Fails if TensorFlow's "the others were cancelled" is what a user reads of a wrong label.
def test_the_error_of_a_replica_is_not_lost() -> None:
    def loss(labels: Any, predictions: Any) -> Any:
        return tf.gather(predictions[:, 0], tf.cast(labels[:, 0], tf.int32) + 99)

    strategy = tmg.create_strategy(devices=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), L.Dense(2)])
        optimizer = keras.optimizers.SGD()
    step = tmg.make_train_step(
        model, optimizer, loss, strategy, verify=False, features=[tmg.steps.OneTrace()]
    )
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
            step((X, Y))


# Fails if the batch of a loop is gone with the error, which only a second run would show.
def test_the_error_of_a_replica_is_not_lost_in_a_loop() -> None:
    strategy = tmg.create_strategy(devices=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), L.Dense(2)])
        optimizer = keras.optimizers.SGD()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(
        model, optimizer, loss, strategy, verify=False, features=[tmg.steps.OneTrace()]
    )
    labels = np.repeat([0, 99, 0], 4)
    batches = iter(tmg.distribute_dataset((X[:12], labels), strategy, batch_size=4))
    with pytest.raises(tf.errors.InvalidArgumentError, match="99"):
        step.run(batches, 3)
    assert optimizer.iterations.numpy() == 1
    assert int(step.run(batches, 3)["steps"]) == 1


# Fails if the batch of a loop that has failed stays, and the next loop waits for its room for ever.
def test_a_loop_goes_on_after_one_that_failed() -> None:
    with tmg.create_strategy(devices=2).scope():
        hidden = [L.Dense(2) for _ in range(16)]  # As many as are traced once by themselves.
        layers = [keras.Input((1,), dtype="int32"), L.Embedding(5, 2), L.Flatten(), *hidden]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    rights, losses = (np.zeros([4, 1], "int32"), np.zeros([4, 2], "float32")), []

    def evaluate() -> None:
        losses.append(tmg.evaluate(model, rights, batch_size=4))

    evaluate()
    wrong = np.full([4, 1], 9, "int32"), rights[1]
    with pytest.raises(tf.errors.InvalidArgumentError):
        tmg.evaluate(model, wrong, batch_size=4)
    thread = threading.Thread(target=evaluate, daemon=True)
    thread.start()
    thread.join(60)
    assert len(losses) == 2
    assert losses[0] == losses[1]
