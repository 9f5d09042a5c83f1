"""Two real workers: each row of each batch on one of them, small batches whole on both."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tensorflow as tf

from tfmultigpu.data.partition import row_offsets

SIZES = (5, 1, 2, 64, 3)


@pytest.fixture(scope="module")
def workers(results: Any) -> list[dict[str, Any]]:
    """What each worker printed, in the order of their replicas."""
    found: list[dict[str, Any]] = results("data")
    assert [result["replica"] for result in found] == [0, 1]
    return found


@pytest.mark.slow
def test_each_row_is_on_one_worker_and_none_is_empty(workers: list[dict[str, Any]]) -> None:
    for shares in (None, (3, 1)):
        start = 0
        read = [worker[f"{shares}"] for worker in workers]
        for size, first, second in zip(SIZES, *read, strict=True):
            rows = list(range(start, start + size))
            start += size
            if size == 1:
                assert first == [size, *rows]
                assert second == [size]
            else:
                middle = int(row_offsets(size, shares or (1, 1))[1])
                assert first == [size, *rows[:middle]]
                assert second == [size, *rows[middle:]]
                assert 0 < middle < size


@pytest.mark.slow
def test_a_second_pass_and_a_loop_in_a_function(workers: list[dict[str, Any]]) -> None:
    numbered = sum(range(sum(SIZES)))
    for worker in workers:
        assert worker["again"] is True
        assert worker["totals"] == [numbered, sum(SIZES)]


@pytest.mark.slow
def test_a_seeded_shuffle_is_the_same_on_both_workers_and_new_each_pass(
    workers: list[dict[str, Any]],
) -> None:
    first, second = (worker["shuffled"] for worker in workers)
    orders = []
    for ours, theirs in zip(first, second, strict=True):
        batches = [a[1:] + b[1:] for a, b in zip(ours, theirs, strict=True)]
        orders.append(list(itertools.chain(*batches)))
        assert sorted(orders[-1]) == list(range(20))
    assert orders[0] != orders[1]


@pytest.mark.slow
def test_each_worker_reads_and_preprocesses_its_own_rows(workers: list[dict[str, Any]]) -> None:
    assert workers[0]["read by number"] == [0, 1, 4, 5, 8]
    assert workers[1]["read by number"] == [2, 3, 6, 7, 9, 10]
    by_batch = zip(*(one["draws 7"] for one in workers), strict=True)
    drawn = [row for parts in by_batch for part in parts for row in part]
    mixed = tf.random.stateless_uniform([], tf.constant([7, 0], tf.int64), None, None, tf.int64)
    for number, (row, draw) in enumerate(drawn):
        assert row == number
        assert draw == float(tf.random.stateless_uniform([], tf.stack([mixed, row])))
    # Without a seed the workers agree on one.
    everything = {draw for one in workers for part in one["draws None"] for _, draw in part}
    assert len(everything) == 11
