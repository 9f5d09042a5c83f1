"""Decisions that all workers must make alike, because the next step is a collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import ClusterError
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = [
    "any_worker",
    "check_alike",
    "differ",
    "has_several_workers",
    "is_chief",
    "union",
    "value_of_chief",
]


def has_several_workers(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a strategy spans several workers."""
    return bool(WorkerExchange(strategy).workers > 1)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this process is the chief, which has the first replica."""
    return bool(WorkerExchange(strategy).is_chief)


def value_of_chief(strategy: tf.distribute.Strategy, value: float) -> float:
    """Returns the ``value`` of the chief; all workers must call it."""
    return float(WorkerExchange(strategy).floats([value])[0, 0])


def any_worker(strategy: tf.distribute.Strategy, flag: bool) -> bool:
    """Returns whether ``flag`` is true on any worker; all workers must call it."""
    return bool(WorkerExchange(strategy)([int(flag)]).any())


def union(strategy: tf.distribute.Strategy, numbers: Iterable[int]) -> list[int]:
    """Returns the sorted union of the workers' numbers, from 0 up; all workers must call it."""
    own = sorted(set(numbers))
    exchange = WorkerExchange(strategy)
    if exchange.workers == 1:
        return own
    most = int(exchange([len(own)]).max())
    if not most:
        return []
    padded = exchange([*own, *[-1] * (most - len(own))])
    return sorted({int(number) for number in padded.ravel()} - {-1})


def check_alike(
    strategy: tf.distribute.Strategy, function: str, arguments: Mapping[str, Any]
) -> None:
    """Checks that all workers call a function with the same arguments; all must call it.

    Args:
        strategy: The strategy of the workers.
        function: The name of the function.
        arguments: The arguments by name, compared by their ``repr``.

    Raises:
        ClusterError: They differ, so a worker would wait forever or train differently.
    """
    exchange = WorkerExchange(strategy)
    if (found := exchange.find_difference(arguments)) is not None:
        name, other = found
        raise ClusterError(
            f"The workers call {function} with different arguments, so some would wait for the "
            f"others forever. Received: {name}={arguments[name]!r} on worker {exchange.worker}, "
            f"and another value on worker {other}. Run the same program on every worker."
        )


def differ(rows: np.ndarray[Any, np.dtype[np.float64]]) -> list[bool]:
    """Returns for each column whether it differs between the rows of workers, beyond rounding."""
    near = np.isclose(rows, rows[:1], rtol=1e-4, atol=1e-7, equal_nan=True)
    return [not column.all() for column in near.T]
