"""Batches of fewer rows than replicas: a partition for loops of users, copies for our steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from each import each
from shards import batches_of, local, mirrored, read, text_of

import tfmultigpu as tmg

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


@each(("replicas", "way"), [(2, "for"), (3, "next"), (4, "eager")])
def test_a_loop_of_a_user_sees_each_row_once(replicas: int, way: str) -> None:
    strategy = mirrored(replicas)
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
        iterator = iter(data)
        seen = sum(step(iterator) for _ in SIZES)
    np.testing.assert_array_equal(seen[:4], 1)
    # Places are counted from the first row of each batch.
    in_batch = [sum(size > place for size in SIZES) for place in range(sum(SIZES))]
    np.testing.assert_array_equal(seen[4], in_batch)
    np.testing.assert_array_equal(seen[5], replicas)


@each("prefetch", [False, True])
def test_a_partition_begins_with_the_first_replica(prefetch: bool) -> None:
    data = tmg.distribute_dataset(batches_of((2, 5)), mirrored(4), prefetch_to_device=prefetch)
    assert read(data) == [[[0], [1], [], []], [[2], [3], [4], [5, 6]]]


def test_copies_are_given_if_asked_for_and_each_row_counts_its_part() -> None:
    strategy = mirrored(3)
    data = tmg.distribute_dataset(batches_of((2, 5)), strategy, small_batches="copy")
    assert [local(strategy, batch) for batch in data] == [[[0, 1]] * 3, [[2], [3, 4], [5, 6]]]
    assert [float(tmg.data.row_weight(batch, strategy)) for batch in data] == [1 / 3, 1.0]
    whole = tmg.distribute_dataset(batches_of((2, 5)), strategy)
    assert [float(tmg.data.row_weight(batch, strategy)) for batch in whole] == [1.0, 1.0]

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


def test_small_batches_must_be_known() -> None:
    strategy = mirrored(2)
    (batch,) = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(4))
    with pytest.raises(tmg.errors.DataError, match="unknown whether the shards of the batch are"):
        tmg.data.row_weight(batch, strategy)
    text = text_of(lambda: tmg.distribute_dataset(batches_of((2,)), small_batches="drop"))
    assert text.startswith("small_batches must be 'partition' or 'copy'. Received: 'drop'.")


# Fails if what a user computed from shards without rows trains beside whole copies of the rest.
def test_a_step_refuses_what_was_computed_from_an_empty_shard() -> None:
    strategy = mirrored(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse", strategy)
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
