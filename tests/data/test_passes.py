"""Passes over sharded data: again and again, two at once, inside functions, on any strategy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from each import each
from shards import HOST_AND_DEVICE, batches_of, local, mirrored, read, text_of, to_list

import tfmultigpu as tmg
from tfmultigpu.data.partition import marked_offsets

# passes -------------------------------------------------------------------------------------------


@HOST_AND_DEVICE
def test_each_loop_is_a_fresh_pass(prefetch: bool) -> None:
    data = tmg.distribute_dataset(batches_of((5, 3, 1)), mirrored(2), prefetch_to_device=prefetch)
    assert read(data) == read(data)
    first, second = iter(data), iter(data)
    assert iter(first) is first
    turns = [next(it) for it in (first, second, first, second, second, first)]
    shards = [local(data.strategy, batch) for batch in turns]
    assert shards[0] == shards[1]
    assert shards[2] == shards[3]
    assert shards[4] == shards[5]
    with pytest.raises(StopIteration):
        next(first)


@HOST_AND_DEVICE
def test_a_shuffled_dataset_is_shuffled_anew_each_pass(prefetch: bool) -> None:
    dataset = tf.data.Dataset.range(50).shuffle(50, seed=7).batch(50)
    data = tmg.distribute_dataset(dataset, mirrored(2), prefetch_to_device=prefetch)
    passes = [list(itertools.chain(*shards)) for shards in read(data) + read(data)]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(50))


@HOST_AND_DEVICE
def test_repeated_data_keeps_its_batches_apart(prefetch: bool) -> None:
    dataset = tf.data.Dataset.range(5).batch(3).repeat(2)
    data = tmg.distribute_dataset(dataset, mirrored(2), prefetch_to_device=prefetch)
    assert len(data) == 4
    assert read(data) == [[[0], [1, 2]], [[3], [4]]] * 2


def test_length() -> None:
    assert len(tmg.distribute_dataset(np.zeros(10), mirrored(2), batch_size=4)) == 3
    unknown = tmg.distribute_dataset(tf.data.Dataset.range(9).batch(4).filter(lambda x: True))
    infinite = tmg.distribute_dataset(tf.data.Dataset.range(9).batch(4).repeat())
    for data, said in ((unknown, "unknown"), (infinite, "infinite")):
        assert said in text_of(lambda data=data: len(data), TypeError)
    assert len(list(unknown)) == 3, "list() asks for the length and does without"


# inside a tf.function -----------------------------------------------------------------------------


def numbers(
    prefetch: bool, replicas: int = 2, strategy: tf.distribute.Strategy | None = None
) -> tmg.data.ShardedDataset:
    dataset = tf.data.Dataset.range(10).batch(4).map(lambda x: (x, {"y": x * 10}))
    return tmg.distribute_dataset(
        dataset, strategy or mirrored(replicas), prefetch_to_device=prefetch
    )


def summed(strategy: tf.distribute.Strategy, x: Any) -> tf.Tensor:
    return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(x,)), axis=None)


@each(("replicas", "prefetch"), [(1, False), (2, False), (2, True)])
def test_a_for_loop_in_a_function_is_one_pass_per_call(replicas: int, prefetch: bool) -> None:
    data = numbers(prefetch, replicas)
    traces = []

    def total(data: tmg.data.ShardedDataset) -> tuple[tf.Tensor, tf.Tensor]:
        traces.append(1)
        result, steps = tf.constant(0, tf.int64), tf.constant(0)
        for x, labels in data:
            result += summed(data.strategy, x) + summed(data.strategy, labels["y"])
            steps += 1
        return result, steps

    as_argument, as_closure = tf.function(total), tf.function(lambda: total(data))
    for _ in range(2):
        assert [int(value) for value in as_argument(data)] == [495, 3]
        assert [int(value) for value in as_closure()] == [495, 3]
    assert len(traces) == 2


@each(("replicas", "prefetch"), [(1, False), (2, False), (2, True)])
def test_next_in_a_function_is_traced_once_for_all_passes_and_datasets_of_a_kind(
    replicas: int, prefetch: bool
) -> None:
    data = numbers(prefetch, replicas)
    traces = []

    @tf.function
    def step(iterator: tmg.data.ShardIterator) -> tf.Tensor:
        traces.append(1)
        x, _ = next(iterator)
        return summed(data.strategy, x)

    for iterator in (iter(data), iter(data), iter(numbers(prefetch, strategy=data.strategy))):
        assert [int(step(iterator)) for _ in range(3)] == [6, 22, 17]
        with pytest.raises(tf.errors.OutOfRangeError):
            step(iterator)
    assert len(traces) == 1


@HOST_AND_DEVICE
def test_next_in_a_function_of_an_iterator_from_outside(prefetch: bool) -> None:
    data = numbers(prefetch)
    iterator = iter(data)
    step = tf.function(lambda: summed(data.strategy, next(iterator)[0]))
    assert [int(step()), int(summed(data.strategy, next(iterator)[0])), int(step())] == [6, 22, 17]


@HOST_AND_DEVICE
def test_many_steps_in_one_call(prefetch: bool) -> None:
    data = numbers(prefetch)

    @tf.function
    def steps(iterator: tmg.data.ShardIterator, count: tf.Tensor) -> tf.Tensor:
        result = tf.constant(0, tf.int64)
        for _ in tf.range(count):
            result += summed(data.strategy, next(iterator)[0])
        return result

    assert int(steps(iter(data), tf.constant(3))) == 45


@HOST_AND_DEVICE
def test_the_rows_of_the_global_batch_are_known_inside_a_function(prefetch: bool) -> None:
    data = tmg.distribute_dataset(batches_of((5, 1)), mirrored(2), prefetch_to_device=prefetch)

    @tf.function
    def rows(iterator: tmg.data.ShardIterator) -> tf.Tensor:
        return marked_offsets(next(iterator))[-1]

    iterator = iter(data)
    assert [int(rows(iterator)), int(rows(iterator))] == [5, 1]


def test_a_for_loop_over_an_iterator_in_a_function_is_refused() -> None:
    data = numbers(prefetch=False)

    def loop(iterator: tmg.data.ShardIterator) -> None:
        for _ in iterator:
            pass

    text = text_of(lambda: tf.function(loop, autograph=False)(iter(data)))
    assert text == (
        "A for loop over an iterator inside a tf.function would be unrolled forever. Write for "
        "batch in data, over the dataset itself, or call next(iterator)."
    )


@HOST_AND_DEVICE
def test_split_gives_the_shards_and_where_they_begin(prefetch: bool) -> None:
    data = numbers(prefetch, replicas=3)
    iterator = iter(data)
    assert iterator.cut.strategy is data.strategy
    assert iterator.cut == iter(numbers(prefetch, strategy=data.strategy)).cut
    assert iterator.cut != iter(numbers(not prefetch, strategy=data.strategy)).cut
    shards, offsets = iterator.cut.split(iterator.source.get_next())
    assert to_list(offsets) == [0, 1, 2, 4]
    assert [to_list(x) for x, _ in shards] == [[0], [1], [2, 3]]
    assert [to_list(labels["y"]) for _, labels in shards] == [[0], [10], [20, 30]]


# strategies ---------------------------------------------------------------------------------------


@HOST_AND_DEVICE
def test_one_device_and_no_strategy_get_plain_tensors(prefetch: bool) -> None:
    for strategy in (None, mirrored(1), tf.distribute.MirroredStrategy(["CPU:2"])):
        data = tmg.distribute_dataset(
            (np.arange(5), np.arange(5)), strategy, batch_size=3, prefetch_to_device=prefetch
        )
        assert [[to_list(x) for x in batch] for batch in data] == [
            [[0, 1, 2], [0, 1, 2]],
            [[3, 4], [3, 4]],
        ]


def test_the_strategy_of_the_scope_is_the_default() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        data = tmg.distribute_dataset(np.arange(4), batch_size=4)
    assert data.strategy is strategy
    assert read(data) == [[[0, 1], [2, 3]]]


@HOST_AND_DEVICE
def test_the_default_mirrored_strategy(prefetch: bool) -> None:
    # The only one of this process that reduces by collectives.
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    data = tmg.distribute_dataset(
        batches_of((9, 2)), strategy, prefetch_to_device=prefetch, shares=(1, 1, 1, 2)
    )
    total = tf.function(lambda iterator: summed(strategy, next(iterator)))
    iterator = iter(data)
    assert [int(total(iterator)), int(total(iterator))] == [36, 9 + 10]


def test_cpus_are_not_prefetched_to() -> None:
    assert not tmg.distribute_dataset(np.arange(4), mirrored(2), batch_size=4).prefetches_to_device
