"""Batches that N does not divide, with every feature on at once: the answer of one device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from law.model import LARGEST, batches_of
from law.pair import Row, covering, pair_of

DESIGN = covering()
# Fails if any quantity of a step is divided before it is added over parts, replicas or steps, is
# counted once for each of them, or reads another row, draw or state than one device does.
ROWS = {
    "synchronized norm": Row(2, norm=True, options=(("loss_scale", 1024.0),)),
    "shares": Row(3, shares=(1, 5, 2), options=(("micro_batches", 2),)),
    "owners": Row(3, DESIGN[0], options=(("shard_update", True),)),
    "parts of each replica": Row(2, DESIGN[4], options=(("micro_batches", (1, 4)),)),
    "sharded variables": Row(3, DESIGN[7], sharded=True, options=(("micro_batches", 2),)),
    "one replica": Row(1, DESIGN[1], options=(("micro_batches", 3),)),
}
MORE = "owners", "one replica"  # The proof has both in other promises.
WEIGHTS = st.sampled_from([0.0, 0.0, 1e-6, 1e-3, 0.25, 1.0, 1.0, 3.0, 1e3])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.more if name in MORE else ()) for name in ROWS],
)
def test_any_sizes_weights_and_masks(name: str) -> None:
    row = ROWS[name]

    @settings(max_examples=8, suppress_health_check=list(HealthCheck))
    @given(
        sizes=st.lists(st.integers(1, LARGEST), min_size=1, max_size=4),
        weights=st.lists(WEIGHTS, min_size=1, max_size=10),
        hidden=st.lists(st.integers(0, 4), max_size=3),
        steps=st.integers(1, 5),
    )
    def hold(sizes: Any, weights: Any, hidden: Any, steps: int) -> None:
        pair_of(row).hold(batches_of(sizes, weights, hidden, row.on), steps)

    pair_of(row).hold(batches_of([7, 1, 2, 5], [0.0, 1.0, 3.0], [1], row.on), 3)
    hold()
