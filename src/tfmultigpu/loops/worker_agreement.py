"""What workers must decide alike, because the next step is a collective that all must join."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import WorkersDifferError
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["check_alike", "differ", "is_chief", "of_any", "of_chief", "on_any", "several_workers"]


def several_workers(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether other processes take part."""
    return bool(WorkerExchange(strategy).workers > 1)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this process has the first replica."""
    return bool(WorkerExchange(strategy).is_chief)


def of_chief(strategy: tf.distribute.Strategy, value: float) -> float:
    """Returns the number that the chief calls this with; all workers must call it."""
    return float(WorkerExchange(strategy).floats([value])[0, 0])


def on_any(strategy: tf.distribute.Strategy, truth: bool) -> bool:
    """Returns whether it is true on any worker; all workers must call it."""
    return bool(WorkerExchange(strategy)([int(truth)]).any())


def of_any(strategy: tf.distribute.Strategy, numbers: Iterable[int]) -> list[int]:
    """Returns what any worker has among its numbers, sorted; all workers must call it."""
    own = sorted(set(numbers))
    exchange = WorkerExchange(strategy)
    if exchange.workers == 1:
        return own
    most = int(exchange([len(own)]).max())
    if not most:
        return []
    told = exchange([*own, *[-1] * (most - len(own))])
    return sorted({int(number) for number in told.ravel()} - {-1})


def check_alike(strategy: tf.distribute.Strategy, what: str, arguments: Mapping[str, Any]) -> None:
    """Checks that all workers call something with the same arguments; all must call it.

    Args:
        strategy: Where they run.
        what: What they call.
        arguments: The same names on every worker, and values whose ``repr`` says what they are.

    Raises:
        WorkersDifferError: They differ, which would end in a worker that waits for ever, or in
            replicas that train differently.
    """
    exchange = WorkerExchange(strategy)
    if (found := exchange.find_difference(arguments)) is not None:
        name, other = found
        raise WorkersDifferError(
            f"The workers call {what} with different arguments, and some would wait for the "
            f"others for ever. Received: {name}={arguments[name]!r} on worker {exchange.worker}, "
            f"and something else on worker {other}. Every worker must run the same program."
        )


def differ(strategy: tf.distribute.Strategy, values: Iterable[float]) -> list[bool]:
    """Returns of each number whether it is not nearly the same everywhere; all must call it."""
    told = WorkerExchange(strategy).floats(values)
    near = np.isclose(told, told[:1], rtol=1e-4, atol=1e-7, equal_nan=True)
    return [not column.all() for column in near.T]
