"""Passes over sharded data: again and again, two at once, inside functions, on any strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from each import each
from shards import HOST_AND_DEVICE, mirrored, text_of

import tfmultigpu as tmg

# passes -------------------------------------------------------------------------------------------


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
