"""A dataset of anything: each row on one replica, once and in order; none without rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, assume, given, settings, strategies as st
from law.pair import SEED, strategy_of

import tfmultigpu as tmg

# Each makes ``n`` rows that can be told apart, some of them without numbers.
LEAVES: dict[str, Callable[[int], Any]] = {
    "dense": lambda n: np.arange(2.0 * n).reshape(n, 2),
    "numbers": lambda n: np.arange(n, dtype="int32"),
    "strings": lambda n: np.array([f"row {i}" for i in range(n)]),
    "ragged": lambda n: tf.ragged.constant([[i] * (i % 3) for i in range(n)], dtype=tf.int64),
    "sparse": lambda n: tf.sparse.from_dense(np.diag(np.arange(1, n + 1))[:, : max(1, n - 1)]),
    "none": lambda n: None,
}
KINDS = st.sampled_from(sorted(LEAVES))


def nested(inner: Any) -> Any:
    """Draws a dict or a tuple of structures."""
    return st.dictionaries(st.sampled_from("abc"), inner, min_size=1) | st.lists(
        inner, min_size=1, max_size=2
    ).map(tuple)


STRUCTURES = st.recursive(KINDS, nested, max_leaves=4).filter(lambda one: not isinstance(one, str))


def rows_of(tensor: Any) -> list[Any]:
    """Returns the rows of a dense, ragged or sparse tensor as values of Python."""
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    return tensor.to_list() if isinstance(tensor, tf.RaggedTensor) else tensor.numpy().tolist()


def by_replica(batch: Any, strategy: tf.distribute.Strategy) -> list[list[list[Any]]]:
    """Returns for each leaf that is not None the rows that each replica gets in ``run``."""
    result = strategy.run(lambda shard: shard, args=(batch,))
    leaves = [leaf for leaf in tf.nest.flatten(result) if leaf is not None]
    return [[rows_of(one) for one in strategy.experimental_local_results(leaf)] for leaf in leaves]


def joined(batches: Iterable[Any], strategy: tf.distribute.Strategy) -> list[list[list[Any]]]:
    """Returns for each batch, for each leaf, the rows of all replicas in order."""
    return [
        [list(itertools.chain(*leaf)) for leaf in by_replica(batch, strategy)] for batch in batches
    ]


def uncut(dataset: Any) -> list[list[list[Any]]]:
    """Returns the same of the dataset itself."""
    return [
        [rows_of(leaf) for leaf in tf.nest.flatten(batch) if leaf is not None] for batch in dataset
    ]


# Fails if a row of any component is lost, twice, out of order or beside another row than it was,
# if the partial last batch is dropped or filled, or if a second pass is another.
# To shrink a structure takes a minute.
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(
    structure=STRUCTURES,
    rows=st.integers(3, 17),
    batch_size=st.integers(3, 6),
    replicas=st.sampled_from([2, 3]),
)
def test_each_row_once_in_any_structure(
    structure: Any, rows: int, batch_size: int, replicas: int
) -> None:
    assume(rows % batch_size not in range(1, replicas))
    assume(set(tf.nest.flatten(structure)) != {"none"})
    hold_each_row_once(structure, rows, batch_size, replicas)


def hold_each_row_once(structure: Any, rows: int, batch_size: int, replicas: int) -> None:
    made = tf.nest.map_structure(lambda kind: LEAVES[kind](rows), structure)
    dataset = tf.data.Dataset.from_tensor_slices(made).batch(batch_size)
    strategy = strategy_of(replicas)
    data = tmg.distribute_dataset(dataset, strategy)
    expected = uncut(dataset)
    for batch, uncut_batch in itertools.zip_longest(data, expected):
        leaves = by_replica(batch, strategy)
        assert [list(itertools.chain(*leaf)) for leaf in leaves] == uncut_batch
        assert all(rows for leaf in leaves for rows in leaf)
    assert len(list(data)) == len(expected)
    assert joined(itertools.islice(data, 1), strategy) == expected[:1]


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.more)])
def test_each_row_once_of_every_kind_at_once(replicas: int) -> None:
    kinds = ({"a": "dense", "b": ("ragged", "none")}, ("strings", {"c": "sparse"}), "numbers")
    hold_each_row_once(kinds, 13, 5, replicas)


# Fails if a replica of a step gets no rows, on which many layers crash or give NaN, or if the rows
# of a batch smaller than the replicas count more than once.
@pytest.mark.parametrize("replicas", [2, 3])
def test_no_replica_of_a_step_is_without_rows(replicas: int) -> None:
    rows = 9
    made = {"x": np.arange(1.0, rows + 1)[:, None], "words": LEAVES["ragged"](rows)}
    dataset = tf.data.Dataset.from_tensor_slices(made).batch(4)  # 4, 4 and 1 rows.
    strategy = strategy_of(replicas)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
        )
        optimizer = keras.optimizers.SGD(0.0)

    def forward(model: Any, batch: Any, training: bool) -> Any:
        count = tf.shape(batch["x"])[0]
        tf.debugging.assert_positive(count)
        tf.debugging.assert_equal(tf.cast(batch["words"].nrows(), tf.int32), count)
        words = tf.reduce_sum(tf.cast(batch["words"], tf.float32), -1, keepdims=True)
        outputs = model(batch["x"], training=training)
        return tmg.loss_sum(lambda y, p: tf.reduce_mean(p + y, -1), words, outputs)

    step = tmg.make_train_step(model, optimizer, None, strategy, forward=forward, verify=False)
    try:
        logs = [step(batch) for batch in tmg.distribute_dataset(dataset, strategy)]
    except tf.errors.InvalidArgumentError as error:
        raise AssertionError(f"a replica has no rows, or other words: {error}") from None
    values = [i + 1 + i * (i % 3) for i in range(rows)]
    expected = [np.mean(values[:4]), np.mean(values[4:8]), np.mean(values[8:])]
    np.testing.assert_allclose([float(one["loss"]) for one in logs], expected, rtol=1e-6)
    assert [float(one["weight"]) for one in logs] == [4, 4, 1]


# Fails if data needs a known end: a pass of an endless dataset cannot be gone through before the
# first batch, and a dataset of unknown length must end where it ends.
@pytest.mark.parametrize("replicas", [2, 3])
def test_endless_data_and_data_of_unknown_length(replicas: int) -> None:
    strategy = strategy_of(replicas)
    numbers = tf.data.Dataset.range(1_000_000_000).batch(7)
    endless = tmg.distribute_dataset(numbers.repeat(), strategy)
    for _ in range(2):  # Each pass begins at the beginning.
        first = joined(itertools.islice(endless, 2), strategy)
        assert first == [[list(range(7))], [list(range(7, 14))]]
    odd = tf.data.Dataset.range(20).filter(lambda i: i % 2 == 1).batch(4, drop_remainder=True)
    unknown = tmg.distribute_dataset(odd, strategy)
    assert joined(unknown, strategy) == [[[1, 3, 5, 7]], [[9, 11, 13, 15]]]


# Fails if arrays are shuffled, cut across their rows, or lose the last batch; or if a function that
# returns a generator is called once for all passes; or if TensorFlow computes in the memory of what
# the generator yields parts of, so that the next pass has other data.
@pytest.mark.parametrize("replicas", [1, 2, pytest.param(3, marks=pytest.mark.more)])
def test_arrays_and_generators(replicas: int) -> None:
    strategy = strategy_of(replicas)
    memory, y = np.arange(96.0), np.arange(11)
    # Each row is aligned, for TensorFlow copies what is not.
    x = memory[-memory.ctypes.data % 64 // 8 :][:88].reshape(11, 8)
    cut = [(x[a : a + 4].tolist(), y[a : a + 4].tolist()) for a in (0, 4, 8)]
    arrays = tmg.distribute_dataset((x, y), strategy, batch_size=4)
    named = tmg.distribute_dataset({"x": x, "y": y}, strategy, batch_size=4)

    def batches() -> Any:
        for a in (0, 4, 8):
            yield x[a : a + 4], y[a : a + 4]

    generated = tmg.distribute_dataset(batches, strategy)
    for data in (arrays, named, generated):
        for _ in range(2):
            assert joined(data, strategy) == [list(batch) for batch in cut]
    double = tf.function(lambda data: strategy.run(lambda x, y: x * 2.0 + 1.0, args=next(data)))
    iterator = iter(generated)
    for _ in cut:
        double(iterator)
    assert x.tolist() == [row for rows, _ in cut for row in rows]


# Fails if ``preprocess`` sees a row twice or on another replica than its own, or if a seed follows
# from the replica, the number of replicas or the batch that its row is in, or is that of the pass
# before or of another row.
def test_preprocessing_gives_each_row_its_own_random_numbers() -> None:
    x = np.arange(11.0)

    def plain(row: Any) -> Any:
        return {"twice": 2.0 * row}

    def random(row: Any, seed: Any) -> Any:
        return row, tf.random.stateless_uniform([2], seed, dtype=tf.float64)

    found = {}
    for replicas, batch_size in [(1, 4), (2, 11), (3, 4)]:
        strategy = strategy_of(replicas)
        keras.utils.set_random_seed(SEED)
        data = tmg.distribute_dataset(x, strategy, batch_size=batch_size, preprocess=random)
        passes = [joined(data, strategy) for _ in range(2)]
        rows = [[np.concatenate(leaf) for leaf in zip(*one, strict=True)] for one in passes]
        np.testing.assert_array_equal([one[0] for one in rows], [x, x])
        found[replicas, batch_size] = np.stack([one[1] for one in rows])
        doubled = tmg.distribute_dataset(x, strategy, batch_size=batch_size, preprocess=plain)
        cut = [x[a : a + batch_size] for a in range(0, len(x), batch_size)]
        assert joined(doubled, strategy) == [[(2 * part).tolist()] for part in cut]
    for key, numbers in found.items():
        np.testing.assert_array_equal(numbers, found[1, 4], str(key))
    assert len(np.unique(found[1, 4])) == 2 * 11 * 2  # Other numbers in each row and pass.
