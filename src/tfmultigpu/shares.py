"""How a global batch is apportioned over replicas that are not alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral

from tfmultigpu.errors import ShareError

_FINEST = 2**20  # parts into which fractional shares are rounded


def plan_shares(global_batch_size: int, capacities: Sequence[float]) -> tuple[int, ...]:
    """Divides the rows of a global batch over replicas in proportion to what each can take.

    The method of largest remainders: every replica gets its proportional share rounded down, and
    the rows left over go to the largest fractions (Hamilton's method; see
    https://en.wikipedia.org/wiki/Quota_method). While rows last no replica is left without one.

    Args:
        global_batch_size: Rows of one global batch, at least 1.
        capacities: One positive number per replica, in any unit: bytes free, rows per second.

    Returns:
        Rows per replica, in the order of ``capacities``; they sum to ``global_batch_size``. Equal
        capacities differ by at most one row, the earlier replica getting it.

    Raises:
        ShareError: A capacity is not a positive finite number, or the batch has no rows.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.plan_shares(64, (24e9, 8e9))
        (48, 16)
    """
    check_shares(capacities)
    if global_batch_size < 1 or int(global_batch_size) != global_batch_size:
        raise ShareError(
            "A global batch is a whole number of rows, at least one. Received: "
            f"global_batch_size={global_batch_size}."
        )
    global_batch_size = int(global_batch_size)
    exact = [_fraction(capacity) for capacity in capacities]
    total = sum(exact)
    quotas = [global_batch_size * capacity / total for capacity in exact]
    rows = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(rows)), key=lambda i: (rows[i] - quotas[i], -exact[i], i))
    for i in by_remainder[: global_batch_size - sum(rows)]:
        rows[i] += 1
    return tuple(_without_empty(rows, exact))


def _fraction(number: float) -> Fraction:
    """The number without rounding, also where it is one of NumPy's."""
    return Fraction(int(number) if isinstance(number, Integral) else float(number))


def _without_empty(rows: list[int], capacities: Sequence[Fraction]) -> list[int]:
    """Moves single rows from the largest parts to empty ones, the most capable first."""
    empty = sorted((i for i, n in enumerate(rows) if n == 0), key=lambda i: (-capacities[i], i))
    for i in empty:
        richest = max(range(len(rows)), key=lambda j: (rows[j], -capacities[j], j))
        if rows[richest] < 2:
            break
        rows[richest] -= 1
        rows[i] += 1
    return rows


def check_shares(shares: Sequence[float], replicas: int | None = None) -> None:
    """Checks relative shares, one per replica.

    Args:
        shares: Relative weights, in any unit.
        replicas: How many there must be; unchecked where None.

    Raises:
        ShareError: There are none, not as many as replicas, or one is not positive and finite.
    """
    shares = tuple(shares)
    if not shares:
        raise ShareError("There are no shares. Give one positive number per replica. Received: ().")
    if replicas is not None and len(shares) != replicas:
        raise ShareError(
            f"There must be one share per replica. Received: {len(shares)} shares {shares} for "
            f"{replicas} replicas."
        )
    for i, share in enumerate(shares):
        if not _is_finite(share) or share < 0:
            raise ShareError(
                "A share is a positive, finite number. Received: "
                f"shares[{i}]={share!r} in {shares}."
            )
        if share == 0:
            raise ShareError(
                f"Replica {i} would get nothing to do, and would still slow down every step. "
                f"Received: shares={shares}. Leave its device out of the strategy instead: "
                "tmg.create_strategy(devices=[...]) with the other devices."
            )


def _is_finite(number: object) -> bool:
    try:
        return math.isfinite(number)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        return False


def integer_shares(shares: Sequence[float]) -> tuple[int, ...]:
    """Returns shares as integers in the same proportion.

    Args:
        shares: Positive relative weights.

    Returns:
        Positive integers, exact where the shares are integers; others, and such as sum to more than
        2**20 in lowest terms, are rounded to one part in 2**20.
    """
    if all(float(share).is_integer() for share in shares):
        whole = [int(share) for share in shares]
        common = math.gcd(*whole)
        if sum(whole) <= common * _FINEST:
            return tuple(share // common for share in whole)
    return plan_shares(_FINEST, shares)
