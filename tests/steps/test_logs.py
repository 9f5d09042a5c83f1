"""What a ``forward`` may return, what metrics see, and which variables of models a step trains.

Metrics of Keras are in test_metrics_of_keras.py; those that wait for shapes to make
their variables in tests/loops/test_epochs.py; in a forward: promises/test_metrics_in_forward.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases.case import Case, on_one_device
from cases.losses import PARTS as BATCHES, ROWS, Both, forward, of_two_models
from law.model import Training
from one_device import difference, step_on, strategy_of
from problems import network, networks, sgd

import tfmultigpu as tmg
from tfmultigpu.errors import LossError


def both_of(*trained: int) -> Training:
    """Two models of which these variables are trained."""
    training = of_two_models()
    for number, weight in enumerate(training.model.weights):
        weight.trainable = number in trained
    return training


# Fails if a variable that was not chosen, or one that is frozen since, moves or has a slot.
@pytest.mark.parametrize(("replicas", "shard_update"), [(1, False), (3, True)])
def test_only_the_chosen_variables_are_trained(replicas: int, shard_update: bool) -> None:
    strategy = strategy_of(replicas)
    with strategy.scope():
        keras.utils.set_random_seed(7)
        both, optimizer = Both(), sgd()
    chosen = [both.weights[0], both.weights[3]]
    options = {"variables": chosen, "shard_update": shard_update, "verify": False}
    step = tmg.make_train_step(both, optimizer, None, strategy, forward=forward, **options)
    for batch in BATCHES:
        step(batch)
    expected = on_one_device(Case("two variables", lambda: both_of(0, 3), BATCHES)).end
    assert difference(both.get_weights(), [*expected.values()][: len(both.weights)]) <= 1e-6
    assert [variable.path for variable in step.variables] == [one.path for one in chosen]
    assert len(optimizer.variables) == 2 + len(chosen)  # Step count, rate, and their momenta.
    both.encoder.trainable = False
    before, moved = (variable.numpy() for variable in chosen)
    step(BATCHES[0])
    np.testing.assert_array_equal(chosen[0].numpy(), before)
    assert np.abs(chosen[1].numpy() - moved).max() > 0


def test_what_a_forward_may_not_return_and_what_several_models_need(
    subtests: pytest.Subtests,
) -> None:
    both, optimizer = Both(), sgd()
    encoder, decoder = both.encoder, both.decoder
    loss = tmg.LossSum(tf.constant(1.0), 1)
    for returned, text in (
        (tmg.LossSum(tf.ones([2]), 2), r"Received: LossSum\(sum=\[1, 1\], weight=2\)"),
        ((loss, {"size": (1.0, 1.0)}), r"Received: \(LossSum.* keras\.metrics\.Mean in it"),
    ):
        wrong = lambda model, batch, training, returned=returned: returned  # noqa: E731
        with pytest.raises(LossError, match=text):
            tmg.make_train_step(encoder, optimizer, None, forward=wrong)(BATCHES[0])
    for model, given, options, kind, text in (
        (encoder, "mse", {"variables": []}, ValueError, "no variable"),
        ([encoder, decoder], None, {"forward": forward}, TypeError, "must be a Keras model"),
        (encoder, None, {"forward": "mse"}, TypeError, "forward='mse'"),
    ):
        with subtests.test(text), pytest.raises(kind, match=text):
            tmg.make_train_step(model, optimizer, given, **options)


# Fails if the norm that is logged, or the one that is clipped, is that of one precision alone.
def test_the_norm_is_that_of_layers_of_different_precision() -> None:
    double = functools.partial(keras.layers.Dense, 8, "tanh", dtype="float64")
    build = networks(4, double, lambda: keras.layers.Dense(4))
    step = step_on(2, build, lambda: keras.optimizers.SGD(0.05), "mse", clip_norm=0.1)
    start = step.model.get_weights()
    assert float(step((ROWS, ROWS))["gradient_norm"]) > 0.2
    moved = [now - then for now, then in zip(step.model.get_weights(), start, strict=True)]
    assert {part.dtype.name for part in moved} == {"float64", "float32"}
    length = np.sqrt(sum(np.sum(np.square(part)) for part in moved))
    assert length / 0.05 == pytest.approx(0.1, rel=1e-4)


# Metrics ------------------------------------------------------------------------------------------

KINDS = (ROWS[:, :3] > 0).astype("float32")


class Own(keras.metrics.Metric):
    """A metric with one variable, whose new value is ``new(old value, labels, predictions)``."""

    def __init__(self, new: Callable[..., Any]) -> None:
        super().__init__(name="mine")
        self.new = new
        self.state = self.add_variable((), "zeros", name="state")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.state.assign(tf.cast(self.new(self.state.value, y_true, y_pred), tf.float32))

    def result(self) -> Any:
        return self.state + 0


NO_SUMS: dict[str, Callable[..., Any]] = {
    "max": lambda old, y, p: tf.maximum(old, tf.reduce_max(p)),
    "last": lambda old, y, p: tf.reduce_mean(p),
    "product": lambda old, y, p: old * (1.0 + tf.reduce_mean(p)) + 1.0,
    "batches": lambda old, y, p: old + 1.0,
    "means of batches": lambda old, y, p: old + tf.reduce_mean(p),
    "squared sum of a batch": lambda old, y, p: old + tf.reduce_sum(p) ** 2,
}


# Fails if a state that adding over replicas makes wrong is not told, by the name of the metric; or
# if one replica, where nothing is added, does not take any metric.
@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_no_sum_over_rows_is_told(name: str) -> None:
    def step_of(replicas: int) -> Any:
        with strategy_of(replicas).scope():
            model = network(4, keras.layers.Dense(3, "sigmoid"))
            metrics = [Own(NO_SUMS[name])]
        return tmg.make_eval_step(model, "mse", strategy_of(replicas), metrics=metrics)

    with pytest.warns(tmg.ReplicaDependenceWarning, match=r"mine/state"):
        step_of(2)((ROWS, KINDS))
    if name == "max":
        alone = step_of(1)
        alone((ROWS, KINDS))
        assert float(alone.metrics[0].result()) == pytest.approx(np.max(alone.model(ROWS)))


def test_what_is_no_metric_of_a_step() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        inputs = keras.Input((4,))
        heads = {name: keras.layers.Dense(3, name=name)(inputs) for name in ("kind", "size")}
        one, two = keras.Model(inputs, heads["kind"]), keras.Model(inputs, heads)
        optimizer = keras.optimizers.SGD(0.0)
        accuracy = keras.metrics.CategoricalAccuracy()
    losses = dict.fromkeys(heads, "mse")
    for model, loss, metric, text in (
        (one, "mse", "accuracy", r"update_state.*Received: 'accuracy'"),
        (two, losses, accuracy, "2 outputs.* the metrics do not fit.*a dict by name"),
    ):
        with pytest.raises(tmg.errors.LossError, match=text):
            tmg.make_train_step(model, optimizer, loss, strategy, metrics=[metric])(
                (ROWS, dict.fromkeys(heads, KINDS))
            )


class Watched(keras.layers.Layer):
    """A layer that measures what goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.metrics.Mean(name="watched")

    def call(self, x: Any) -> Any:
        self.mean.update_state(x)
        return x


# Fails if a row counts once for each replica or part that holds a copy, in any kind of step.
def test_each_row_counts_once_in_training_evaluation_and_prediction(
    subtests: pytest.Subtests,
) -> None:
    build = networks(4, Watched, lambda: keras.layers.Dense(3))
    step = step_on(4, build, keras.optimizers.SGD, "mse", micro_batches=3, verify=False)
    evaluate = tmg.make_eval_step(step.model, "mse", step.strategy)
    predict = tmg.make_predict_step(step.model, step.strategy)
    mean = step.model.layers[0].mean
    for call in (step, evaluate, lambda batch: predict(batch[0])):
        with subtests.test(call=call):
            for rows in (1, 2, 5):
                mean.reset_state()
                call((ROWS[:rows], KINDS[:rows]))
                assert float(mean.count.numpy()) == rows
                assert float(mean.result()) == pytest.approx(ROWS[:rows].mean(), rel=1e-5)
