"""Two workers, and what a function asks that tests call on them, or in their own process."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from law import worker_functions
from law.processes import call_all, pool

from tfmultigpu.strategies.process_state import process_state

WITHIN = 600.0  # Seconds of a call, for what hangs; other tests may need the processors too.


def strategy() -> tf.distribute.Strategy:
    """Returns the strategy over the workers; in the process of the tests that of one device."""
    return worker_functions.joined.get("strategy") or tf.distribute.get_strategy()


def index() -> int:
    return 0 if process_state.cluster is None else process_state.cluster.index


def pair_of(join: Callable[[], int], replicas: int) -> Iterator[Callable[..., list[Any]]]:
    """Yields a function that calls another on two workers at once, until both have answered."""
    workers = pool().cluster(2)
    call_both = functools.partial(call_all, workers, seconds=WITHIN)
    assert call_both(join) == [replicas] * 2
    yield call_both
    for worker in workers:
        worker.end()


def run_as_program(function: Callable[..., object], *arguments: Any) -> None:
    """Calls a function, and ends this process as a program that does nothing else."""
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
