"""Unequal devices get unequal parts of each batch: exact, proportional, none empty."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st
from law.pair import strategy_of

import tfmultigpu as tmg

DRAWN = {"max_examples": 200}
CAPACITIES = st.lists(
    st.integers(1, 10**12) | st.floats(1e-3, 1e9, allow_nan=False), min_size=1, max_size=9
)


# Fails if a share is rounded by itself (they no longer sum to the batch), is more than one example
# from its proportion though none had to be lifted, is empty while there are enough, or if more
# capacity gets fewer examples.
@settings(**DRAWN)
@given(batch=st.integers(1, 5000), capacities=CAPACITIES)
def test_shares_sum_exactly_and_are_proportional(batch: int, capacities: list[float]) -> None:
    shares = tmg.plan_shares(batch, capacities)
    assert sum(shares) == batch
    assert all(isinstance(share, int) for share in shares)
    assert min(shares) >= (1 if batch >= len(capacities) else 0)
    assert max(shares) <= max(1, batch)
    exact = [Fraction(capacity) for capacity in capacities]
    quotas = [batch * capacity / sum(exact) for capacity in exact]
    if min(quotas) >= 1:
        assert all(abs(share - quota) < 1 for share, quota in zip(shares, quotas, strict=True))
    for capacity, share in zip(exact, shares, strict=True):
        for other, less in zip(exact, shares, strict=True):
            assert capacity <= other or share >= less


# Fails if the place in the list decides: a device would train otherwise under another number.
@settings(**DRAWN)
@given(batch=st.integers(1, 500), capacities=CAPACITIES, data=st.data())
def test_shares_do_not_depend_on_the_order(
    batch: int, capacities: list[float], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(capacities))))
    shares = tmg.plan_shares(batch, capacities)
    mixed = tmg.plan_shares(batch, [capacities[i] for i in order])
    # Of equal capacities it is the earlier one that gets more.
    pairs = sorted(zip(capacities, shares, strict=True))
    assert sorted(zip([capacities[i] for i in order], mixed, strict=True)) == pairs


# Fails if a refusal becomes a guess.
@pytest.mark.parametrize(
    ("batch", "capacities", "said"),
    [
        (0, (1, 1), "0"),
        (2.5, (1, 1), "2.5"),
        (8, (), "()"),
        (8, (1, 0), "0"),
        (8, (1, -1), "-1"),
        (8, (1, float("nan")), "nan"),
        (8, (1, float("inf")), "inf"),
        (8, 3, "3"),
    ],
)
def test_what_cannot_be_divided_is_refused(batch: Any, capacities: Any, said: str) -> None:
    with pytest.raises((tmg.errors.TfMultiGpuError, TypeError)) as caught:
        tmg.plan_shares(batch, capacities)
    assert said in str(caught.value)


# Fails if a capacity is guessed where the memory of a device is unknown, as that of a CPU is.
@pytest.mark.parametrize("replicas", [1, 2])
def test_unknown_memory_is_told(replicas: int) -> None:
    with pytest.raises(tmg.errors.TfMultiGpuError, match="CPU:0"):
        tmg.memory_capacities(strategy_of(replicas))


def rows_by_replica(batch: Any, strategy: tf.distribute.Strategy) -> list[list[float]]:
    rows = strategy.run(lambda shard: shard, args=(batch,))
    return [one.numpy().tolist() for one in strategy.experimental_local_results(rows)]


# Fails if shares go to the wrong replica, are rounded to nothing for a small one, or give other
# rows than those of plan_shares for the batch they were planned for.
@pytest.mark.parametrize(
    ("capacities", "batch"), [((3, 1), 8), ((1, 2, 1), 9), ((100, 1, 1), 7), ((2.5, 1.5), 5)]
)
def test_replicas_get_their_shares_of_each_batch(capacities: Any, batch: int) -> None:
    strategy = strategy_of(len(capacities))
    shares = tmg.plan_shares(batch, capacities)
    rows = np.arange(2.0 * batch + len(capacities))
    for given_shares in (capacities, shares):
        data = tmg.distribute_dataset(rows, strategy, batch_size=batch, shares=given_shares)
        *whole, last = [rows_by_replica(one, strategy) for one in data]
        for cut in whole:
            assert tuple(map(len, cut)) == shares
        assert tuple(map(len, last)) == (1,) * len(capacities)
        np.testing.assert_array_equal(np.concatenate([*itertools.chain(*whole, last)]), rows)


# Fails if a replica does not know which rows of the global batch it has and what each counts.
@pytest.mark.parametrize("shares", [(3, 1), (1, 1, 2)])
def test_a_replica_knows_its_rows(shares: Any) -> None:
    strategy = strategy_of(len(shares))
    data = tmg.distribute_dataset(np.arange(9.0), strategy, batch_size=8, shares=shares)

    def replica(shard: Any) -> Any:
        rows = tmg.rows()
        return tf.stack([tf.cast(one, tf.float64) for one in (rows.first, rows.count, rows.total)])

    found = []
    for batch in data:
        local = strategy.experimental_local_results(strategy.run(replica, args=(batch,)))
        found.append([one.numpy().astype(int).tolist() for one in local])
    ends = np.cumsum([0, *tmg.plan_shares(8, shares)]).tolist()
    assert found[0] == [[a, b - a, 8] for a, b in itertools.pairwise(ends)]
