"""Shares of a global batch: what the promises leave out. The rest: promises/test_shares.py."""

from __future__ import annotations

import numpy as np
import pytest
from each import each
from hypothesis import given, strategies as st

import tfmultigpu as tmg
from tfmultigpu.data.shares import replica_shares


@each(
    ("rows", "capacities", "expected"),
    [
        (64, (24e9, 8e9), (48, 16)),
        (10, (1, 1, 1), (4, 3, 3)),
        (2, (1, 1000, 1), (1, 1, 0)),
        (np.int64(64), np.array([24, 8]), (48, 16)),
        (5, [25434521600, 8589934592], (4, 1)),
    ],
)
def test_known_plans(rows: int, capacities: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert tmg.plan_shares(rows, capacities) == expected


@each(
    ("shares", "replicas", "text"),
    [
        (
            (),
            2,
            "positive, finite number per replica. Received: (), 0 numbers, for 2 replicas.",
        ),
        ((1, 1), 3, "Received: (1, 1), 2 numbers, for 3 replicas."),
        (3, 1, "Received: 3, 0 numbers, for 1 replicas."),
        ((float("nan"), 1), 2, "Received: (nan, 1), 2 numbers"),
        (("big", 1), 2, "Received: ('big', 1), 2 numbers"),
        ((3, 0), 2, "A replica without examples would slow down every step: leave its device out"),
    ],
)
def test_shares_that_cannot_be_given_out(shares: tuple, replicas: int, text: str) -> None:
    with pytest.raises(tmg.errors.DataError) as caught:
        replica_shares(shares, replicas)
    assert text in str(caught.value)


@given(st.lists(st.one_of(st.integers(1, 10**12), st.floats(1e-3, 1e12)), min_size=1, max_size=8))
def test_integers_keep_the_proportion(capacities: list[float]) -> None:
    whole = replica_shares(capacities, len(capacities))
    # Multiplied by a number of rows they stay within 64 bits.
    assert 0 < sum(whole) <= 2**20
    for share, capacity in zip(whole, capacities, strict=True):
        assert share > 0
        assert abs(share / sum(whole) - capacity / sum(capacities)) <= 9 / 2**20
