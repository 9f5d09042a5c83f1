"""What a step minimizes: the outputs that a loss is paired with, its divisor, and penalties."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.pair import strategy_of

import tfmultigpu as tmg

X = np.linspace(-1.0, 1.0, 20, dtype="float32").reshape(5, 4)


def two_outputs(strategy: Any) -> Any:
    with strategy.scope():
        inputs = keras.Input((4,))
        # In another order than that of their names.
        outputs = {"z": keras.layers.Dense(1, name="z")(inputs)}
        outputs["a"] = keras.layers.Dense(1, name="a")(inputs)
        return keras.Model(inputs, outputs), keras.optimizers.SGD(0.1)


# Fails if losses and labels in a list are not those of the outputs in Keras' order, by name.
def test_lists_are_in_the_order_of_keras() -> None:
    strategy = strategy_of(2)
    model, optimizer = two_outputs(strategy)
    outputs = {name: value.numpy() for name, value in model(X).items()}
    step = tmg.make_train_step(model, optimizer, ["mse", "mae"], strategy)
    logs = step((X, [np.full((5, 1), 7.0, "float32"), np.zeros((5, 1), "float32")]))
    np.testing.assert_allclose(logs["a_loss"], np.mean((outputs["a"] - 7.0) ** 2), rtol=1e-5)
    np.testing.assert_allclose(logs["z_loss"], np.mean(abs(outputs["z"])), rtol=1e-5)
    with pytest.raises(tmg.errors.TfMultiGpuError, match=r"no labels.* y=None of output 'z'"):
        tmg.make_train_step(model, optimizer, "mse", strategy)((X, {"a": X[:, :1]}))


# Fails if the gradient leaves out, in silence, what it is divided by.
def test_a_divisor_that_depends_on_weights_is_told() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)

    def forward(model: Any, batch: Any, training: bool) -> Any:
        weights = tf.sigmoid(model(batch[0], training=training))
        return tmg.LossSum(tf.reduce_sum(weights * batch[1]), tf.reduce_sum(weights))

    step = tmg.make_train_step(model, optimizer, None, strategy, forward=forward)
    with pytest.raises(tmg.errors.TfMultiGpuError, match="divided by depends on trained"):
        step((X, X[:, :1]))


# Fails if the loss in the logs leaves out penalties of variables that the step does not train.
def test_penalties_of_all_variables_are_in_the_loss() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((4,)),
            keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(1.0)),
            keras.layers.Dense(1),
        ])  # fmt: skip
        optimizer = keras.optimizers.SGD(0.1)
    data = X, X[:, :1]
    expected = tmg.make_eval_step(model, "mse", strategy)(data)["loss"]
    last = model.layers[-1].trainable_variables
    first = [np.array(value) for value in model.layers[0].get_weights()]
    loss = tmg.make_train_step(model, optimizer, "mse", strategy, variables=last)(data)["loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for old, new in zip(first, model.layers[0].get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


# Fails if a loss weight that the step cannot follow is read once in silence.
def test_variable_loss_weights_are_refused() -> None:
    strategy = strategy_of(2)
    model, optimizer = two_outputs(strategy)
    objective = tmg.steps.Objective("mse", loss_weights={"a": tf.Variable(1.0), "z": 1.0})
    step = tmg.make_train_step(model, optimizer, objective, strategy)
    with pytest.raises(tmg.errors.TfMultiGpuError, match="loss_weights are numbers"):
        step((X, {"a": X[:, :1], "z": X[:, :1]}))
