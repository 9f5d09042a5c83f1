"""chain_steps: what it refuses, and what a failure leaves."""

from __future__ import annotations

import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg

X = np.random.default_rng(3).normal(size=(7, 3)).astype("float32")


def step_of(strategy, *, limit=np.inf, logged="value", seconds=0.0, more=0.0):
    """A step that refuses numbers above a limit, and logs a value of this name.

    It takes so many seconds; ``more`` is added to the numbers, before they are refused.
    """
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)

    def forward(model, batch, training):
        slept = [tf.py_function(lambda: time.sleep(seconds), [], [])] if seconds else []
        with tf.control_dependencies([tf.debugging.assert_less(batch + more, limit), *slept]):
            loss = tmg.loss_sum("mse", batch[:, :1], model(batch, training=training))
        return loss, {logged: loss}

    return tmg.make_train_step(model, optimizer, None, strategy, forward=forward, verify=False)


@pytest.fixture(scope="module")
def strategy():
    return strategy_of(2)


def test_names_and_times_that_do_not_fit_the_steps_are_refused(strategy):
    steps = step_of(strategy), step_of(strategy)
    for names, kind, text in (
        (("d",), ValueError, "names=('d',) for 2 step(s). Write names=('step1', 'step2')"),
        (("d", "d"), ValueError, "so they must differ. Received: names=['d', 'd']. Write names="),
        (("d", ""), TypeError, "so each is a text. Received: names=('d', ''). Write names="),
        ((1, 2), TypeError, "so each is a text. Received: names=(1, 2). Write names="),
    ):
        with pytest.raises(kind, match=re.escape(text)):
            tmg.chain_steps(*steps, names=names)
    with pytest.raises(ValueError, match=re.escape("times=5 for 2 step(s). Write times=(1, 1)")):
        tmg.chain_steps(*steps, times=5)


def test_logs_of_one_name_are_refused_not_lost(strategy):
    steps = step_of(strategy, logged="b_value"), step_of(strategy, logged="value")
    step = tmg.chain_steps(*steps, names=("a", "a_b"))
    with pytest.raises(ValueError, match=r"'a_b_value' from the step 'a_b' and from one before"):
        step(X)


@pytest.mark.parametrize("fails", ["batch", "variable"])
def test_a_step_that_fails_has_changed_nothing_and_those_before_it_have_trained(strategy, fails):
    """Also if the one before takes longer, and the failure does not wait for the batch."""
    more = tf.Variable(0.0, trainable=False)
    steps = step_of(strategy, seconds=0.2), step_of(strategy, limit=100.0, more=more)
    step = tmg.chain_steps(*steps)
    step(X)
    before = [one.model.get_weights() for one in steps]
    more.assign(0.0 if fails == "batch" else 1e3)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(np.where(np.arange(7)[:, None] == 5, 1e3 if fails == "batch" else 0.0, X))
    assert [int(one.optimizer.iterations.numpy()) for one in steps] == [2, 1]
    first, second = (one.model.get_weights() for one in steps)
    assert not np.array_equal(first[0], before[0][0])
    assert all(np.array_equal(a, b) for a, b in zip(second, before[1], strict=True))
