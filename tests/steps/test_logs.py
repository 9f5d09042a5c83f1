"""Losses of ``forward``, what metrics see, and which variables of several models a step trains.

Metrics of Keras are in tests/invariance/test_metric_results.py; those that wait for shapes to make
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
from one_device import Replicated, difference, plain, strategy_of, train_by_hand
from problems import network, networks, normal_rows

import tfmultigpu as tmg
from tfmultigpu.errors import LossError

SIZES = (5, 1, 3, 7)
(ROWS,) = normal_rows(sum(SIZES), 4, seed=4)
BATCHES = np.split(ROWS, np.cumsum(SIZES)[:-1])


class Both(keras.Model):
    """Two models as one, for a forward that calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = network(4, keras.layers.Dense(3))
        self.decoder = network(3, keras.layers.Dense(4))
        self.size = keras.metrics.Mean()


sgd = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)


def forward(both: Any, batch: Any, training: bool) -> Any:
    code = both.encoder(batch, training=training)
    error = tmg.loss_sum("mse", batch, both.decoder(code, training=training))
    size = tf.reduce_sum(code**2, -1)
    both.size.update_state(size)
    return tmg.LossSum(error.sum + tf.reduce_sum(size), error.weight)


@functools.cache
def by_hand(chosen: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[list[float], list[np.ndarray]]:
    """Returns the loss of each batch, and the weights, of a loop without code of ours."""
    run = Replicated(1, Both, sgd, None, forward=forward)  # Its model, not its step.
    trained = [run.model.weights[i] for i in chosen]

    def loss(both: Any, batch: Any) -> Any:
        code = both.encoder(batch)
        error = tf.reduce_mean((batch - both.decoder(code)) ** 2)
        return error + tf.reduce_mean(tf.reduce_sum(code**2, -1))

    losses = train_by_hand(run.model, run.optimizer, loss, BATCHES, trained)
    return losses, run.model.get_weights()


# Fails if the loss is divided before it is added, by another weight, or once a replica.
@pytest.mark.parametrize(
    ("replicas", "options"),
    [(2, {"jit_compile": True}), (3, {"micro_batches": 2})],
    ids=str,
)
def test_losses_and_weights_are_those_of_one_device(replicas: int, options: Any) -> None:
    run = Replicated(replicas, Both, sgd, None, forward=forward, **options)
    losses, weights = by_hand()
    for batch, loss in zip(BATCHES, losses, strict=True):
        logs = plain(run.step(batch))
        np.testing.assert_allclose(logs["loss"], loss, rtol=1e-5)
        assert logs["weight"] == len(batch)
    assert difference(run.model.get_weights(), weights) <= 1e-6
    assert run.step.verification.outcome == "same"


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
    assert difference(both.get_weights(), by_hand((0, 3))[1]) <= 1e-6
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
    run = Replicated(4, build, keras.optimizers.SGD, "mse", micro_batches=3, verify=False)
    evaluate = tmg.make_eval_step(run.model, "mse", run.strategy)
    predict = tmg.make_predict_step(run.model, run.strategy)
    mean = run.model.layers[0].mean
    for call in (run.step, evaluate, lambda batch: predict(batch[0])):
        with subtests.test(call=call):
            for rows in (1, 2, 5):
                mean.reset_state()
                call((ROWS[:rows], KINDS[:rows]))
                assert float(mean.count.numpy()) == rows
                assert float(mean.result()) == pytest.approx(ROWS[:rows].mean(), rel=1e-5)
