"""``assert_replica_invariant(train)`` holds any loop to one device, and says what differs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import FLOAT, regression

import tfmultigpu as tmg

hold = tmg.testing.assert_replica_invariant
BATCHES = regression([5, 3, 6])
Train = Callable[[tf.distribute.Strategy], Any]


def by_hand(norm: bool | None = None) -> Train:
    """Returns a loop of the pieces by hand; ``norm``: whether BatchNormalization sees all rows."""

    def train(strategy: tf.distribute.Strategy) -> Any:
        with strategy.scope():
            layers = [keras.layers.Dense(3, **FLOAT), keras.layers.Dense(2, **FLOAT)]
            if norm is not None:
                layers.insert(1, keras.layers.BatchNormalization(synchronized=norm, **FLOAT))
            model = keras.Sequential([keras.Input((4,), dtype="float64"), *layers])
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            variables = model.trainable_variables
            window = tmg.GradientAccumulator(variables)

        def replica(batch: Any) -> Any:
            with tf.GradientTape() as tape:
                pair = tmg.loss_sum("mse", batch[1], model(batch[0], training=True))
            window.add(tape.gradient(pair.sum, variables), pair.weight)
            return tmg.global_mean(pair)

        @tf.function
        def step(batch: Any) -> Any:
            losses = strategy.run(replica, args=(batch,))
            tmg.apply_reduced_gradients(optimizer, window.reduce()[0], variables)
            return strategy.experimental_local_results(losses)[0]

        data = tmg.distribute_dataset(lambda: iter(BATCHES), strategy)
        return {
            "losses": [step(batch) for batch in data],
            "model": model.variables,
            "momenta": {variable.path: variable for variable in optimizer.variables},
        }

    return train


def plain(divide_by_all: bool) -> Train:
    """Returns a loop of plain ``tf.distribute``, right or with the mean of each replica."""
    x, y = (np.concatenate(part) for part in zip(*BATCHES, strict=True))

    def train(strategy: tf.distribute.Strategy) -> Any:
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((4,), dtype="float64"), keras.layers.Dense(2, **FLOAT)]
            )
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)

        def replica(batch: Any) -> None:
            with tf.GradientTape() as tape:
                errors = tf.reduce_sum(tf.square(batch[1] - model(batch[0], training=True)), -1)
                rows = tf.cast(tf.size(errors), tf.float64)
                if divide_by_all:
                    rows = tf.distribute.get_replica_context().all_reduce("SUM", rows)
                    loss = tf.reduce_sum(errors) / rows
                else:
                    loss = tf.reduce_mean(errors) / strategy.num_replicas_in_sync
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

        step = tf.function(lambda batch: strategy.run(replica, args=(batch,)))
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(7)
        for batch in strategy.experimental_distribute_dataset(dataset):
            step(batch)
        return model.get_weights()

    return train


# Fails if a right loop is accused: by hand and in plain TensorFlow, with BatchNormalization that
# sees all rows, with uneven shards, variables of other names each time and optimizer state.
def test_a_right_loop_passes() -> None:
    assert hold(by_hand(norm=True), replicas=3).amount < 1e-6  # Losses are float32.
    assert hold(plain(divide_by_all=True), replicas=2).amount < 1e-9


# Fails if BatchNormalization of a replica's rows in a loop by hand passes, or if the variable,
# both values and the size of the difference are missing.
def test_a_norm_that_is_not_synchronized_is_found_by_hand() -> None:
    with pytest.raises(
        tmg.testing.ReplicaInvarianceError, match="MirroredStrategy with 2 repl"
    ) as caught:
        hold(by_hand(norm=False))
    assert r"result['losses'][0]: " in str(caught.value)
    number = r"-?\d+\.\d+(e-\d+)?"
    relative = r"( \(relative \d\.\de[+-]\d+\))?\n"
    line = rf"result\['model'\]\[0\] \(.*dense.*/kernel\)\[\d, \d\]: {number} instead of {number}"
    caught.match(rf"{line}, off by \d\.\de[+-]\d+{relative}")


# Fails if the mean of means, the usual fault of a plain loop, passes.
def test_a_mean_of_means_is_found() -> None:
    with pytest.raises(AssertionError, match=r"result\[0\]\[\d, \d\]: .* instead of"):
        hold(plain(divide_by_all=False), replicas=2)


def returning(one: Any, several: Any = None) -> Train:
    """Returns a function of which one device and replicas return these."""
    return lambda strategy: one if strategy.num_replicas_in_sync == 1 else several


# Fails if replicas that return another number, dtype, shape or name pass, or if a copy of a
# variable that no other has passes because the first is right.
def test_what_differs_is_named() -> None:
    def copies(strategy: tf.distribute.Strategy) -> Any:
        with strategy.scope():
            variable = tf.Variable(1.0)
        for copy in strategy.experimental_local_results(variable)[1:]:
            copy.assign(1.5)
        return variable

    for train, said in (
        (returning({"a": (1.0, 2.0)}, {"a": (1.0, 3.0)}), r"\['a'\]\[1\]: 3.0 .* 2.0, off by 5.0"),
        (returning([0.25], [0.75]), r"off by 5.0e-01 \(relative 2.0e\+00\)"),
        (returning(np.ones(2), np.ones(2, "f")), "dtype float32 instead of dtype float64"),
        (returning(np.ones(2), np.ones(3)), r"shape \(3,\) instead of shape \(2,\)"),
        (returning([1.0], [np.nan]), "nan instead of 1.0"),
        (returning({"a": 1.0}, {"b": 1.0}), r"\['a'\]\"\] on one .* \[\"result\['b'\]\"\] on rep"),
        (returning([1.0, 2.0], [1.0]), r"\['result\[1\]'\] on one device alone"),
        (copies, r"result \(.*\): 1.5 instead of 1.0"),
    ):
        with pytest.raises(tmg.testing.ReplicaInvarianceError, match=said):
            hold(train)


# Fails if replicas are accused of draws without a seed, or of state from the call before.
def test_what_is_another_each_time_is_not_blamed_on_replicas() -> None:
    calls = itertools.count()
    with pytest.raises(AssertionError, match="on one device too") as caught:
        hold(lambda strategy: float(next(calls)))
    assert "differs from one device" not in str(caught.value)


# Fails if what cannot be compared is compared, or is an error that does not help.
def test_what_cannot_be_compared_is_refused() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    every = tf.function(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group)
    for train, said in (
        (lambda strategy: strategy.run(every), r"PerReplica.*strategy\.reduce\(.SUM., value"),
        (returning({"a": model}), r"\['a'\] of Sequential\. .*model\.get_weights\(\)"),
        (returning(None), r"nothing to compare.*model\.get_weights\(\)"),
        (returning([np.full(3, np.nan)]), r"result\[0\] of nan.*learning rate"),
        (lambda: None, r"Write def train\(strategy\)"),
    ):
        with pytest.raises(tmg.TfMultiGpuError, match=said):
            hold(train)
    with pytest.raises(TypeError, match=r"micro_batches=2\. .*inside the function"):
        hold(returning(1.0, 1.0), micro_batches=2)
