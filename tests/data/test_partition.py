"""Cutting a batch by rows: each row in one part, no part empty, small batches whole."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import tensorflow as tf
from each import each
from hypothesis import given, settings, strategies as st

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import check_rows_agree, count_rows
from tfmultigpu.strategies.topology import local_replicas

shares_of = st.lists(st.integers(1, 60), min_size=1, max_size=8)
Pair = namedtuple("Pair", ["x", "y"])


def offsets(count: int, shares: list[int]) -> list[int]:
    return partition.row_offsets(count, shares).numpy().tolist()


@settings(max_examples=200, deadline=None)
@given(shares=shares_of, extra=st.integers(0, 300))
def test_every_row_is_in_one_part_and_no_part_is_empty(shares: list[int], extra: int) -> None:
    count = len(shares) + extra
    ends = offsets(count, shares)
    assert ends[0] == 0
    assert ends[-1] == count
    assert all(start < stop for start, stop in itertools.pairwise(ends))


@settings(max_examples=100, deadline=None)
@given(shares=shares_of, times=st.integers(1, 20))
def test_shares_that_sum_to_the_rows_are_met_exactly(shares: list[int], times: int) -> None:
    sizes = np.diff(offsets(times * sum(shares), shares))
    assert sizes.tolist() == [times * share for share in shares]


@settings(max_examples=100, deadline=None)
@given(shares=shares_of, extra=st.integers(0, 300))
def test_parts_are_proportional_to_one_row_where_none_would_be_empty(
    shares: list[int], extra: int
) -> None:
    # With 2 * total / smallest rows each proportional part has two rows: nothing has to be pushed.
    count = math.ceil(2 * sum(shares) / min(shares)) + extra
    for size, share in zip(np.diff(offsets(count, shares)), shares, strict=True):
        assert abs(size - count * share / sum(shares)) <= 1


@each(
    ("count", "shares", "expected"),
    [
        (9, (1, 1, 1, 1), [2, 2, 2, 3]),  # TensorFlow: 3, 3, 3, 0
        (5, (1, 1, 1, 1), [1, 1, 1, 2]),  # TensorFlow: 2, 2, 1, 0
        (8, (3, 1), [6, 2]),
        (4, (1000, 1, 1, 1), [1, 1, 1, 1]),
        (5, (1, 1000, 1), [1, 3, 1]),
        (10, (1, 1, 1000), [1, 1, 8]),
        (9, (349525, 699051), [3, 6]),  # one third and two thirds, rounded
    ],
)
def test_known_cuts(count: int, shares: tuple[int, ...], expected: list[int]) -> None:
    assert np.diff(offsets(count, shares)).tolist() == expected
    traced = tf.function(lambda n: partition.row_offsets(n, shares))
    assert np.diff(traced(tf.constant(count))).tolist() == expected


def dense_parts(batch: tf.Tensor, shares: tuple[int, ...]) -> list[list[int]]:
    return [part.numpy().tolist() for part in partition.cut_rows(batch, shares)]


def test_cut_rows_keeps_order() -> None:
    assert dense_parts(tf.range(7), (1, 1, 1)) == [[0, 1], [2, 3], [4, 5, 6]]
    assert dense_parts(tf.range(7), (5, 2)) == [[0, 1, 2, 3, 4], [5, 6]]


def test_a_small_batch_goes_whole_to_every_part() -> None:
    assert dense_parts(tf.range(2), (1, 1, 1)) == [[0, 1], [0, 1], [0, 1]]
    assert dense_parts(tf.range(1), (5, 1)) == [[0], [0]]


def test_only_the_parts_asked_for() -> None:
    batch = tf.range(8)
    (second, first) = partition.cut_rows(batch, (1, 1, 1, 1), parts=(3, 0))
    assert second.numpy().tolist() == [6, 7]
    assert first.numpy().tolist() == [0, 1]
    assert partition.cut_rows(batch, (1,), parts=(0,))[0] is batch


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 40), parts=st.integers(1, 9))
def test_cut_part_gives_each_row_once_or_the_whole_batch(count: int, parts: int) -> None:
    pieces = [partition.cut_part(tf.range(count), parts, i).numpy().tolist() for i in range(parts)]
    if count < parts:
        assert pieces == [list(range(count))] * parts
    else:
        assert list(itertools.chain(*pieces)) == list(range(count))
        assert {len(piece) for piece in pieces} <= {count // parts, -(-count // parts)}


def test_cut_part_takes_a_tensor_for_the_part() -> None:
    cut = tf.function(lambda batch, i: partition.cut_part(batch, 3, i))
    assert cut(tf.range(9), tf.constant(1)).numpy().tolist() == [3, 4, 5]


def structure(count: int) -> dict:
    lengths = [i % 3 for i in range(count)]
    return {
        "dense": tf.reshape(tf.range(count * 2), [count, 2]),
        "text": tf.constant([f"row {i}" for i in range(count)]),
        "flag": tf.constant([i % 2 == 0 for i in range(count)]),
        "ragged": tf.RaggedTensor.from_row_lengths(tf.range(sum(lengths)), lengths),
        "ragged32": tf.RaggedTensor.from_row_lengths(
            tf.range(sum(lengths)), tf.constant(lengths, tf.int32)
        ),
        "sparse": tf.sparse.from_dense(np.eye(count, 4, dtype="float32")),
        "pair": Pair(tf.range(count), (tf.cast(tf.range(count), tf.uint8), None)),
    }


def to_lists(leaf: object) -> object:
    if leaf is None:
        return None
    dense = tf.sparse.to_dense(leaf) if isinstance(leaf, tf.SparseTensor) else leaf
    return dense.to_list() if isinstance(dense, tf.RaggedTensor) else dense.numpy().tolist()


@each("traced", [False, True])
@each("count", [1, 2, 3, 7])
def test_every_kind_of_tensor_is_cut_alike(count: int, traced: bool) -> None:
    shares = (1, 2, 1)
    batch = structure(count)
    cut = tf.function(partition.cut_rows) if traced else partition.cut_rows
    parts = cut(batch, shares)
    ends = offsets(count, list(shares)) if count >= 3 else None
    for i, part in enumerate(parts):
        tf.nest.assert_same_structure(part, batch)
        begin, end = (ends[i], ends[i + 1]) if ends else (0, count)
        for whole, cut_leaf in zip(tf.nest.flatten(batch), tf.nest.flatten(part), strict=True):
            if whole is None:
                assert cut_leaf is None
            else:
                assert to_lists(cut_leaf) == to_lists(whole)[begin:end]
                assert cut_leaf.dtype == whole.dtype


def test_a_sparse_part_still_knows_its_columns() -> None:
    @tf.function(input_signature=[tf.SparseTensorSpec([None, 5, None, 3], tf.float32)])
    def shapes(batch: tf.SparseTensor) -> tf.Tensor:
        for part in partition.cut_rows(batch, (1, 1)):
            assert part.shape.as_list() == [None, 5, None, 3]
        return tf.stack([part.dense_shape for part in partition.cut_rows(batch, (1, 1))])

    batch = tf.sparse.from_dense(np.ones((5, 5, 2, 3), "float32"))
    assert shapes(batch).numpy().tolist() == [[2, 5, 2, 3], [3, 5, 2, 3]]


def test_tensors_of_unknown_rank_are_cut() -> None:
    @tf.function(
        input_signature=[tf.TensorSpec(None, tf.int32), tf.SparseTensorSpec(None, tf.int32)]
    )
    def cut(dense: tf.Tensor, sparse: tf.SparseTensor) -> list:
        assert check_rows_agree((dense, sparse))
        first, second = partition.cut_rows((dense, sparse), (1, 1))
        return first[0], second[0], tf.sparse.to_dense(second[1])

    first, second, sparse = cut(tf.range(5), tf.sparse.from_dense(tf.eye(5, dtype=tf.int32)))
    assert first.numpy().tolist() == [0, 1]
    assert second.numpy().tolist() == [2, 3, 4]
    assert sparse.numpy().tolist() == np.eye(5)[2:].tolist()


def test_the_offsets_ride_on_the_pieces() -> None:
    batch = {"x": tf.zeros([2, 3]), "y": (tf.zeros([2]), None)}
    assert partition.marked_offsets(batch) is None
    marked = partition.mark_offsets(batch, partition.shard_offsets(7, (3, 1)))
    assert marked is batch
    for part in (batch, batch["x"], batch["y"], (batch["x"] + 1, batch["y"])):
        assert partition.marked_offsets(part).numpy().tolist() == [0, 5, 7]
    assert partition.marked_offsets(batch["x"] + 1) is None
    assert tf.function(partition.marked_offsets)(batch) is None


def worker(kind: str, index: int, devices: int, replicas: int, chief: bool) -> SimpleNamespace:
    cluster = {"worker": ["a", "b"]} | ({"chief": ["c"]} if chief else {})
    spec = SimpleNamespace(as_dict=lambda: cluster)
    return SimpleNamespace(
        num_replicas_in_sync=replicas,
        extended=SimpleNamespace(worker_devices=("CPU:0",) * devices),
        cluster_resolver=SimpleNamespace(task_type=kind, task_id=index, cluster_spec=lambda: spec),
    )


@each(
    ("strategy", "expected"),
    [
        (worker("worker", 0, devices=1, replicas=2, chief=False), (0,)),
        (worker("worker", 1, devices=1, replicas=2, chief=False), (1,)),
        (worker("worker", 1, devices=4, replicas=8, chief=False), (4, 5, 6, 7)),
        (worker("chief", 0, devices=2, replicas=6, chief=True), (0, 1)),
        (worker("worker", 0, devices=2, replicas=6, chief=True), (2, 3)),
        (worker("worker", 1, devices=2, replicas=6, chief=True), (4, 5)),
        (worker("worker", 0, devices=3, replicas=3, chief=False), (0, 1, 2)),
    ],
)
def test_each_worker_takes_the_parts_of_its_replicas(
    strategy: SimpleNamespace, expected: tuple[int, ...]
) -> None:
    assert local_replicas(strategy) == expected


def test_one_process_takes_all_parts() -> None:
    assert local_replicas(tf.distribute.get_strategy()) == (0,)
    assert local_replicas(tf.distribute.OneDeviceStrategy("CPU:1")) == (0,)
    assert local_replicas(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])) == (0, 1)


def test_a_tensor_is_counted_and_cut_where_it_is() -> None:
    """Asked for on a CPU, a number of rows must not bring all of a GPU's tensor there."""

    @tf.function(autograph=False)
    def cut(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.device("CPU:0"):
            count = count_rows(batch)
        return count, partition.cut_part(batch, 2, 1)

    graph = cut.get_concrete_function(tf.TensorSpec([None, 3])).graph
    batch = graph.inputs[0]
    touching = [op for op in graph.get_operations() if any(one is batch for one in op.inputs)]
    assert {op.type for op in touching} >= {"Shape", "StridedSlice"}
    assert {op.device for op in touching} == {""}
    # What is decided about the cut is decided without waiting for a GPU.
    divided = [op for op in graph.get_operations() if op.type == "FloorDiv"]
    assert {op.device for op in divided} == {"/device:CPU:0"}
    count, part = cut(tf.ones([5, 3]))
    assert (int(count), part.shape) == (5, (3, 3))
