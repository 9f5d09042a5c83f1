"""However batches reach the step, under whichever strategy, one device gives the same."""

from __future__ import annotations

import keras
import tensorflow as tf
from one_device import as_dataset, assert_same, cut, difference, strategy_of
from small_problem import CASES, MIXED, X, Y, crossentropy, mlp, replicated, sgd, truth

import tfmultigpu as tmg

# How batches reach the step ----------------------------------------------------------------------


def test_step_takes_shards_of_a_distributed_dataset_or_whole_batches():
    run = replicated(3, "all")
    batches = cut(CASES["all"][0], MIXED)
    data = tmg.distribute_dataset(as_dataset(batches), run.strategy)
    expected = truth("all", tuple(MIXED))
    assert_same(run.train(data), expected, what="shards")
    assert_same(run.train(data), expected, what="a second pass over the same dataset")
    assert_same(run.train(batches), expected, what="whole batches of arrays")
    tensors = [tuple(tf.constant(part) for part in batch) for batch in batches]
    assert_same(run.train(tensors), expected, what="whole batches of tensors")


def test_shards_of_unequal_shares_prefetched_to_the_replicas():
    run = replicated(3, "all", micro_batches=2)
    batches = cut(CASES["all"][0], MIXED)
    data = tmg.distribute_dataset(
        as_dataset(batches), run.strategy, shares=(5, 2, 1), prefetch_to_device=True
    )
    expected = truth("all", tuple(MIXED))
    assert_same(run.train(data), expected)
    run.reset()
    iterator = iter(data)
    assert [int(run.step.run(iterator, 13)["steps"]) for _ in range(3)] == [13, 7, 0]
    assert difference([v.numpy() for v in run.model.variables], expected.weights) <= 1e-6


# Under which strategy ----------------------------------------------------------------------------


def test_one_device_strategy():
    run = replicated(tf.distribute.OneDeviceStrategy("CPU:1"), "all", micro_batches=2)
    batches = cut(CASES["all"][0], MIXED)
    data = tmg.distribute_dataset(as_dataset(batches), run.strategy)
    assert_same(run.train(data), truth("all", tuple(MIXED)))


def test_the_strategy_in_scope_is_the_default():
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = mlp(), sgd()
        step = tmg.make_train_step(model, optimizer, crossentropy())
        data = tmg.distribute_dataset((X, Y), batch_size=65)
    assert step.strategy is strategy
    assert [float(step(batch)["weight"]) for batch in data] == [65.0] * 4


# What it costs -----------------------------------------------------------------------------------


def test_one_trace_whatever_the_batch_sizes():
    traced = []

    class Counted(keras.layers.Layer):
        def call(self, inputs):
            traced.append(1)
            return inputs

    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), Counted(), keras.layers.Dense(4)])
        optimizer = sgd()
    options = {"micro_batches": 2, "verify": False}
    step = tmg.make_train_step(model, optimizer, crossentropy(), strategy, **options)
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
