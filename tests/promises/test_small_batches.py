"""With fewer rows than replicas one copy counts, also in code of the user, or it is told."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from law.model import FLOAT, Training, regression, small
from law.pair import Pair, strategy_of

import tfmultigpu as tmg

layers = keras.layers


@tf.custom_gradient  # type: ignore[untyped-decorator]
def clipped(x: Any) -> Any:
    """Clips what comes back, and adds to it what does not depend on it."""
    return tf.identity(x), lambda gradient: tf.clip_by_value(gradient, -0.01, 0.01) + 0.1 * x


class Moments(layers.Layer):
    """Divides by a moment that it adds over the replicas, and keeps it; counts rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        options = {"initializer": "ones", "trainable": False}
        self.kept = self.add_weight(name="kept", shape=(5,), **options)
        self.seen = self.add_weight(name="seen", aggregation="sum", **options)

    def call(self, x: Any, training: bool = False) -> Any:
        here = tf.cast(tf.shape(x)[0], self.dtype)
        total, rows = tf.reduce_sum(x**2, 0), here
        context = tf.distribute.get_replica_context()
        if tf.distribute.has_strategy() and context is not None:
            total, rows = context.all_reduce("SUM", [total, rows])
        self.kept.assign(0.5 * self.kept + 0.5 * total / rows)
        self.seen.assign_add(here)
        return clipped(x) / tf.sqrt(1.0 + total / rows)


def with_moments() -> Training:
    training = small()
    first, last = training.model.layers
    inner = keras.Input((4,), dtype="float64"), first, Moments(**FLOAT), last
    return dataclasses.replace(training, model=keras.Sequential(list(inner)))


# Fails if a copy adds to a gradient that is not linear, to a sum of the user's or to a weight of
# Keras with aggregation="sum"; or if the value before is in such a weight once for each replica.
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.more)])
def test_code_of_the_user_sees_one_copy(replicas: int) -> None:
    batches = regression([5, 1, 3, 1])
    Pair(with_moments, batches[0], replicas, verify=False).hold(batches)


class AddsAll(layers.Layer):
    """Counts rows by an addition in its own words, of which TensorFlow knows nothing."""

    def __init__(self, add: Callable[[Any, Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.add = add
        self.seen = self.add_weight(name="seen", initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        rows = tf.cast(tf.shape(x)[0], self.dtype)
        self.seen.assign(self.add(self.seen, rows))
        return x


def by_hand(seen: Any, rows: Any) -> Any:
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return seen + rows
    add = lambda strategy, each: tf.add_n(strategy.experimental_local_results(each))  # noqa: E731
    return seen + context.merge_call(add, args=(rows,))


def with_the_state(seen: Any, rows: Any) -> Any:
    context = tf.distribute.get_replica_context()
    return seen + rows if context is None else context.all_reduce("SUM", seen + rows)


# Fails if a batch of fewer rows than replicas is not compared, or told before there is one; or if
# a state of zero hides that it is counted once for each replica.
@pytest.mark.parametrize(
    ("add", "number", "word"), [(by_hand, 2, "1 row(s)"), (with_the_state, 0, "seen")]
)
def test_what_is_wrong_for_copies_or_from_other_states_is_told(
    add: Callable[[Any, Any], Any], number: int, word: str
) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), AddsAll(add), layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    for i, batch in enumerate(regression([4, 3, 1, 1])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(batch)
        messages = [str(w.message) for w in caught if w.category is tmg.ReplicaDependenceWarning]
        assert len(messages) == (i == number), messages
        assert all(word in message for message in messages)


class Coupled(layers.Layer):
    """Adds a loss over the rows of a replica, times a factor that nothing in the step assigns."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        norm = tf.norm(tf.reduce_mean(x, 0))
        self.add_loss(self.factor * norm * tf.ones(tf.shape(x)[:1]))
        return x


# Fails if a factor that a callback raises later hides what it is multiplied by, or does not stay 0.
def test_a_factor_that_is_zero_hides_nothing() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Coupled(), layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="the loss is"):
        step(regression([4])[0])
    copies = strategy.experimental_local_results(model.layers[0].factor.value)
    assert [float(copy) for copy in copies] == [0.0, 0.0]
