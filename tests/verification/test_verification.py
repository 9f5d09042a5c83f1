"""A step held to one device: what is said, what stays, what cannot be verified."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from problems import network, normal_rows

import tfmultigpu as tmg
from tfmultigpu import _compat
from tfmultigpu.addons.verification import Verification
from tfmultigpu.addons.verification.compare import Quantity, Rounding, beyond_bounds
from tfmultigpu.steps import Feature
from tfmultigpu.strategies.collectives import forcing_addition

L = keras.layers
X, Y = normal_rows(23, 4, 2)
Told = tmg.ReplicaDependenceWarning


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tmg.create_strategy(devices=["CPU:0", "CPU:1"])


def step_of(
    strategy: Any, *layers: Any, loss: Any = "mse", optimizer: Any = None, **options: Any
) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        made = [layer() for layer in layers]
        model = network(4, *made, L.Dense(2, name="last"))
        optimizer = optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9)
    return tmg.make_train_step(model, optimizer, loss, strategy, **options)


def values(step: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in step.changed_variables()]


def told(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if issubclass(each.category, Told)]


def minus_mean() -> Any:
    return L.Lambda(lambda x: x - tf.reduce_mean(x, 0), name="centred")


class KeepsMean(L.Layer):
    """Keeps a mean of the means of its batches, and does not use it in training."""

    def __init__(self) -> None:
        super().__init__(name="kept")
        self.mean = self.add_weight(
            name="mean", initializer="zeros", trainable=False, aggregation="mean"
        )

    def call(self, x: Any) -> Any:
        self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x))
        return x


# What is said -------------------------------------------------------------------------------------


def test_a_difference_names_the_numbers_the_layer_and_the_line_to_write(
    strategy: Any, subtests: pytest.Subtests
) -> None:
    step = step_of(strategy, lambda: L.Dense(3), minus_mean)
    with pytest.warns(Told) as caught:
        step((X[:7], Y[:7]))
    found = step.verification
    assert found.outcome == "different"
    assert found.culprit.startswith("Lambda '")
    one, _, other = (
        found.differences[0].removeprefix("the loss is ").partition(" on one device and ")
    )
    assert float(one) != float(other.removesuffix(" as computed"))
    assert [str(each.message) for each in caught] == [str(found)]
    for part in ("the loss is ", "centred'", "tmg.gather_rows(tensor)"):
        with subtests.test(part=part):
            assert part in str(found)


def test_a_warning_is_at_the_line_of_the_user_also_under_fit(strategy: Any) -> None:
    step = step_of(strategy, minus_mean)
    with strategy.scope():
        step.model.compile("sgd", "mse")
    for call in (
        lambda: step((X[:7], Y[:7])),
        lambda: tmg.fit(step.model, (X, Y), batch_size=8, verbose=0),
    ):
        with pytest.warns(Told) as caught:
            call()
        assert {each.filename for each in caught} == {__file__}


def test_micro_batches_are_verified_on_one_device_too() -> None:
    alone = tf.distribute.get_strategy()
    step = step_of(alone, L.BatchNormalization, micro_batches=3)
    assert "Write micro_batches=1" in told(lambda: step((X[:7], Y[:7])))[0]
    step = step_of(alone, lambda: L.Dropout(0.5), micro_batches=3)
    assert told(lambda: step((X[:7], Y[:7]))) == []
    assert step.verification == Verification("same")
    step = step_of(alone, L.BatchNormalization)
    step((X[:7], Y[:7]))
    assert step.verification is None  # There is nothing to verify.


def test_gradients_are_compared_when_asked(strategy: Any) -> None:
    def coupled_backwards(y: Any, predictions: Any) -> Any:
        """The values of mse; the gradient of something that adds up over the whole batch."""
        mean = tf.reduce_mean(predictions)
        nothing = tf.square(mean) - tf.stop_gradient(tf.square(mean))
        return tf.reduce_mean(tf.square(y - predictions), -1) + nothing

    for verify in ("first", "gradients"):  # By its size, by its elements.
        step = step_of(strategy, loss=coupled_backwards, verify=verify)
        assert len(told(lambda step=step: step((X[:7], Y[:7])))) == 1
        first, *_, last = step.verification.differences
        assert first.startswith("the norm of the gradient is ")
        assert "last_kernel_momentum' after the update is " in last
    step = step_of(strategy, verify="gradients", clip_norm=0.01)
    assert told(lambda: step((X[:7], Y[:7]))) == []


# Which batches ------------------------------------------------------------------------------------


def test_a_mean_of_equal_means_is_told_at_the_first_uneven_batch(strategy: Any) -> None:
    def run(verify: Any) -> Any:
        step = step_of(strategy, KeepsMean, lambda: L.Dropout(0.5), verify=verify)
        iterator = iter(tmg.distribute_dataset((X, Y), strategy, batch_size=4))  # The last has 3.
        logs: list[Any] = []
        said = told(lambda: logs.extend(step.run(iterator, steps) for steps in (2, 1, 9)))
        return step, said, [{name: float(v) for name, v in each.items()} for each in logs]

    (step, said, logs), (other, _, expected) = run("first"), run(False)
    assert len(said) == 1
    assert "the state 'kept/mean'" in said[0]
    assert [each["steps"] for each in logs] == [2, 1, 3]
    assert logs == expected
    for one, two in zip(values(step), values(other), strict=True):
        np.testing.assert_array_equal(one, two)


def test_code_for_even_batches_alone_is_verified_with_all_rows(strategy: Any) -> None:
    step = step_of(strategy, lambda: L.Lambda(lambda x: tf.concat(tf.split(x, 2), 0)))
    assert told(lambda: step((X[:8], Y[:8]))) == []


def test_a_batch_of_fewer_rows_than_replicas_is_compared_and_the_next_too() -> None:
    four = tmg.create_strategy(devices=[f"CPU:{i}" for i in range(4)])
    step = step_of(four, minus_mean)
    assert told(lambda: step((X[:3], Y[:3]))) == []
    assert step.verification.outcome == "same"  # Each replica has all rows.
    iterator = iter(tmg.distribute_dataset((X[:12], Y[:12]), four, batch_size=3))
    assert told(lambda: step.run(iterator, 4)) == []
    assert len(told(lambda: step((X[:8], Y[:8])))) == 1


def test_eval_and_predict_steps_and_the_loops_are_verified(strategy: Any) -> None:
    model = step_of(strategy, minus_mean).model
    evaluate = tmg.make_eval_step(model, "mse", strategy)
    predict = tmg.make_predict_step(model, strategy)
    assert "the loss is" in told(lambda: evaluate((X[:7], Y[:7])))[0]
    assert "'output 0' is" in told(lambda: predict(X[:7]))[0]
    with strategy.scope():
        model.compile("sgd", "mse")
    for loop in (tmg.evaluate, tmg.fit):
        assert told(lambda loop=loop: loop(model, (X, Y), batch_size=8, verbose=0))
    assert told(lambda: tmg.predict(model, X, batch_size=8, verbose=0))
    assert told(lambda: tmg.fit(model, (X, Y), batch_size=8, verbose=0, verify=False)) == []


# Nothing is changed -------------------------------------------------------------------------------


class Scales(Feature):
    """Multiplies the gradient by the number of replicas, which one device has not."""

    def __init__(self, *, is_known: bool) -> None:
        self._is_known = is_known

    def on_gradient(self, gradient: Any) -> Any:
        by = float(tf.distribute.get_strategy().num_replicas_in_sync)
        return gradient._replace(tensors=tuple(by * each for each in gradient.tensors))

    def on_one_device(self) -> Feature | None:
        return self if self._is_known else None


def test_what_a_feature_does_to_a_gradient_is_compared_if_one_device_has_it(
    strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with forcing_addition(in_memory=False):  # On each replica.
        step = step_of(strategy, features=[Scales(is_known=True)])
        (message,) = told(lambda: step((X[:7], Y[:7])))
        step = step_of(strategy, features=[Scales(is_known=False)])
        assert told(lambda: step((X[:7], Y[:7]))) == []
    assert "must not depend on the replicas" in message
    assert step.verification.outcome == "same"
    assert "The update was not compared: Scales changes the gradient" in caplog.text


def test_an_update_that_loses_its_clipping_is_told(strategy: Any) -> None:
    for clip, said in ((_compat.clip_as_set, 0), (lambda _, gradients: gradients, 1)):
        step = step_of(strategy, optimizer=lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01))
        with pytest.MonkeyPatch.context() as patch, forcing_addition(in_memory=False):
            patch.setattr(_compat, "clip_as_set", clip)
            assert len(told(lambda step=step: step((X[:7], Y[:7])))) == said


class Drifts(keras.optimizers.Adam):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        variable.assign_add(tf.fill(variable.shape, float(variable.device[-1])))


def test_replicas_whose_weights_drift_apart_are_told(strategy: Any) -> None:
    assert told(lambda: step_of(strategy, optimizer=Drifts)((X[:7], Y[:7])))


def test_verification_changes_no_bit_of_the_training(strategy: Any) -> None:
    def run(verify: Any) -> tuple[list[np.ndarray], list[float]]:
        layers = [
            lambda: L.Dense(5, kernel_regularizer="l2"),
            lambda: L.Dropout(0.5),
            lambda: L.Lambda(lambda x: x + keras.random.normal(tf.shape(x))),  # Without a seed.
        ]
        options = {"micro_batches": 2, "loss_scale": "dynamic", "clip_norm": 0.1}
        adam = lambda: keras.optimizers.Adam(0.1)  # noqa: E731
        step = step_of(strategy, *layers, optimizer=adam, verify=verify, **options)
        losses = [float(step((X[i : i + 5], Y[i : i + 5]))["loss"]) for i in (0, 5, 10)]
        return values(step), losses

    (ours, losses), (expected, others) = run("gradients"), run(False)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert losses == others


# What cannot be verified --------------------------------------------------------------------------


def test_draws_that_no_two_runs_repeat_are_not_compared(strategy: Any) -> None:
    step = step_of(strategy, lambda: L.Lambda(lambda x: x + tf.random.normal(tf.shape(x))))
    (message,) = told(lambda: step((X[:7], Y[:7])))
    assert "differs between two runs on one device. Draw by keras.random" in message
    assert step.verification.outcome == "not verified"
    assert told(lambda: step((X[:8], Y[:8]))) == []


# Rounding -----------------------------------------------------------------------------------------


def test_a_network_that_amplifies_rounding_raises_no_alarm(strategy: Any) -> None:
    sines = [lambda: L.Lambda(lambda x: tf.sin(60.0 * x))] * 2
    step = step_of(strategy, lambda: L.Dense(64, "relu"), *sines)
    assert told(lambda: step((X, Y))) == []
    assert step.verification.outcome == "same"


def test_half_precision_raises_no_alarm_and_misses_no_difference(strategy: Any) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        kinds = (lambda: L.Dense(16, "relu"), lambda: L.Dropout(0.2))
        step = step_of(strategy, *kinds)
        assert told(lambda: step((X, Y))) == []
        step = step_of(strategy, *kinds, lambda: L.Lambda(lambda x: x - 9.0 * tf.reduce_mean(x, 0)))
        assert "Lambda" in told(lambda: step((X, Y)))[0]
    finally:
        keras.config.set_dtype_policy("float32")


def test_bounds_follow_from_dtype_layers_and_additions_and_moved_weights() -> None:
    class Layer:
        compute_dtype = "float32"

    rounding = Rounding([Layer()] * 9)
    assert rounding.bound == pytest.approx(16 * 2**-23 * 3)
    assert rounding.of_sum(100) == pytest.approx(16 * 2**-23 * 3 + 4 * 2**-23 * 10)
    Layer.compute_dtype = "bfloat16"
    assert Rounding([Layer()] * 9).bound == 2**-7
    still, *moved = ({"loss": value} for value in (1.0, 1.001, 0.9995))
    for other, beyond in ((1.010, False), (1.020, True), (np.inf, True)):
        quantity = Quantity("loss", "the loss", 1.0, [other], 0.0)
        assert quantity.is_beyond(still, moved, 16.0) == beyond


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-7], None),
        ([1.0, 2.0], [1.0, 2.1], (2.0, 2.1)),
        ([np.nan, np.inf], [np.nan, np.inf], None),
        ([1.0], [np.nan], (1.0, np.nan)),
        ([3, 4], [3, 5], (4.0, 5.0)),
        (2.0, 2.5, (2.0, 2.5)),
        ([], [], None),
        ([1 + 1j], [1 + 2j], (1 + 1j, 1 + 2j)),
    ],
)
def test_the_largest_difference_is_found(one: Any, other: Any, apart: Any) -> None:
    found = beyond_bounds(np.array(one), np.array(other), 1e-6)
    assert (None if found is None else found[2:]) == pytest.approx(apart, nan_ok=True)
