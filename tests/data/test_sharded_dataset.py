"""Global batches cut into shards: what promises/test_datasets.py leaves out, and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from each import each
from shards import batches_of, mirrored, read, text_of

import tfmultigpu as tmg
from tfmultigpu.data.sharded_dataset import should_prefetch


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


def test_only_dense_numbers_are_copied_ahead_to_accelerators() -> None:
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
        spec = tf.data.Dataset.from_tensors(batch).element_spec
        assert should_prefetch(spec, gpus) is expected, spec
        assert should_prefetch(spec, mirrored(2)) is False


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
