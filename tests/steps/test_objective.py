"""What a step minimizes: losses of outputs and of layers, divisors, penalties, what they reach."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from each import each
from one_device import ByHand, Replicated, assert_same, cut, hold

import tfmultigpu as tmg

_random = np.random.default_rng(4)
X = _random.normal(size=(9, 5)).astype("float32")
Y = _random.normal(size=(9, 2)).astype("float32")
BATCHES = cut((X, Y), (5, 2, 7, 1))
SQUARES = keras.losses.MeanSquaredError()
L = keras.layers


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def of(*layers: Callable[[], Any]) -> Callable[[], keras.Model]:
    return lambda: keras.Sequential([keras.Input((5,)), *(layer() for layer in layers)])


def two_outputs() -> keras.Model:
    inputs = keras.Input((5,))
    # In another order than that of their names.
    outputs = {name: L.Dense(1, name=name)(inputs) for name in ("z", "a")}
    return keras.Model(inputs, outputs)


# Fails if losses and labels in a list are not those of the outputs in Keras' order, by name.
def test_lists_are_in_the_order_of_keras() -> None:
    run = Replicated(2, two_outputs, sgd, ["mse", "mae"])
    outputs = {name: value.numpy() for name, value in run.model(X).items()}
    logs = run.step((X, [np.full((9, 1), 7.0, "float32"), np.zeros((9, 1), "float32")]))
    np.testing.assert_allclose(logs["a_loss"], np.mean((outputs["a"] - 7.0) ** 2), rtol=1e-5)
    np.testing.assert_allclose(logs["z_loss"], np.mean(abs(outputs["z"])), rtol=1e-5)


# Fails if the gradient leaves out, in silence, what it is divided by, or a loss weight that the
# step cannot follow is read once.
def test_divisors_and_weights_that_are_trained_or_change_are_refused() -> None:
    def forward(model: Any, batch: Any, training: bool) -> Any:
        weights = tf.sigmoid(model(batch[0], training=training))
        return tmg.LossSum(tf.reduce_sum(weights * batch[1]), tf.reduce_sum(weights))

    weighted = tmg.steps.Objective("mse", loss_weights={"a": tf.Variable(1.0), "z": 1.0})
    for build, loss, options, y, text in (
        (
            of(lambda: L.Dense(2)),
            None,
            {"forward": forward},
            Y,
            "divides the loss depends on trained",
        ),
        (two_outputs, weighted, {}, {"a": X[:, :1], "z": X[:, :1]}, "loss_weights are numbers"),
    ):
        with pytest.raises(tmg.errors.TfMultiGpuError, match=text):
            Replicated(2, build, sgd, loss, **options).step((X, y))


# Fails if the loss in the logs leaves out penalties of variables that the step does not train.
def test_penalties_of_all_variables_are_in_the_loss() -> None:
    first = lambda: L.Dense(3, kernel_regularizer=keras.regularizers.L2(1.0))  # noqa: E731
    run = Replicated(2, of(first, lambda: L.Dense(2)), sgd, "mse")
    expected = tmg.make_eval_step(run.model, "mse", run.strategy)((X, Y))["loss"]
    first, last = run.model.layers
    before = first.get_weights()
    step = tmg.make_train_step(
        run.model, run.optimizer, "mse", run.strategy, variables=last.trainable_variables
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

    run = Replicated(1, build, sgd, "mse")
    for calls in (1.0, 2.0):
        weights = run.model.layers[0].get_weights()[0]
        loss = float(run.step((X, Y))["loss"])
        assert run.model.counts.numpy() == calls
        assert loss > (weights**2).sum() / calls - 1e-6


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
    run = Replicated(replicas, of(FIRST, SECOND, Stop), sgd, loss, **options)
    with pytest.raises(tmg.errors.LossError, match=r"No gradient reaches any.*first/kernel'.*tf\."):
        run.step((X, Y))
    assert int(run.optimizer.iterations.numpy()) == 0
    stopped = of(FIRST, Stop, SECOND)
    expected = ByHand(stopped, sgd, SQUARES).train(BATCHES)
    run = Replicated(replicas, stopped, sgd, loss, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same(run.train(BATCHES), expected)
        run.step((X, Y, np.ones(9, "float32")) if loss else (X, Y))  # Traced again, for weights.
    (text,) = {str(one.message) for one in caught}
    assert "first/kernel', '" in text
    assert "first/bias']" in text


class Idle(L.Layer):
    def build(self, _: Any) -> None:
        self.idle = self.add_weight(shape=(3,), initializer="ones", regularizer="l2")

    def call(self, inputs: Any) -> Any:
        return inputs


# Fails if a variable that only its penalty moves is left out, or its gradient goes to another.
@pytest.mark.parametrize("options", [{}, {"shard_update": True}])
def test_a_penalty_trains_what_no_loss_reaches(options: Any) -> None:
    expected = ByHand(of(Idle, SECOND), sgd, SQUARES).train(BATCHES)
    run = Replicated(2, of(Idle, SECOND), sgd, "mse", **options)
    assert_same(run.train(BATCHES), expected)


def test_nothing_to_train_is_said_and_the_loss_is_logged() -> None:
    run = Replicated(2, of(lambda: L.Dense(2, trainable=False)), sgd, "mse")
    with pytest.warns(UserWarning, match="The model has no trainable variables"):
        losses = run.train(BATCHES).losses
    expected = [np.mean((run.model(x) - y) ** 2) for x, y in BATCHES]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert int(run.optimizer.iterations.numpy()) == 0


# Losses that layers add: means over the rows, or one value per row, as Keras counts them ----------

ADDED: dict[str, Callable[[Any], Any]] = {
    "a mean": lambda x: tf.reduce_mean(x * x),
    "one value per row": lambda x: 0.1 * tf.reduce_mean(x * x, axis=-1),
    "one value per row, with an axis": lambda x: 0.1 * tf.reduce_mean(x * x, -1, keepdims=True),
    "a mean for each unit": lambda x: tf.reduce_mean(x * x, axis=0),
    "no rows at all": lambda x: tf.constant(3.0),
}
NO_MEANS: dict[str, Callable[[Any], Any]] = {
    "a sum": lambda x: 0.1 * tf.reduce_sum(x * x),
    "a sum for each unit": lambda x: 0.1 * tf.reduce_sum(x * x, axis=0),
    "rows divided by their number": lambda x: (
        tf.reduce_sum(x * x, -1) / tf.cast(tf.shape(x)[0], x.dtype)
    ),
    "whole numbers": lambda x: tf.reduce_sum(tf.cast(x > 0, tf.int32)),
}


class Add(L.Layer):
    """Adds a loss of what it is given."""

    def __init__(self, function: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.function(inputs))
        return inputs


def adding(*functions: Any, dtype: str = "float32") -> Callable[[], keras.Model]:
    """A block with dropout and a layer that adds a loss for each of the functions."""

    def build() -> keras.Model:
        layers: list[Any] = [keras.Input((5,), dtype=dtype)]
        for i, function in enumerate(functions):
            layers += [L.Dense(4, "tanh", dtype=dtype), L.Dropout(0.5, seed=i, dtype=dtype)]
            layers += [Add(function, dtype=dtype)]
        return keras.Sequential([*layers, L.Dense(2, dtype=dtype)])

    return build


# Fails if a mean is divided once more, a value per row counts as a mean, or either counts once for
# each replica or part. In float64; the weights of each block tell which kind is wrong.
def test_what_layers_add_counts_as_on_one_device() -> None:
    batches = [tuple(array.astype("float64") for array in batch) for batch in BATCHES]
    loss = keras.losses.MeanSquaredError(dtype="float64")
    build = adding(*ADDED.values(), dtype="float64")
    expected = ByHand(build, sgd, loss).train(batches)
    run = Replicated(3, build, sgd, loss, micro_batches=2)
    assert_same(run.train(batches), expected, weights=1e-13)


# Fails if a loss that is no mean over the rows, and counts as one, is not told; or if it is
# told on one replica in one piece, where it is what Keras makes of it.
@each("name", NO_MEANS)
def test_what_is_no_mean_is_told(name: str) -> None:
    run = Replicated(2, adding(NO_MEANS[name]), sgd, SQUARES)
    with pytest.warns(tmg.ReplicaDependenceWarning, match=r"self\.add_loss\(values\) takes one"):
        run.step((X, Y))
    if name == "a sum":
        hold(1, adding(NO_MEANS[name]), sgd, SQUARES, BATCHES)


# Fails if an added loss of sparse rows, or of a layer that a forward calls, is lost, counted twice
# or as another kind; or if that of another model counts.
def test_whose_losses_count_and_for_which_batches() -> None:
    critic = keras.Sequential([keras.Input((2,)), Add(ADDED["a mean"])])

    def build() -> keras.Model:
        layers = [L.Dense(2), Add(ADDED["a mean"])]
        return keras.Sequential([keras.Input((5,), sparse=True), *layers])

    def forward(model: Any, batch: Any, training: bool) -> Any:
        x, y = batch
        dense, add = model.layers
        critic(y)  # As in Keras, its losses are not those of the model.
        return tmg.loss_sum("mse", y, add(dense(x)))

    expected = ByHand(build, sgd, SQUARES).train(BATCHES)
    assert_same(Replicated(3, build, sgd, None, forward=forward).train(BATCHES), expected)
    sparse = [(tf.sparse.from_dense(x), y) for x, y in BATCHES]
    assert_same(Replicated(3, build, sgd, SQUARES).train(sparse), expected)
