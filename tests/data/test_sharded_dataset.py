"""Sharded data in functions and passes of users, batches of few rows, and errors.

Each row once, of any structure: tests/promises/test_datasets.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import step_on, strategy_of
from problems import networks

import tfmultigpu as tmg
from tfmultigpu.data.sharded_dataset import should_prefetch


def batches_of(sizes: tuple[int, ...]) -> tf.data.Dataset:
    """Batches of these many rows, numbered through from zero."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    pairs = tf.data.Dataset.from_tensor_slices((starts, starts + np.array(sizes)))
    return pairs.map(lambda start, stop: tf.range(start, stop))


def read(data: tmg.data.ShardedDataset) -> list[list[Any]]:
    """The rows of each replica, batch by batch."""
    local = data.strategy.experimental_local_results
    return [[part.numpy().tolist() for part in local(batch)] for batch in data]


HOST_AND_DEVICE = pytest.mark.parametrize(
    ("replicas", "prefetch"), [(1, False), (2, False), (2, True)]
)


def test_batches_of_one_size_have_shards_of_known_size() -> None:
    dataset = tf.data.Dataset.range(10).batch(4, drop_remainder=True)
    data = tmg.distribute_dataset(dataset, strategy_of(2), shares=(3, 1))
    shapes: list[Any] = []

    tf.function(
        lambda i: data.strategy.run(lambda b: shapes.append(b.shape.as_list()), args=(next(i),))
    )(iter(data))
    assert shapes == [[3], [1]]


def test_only_dense_numbers_are_copied_ahead_to_accelerators(subtests: pytest.Subtests) -> None:
    gpus = SimpleNamespace(
        num_replicas_in_sync=2, extended=SimpleNamespace(worker_devices=("/GPU:0", "/GPU:1"))
    )
    rows = tf.range(4)
    for batch, expected in (
        (({"b": (rows, rows + 1), "a": rows}, rows), True),
        ((rows, None, {"w": None}), True),
        (tf.strings.as_string(rows), False),
        (tf.RaggedTensor.from_row_lengths(rows, rows[1:2] + 3), False),
        ({"s": tf.sparse.from_dense(tf.eye(4)), "d": rows}, False),
    ):
        with subtests.test(batch=batch):
            spec = tf.data.Dataset.from_tensors(batch).element_spec
            assert should_prefetch(spec, gpus) is expected, spec
            assert should_prefetch(spec, strategy_of(2)) is False


def test_length() -> None:
    assert len(tmg.distribute_dataset(np.zeros(10), strategy_of(2), batch_size=4)) == 3
    numbers = tf.data.Dataset.range(9).batch(4)
    for dataset, said in ((numbers.filter(lambda x: True), "unknown"), (numbers.repeat(), "infin")):
        with pytest.raises(TypeError, match=said):
            len(tmg.distribute_dataset(dataset))
    # list() asks for the length and does without.
    assert len(list(tmg.distribute_dataset(numbers.filter(lambda x: True)))) == 3


# Fails if a pass in a function goes on where the last one ended, reads another iterator, or is
# traced for each pass or each dataset of a kind.
@HOST_AND_DEVICE
def test_passes_in_functions(replicas: int, prefetch: bool) -> None:
    strategy, traces = strategy_of(replicas), []

    def numbers() -> tmg.data.ShardedDataset:
        dataset = tf.data.Dataset.range(10).batch(4).map(lambda x: (x, {"y": x * 10}))
        return tmg.distribute_dataset(dataset, strategy, prefetch_to_device=prefetch)

    def summed(x: Any) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(x,)), axis=None)

    def total(data: tmg.data.ShardedDataset) -> tuple[tf.Tensor, tf.Tensor]:
        traces.append("total")
        result, steps = tf.constant(0, tf.int64), tf.constant(0)
        for x, labels in data:
            result += summed(x) + summed(labels["y"])
            steps += 1
        return result, steps

    data = numbers()
    as_argument, as_closure = tf.function(total), tf.function(lambda: total(data))
    for _ in range(2):
        assert [int(value) for value in as_argument(data)] == [495, 3]
        assert [int(value) for value in as_closure()] == [495, 3]

    @tf.function
    def step(iterator: tmg.data.ShardIterator) -> tf.Tensor:
        traces.append("step")
        return summed(next(iterator)[0])

    for iterator in (iter(data), iter(data), iter(numbers())):
        assert [int(step(iterator)) for _ in range(3)] == [6, 22, 17]
        with pytest.raises(tf.errors.OutOfRangeError):
            step(iterator)
    assert traces == ["total", "total", "step"]
    outside = iter(data)
    inside = tf.function(lambda: summed(next(outside)[0]))
    assert [int(inside()), int(summed(next(outside)[0])), int(inside())] == [6, 22, 17]
    specified = tf.function(lambda batch: summed(batch[0]), input_signature=[data.element_spec])
    again = iter(data)
    assert [int(specified(again.get_next())) for _ in range(3)] == [6, 22, 17]
    with pytest.raises(tf.errors.OutOfRangeError):
        again.get_next()


# batches of fewer rows than replicas: a partition for loops of users, copies for our steps --------

SIZES = (7, 1, 3, 2)


def kinds(rows: Any) -> Any:
    """A batch of every kind of tensor; each holds the numbers of its rows."""
    return {
        "ragged": tf.RaggedTensor.from_row_lengths(rows, tf.ones_like(rows)),
        "pair": (tf.cast(rows, tf.float32)[:, None], None),
        "sparse": tf.sparse.from_dense(rows[:, None] + 1),
        "text": tf.strings.as_string(rows),
    }


def numbers_of(batch: Any) -> list[Any]:
    """The numbers of its rows by each tensor, then all numbers of the batch."""
    found = (
        batch["ragged"].flat_values,
        batch["pair"][0][:, 0],
        batch["sparse"].values - 1,
        tf.strings.to_number(batch["text"]),
        tf.cast(tmg.rows().first, tf.int32) + tf.range(tf.cast(tmg.rows().count, tf.int32)),
        tmg.gather_rows(batch["pair"][0])[:, 0],
    )
    return [tf.cast(tensor, tf.int64) for tensor in found]


@pytest.mark.parametrize(("replicas", "way"), [(2, "for"), (3, "next"), (4, "eager")])
def test_a_loop_of_a_user_sees_each_row_once(replicas: int, way: str) -> None:
    strategy = strategy_of(replicas)
    data = tmg.distribute_dataset(batches_of(SIZES).map(kinds), strategy)

    def times_seen(batch: Any) -> Any:
        columns = strategy.run(numbers_of, args=(batch,))
        flat = [tf.concat(strategy.experimental_local_results(one), 0) for one in columns]
        total = tf.constant([sum(SIZES)], tf.int64)
        return tf.stack([tf.scatter_nd(n[:, None], tf.ones_like(n), total) for n in flat])

    @tf.function
    def in_a_for() -> Any:
        seen = tf.zeros([6, sum(SIZES)], tf.int64)
        for batch in data:
            seen += times_seen(batch)
        return seen

    if way == "for":
        seen = in_a_for()
    else:
        compiled = tf.function(lambda iterator: times_seen(next(iterator)))
        step = compiled if way == "next" else lambda iterator: times_seen(next(iterator))
        seen = sum(map(step, [iter(data)] * len(SIZES)))
    np.testing.assert_array_equal(seen[:4], 1)
    # Places are counted from the first row of each batch.
    in_batch = [sum(size > place for size in SIZES) for place in range(sum(SIZES))]
    np.testing.assert_array_equal(seen[4], in_batch)
    np.testing.assert_array_equal(seen[5], replicas)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_partition_begins_with_the_first_replica(prefetch: bool) -> None:
    data = tmg.distribute_dataset(batches_of((2, 5)), strategy_of(4), prefetch_to_device=prefetch)
    assert read(data) == [[[0], [1], [], []], [[2], [3], [4], [5, 6]]]


def test_copies_are_given_if_asked_for_and_the_first_counts() -> None:
    strategy = strategy_of(3)
    data = tmg.distribute_dataset(batches_of((2, 5)), strategy, small_batches="copy")
    assert read(data) == [[[0, 1]] * 3, [[2], [3, 4], [5, 6]]]

    def weights(batch: Any) -> list[float]:
        weight = tmg.data.row_weight(batch, strategy)
        return list(map(float, strategy.experimental_local_results(weight)))

    assert list(map(weights, data)) == [[1.0, 0.0, 0.0], [1.0] * 3]
    whole = tmg.distribute_dataset(batches_of((2, 5)), strategy)
    assert list(map(weights, whole)) == [[1.0] * 3] * 2

    def squares(batch: Any, weight: Any) -> Any:
        x = tf.cast(batch, tf.float32)[:, None]
        pair = tmg.loss_sum(
            keras.losses.MeanSquaredError("sum"), tf.zeros_like(x), x, row_weight=weight
        )
        return pair.sum, tf.cast(tmg.rows().weight, tf.float32) * tf.reduce_sum(x**2)

    for dataset in (data, whole):
        total = [
            [float(strategy.reduce("SUM", part, axis=None)) for part in parts]
            for batch in dataset
            for parts in [strategy.run(squares, (batch, tmg.data.row_weight(batch, strategy)))]
        ]
        np.testing.assert_allclose(total, [[1.0] * 2, [4 + 9 + 16 + 25 + 36.0] * 2], rtol=1e-6)


# Fails if what a user computed from shards without rows trains beside whole copies of the rest.
def test_a_step_refuses_what_was_computed_from_an_empty_shard() -> None:
    build = networks(1, lambda: keras.layers.Dense(1, use_bias=False))
    step = step_on(3, build, lambda: keras.optimizers.SGD(0.1), "mse")
    model, strategy = step.model, step.strategy
    pairs = batches_of((5, 2, 4)).map(lambda x: (tf.cast(x, tf.float32)[:, None],) * 2)
    data = tmg.distribute_dataset(pairs, strategy)

    def doubled(batch: Any) -> Any:
        return strategy.run(lambda x, y: 2 * x, args=batch), batch[1]

    def all_doubled(batch: Any) -> Any:
        return strategy.run(lambda x, y: (2 * x, 2 * y), args=batch)

    for compute in (doubled, all_doubled):
        iterator = iter(data)
        assert int(step(compute(next(iterator)))["weight"]) == 5
        before = model.get_weights()
        with pytest.raises(tmg.errors.DataError, match="fewer rows than"):
            step(compute(next(iterator)))
        np.testing.assert_array_equal(model.get_weights(), before)
        assert int(step(compute(next(iterator)))["weight"]) == 4

    compiled = tf.function(lambda iterator: step(doubled(next(iterator)))["weight"])
    iterator = iter(data)
    assert int(compiled(iterator)) == 5
    before = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="fewer rows than there are replicas"):
        compiled(iterator)
    np.testing.assert_array_equal(model.get_weights(), before)


# errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset",
    [
        tf.data.Dataset.from_tensor_slices((np.zeros((6, 4)), np.arange(6))),
        tf.data.Dataset.from_tensor_slices((np.zeros((6, 28, 28)), np.zeros((6, 10)))),
        tf.data.Dataset.range(6).window(2),
    ],
)
def test_a_dataset_that_is_not_batched(dataset: Any) -> None:
    with pytest.raises(tmg.errors.DataError, match=r"is not batched, .*Batch it with the"):
        tmg.distribute_dataset(dataset, strategy_of(2))


@HOST_AND_DEVICE
def test_batches_that_cannot_be_cut(replicas: int, prefetch: bool) -> None:
    fives = tf.data.Dataset.range(10).batch(5)
    for dataset, said in (
        (fives.map(lambda x: (x, x[: 10 - x[-1]])), "would be paired wrongly.*Received: rows 5, 1"),
        (batches_of((3, 0)), "A batch has no rows.*Drop empty"),
    ):
        data = tmg.distribute_dataset(dataset, strategy_of(replicas), prefetch_to_device=prefetch)
        iterator = iter(data)
        next(iterator)
        with pytest.raises(tmg.errors.DataError, match=said):
            next(iterator)
