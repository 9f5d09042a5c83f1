"""Which of several devices a large variable goes to, or which rows of a table; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tfmultigpu.data.shares import plan_shares

# Bytes from which a variable is large.
AT_LEAST = 2**16
# Bytes from which a table is divided, if nobody knows how much memory there is.
LARGE_TABLE = 2**26


class Table(Protocol):
    """A weight that is to be created, or is there already."""

    @property
    def size(self) -> int:
        """The bytes of the weight."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; of a table rows and width."""

    @property
    def is_table(self) -> bool:
        """Whether its rows may be divided over the devices."""


def next_device(loads: Sequence[int], memory: Sequence[float] | None, size: int) -> int:
    """Returns the number of the device that has the smallest part of its memory in use then."""
    sizes = memory or (1.0,) * len(loads)
    used = [(load + size) / of for load, of in zip(loads, sizes, strict=True)]
    return used.index(min(used))


def rows_of_devices(
    table: Table, loads: Sequence[int], memory: Sequence[float] | None
) -> list[int] | None:
    """Returns how many rows each device gets; None if one device takes the whole table.

    A table is divided if it would take more than half of what any device has left, or, if that is
    not known, from 64 MiB on. Then all devices end with the same part of their memory in use, if
    that can be.
    """
    free = np.subtract(memory, loads) if memory else None
    enough = LARGE_TABLE if free is None else max(free) / 2
    if not table.is_table or table.size <= enough or table.shape[0] < len(loads):
        return None
    sizes = np.asarray(memory or [1.0] * len(loads), "float64")
    used = np.asarray(loads, "float64")
    takes = np.ones(len(loads), bool)
    while True:
        # Where the devices that take rows would all end.
        level = (table.size + used[takes].sum()) / sizes[takes].sum()
        shares = np.where(takes, level * sizes - used, 0.0)
        if (shares >= 0).all():
            break
        takes &= shares > 0
    chosen = np.flatnonzero(shares > 0)
    rows = [0] * len(loads)
    planned = plan_shares(table.shape[0], [float(share) for share in shares[chosen]])
    for number, count in zip(chosen, planned, strict=True):
        rows[number] = count
    return rows
