"""Numbers and rows that workers tell each other."""

from __future__ import annotations

import numpy as np
import pytest
from one_device import strategy_of

from tfmultigpu.errors import ClusterError
from tfmultigpu.strategies.worker_exchange import WorkerExchange, _gather_of


def test_numbers_of_nearly_any_count_share_one_trace() -> None:
    exchange = WorkerExchange(strategy_of(2))
    exchange.workers, exchange._local = 2, 1  # As if each replica were a worker.
    for count in (0, 1, 3, 8, 9, 16):
        numbers = [7 - i for i in range(count)]
        told = exchange("a test", numbers)
        assert told.dtype == np.int64
        assert told.tolist() == [numbers, numbers]
    floats = [0.1, -1e300, float("inf")]
    assert exchange.floats("a test", floats).tolist() == [floats, floats]
    # Of up to 7 numbers, and of up to 15 and 31.
    assert _gather_of(exchange.strategy).experimental_get_tracing_count() == 3


def test_rows_of_all_replicas_are_gathered_in_order_and_traced_once() -> None:
    exchange = WorkerExchange(strategy_of(3))
    exchange.workers = 3  # As if each replica were a worker.
    before = _gather_of(exchange.strategy).experimental_get_tracing_count()
    for dtype in ("float32", "bool", "uint8"):
        for _ in range(3):
            values = iter([[[1, 0]], [[0, 1]], [[1, 1]]])
            rows = exchange.rows(lambda values=values, dtype=dtype: np.array(next(values), dtype))
            assert rows.dtype == dtype
            assert rows.tolist() == np.array([[1, 0], [0, 1], [1, 1]], dtype).tolist()
    assert _gather_of(exchange.strategy).experimental_get_tracing_count() == before + 3


def test_one_process_gathers_without_tensorflow() -> None:
    strategy = strategy_of.__wrapped__(2)
    values = iter([[[1, 0]], [[0, 1], [1, 1]]])
    rows = WorkerExchange(strategy).rows(lambda: np.array(next(values), "uint8"))
    assert rows.dtype == "uint8"
    assert rows.tolist() == [[1, 0], [0, 1], [1, 1]]


def test_another_count_or_another_purpose_is_another_call(monkeypatch) -> None:
    exchange = WorkerExchange(strategy_of(2))
    exchange.workers, exchange._local = 2, 1
    change: dict[int, int] = {}

    def rows(own):
        other = own().copy()
        for place, value in change.items():
            other[0, place] = value
        return np.concatenate([own(), other])

    monkeypatch.setattr(exchange, "rows", rows)
    change[2] = 5
    assert exchange("a test", [4]).tolist() == [[4], [5]]
    for place in (0, 1):  # How many numbers, and what for.
        change = {place: 1}
        with pytest.raises(ClusterError, match=r"and workers \[1\] were elsewhere"):
            exchange("a test", [4, 5, 6])
