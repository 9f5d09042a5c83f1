"""User data becomes a dataset of global batches, or an error says what to give instead."""

from __future__ import annotations

import logging
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.data.sources import global_batches


def to_dataset(data: Any, batch_size: int | None = None) -> tf.data.Dataset:
    return global_batches(data, batch_size).dataset


Pair = namedtuple("Pair", ["x", "y"])


def lists(dataset: tf.data.Dataset) -> list[Any]:
    def value(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            leaf = tf.sparse.to_dense(leaf)
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.to_list()
        return None if leaf is None else leaf.numpy().tolist()

    return [tf.nest.map_structure(value, batch) for batch in dataset]


# arrays -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        (np.arange(3), [[0, 1], [2]]),
        (tf.range(3), [[0, 1], [2]]),
        ((np.arange(3), np.arange(3) * 10), [([0, 1], [0, 10]), ([2], [20])]),
        ([np.arange(3), np.arange(3)], [(([0, 1], [0, 1]),), (([2], [2]),)]),
        ([5, 6, 7], [[5, 6], [7]]),
        (([1, 2, 3], [4, 5, 6]), [([1, 2], [4, 5]), ([3], [6])]),
        (
            {"b": np.arange(3), "a": (np.arange(3),)},
            [{"b": [0, 1], "a": ([0, 1],)}, {"b": [2], "a": ([2],)}],
        ),
        (Pair(np.arange(2), np.arange(2)), [Pair([0, 1], [0, 1])]),
        ((np.arange(3), None), [([0, 1], None), ([2], None)]),
        (np.array(["a", "b"]), [[b"a", b"b"]]),
        (tf.ragged.constant([[1], [], [2, 3]]), [[[1], []], [[2, 3]]]),
        (tf.sparse.from_dense([[1, 0], [0, 2], [3, 0]]), [[[1, 0], [0, 2]], [[3, 0]]]),
        (np.zeros((0, 2)), []),
    ],
)
def test_arrays_are_batched_in_order(arrays: Any, expected: list[Any]) -> None:
    dataset = to_dataset(arrays, batch_size=2)
    assert lists(dataset) == expected
    assert dataset.options().autotune.enabled is False


class Loader:
    def __iter__(self) -> Iterator[np.ndarray]:
        return iter([np.arange(2)])


def test_a_function_that_returns_a_loader_is_data() -> None:
    loader = Loader()
    dataset = to_dataset(lambda: loader)
    assert lists(dataset) == lists(dataset) == [[0, 1]]


# generators ---------------------------------------------------------------------------------------


def test_a_generator_function_is_read_from_its_first_batch_in_each_pass() -> None:
    calls = []

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        calls.append(len(calls))
        for start in (0, 2, 4):
            yield np.arange(start, start + 2), np.full((2,), calls[-1])

    dataset = to_dataset(batches)
    assert calls == [0]
    assert lists(dataset) == [([0, 1], [0, 0]), ([2, 3], [0, 0]), ([4, 5], [0, 0])]
    assert calls == [0], "the generator that was looked at is the one of the first pass"
    assert lists(dataset) == [([0, 1], [1, 1]), ([2, 3], [1, 1]), ([4, 5], [1, 1])]


def test_rows_and_axes_that_vary_between_the_first_batches_are_open() -> None:
    shapes = [(2, 3, 5), (4, 7, 5), (1, 9, 5)]
    dataset = to_dataset(lambda: (np.zeros(shape) for shape in shapes))
    assert dataset.element_spec.shape.as_list() == [None, None, 5]
    assert [tuple(batch.shape) for batch in dataset] == shapes


def test_a_batch_that_does_not_fit_the_first_two_is_named() -> None:
    data = tmg.distribute_dataset(lambda: (np.zeros(s) for s in [(2, 3), (2, 3), (2, 4)]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"of shape \(2, 4\) where .*None, 3"):
        list(data)


@pytest.mark.parametrize("second", [np.zeros(2, "int64"), (np.zeros(2), np.zeros(2)), None])
def test_batches_of_different_kinds_are_refused(second: Any) -> None:
    with pytest.raises((TypeError, ValueError, tmg.errors.DataError)):
        list(tmg.distribute_dataset(lambda: iter([np.zeros(2), second])))


def test_a_later_batch_of_another_type_is_not_rounded() -> None:
    data = tmg.distribute_dataset(lambda: iter([[1, 2], [3], [0.5]]))
    with pytest.raises(tmg.errors.DataError, match=r"differ in their types.*float64, after.*int64"):
        list(data)


@pytest.mark.parametrize(
    "iterator", [iter([np.zeros(2)]), (np.zeros(2) for _ in range(2)), map(np.zeros, [2])]
)
def test_an_iterator_is_refused_before_a_batch_is_lost(iterator: Iterator[np.ndarray]) -> None:
    name = type(iterator).__name__
    with pytest.raises(tmg.errors.DataError, match=f"Received: {name}. Give its function, make_b"):
        to_dataset(iterator)
    assert next(iterator).shape == (2,)


# PyDataset ----------------------------------------------------------------------------------------


class Counting(keras.utils.PyDataset):
    """Batch i holds the numbers 2i and 2i + 1, and which epoch it is."""

    def __init__(self, batches: int | None, **options: Any) -> None:
        super().__init__(**options)
        self.batches = batches
        self.epoch = 0
        self.read: list[int] = []
        self.ended = 0

    @property
    def num_batches(self) -> int | None:
        return self.batches

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.read.append(index)
        rows = np.arange(2 * index, 2 * index + 2)
        return rows, np.full((2,), self.epoch)

    def on_epoch_end(self) -> None:
        self.ended += 1
        self.epoch += 1


def test_a_py_dataset_loses_no_batch_and_ends_its_epochs_between_passes() -> None:
    source = Counting(3)
    data = tmg.distribute_dataset(source, strategy_of(1))
    assert (source.ended, source.read) == (0, [0, 1]), "Keras looks at two batches as well"
    assert len(data) == 3
    assert lists(data) == [([0, 1], [1, 1]), ([2, 3], [1, 1]), ([4, 5], [1, 1])]
    assert lists(data) == [([0, 1], [2, 2]), ([2, 3], [2, 2]), ([4, 5], [2, 2])]
    assert source.ended == 2, "once before each pass"
    assert source.read == [0, 1, 0, 1, 2, 0, 1, 2]


def test_a_loop_in_a_graph_tells_a_py_dataset_of_its_passes() -> None:
    source = Counting(2)
    data = tmg.distribute_dataset(source, strategy_of(2))

    @tf.function
    def total() -> tf.Tensor:
        result = tf.zeros([], tf.int64)
        for _, epoch in data:
            result += tf.reduce_sum(data.strategy.experimental_local_results(epoch)[0])
        return result

    assert [int(total()) for _ in range(3)] == [2, 4, 6]
    assert source.ended == 3


def test_a_py_dataset_without_end() -> None:
    dataset = to_dataset(Counting(None))
    assert [rows for rows, _ in lists(dataset.take(3))] == [[0, 1], [2, 3], [4, 5]]


def test_workers_of_a_py_dataset_work_at_once_and_keep_the_order() -> None:
    threads: set[int] = set()

    class Slow(Counting):
        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            time.sleep(0.02 * (3 - index % 4))
            threads.add(threading.get_ident())
            return super().__getitem__(index)

    data = Slow(8, workers=4, max_queue_size=2)
    assert [rows for rows, _ in lists(to_dataset(data))] == [[2 * i, 2 * i + 1] for i in range(8)]
    assert len(threads) > 1


# Fails if a pass that is broken off leaves its threads, or its batches to the next pass.
def test_a_pass_that_is_broken_off_leaves_nothing_to_the_next() -> None:
    data = tmg.distribute_dataset(Counting(6, workers=2), strategy_of(1))
    for _ in range(2):
        iterator = iter(data)
        assert next(iterator)[0].numpy().tolist() == [0, 1]
        iterator.close()
        assert next(iterator, "ended") == "ended"
        iterator.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("Worker_")]
    assert [rows.numpy().tolist() for rows, _ in data] == [[2 * i, 2 * i + 1] for i in range(6)]


# Fails if the library holds a generator whose pass is over.
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_closed_iterator_ends_its_generator(shards: int, prefetch: bool) -> None:
    ended = []

    def batches() -> Iterator[np.ndarray]:
        try:
            while True:
                yield np.zeros((4, 1))
        finally:
            ended.append(True)

    data = tmg.distribute_dataset(batches, strategy_of(shards), prefetch_to_device=prefetch)
    iterator = iter(data)
    next(iterator)
    assert not ended
    iterator.close()
    assert ended == [True]
    next(iter(data))
    assert ended == [True, True], "the second pass ends with its iterator"


# what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda: "train.csv", {"batch_size": 2}, "str is not an array. Received: 'train.csv'"),
        (Loader, {"batch_size": 2}, r"Loader is not an array\..* a function that returns it: lamb"),
        (lambda: Counting(0), {}, "The data yields no batches. Received: 'Counting'"),
        *(
            (
                make,
                {"batch_size": 8},
                r"a \w+ yields batches by itself.* add \.batch\(8\) in the line",
            )
            for make in (
                lambda: tf.data.Dataset.range(4).batch(2),
                lambda: Counting(2),
                lambda: Loader,
            )
        ),
        *(
            (lambda make=make: make(strategy_of(2)), {}, "already distributed. Received: " + name)
            for make, name in (
                (lambda s: tmg.distribute_dataset(np.arange(4), s, batch_size=2), "ShardedDataset"),
                (
                    lambda s: next(iter(tmg.distribute_dataset(np.arange(4), s, batch_size=2))),
                    "Per",
                ),
                (
                    lambda s: s.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2)),
                    "DistributedDataset",
                ),
            )
        ),
    ],
)
def test_what_is_refused(make: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(tmg.errors.DataError, match=said):
        to_dataset(make(), **options)


# Fails if TensorFlow warns of options that this library sets twice, which says nothing to a user.
def test_a_pass_that_is_left_ends_without_a_word_of_tensorflow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = tmg.distribute_dataset((np.ones((5, 2)), np.ones((5, 1))), batch_size=2)
    with caplog.at_level(logging.WARNING):
        iterator = iter(data)
        next(iterator)
        iterator.close()
    assert not caplog.records
