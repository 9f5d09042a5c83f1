"""However batches reach the step, under whichever strategy, one device gives the same."""

from __future__ import annotations

import keras
import tensorflow as tf
from one_device import Replicated, as_dataset, cut, strategy_of
from problems import MIXED, X, Y, crossentropy, mlp, networks, sgd

import tfmultigpu as tmg


def test_the_strategy_in_scope_is_the_default():
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = mlp(), sgd()
        step = tmg.make_train_step(model, optimizer, crossentropy())
        data = tmg.distribute_dataset((X, Y), batch_size=65)
    assert step.strategy is strategy
    assert [float(step(batch)["weight"]) for batch in data] == [65.0] * 4


def test_one_trace_whatever_the_batch_sizes():
    traced = []

    class Counted(keras.layers.Layer):
        def call(self, inputs):
            traced.append(1)
            tf.debugging.assert_positive(tf.shape(inputs)[0])  # No part is without rows.
            return inputs

    build, options = networks(6, Counted, lambda: keras.layers.Dense(4)), {"micro_batches": 2}
    step = Replicated(2, build, sgd, crossentropy(), verify=False, **options).step
    strategy = step.strategy
    traced.clear()
    batches = cut((X, Y), MIXED)
    step(batches[0])
    once = len(traced)
    # A loop over micro-batches may be tried once more when its first guess was wrong.
    assert once in (2, 4)
    for batch in batches:
        step(batch)
    for batch in batches:
        step(tuple(tf.constant(part) for part in batch))
    assert len(traced) == once, "whole batches of other sizes were traced again"
    data = tmg.distribute_dataset(as_dataset(batches), strategy)
    for batch in data:
        step(batch)
    shards = len(traced)
    for batch in tmg.distribute_dataset(as_dataset(batches[::-1]), strategy):
        step(batch)
    assert len(traced) == shards, "shards of other sizes were traced again"
    iterator = iter(data)
    step.run(iterator, 3)
    many = len(traced)
    step.run(iterator, 5)
    step.run(iter(data), 50)
    assert len(traced) == many, "another number of steps, or another pass, was traced again"
