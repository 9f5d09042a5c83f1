"""Shares of a global batch for replicas of different speed or memory."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from each import each
from hypothesis import given, strategies as st

import tfmultigpu as tmg
from tfmultigpu.data.shares import check_shares, integer_shares

capacity = st.one_of(st.integers(1, 10**12), st.floats(1e-3, 1e12))
capacities_of = st.lists(capacity, min_size=1, max_size=8)
rows_of = st.integers(1, 5000)


def quotas(rows: int, capacities: list[float]) -> list[Fraction]:
    exact = [Fraction(c) for c in capacities]
    return [rows * c / sum(exact) for c in exact]


@given(rows=rows_of, capacities=capacities_of)
def test_the_parts_sum_to_the_batch(rows: int, capacities: list[float]) -> None:
    parts = tmg.plan_shares(rows, capacities)
    assert sum(parts) == rows
    assert len(parts) == len(capacities)
    assert all(isinstance(part, int) and part >= 0 for part in parts)


@given(rows=rows_of, capacities=capacities_of)
def test_no_replica_is_left_empty_while_rows_last(rows: int, capacities: list[float]) -> None:
    parts = tmg.plan_shares(rows, capacities)
    assert sum(part > 0 for part in parts) == min(rows, len(parts))
    assert max(parts) == 1 or 0 not in parts


@given(rows=rows_of, capacities=capacities_of)
def test_the_parts_are_proportional_within_one_row(rows: int, capacities: list[float]) -> None:
    exact = quotas(rows, capacities)
    parts = tmg.plan_shares(rows, capacities)
    if min(exact) >= 1:
        assert all(abs(part - quota) < 1 for part, quota in zip(parts, exact, strict=True))
    else:
        # A replica that would have had nothing gets its row from the others.
        assert all(part < quota + 1 for part, quota in zip(parts, exact, strict=True) if part > 1)


@given(rows=rows_of, capacities=capacities_of, seed=st.integers(0, 99))
def test_the_order_of_the_replicas_does_not_matter(
    rows: int, capacities: list[float], seed: int
) -> None:
    parts = tmg.plan_shares(rows, capacities)
    order = list(range(len(capacities)))
    random.Random(seed).shuffle(order)
    permuted = tmg.plan_shares(rows, [capacities[i] for i in order])
    # Replicas of equal capacity may swap; with different ones each keeps its part.
    expected = sorted(zip(capacities, parts, strict=True))
    assert sorted(zip([capacities[i] for i in order], permuted, strict=True)) == expected


@given(rows=rows_of, capacities=capacities_of)
def test_more_capacity_never_means_fewer_rows(rows: int, capacities: list[float]) -> None:
    parts = tmg.plan_shares(rows, capacities)
    ordered = sorted(zip(capacities, parts, strict=True))
    assert [part for _, part in ordered] == sorted(parts)


@given(rows=rows_of, count=st.integers(1, 8))
def test_equal_capacities_differ_by_one_row_and_the_first_get_it(rows: int, count: int) -> None:
    parts = tmg.plan_shares(rows, [7.5] * count)
    assert max(parts) - min(parts) <= 1
    assert list(parts) == sorted(parts, reverse=True)


@each(
    ("rows", "capacities", "expected"),
    [
        (64, (24e9, 8e9), (48, 16)),
        (10, (1, 1, 1), (4, 3, 3)),
        (3, (1, 1000, 1), (1, 1, 1)),
        (2, (1, 1000, 1), (1, 1, 0)),
        (1, (1, 2), (0, 1)),
        (10, (0.1, 0.2, 0.7), (1, 2, 7)),
        (np.int64(64), np.array([24, 8]), (48, 16)),
        (64, np.array([0.75, 0.25], np.float32), (48, 16)),
        (5, [25434521600, 8589934592], (4, 1)),
    ],
)
def test_known_plans(rows: int, capacities: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert tmg.plan_shares(rows, capacities) == expected


@each("rows", [0, -1, 1.5])
def test_a_batch_is_a_whole_number_of_rows(rows: float) -> None:
    with pytest.raises(tmg.errors.DataError) as caught:
        tmg.plan_shares(rows, (1, 1))
    assert str(caught.value) == (
        f"global_batch_size must be a whole number, at least 1. Received: global_batch_size={rows}."
    )


@each(
    ("shares", "replicas", "text"),
    [
        ((), None, "There are no shares. Give one positive number per replica. Received: ()."),
        (
            (1, 1),
            3,
            "There must be one share per replica. Received: 2 shares (1, 1) for 3 replicas.",
        ),
        (
            (1, -2),
            2,
            "A share is a positive, finite number. Received: shares[1]=-2 in (1, -2).",
        ),
        (
            (float("nan"), 1),
            2,
            "A share is a positive, finite number. Received: shares[0]=nan in (nan, 1).",
        ),
        (
            (1, float("inf")),
            2,
            "A share is a positive, finite number. Received: shares[1]=inf in (1, inf).",
        ),
        (
            ("big", 1),
            2,
            "A share is a positive, finite number. Received: shares[0]='big' in ('big', 1).",
        ),
        (
            (3, 0),
            2,
            "Replica 1 would get no examples and still slow down every step. Received: "
            "shares=(3, 0). Leave its device out of the strategy instead: "
            "tmg.create_strategy(devices=[...]) with the other devices.",
        ),
    ],
)
def test_shares_that_cannot_be_given_out(shares: tuple, replicas: int | None, text: str) -> None:
    with pytest.raises(tmg.errors.DataError) as caught:
        check_shares(shares, replicas)
    assert str(caught.value) == text
    with pytest.raises(tmg.errors.DataError):
        tmg.plan_shares(64, shares if shares != (1, 1) else (1, 0))


@each(
    ("shares", "expected"),
    [
        ((3, 1), (3, 1)),
        ((48, 16), (3, 1)),
        ((0.5, 0.5), (2**19, 2**19)),
        ((24e9, 8e9), (3, 1)),
        ((2.0,), (1,)),
    ],
)
def test_integer_shares(shares: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert integer_shares(shares) == expected


@given(capacities=capacities_of)
def test_integer_shares_keep_the_proportion(capacities: list[float]) -> None:
    whole = integer_shares(capacities)
    total = sum(capacities)
    # Multiplied by a number of rows they stay within 64 bits.
    assert 0 < sum(whole) <= 2**20
    for share, given_share in zip(whole, capacities, strict=True):
        assert share > 0
        assert abs(share / sum(whole) - given_share / total) <= 9 / 2**20


# Limits -------------------------------------------------------------------------------------------


@st.composite
def limited(draw: st.DrawFn) -> tuple[int, list[float], int, list[float], int]:
    """Rows, capacities, minimum, maximum and multiple that can be met."""
    capacities = draw(capacities_of)
    unit, minimum = draw(st.integers(1, 16)), draw(st.integers(1, 40))
    low = -(-minimum // unit) * unit
    high = [draw(st.one_of(st.just(np.inf), st.integers(low, 3000))) for _ in capacities]
    most = sum(limit // unit * unit if limit < np.inf else 5000 for limit in high)
    return (
        draw(st.integers(low * len(high), max(int(most), low * len(high)))),
        capacities,
        minimum,
        high,
        unit,
    )


@given(limited())
def test_limits_are_kept_and_every_row_is_given_out(
    problem: tuple[int, list[float], int, list[float], int],
) -> None:
    rows, capacities, minimum, maximum, unit = problem
    rows -= rows % unit  # what is left over is looked at below
    parts = tmg.plan_shares(rows, capacities, minimum=minimum, maximum=maximum, multiple_of=unit)
    assert sum(parts) == rows
    assert all(part % unit == 0 for part in parts)
    assert all(minimum <= part <= limit for part, limit in zip(parts, maximum, strict=True))
    # Those that no limit holds are in proportion to each other.
    free = [
        (part, Fraction(capacity))
        for part, capacity, limit in zip(parts, capacities, maximum, strict=True)
        if part >= minimum + unit and part <= limit - unit
    ]
    for one, capacity in free:
        for other, against in free:
            assert abs(one - other * capacity / against) <= unit * (1 + capacity / against)


@each(
    ("rows", "capacities", "limits", "expected"),
    [
        (64, (3, 1), {"maximum": (40, 100)}, (40, 24)),
        (64, (3, 1), {"maximum": (np.inf, 10)}, (54, 10)),
        (64, (3, 1), {"maximum": (40.9, 24.9)}, (40, 24)),
        (64, (3, 1), {"maximum": 40}, (40, 24)),
        (64, (100, 1, 1), {"minimum": 8}, (48, 8, 8)),
        (64, (3, 1), {"multiple_of": 8}, (48, 16)),
        (100, (2, 1), {"multiple_of": 8}, (68, 32)),
        (100, (1, 2), {"multiple_of": 8}, (32, 68)),
        (24, (100, 1, 1), {"multiple_of": 8}, (8, 8, 8)),
        (9, (2, 1), {"multiple_of": 4, "maximum": (4, 8)}, (4, 5)),
        (22, (3, 2, 2), {"multiple_of": 4, "maximum": (13, 6, 7)}, (12, 6, 4)),
        (90, (5, 3, 1), {"maximum": (30, 30, 30)}, (30, 30, 30)),
        (90, (5, 3, 1), {"maximum": (30, 90, 90), "minimum": 10}, (30, 45, 15)),
    ],
)
def test_known_plans_within_limits(
    rows: int, capacities: tuple, limits: dict, expected: tuple[int, ...]
) -> None:
    assert tmg.plan_shares(rows, capacities, **limits) == expected


@given(
    rows=st.integers(1, 20),
    maximum=st.lists(st.integers(1, 9), min_size=2, max_size=3),
    minimum=st.integers(1, 4),
    unit=st.integers(2, 4),
    capacities=st.permutations((3.0, 2.0, 1.0)),
)
def test_what_can_be_divided_is_divided(
    rows: int, maximum: list[int], minimum: int, unit: int, capacities: list[float]
) -> None:
    rest = rows % unit
    shares = [
        [n for n in range(minimum, most + 1) if n % unit in (0, rest) and n - n % unit >= minimum]
        for most in maximum
    ]
    plans = [
        plan
        for plan in itertools.product(*shares)
        if sum(plan) == rows and sum(n % unit > 0 for n in plan) == (rest > 0)
    ]
    limits = {"minimum": minimum, "maximum": maximum, "multiple_of": unit}
    if plans:
        assert tmg.plan_shares(rows, capacities[: len(maximum)], **limits) in plans
    else:
        with pytest.raises(tmg.errors.DataError, match="cannot be divided within the limits"):
            tmg.plan_shares(rows, capacities[: len(maximum)], **limits)


@each(
    ("rows", "limits", "text"),
    [
        (
            64,
            {"maximum": (40, 20)},
            "cannot be divided within the limits. Received: 64 examples for 2",
        ),
        (64, {"minimum": 33}, "minimum=33"),
        (10, {"multiple_of": 8}, "multiple_of=8"),
        (64, {"maximum": (40,)}, "There must be one maximum per replica."),
        (64, {"maximum": (40, 0.5)}, "maximum[1]=0.5. Leave its device out of the strategy"),
        (64, {"maximum": (40, float("nan"))}, "maximum[1]=nan"),
        (64, {"minimum": 0}, "minimum must be a whole number, at least 1. Received: minimum=0."),
        (64, {"multiple_of": 1.5}, "multiple_of=1.5."),
    ],
)
def test_limits_that_cannot_be_met(rows: int, limits: dict, text: str) -> None:
    with pytest.raises(tmg.errors.DataError) as caught:
        tmg.plan_shares(rows, (1, 1), **limits)
    assert text in str(caught.value)


@each("limits", [{"minimum": 0}, {"multiple_of": 1.5}])
def test_limits_are_whole_numbers(limits: dict) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(limits))} must be a whole"):
        tmg.plan_shares(64, (1, 1), **limits)


# Micro-batches ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(1, 5000)), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_the_least_micro_batches_that_each_replica_can_hold(
    replicas: list[tuple[int, float]], left: float
) -> None:
    shares = [share for share, _ in replicas]
    limits = [limit for _, limit in replicas]
    counts = tmg.data.plan_micro_batches(shares, limits)
    for share, limit, count in zip(shares, limits, counts, strict=True):
        assert -(-share // count) <= limit
        assert count == 1 or -(-share // (count - 1)) > limit
        # A smaller shard is cut into as many parts, but none of no rows.
        rows = max(1, int(left * share))
        assert -(-rows // min(count, rows)) <= limit


@each(
    ("shares", "maximum", "expected"),
    [
        ((192, 64), (256, 24), (1, 3)),
        ((192, 64), 24, (8, 3)),
        ((192, 64), (np.inf, 24.9), (1, 3)),
        (tmg.plan_shares(512, (80e9, 12e9)), (445, 10), (1, 7)),
        (np.array([4, 2]), np.array([1, 1]), (4, 2)),
    ],
)
def test_known_numbers_of_micro_batches(shares, maximum, expected) -> None:
    counts = tmg.data.plan_micro_batches(shares, maximum)
    assert counts == expected
    assert all(type(count) is int for count in counts)


@each(
    ("shares", "maximum", "text"),
    [
        ((64, 0), 8, "tmg.create_strategy(devices=[...]) with the other devices."),
        ((64, 0.5), 8, "shares must be whole numbers, at least 1. Received: a share of 0.5."),
        ((64, 8), (8, 0.5), "A replica must hold at least one example. Received: maximum[1]=0.5."),
        ((64, 8), (8, 8, 8), "There must be one maximum per replica."),
        ((), 8, "There are no shares."),
    ],
)
def test_micro_batches_that_cannot_be_planned(shares, maximum, text) -> None:
    with pytest.raises(tmg.errors.DataError) as caught:
        tmg.data.plan_micro_batches(shares, maximum)
    assert text in str(caught.value)


def test_shares_that_are_no_sequence() -> None:
    for wrong in (None, 3):
        for call in (tmg.plan_shares, lambda _, one: tmg.data.plan_micro_batches(one, 5)):
            with pytest.raises(tmg.errors.DataError, match=rf"per replica\. Received: {wrong}\."):
                call(64, wrong)
