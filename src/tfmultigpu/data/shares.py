"""Shares of a global batch for replicas of different speed or memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from numbers import Integral
from typing import Any

from tfmultigpu.arguments import brief, check_count
from tfmultigpu.errors import DataError
from tfmultigpu.lists import pick

_PARTS = 2**20  # Fractional shares are rounded to this many parts.


def plan_shares(global_batch_size: int, capacities: Sequence[float]) -> tuple[int, ...]:
    """Divides the examples of a global batch over replicas in proportion to their capacities.

    It uses the method of largest remainders (Hamilton): every replica gets its proportional share,
    rounded down, and the examples left over go to the largest fractions. Every replica gets at
    least one example while there are enough.

    Args:
        global_batch_size: Examples of one global batch, at least 1.
        capacities: One positive number per replica, in any unit: bytes free
            (``memory_capacities``), examples per second (``measured_capacities``).

    Returns:
        Examples per replica, in the order of ``capacities``; they sum to ``global_batch_size``.
        Shares of equal capacities differ by at most one example; the earlier replica gets more.

    Raises:
        DataError: A capacity is not a positive finite number, or the batch has no examples.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.data.plan_shares(64, (24e9, 8e9))
        (48, 16)
    """
    rows = check_count("global_batch_size", global_batch_size, error=DataError)
    exact = list(map(_exactly, _checked(capacities)))
    replicas = range(len(exact))
    if rows < len(exact):
        largest = sorted(replicas, key=lambda i: (-exact[i], i))[:rows]
        return tuple(int(i in largest) for i in replicas)
    parts: dict[int, int] = {}  # Replicas whose proportional share is less than one example.
    while True:
        others = [i for i in replicas if i not in parts]
        total = sum(pick(exact, others))
        quotas = {i: (rows - len(parts)) * exact[i] / total for i in others}
        small = [i for i in others if quotas[i] < 1]
        if not small:
            break
        parts.update(dict.fromkeys(small, 1))
    for i in others:
        parts[i] = int(quotas[i])
    by_remainder = sorted(others, key=lambda i: (parts[i] - quotas[i], -exact[i], i))
    for i in by_remainder[: rows - sum(parts.values())]:
        parts[i] += 1
    return tuple(pick(parts, replicas))


def _exactly(number: float) -> Fraction:
    if isinstance(number, Integral):
        return Fraction(int(number))
    return Fraction(float(number))


def replica_shares(shares: Sequence[float] | None, replicas: int) -> tuple[int, ...]:
    """Returns the relative share of each replica as small integers; None means equal shares."""
    if shares is None:
        return (1,) * replicas
    shares = _checked(shares, replicas)
    if all(float(share).is_integer() for share in shares) and sum(shares) <= _PARTS:
        return tuple(map(int, shares))
    return plan_shares(_PARTS, shares)


def _checked(shares: Any, replicas: int | None = None) -> tuple[float, ...]:
    """Checks that there is one positive finite number per replica."""
    numbers: tuple[float, ...] = ()
    if isinstance(shares, Iterable):
        numbers = tuple(shares)
    try:
        is_right = numbers and all(math.isfinite(share) and share > 0 for share in numbers)
    except (TypeError, OverflowError):
        is_right = False
    if not is_right or len(numbers) != (replicas or len(numbers)):
        wanted = "" if replicas is None else f", for {replicas} replicas"
        raise DataError(
            "Shares are one positive, finite number per replica.",
            f"{brief(shares)}, {len(numbers)} numbers{wanted}",
            "A replica without examples would slow down every step: leave its device out with "
            "tmg.create_strategy(devices=[...]).",
        )
    return numbers
