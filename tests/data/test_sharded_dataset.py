"""Global batches cut into shards: each row once, whatever the batch size."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from each import each
from shards import batches_of, local, mirrored, read, text_of, to_list

import tfmultigpu as tmg
from tfmultigpu.data.partition import row_offsets
from tfmultigpu.data.sharded_dataset import should_prefetch

Pair = namedtuple("Pair", ["x", "y"])


# coverage -----------------------------------------------------------------------------------------


ROWS = functools.partial(tf.data.Dataset.range, 10)
STRUCTURES: dict[str, Callable[[], tf.data.Dataset]] = {
    "dense": lambda: ROWS().batch(4),
    "one": lambda: ROWS().batch(4).map(lambda x: (x,)),
    "tuple": lambda: ROWS().batch(4).map(lambda x: (x, x * 2, tf.cast(x, tf.float16))),
    "dict": lambda: ROWS().batch(4).map(lambda x: {"z": x, "a": -x}),
    "nested": lambda: ROWS().batch(4).map(lambda x: ({"b": (x, x + 1), "a": x}, (x, {"y": x}))),
    "named": lambda: ROWS().batch(4).map(lambda x: Pair(x, Pair(x, -x))),
    "none": lambda: ROWS().batch(4).map(lambda x: (x, None, {"w": None, "v": x})),
    "named_none": lambda: ROWS().batch(4).map(lambda x: Pair(None, x)),
    "text": lambda: ROWS().map(tf.strings.as_string).batch(4),
    "bool": lambda: ROWS().map(lambda x: x % 2 == 0).batch(4),
    "uint8": lambda: ROWS().map(lambda x: tf.fill([3, 3, 1], tf.cast(x, tf.uint8))).batch(4),
    "bfloat16": lambda: ROWS().map(lambda x: tf.cast(x, tf.bfloat16)).batch(4),
    "ragged": lambda: tf.data.Dataset.from_tensor_slices(
        (
            tf.ragged.constant([[i] * (i % 3) for i in range(10)]),
            tf.ragged.constant([[[i]] * (i % 2) for i in range(10)], row_splits_dtype=tf.int32),
        )
    ).batch(4),
    "sparse": lambda: tf.data.Dataset.from_tensor_slices(
        {"s": tf.sparse.from_dense(np.eye(10, 6, dtype="float32")), "d": np.arange(10)}
    ).batch(4),
    "unknown": lambda: ROWS().batch(4).filter(lambda x: True),
    "unknown_shape": lambda: (
        ROWS().batch(4).map(lambda x: tf.py_function(lambda y: y, [x], Tout=tf.int64))
    ),
    "whole_batches": lambda: ROWS().batch(4, drop_remainder=True).map(lambda x: (x, x)),
    "padded": lambda: ROWS().padded_batch(4),
    "options": lambda: ROWS().batch(4).with_options(odd_options()),
}


def odd_options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = False
    options.threading.private_threadpool_size = 1
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return options


@each(
    ("name", "prefetch"),
    [
        *((name, False) for name in sorted(STRUCTURES)),
        *((name, True) for name in ("dense", "nested", "named_none", "unknown")),
    ],
)
def test_every_structure_comes_out_as_it_went_in(name: str, prefetch: bool) -> None:
    dataset = STRUCTURES[name]()
    expected = [tf.nest.map_structure(to_list, batch) for batch in dataset]
    strategy = mirrored(3)
    data = tmg.distribute_dataset(dataset, strategy, shares=(2, 1, 1), prefetch_to_device=prefetch)
    found = list(data)
    assert len(found) == len(expected)
    for batch, whole in zip(found, expected, strict=True):
        tf.nest.assert_same_structure(batch, next(iter(dataset)), expand_composites=False)
        leaves = [local(strategy, leaf) for leaf in tf.nest.flatten(batch)]
        for shards, rows in zip(leaves, leaves_of(dataset.element_spec, whole), strict=True):
            if rows is None:
                assert shards == [None] * 3
            elif len(rows) < 3:
                assert shards == [rows[i : i + 1] for i in range(3)]
            else:
                ends = row_offsets(len(rows), (2, 1, 1)).numpy()
                assert shards == [rows[ends[i] : ends[i + 1]] for i in range(3)]


def leaves_of(spec: Any, batch: Any) -> list[Any]:
    """The leaves of a batch of lists, which tf.nest would otherwise take apart too."""
    if isinstance(spec, tf.TypeSpec):
        return [batch]
    parts = sorted(spec) if isinstance(spec, dict) else range(len(spec))
    return [leaf for part in parts for leaf in leaves_of(spec[part], batch[part])]


def test_a_dict_keeps_the_order_of_its_keys() -> None:
    data = tmg.distribute_dataset(STRUCTURES["dict"](), mirrored(2))
    assert list(next(iter(data))) == ["z", "a"]


def test_columns_and_types_survive_for_layers_that_must_know_them() -> None:
    strategy = mirrored(2)
    sparse = STRUCTURES["sparse"]()
    shapes: list[Any] = []

    @tf.function
    def first(iterator: Any) -> None:
        batch = next(iterator)
        strategy.run(lambda b: shapes.append(b["s"].shape.as_list()), args=(batch,))

    first(iter(tmg.distribute_dataset(sparse, strategy)))
    assert shapes == [[None, 6], [None, 6]]


def test_batches_of_one_size_have_shards_of_known_size() -> None:
    dataset = tf.data.Dataset.range(10).batch(4, drop_remainder=True)
    data = tmg.distribute_dataset(dataset, mirrored(2), shares=(3, 1))
    shapes: list[Any] = []

    @tf.function
    def first(iterator: Any) -> None:
        batch = next(iterator)
        data.strategy.run(lambda b: shapes.append(b.shape.as_list()), args=(batch,))

    first(iter(data))
    assert shapes == [[3], [1]]


def test_element_spec_is_that_of_a_global_batch() -> None:
    dataset = STRUCTURES["nested"]()
    assert tmg.distribute_dataset(dataset, mirrored(2)).element_spec == dataset.element_spec


@each(
    ("name", "expected"),
    [("nested", True), ("none", True), ("text", False), ("ragged", False), ("sparse", False)],
)
def test_only_dense_numbers_are_copied_ahead_to_accelerators(name: str, expected: bool) -> None:
    gpus = SimpleNamespace(
        num_replicas_in_sync=2, extended=SimpleNamespace(worker_devices=("/GPU:0", "/GPU:1"))
    )
    assert should_prefetch(STRUCTURES[name]().element_spec, gpus) is expected
    assert should_prefetch(STRUCTURES[name]().element_spec, mirrored(2)) is False


# errors -------------------------------------------------------------------------------------------


@each(
    "dataset",
    [
        tf.data.Dataset.from_tensor_slices((np.zeros((6, 4)), np.arange(6))),
        tf.data.Dataset.from_tensor_slices((np.zeros((6, 28, 28)), np.zeros((6, 10)))),
        tf.data.Dataset.range(6).window(2),
    ],
)
def test_a_dataset_that_is_not_batched(dataset: Any) -> None:
    text = text_of(lambda: tmg.distribute_dataset(dataset, mirrored(2)))
    assert text.startswith("The dataset is not batched, or its components do not belong together")
    assert f"Received: element_spec={dataset.element_spec}. Batch it with the" in text


@each(("replicas", "prefetch"), [(1, False), (2, False), (2, True)])
def test_features_and_labels_of_different_rows(replicas: int, prefetch: bool) -> None:
    dataset = tf.data.Dataset.range(10).batch(5).map(lambda x: (x, x[: 10 - x[-1]]))
    data = tmg.distribute_dataset(dataset, mirrored(replicas), prefetch_to_device=prefetch)
    iterator = iter(data)
    next(iterator)
    assert text_of(lambda: next(iterator)) == (
        "The tensors of a batch differ in their number of rows (their first axis), so features "
        "and labels would be paired wrongly. Make batches of single examples, dataset.batch(n), or "
        "check what comes before .batch(). If each example has k rows of another kind, give them "
        "an axis of their own: tf.reshape(u, [rows, k, ...]). Received: rows 5, 1."
    )


@each(("replicas", "prefetch"), [(1, False), (2, False), (2, True)])
def test_a_batch_without_rows(replicas: int, prefetch: bool) -> None:
    data = tmg.distribute_dataset(
        batches_of((3, 0)), mirrored(replicas), prefetch_to_device=prefetch
    )
    iterator = iter(data)
    next(iterator)
    text = text_of(lambda: next(iterator))
    assert text.startswith("A batch has no rows. A replica cannot train on it. Drop empty")


def test_empty_batches_can_be_dropped_as_the_error_says() -> None:
    dataset = batches_of((3, 0, 2)).filter(lambda x: tf.shape(x)[0] > 0)
    assert read(tmg.distribute_dataset(dataset, mirrored(2))) == [[[0], [1, 2]], [[3], [4]]]


def test_another_error_of_the_pipeline_stays_what_it_is() -> None:
    dataset = (
        tf.data.Dataset.range(4)
        .batch(2)
        .map(
            lambda x: tf.debugging.check_numerics(tf.math.log(tf.cast(x, tf.float32) - 9.0), "here")
        )
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="here : Tensor had NaN"):
        list(tmg.distribute_dataset(dataset, mirrored(2)))


def test_shares_may_be_an_array() -> None:
    data = tmg.distribute_dataset(
        np.arange(4), mirrored(2), batch_size=4, shares=np.array([0.25, 0.75])
    )
    assert data.shares == (2**18, 3 * 2**18)
    assert read(data) == [[[0], [1, 2, 3]]]
