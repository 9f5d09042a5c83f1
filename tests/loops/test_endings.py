"""Processes end after loops of every kind, on one replica and on three; a promise has two."""

from __future__ import annotations

import pytest
from law.endings import assert_ends


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_process_ends_after_loops_of_every_kind(replicas: int) -> None:
    assert_ends(replicas)
