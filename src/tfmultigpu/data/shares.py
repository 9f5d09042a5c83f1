"""Shares of a global batch for replicas of different speed or memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import numpy as np

from tfmultigpu.arguments import check_count
from tfmultigpu.errors import DataError

__all__ = ["check_shares", "integer_shares", "plan_micro_batches", "plan_shares", "replica_shares"]

_PARTS = 2**20  # Fractional shares are rounded to this many parts.


def plan_shares(
    global_batch_size: int,
    capacities: Sequence[float],
    *,
    minimum: int = 1,
    maximum: float | Sequence[float] | None = None,
    multiple_of: int = 1,
) -> tuple[int, ...]:
    """Divides the examples of a global batch over replicas in proportion to their capacities.

    It uses the method of largest remainders (Hamilton's method; see
    https://en.wikipedia.org/wiki/Quota_method). Every replica gets its proportional share, rounded
    down. The examples left over go to the largest fractions. Every replica gets at least one
    example while there are enough. A share below its minimum or above its maximum is set to that
    limit, and the other replicas divide the rest in proportion.

    Args:
        global_batch_size: Examples of one global batch, at least 1.
        capacities: One positive number per replica, in any unit: bytes free
            (``memory_capacities``), examples per second (``measured_capacities``).
        minimum: Fewest examples of a replica.
        maximum: Most examples of each replica, one number for all or one per replica. If the
            capacities are speeds, give the examples that fit in memory. None: no limit.
        multiple_of: Shares are multiples of this. The remainder of the batch, less than one
            multiple, goes to the replica of largest capacity that has room for it.

    Returns:
        Examples per replica, in the order of ``capacities``; they sum to ``global_batch_size``.
        Shares of equal capacities differ by at most one example (one multiple); the earlier replica
        gets more.

    Raises:
        DataError: A capacity is not a positive finite number, the batch has no examples, or it
            cannot be divided within the limits.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.plan_shares(64, (24e9, 8e9))
        (48, 16)
        >>> tmg.plan_shares(64, (3, 1), maximum=(40, 100))
        (40, 24)
        >>> tmg.plan_shares(100, (2, 1), multiple_of=8)
        (68, 32)
    """
    capacities = check_shares(capacities)
    rows = check_count("global_batch_size", global_batch_size, error=DataError)
    minimum = check_count("minimum", minimum, error=DataError)
    unit = check_count("multiple_of", multiple_of, error=DataError)
    exact = [_fraction(capacity) for capacity in capacities]
    by_capacity = sorted(range(len(exact)), key=lambda i: (-exact[i], i))
    if minimum == unit == 1 and maximum is None and rows < len(exact):
        return tuple(int(i in by_capacity[:rows]) for i in range(len(exact)))
    limits = _limits(maximum, len(exact))
    low = [-(-int(minimum) // unit)] * len(exact)
    high = [rows // unit if limit is None else limit // unit for limit in limits]
    units, rest = divmod(rows, unit)
    for last in by_capacity:
        bounds = list(high)
        limit = limits[last]
        if rest and limit is not None:
            bounds[last] = max(0, limit - rest) // unit
        if sum(low) <= units <= sum(bounds) and all(map(operator.le, low, bounds)):
            break
    else:
        raise DataError(
            f"The batch cannot be divided within the limits. Received: {rows} examples for "
            f"{len(exact)} replicas, minimum={minimum}, maximum={maximum}, "
            f"multiple_of={multiple_of}. If memory is the limit, use a smaller batch, or drop "
            "the maximum and compute shares in parts (plan_micro_batches). If the minimum is the "
            "limit, use a larger batch."
        )
    parts = [share * unit for share in _apportion(units, exact, low, bounds)]
    parts[last] += rest
    return tuple(parts)


def plan_micro_batches(shares: Sequence[int], maximum: float | Sequence[float]) -> tuple[int, ...]:
    """Returns the number of micro-batches that lets each replica hold its share part by part.

    Shares then follow speed and micro-batches follow memory. A small GPU trains beside a large one
    without a smaller global batch::

        shares = tmg.plan_shares(1024, speeds)
        micro_batches = tmg.data.plan_micro_batches(shares, rows_in_memory)
        data = tmg.distribute_dataset(dataset, strategy, shares=shares)
        step = tmg.make_train_step(model, optimizer, loss, strategy, micro_batches=micro_batches)

    Args:
        shares: Examples of each replica in the largest global batch, from ``plan_shares``.
        maximum: Examples that each replica holds at once, one number for all or one per replica.
            Fractions are rounded down; ``math.inf`` means no limit.

    Returns:
        The least number of micro-batches for each replica, at least 1.

    Raises:
        DataError: A share is not a whole number, a replica does not hold one example, or there is
            not one maximum per replica.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.data.plan_micro_batches((192, 64), (256, 24))
        (1, 3)
    """
    shares = check_shares(shares)
    for share in shares:
        if not _is_finite(share) or share < 1 or int(share) != share:
            raise DataError(
                f"shares must be whole numbers, at least 1. Received: a share of {share}."
            )
    limits = _limits(maximum, len(shares))
    return tuple(
        1 if limit is None else -(-int(share) // limit)
        for share, limit in zip(shares, limits, strict=True)
    )


def _limits(maximum: float | Sequence[float] | None, replicas: int) -> list[int | None]:
    """Returns the maximum of each replica, rounded down; None for no limit."""
    if maximum is None:
        return [None] * replicas
    limits: list[Any] = np.atleast_1d(np.asarray(maximum, dtype=object)).tolist()
    limits = limits * replicas if np.ndim(maximum) == 0 else limits
    if len(limits) != replicas:
        raise DataError(
            f"There must be one maximum per replica. Received: maximum={maximum} for {replicas} "
            "replicas."
        )
    for i, limit in enumerate(limits):
        if not isinstance(limit, Real) or math.isnan(limit) or limit < 1:
            raise DataError(
                f"A replica must hold at least one example. Received: maximum[{i}]={limit!r}. "
                "Leave its device out of the strategy: tmg.create_strategy(devices=[...])."
            )
    return [None if limit == math.inf else int(limit) for limit in limits]


def _fraction(number: float) -> Fraction:
    """Returns a Python or NumPy number as a fraction, without rounding."""
    return Fraction(int(number) if isinstance(number, Integral) else float(number))


def _apportion(
    units: int, capacities: Sequence[Fraction], low: Sequence[int], high: Sequence[int]
) -> list[int]:
    """Divides units in proportion, each part between its bounds; the bounds must allow it."""
    parts: dict[int, int] = {}
    while True:
        free = [i for i in range(len(capacities)) if i not in parts]
        left = units - sum(parts.values())
        total = sum(capacities[i] for i in free)
        quotas = {i: left * capacities[i] / total for i in free}
        missing = {i: low[i] - quotas[i] for i in free if quotas[i] < low[i]}
        beyond = {i: quotas[i] - high[i] for i in free if quotas[i] > high[i]}
        if not missing and not beyond:
            break
        # The side with the larger sum is fixed first, so that the other side can still balance it.
        if sum(missing.values()) >= sum(beyond.values()):
            parts.update({i: low[i] for i in missing})
        else:
            parts.update({i: high[i] for i in beyond})
    parts.update({i: int(quotas[i]) for i in free})
    by_remainder = sorted(free, key=lambda i: (parts[i] - quotas[i], -capacities[i], i))
    for i in by_remainder[: units - sum(parts.values())]:
        parts[i] += 1
    return [parts[i] for i in range(len(capacities))]


def check_shares(shares: Sequence[float], replicas: int | None = None) -> tuple[Any, ...]:
    """Checks relative shares, one per replica.

    Args:
        shares: Relative weights, in any unit.
        replicas: Their required number; None: any.

    Returns:
        The shares as a tuple.

    Raises:
        DataError: There are no shares, another number than ``replicas``, or one is not positive
            and finite.
    """
    if not isinstance(shares, Iterable):
        raise DataError(f"There must be one positive number per replica. Received: {shares!r}.")
    shares = tuple(shares)
    if not shares:
        raise DataError("There are no shares. Give one positive number per replica. Received: ().")
    if replicas is not None and len(shares) != replicas:
        raise DataError(
            f"There must be one share per replica. Received: {len(shares)} shares {shares} for "
            f"{replicas} replicas."
        )
    for i, share in enumerate(shares):
        if not _is_finite(share) or share < 0:
            raise DataError(
                "A share is a positive, finite number. Received: "
                f"shares[{i}]={share!r} in {shares}."
            )
        if share == 0:
            raise DataError(
                f"Replica {i} would get no examples and still slow down every step. Received: "
                f"shares={shares}. Leave its device out of the strategy instead: "
                "tmg.create_strategy(devices=[...]) with the other devices."
            )
    return shares


def _is_finite(number: object) -> bool:
    try:
        return math.isfinite(number)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        return False


def replica_shares(shares: Sequence[float] | None, replicas: int) -> tuple[int, ...]:
    """Returns the relative share of each replica as integers; None means equal shares.

    Raises:
        DataError: The shares are not one positive number per replica.
    """
    return (1,) * replicas if shares is None else integer_shares(check_shares(shares, replicas))


def integer_shares(shares: Sequence[float]) -> tuple[int, ...]:
    """Returns shares as integers in the same proportion.

    Args:
        shares: Positive relative weights.

    Returns:
        Positive integers. Integer shares are exact. Other shares, and integers that sum to more
        than 2**20 in lowest terms, are rounded to one part in 2**20.
    """
    if all(float(share).is_integer() for share in shares):
        whole = [int(share) for share in shares]
        common = math.gcd(*whole)
        if sum(whole) <= common * _PARTS:
            return tuple(share // common for share in whole)
    return plan_shares(_PARTS, shares)
