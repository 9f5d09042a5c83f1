"""Cutting a batch by rows: each row in one part, no part empty, small batches whole."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st

import tfmultigpu as tmg
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import check_rows_agree, count_rows
from tfmultigpu.data.shares import replica_shares
from tfmultigpu.strategies.topology import local_replicas

shares_of = st.lists(st.integers(1, 60), min_size=1, max_size=8)


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


@pytest.mark.parametrize(
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
    ids=str,
)
def test_known_cuts(count: int, shares: tuple[int, ...], expected: list[int]) -> None:
    assert np.diff(offsets(count, shares)).tolist() == expected
    traced = tf.function(lambda n: partition.row_offsets(n, shares))
    assert np.diff(traced(tf.constant(count))).tolist() == expected


@given(st.lists(st.one_of(st.integers(1, 10**12), st.floats(1e-3, 1e12)), min_size=1, max_size=8))
def test_shares_as_integers_keep_the_proportion(capacities: list[float]) -> None:
    whole = replica_shares(capacities, len(capacities))
    # Multiplied by a number of rows they stay within 64 bits.
    assert 0 < sum(whole) <= 2**20
    for share, capacity in zip(whole, capacities, strict=True):
        assert share > 0
        assert abs(share / sum(whole) - capacity / sum(capacities)) <= 9 / 2**20


# Other refusals: tests/promises/test_shares.py and test_bad_input.py.
def test_shares_of_numpy_and_shares_that_are_no_numbers() -> None:
    assert tmg.plan_shares(np.int64(64), np.array([24, 8])) == (48, 16)
    for shares in (("big", 1), (float("nan"), 1)):
        with pytest.raises(
            tmg.errors.DataError, match=rf"Received: \({shares[0]!r}, 1\), 2 numbers"
        ):
            replica_shares(shares, 2)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 40), parts=st.integers(1, 9))
def test_cut_part_gives_each_row_once_or_the_whole_batch(count: int, parts: int) -> None:
    pieces = [partition.cut_part(tf.range(count), parts, i).numpy().tolist() for i in range(parts)]
    if count < parts:
        assert pieces == [list(range(count))] * parts
    else:
        assert list(itertools.chain(*pieces)) == list(range(count))
        assert {len(piece) for piece in pieces} <= {count // parts, -(-count // parts)}


def halves(batch: Any) -> list[Any]:
    offsets = partition.shard_offsets(count_rows(batch), (1, 1))
    return partition.cut_rows(batch, offsets, (0, 1))


def test_a_sparse_part_still_knows_its_columns() -> None:
    @tf.function(input_signature=[tf.SparseTensorSpec([None, 5, None, 3], tf.float32)])
    def shapes(batch: tf.SparseTensor) -> tf.Tensor:
        for part in halves(batch):
            assert part.shape.as_list() == [None, 5, None, 3]
        return tf.stack([part.dense_shape for part in halves(batch)])

    batch = tf.sparse.from_dense(np.ones((5, 5, 2, 3), "float32"))
    assert shapes(batch).numpy().tolist() == [[2, 5, 2, 3], [3, 5, 2, 3]]


def test_tensors_of_unknown_rank_are_cut() -> None:
    @tf.function(
        input_signature=[tf.TensorSpec(None, tf.int32), tf.SparseTensorSpec(None, tf.int32)]
    )
    def cut(dense: tf.Tensor, sparse: tf.SparseTensor) -> list:
        assert check_rows_agree((dense, sparse))
        first, second = halves((dense, sparse))
        return first[0], second[0], tf.sparse.to_dense(second[1])

    first, second, sparse = cut(tf.range(5), tf.sparse.from_dense(tf.eye(5, dtype=tf.int32)))
    assert first.numpy().tolist() == [0, 1]
    assert second.numpy().tolist() == [2, 3, 4]
    assert sparse.numpy().tolist() == np.eye(5)[2:].tolist()


def worker(kind: str, index: int, devices: int, replicas: int, chief: bool) -> SimpleNamespace:
    cluster = {"worker": ["a", "b"]} | ({"chief": ["c"]} if chief else {})
    spec = SimpleNamespace(as_dict=lambda: cluster)
    return SimpleNamespace(
        num_replicas_in_sync=replicas,
        extended=SimpleNamespace(worker_devices=("CPU:0",) * devices),
        cluster_resolver=SimpleNamespace(task_type=kind, task_id=index, cluster_spec=lambda: spec),
    )


@pytest.mark.parametrize(
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
