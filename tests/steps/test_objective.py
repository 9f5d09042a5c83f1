"""What a step minimizes: losses of outputs and of layers, divisors, penalties, what they reach."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases.case import EXACT, Case, differences, on_one_device, on_replicas
from cases.losses import Add, adding
from law.model import Training
from one_device import cut, difference, step_on, strategy_of
from problems import integers, networks, normal, normal_rows, sgd

import tfmultigpu as tmg

X, Y = normal_rows(9, 5, 2, seed=4)
BATCHES = cut((X, Y), (5, 2, 7, 1))
SQUARES = keras.losses.MeanSquaredError()
L = keras.layers


of = functools.partial(networks, 5)


def two_outputs() -> keras.Model:
    inputs = keras.Input((5,))
    # In another order than that of their names.
    outputs = {name: L.Dense(1, name=name)(inputs) for name in ("z", "a")}
    return keras.Model(inputs, outputs)


# Fails if losses and labels in a list are not those of the outputs in Keras' order, by name.
def test_lists_are_in_the_order_of_keras() -> None:
    step = step_on(2, two_outputs, sgd, ["mse", "mae"])
    outputs = {name: value.numpy() for name, value in step.model(X).items()}
    logs = step((X, [np.full((9, 1), 7.0, "float32"), np.zeros((9, 1), "float32")]))
    np.testing.assert_allclose(logs["a_loss"], np.mean((outputs["a"] - 7.0) ** 2), rtol=1e-5)
    np.testing.assert_allclose(logs["z_loss"], np.mean(abs(outputs["z"])), rtol=1e-5)


# Fails if the loss in the logs leaves out penalties of variables that the step does not train.
def test_penalties_of_all_variables_are_in_the_loss() -> None:
    first = lambda: L.Dense(3, kernel_regularizer=keras.regularizers.L2(1.0))  # noqa: E731
    step = step_on(2, of(first, lambda: L.Dense(2)), sgd, "mse")
    expected = tmg.make_eval_step(step.model, "mse", step.strategy)((X, Y))["loss"]
    first, last = step.model.layers
    before = first.get_weights()
    step = tmg.make_train_step(
        step.model, step.optimizer, "mse", step.strategy, variables=last.trainable_variables
    )
    np.testing.assert_allclose(step((X, Y))["loss"], expected, rtol=1e-6)
    for old, new in zip(before, first.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_regularizer_with_a_count_of_its_own() -> None:
    class Annealed(keras.regularizers.Regularizer):
        def __init__(self) -> None:
            self.calls = keras.Variable(0.0, trainable=False)

        def __call__(self, own: Any) -> Any:
            self.calls.assign_add(1.0)
            return tf.reduce_sum(own * own) / self.calls.value

    def build() -> keras.Model:
        regularizer = Annealed()
        model = of(lambda: L.Dense(2, kernel_regularizer=regularizer))()
        model.counts = regularizer.calls
        return model

    step = step_on(1, build, sgd, "mse")
    for calls in (1.0, 2.0):
        weights = step.model.layers[0].get_weights()[0]
        loss = float(step((X, Y))["loss"])
        assert step.model.counts.numpy() == calls
        assert loss > (weights**2).sum() / calls - 1e-6


class ReadsAnother(keras.regularizers.Regularizer):
    def __init__(self, other: Any) -> None:
        self.other = other

    def __call__(self, x: Any) -> Any:
        return 0.1 * tf.reduce_sum(tf.square(x)) * tf.reduce_sum(tf.square(self.other))


# Fails if the gradient of a penalty that reaches another variable is lost in silence.
def test_a_regularizer_that_reads_another_variable_is_refused() -> None:
    def build() -> keras.Model:
        model = of(lambda: L.Dense(4, "tanh"), lambda: L.Dense(2))()
        first, last = model.layers
        last.kernel.regularizer = ReadsAnother(first.kernel)
        return model

    with pytest.raises(tmg.TfMultiGpuError, match="regularizer"):
        step_on(2, build, sgd, "mse")((X, Y))


# Gradients that do not exist ----------------------------------------------------------------------


class Stop(L.Layer):
    def call(self, inputs: Any) -> Any:
        return tf.stop_gradient(inputs)


FIRST, SECOND = (lambda: L.Dense(4, name="first")), (lambda: L.Dense(2))


def forward(model: Any, batch: Any, training: bool) -> Any:
    return tmg.loss_sum("mse", batch[1], model(batch[0], training=training))


KINDS = {
    "parts": (2, "mse", {"micro_batches": 2}),
    "forward": (1, None, {"forward": forward}),
    "owners": (2, "mse", {"shard_update": True}),
}


# Fails if a step without any gradient is counted, or one for some variables is not told.
@pytest.mark.parametrize("kind", KINDS)
def test_missing_gradients_are_told(kind: str) -> None:
    replicas, loss, options = KINDS[kind]
    step = step_on(replicas, of(FIRST, SECOND, Stop), sgd, loss, **options)
    with pytest.raises(tmg.errors.LossError, match=r"No gradient reaches any.*first/kernel'.*tf\."):
        step((X, Y))
    assert int(step.optimizer.iterations.numpy()) == 0
    stopped = of(FIRST, Stop, SECOND)
    step = step_on(replicas, stopped, sgd, loss, **options)
    expected = on_one_device(Case("stopped", lambda: Training(stopped(), sgd(), SQUARES), BATCHES))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in BATCHES:
            step(batch)
        assert difference(step.model.get_weights(), [*expected.end.values()][:4]) <= EXACT
        step((X, Y, np.ones(9, "float32")) if loss else (X, Y))  # Traced again, for weights.
    (text,) = {str(one.message) for one in caught}
    assert "first/kernel', '" in text
    assert "first/bias']" in text


def two_heads() -> Training:
    """A tagger with a masked output for each token, and a plain output for each row."""
    tokens = keras.Input((4,), dtype="int32")
    embedded = L.Embedding(9, 5, mask_zero=True)(tokens)
    pooled = L.GlobalAveragePooling1D()(embedded)
    outputs = [L.Dense(3, name="tags")(embedded), L.Dense(2, name="score")(pooled)]

    def whole(model: Any, batch: Any) -> Any:
        x, (_, score) = batch
        return SQUARES(score, model(x, training=True)[1])

    return Training(keras.Model(tokens, outputs), sgd(), [None, "mse"], whole=whole)


# Fails if the head of an output without a loss moves, or is in the logs.
def test_an_output_without_a_loss_and_its_head_without_gradient() -> None:
    tokens = integers(9, 9, 4) * (np.arange(4) < integers(4, 9, 1) + 1)
    batches = [(t, (g, y)) for t, g, y in cut((tokens, integers(3, 9, 4), Y), (5, 2, 7, 1))]
    case = Case("two heads", two_heads, batches)
    with pytest.warns(UserWarning, match=r"No gradient reaches some .*'tags/kernel', 'tags/bias'"):
        result = on_replicas(case, strategy_of(3))
    assert max(differences(result, on_one_device(case)).values()) <= EXACT
    heads = [name for name in result.start if name.endswith(("tags/kernel", "tags/bias"))]
    assert len(heads) == 2
    for name in heads:
        np.testing.assert_array_equal(result.start[name], result.end[name], name)
    assert "tags_loss" not in result.logs[0]


def test_nothing_to_train_is_said_and_the_loss_is_logged() -> None:
    step = step_on(2, of(lambda: L.Dense(2, trainable=False)), sgd, "mse")
    with pytest.warns(UserWarning, match="The model has no trainable variables"):
        losses = [float(step(batch)["loss"]) for batch in BATCHES]
    expected = [np.mean((step.model(x) - y) ** 2) for x, y in BATCHES]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert int(step.optimizer.iterations.numpy()) == 0


# Losses that layers add: as Keras counts them in tests/cases/losses.py ----------------------------

NO_MEANS: dict[str, Callable[[Any], Any]] = {
    "a sum": lambda x: 0.1 * tf.reduce_sum(x * x),
    "a sum for each unit": lambda x: 0.1 * tf.reduce_sum(x * x, axis=0),
    "rows divided by their number": lambda x: (
        tf.reduce_sum(x * x, -1) / tf.cast(tf.shape(x)[0], x.dtype)
    ),
    "whole numbers": lambda x: tf.reduce_sum(tf.cast(x > 0, tf.int32)),
}


# Fails if a loss that is no mean over the rows, and counts as one, is not told. On one replica in
# one piece it is what Keras makes of it: tests/cases/losses.py.
@pytest.mark.parametrize("name", NO_MEANS)
def test_what_is_no_mean_is_told(name: str) -> None:
    step = step_on(2, adding(NO_MEANS[name]), sgd, SQUARES)
    with pytest.warns(tmg.ReplicaDependenceWarning, match=r"self\.add_loss\(values\) takes one"):
        step((X, Y))


# Fails if a mean times its rows is formed in float16: 400 * 256 is over 65504.
def test_a_penalty_in_float16_does_not_overflow() -> None:
    def large(x: Any) -> Any:
        return tf.reduce_mean(x) * 0.0 + tf.constant(400.0, x.dtype)

    build = of(lambda: Add(large, dtype="mixed_float16"), lambda: L.Dense(2))
    logs = step_on(2, build, sgd, "mse", loss_scale=1.0)((normal(256, 5), normal(256, 2)))
    assert 400.0 < float(logs["loss"]) < 410.0
