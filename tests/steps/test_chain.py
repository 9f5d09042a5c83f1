"""chain_steps beside its promises: names, logs and totals, failures, frozen layers, refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import step_on
from problems import normal_rows

import tfmultigpu as tmg

(X,) = normal_rows(17, 3, seed=3)
BATCH = X[:7]


def step_of(
    replicas: int = 2,
    guard: Callable[[Any], Any] = lambda batch: tf.no_op(),
    name: str | None = None,
    **options: Any,
) -> Any:
    """A step that predicts the first column."""

    def forward(model: Any, batch: Any, training: bool) -> Any:
        with tf.control_dependencies([guard(batch)]):
            return tmg.loss_sum("mse", batch[:, :1], model(batch, training=training))

    def build() -> keras.Model:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name=name)

    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    return step_on(replicas, build, sgd, None, forward=forward, **options)


def counts(*steps: Any) -> list[int]:
    return [int(step.optimizer.iterations.numpy()) for step in steps]


# Fails if a layer that is frozen between calls trains on, or a skipped step skips the other one.
def test_a_frozen_layer_stays_and_an_overflow_skips_its_step_alone() -> None:
    steps = [step_of(loss_scale=2.0**127, verify=False), step_of(verify=False)]
    chain = tmg.chain_steps(*steps, names=("a", "b"))
    before = [step.model.get_weights()[0] for step in steps]
    logs = chain(100 * BATCH)
    assert (float(logs["a_skipped"]), float(logs["b_skipped"])) == (1.0, 0.0)
    np.testing.assert_array_equal(steps[0].model.get_weights()[0], before[0])
    assert counts(*steps) == [0, 1]
    kernel = steps[1].model.get_weights()[0]
    assert np.abs(kernel - before[1]).max() > 0
    steps[1].model.trainable = False
    with pytest.warns(UserWarning, match="no trainable variables"):
        chain(BATCH)
    np.testing.assert_array_equal(steps[1].model.get_weights()[0], kernel)


# Fails if the update of one step is broken off by another, also if the one before takes longer and
# the failure does not wait for the batch.
def test_a_step_that_fails_has_changed_nothing_and_those_before_it_have_trained() -> None:
    more = tf.Variable(0.0, trainable=False)

    def slow(batch: Any) -> Any:
        return tf.py_function(lambda: time.sleep(0.2), [], [])

    def limited(batch: Any) -> Any:
        return tf.debugging.assert_less(batch + more, 100.0)

    steps = [step_of(guard=slow, verify=False), step_of(guard=limited, verify=False)]
    chain = tmg.chain_steps(*steps)
    chain(BATCH)
    for failures, (of_the_batch, of_the_variable) in enumerate(((1e3, 0.0), (0.0, 1e3)), 1):
        before = [step.model.get_weights()[0] for step in steps]
        more.assign(of_the_variable)
        with pytest.raises(tf.errors.InvalidArgumentError):
            chain(np.where(np.arange(7)[:, None] == 5, of_the_batch, BATCH))
        assert counts(*steps) == [1 + failures, 1]
        assert not np.array_equal(steps[0].model.get_weights()[0], before[0])
        np.testing.assert_array_equal(steps[1].model.get_weights()[0], before[1])


def test_names_are_those_of_the_models_or_numbers() -> None:
    first, second = step_of(1, name="critic"), step_of(1, name="generator")
    assert list(tmg.chain_steps(first, second).steps) == ["critic", "generator"]
    assert list(tmg.chain_steps(first, first).steps) == ["step1", "step2"]


def test_a_chain_is_profiled_and_explained() -> None:
    steps = [step_of(name="critic"), step_of(name="generator")]
    chain = tmg.chain_steps(steps[0], *steps)
    data = tmg.distribute_dataset(X, steps[0].strategy, batch_size=8)
    profile = tmg.tuning.profile_step(chain, data, steps=2)
    critic, generator = counts(*steps)
    assert critic == 2 * generator > 0
    assert profile.examples == 8
    assert min(profile.input, profile.call, profile.all_reduce) > 0
    report = tmg.explain(chain, dataset=data)
    assert set(report.facts) == {f"model {step.model.name}" for step in steps}
    assert report.codes == ("in-order",)
