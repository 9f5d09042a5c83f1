"""Tells replicas in ``strategy.run`` which rows of the global batch they have.

A batch of ``distribute_dataset`` is marked with the offsets of its shards. The first such dataset
replaces ``strategy.run`` on its strategy object. The new one finds the mark in what it is given and
keeps it while the replicas run. What runs, and how, does not change.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import tensorflow as tf

# Attributes of the tensors of a batch: the offsets of its shards; that they have all rows; or, if
# shards may be without rows, the tensor that is whole on every replica then.
OFFSETS, WHOLE, COPIES = "_tfmultigpu_offsets", "_tfmultigpu_whole", "_tfmultigpu_copies"
_RUNNING = "_offsets_of_run"


class _Run(NamedTuple):
    """The batch of one call of ``strategy.run``: what its shards are marked with, or all of it."""

    offsets: Any
    whole: Any
    in_function: bool


def keep_offsets_of_runs(strategy: tf.distribute.Strategy) -> None:
    """Has ``run`` of this strategy object keep the offsets of the batch it is called with."""
    if _RUNNING not in vars(strategy):
        setattr(strategy, _RUNNING, [])
        strategy.run = types.MethodType(_run, strategy)


def offsets_of_run(strategy: tf.distribute.Strategy) -> tuple[Any, Any]:
    """Returns the offsets of all shards of the batch that ``strategy.run`` is called with now."""
    running = getattr(strategy, _RUNNING, None)
    run = running[-1] if running else None
    if run is None or (tf.inside_function() and not run.in_function):
        return None, None
    return run.offsets, run.whole


def _run(strategy: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    original = type(strategy).run
    if not _begin(strategy, args, kwargs):
        return original(strategy, function, *args, **kwargs)
    try:
        results = original(strategy, function, *args, **kwargs)
    finally:
        getattr(strategy, _RUNNING).pop()
    return results


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _begin(strategy: Any, args: Any, kwargs: Any) -> bool:
    """Keeps the mark of a batch among the arguments of ``run``; returns whether there is one."""
    leaves = tf.nest.flatten((args, kwargs))
    offsets = next((getattr(leaf, OFFSETS) for leaf in leaves if hasattr(leaf, OFFSETS)), None)
    whole = next((leaf for leaf in leaves if hasattr(leaf, WHOLE)), None)
    if offsets is None and whole is None:
        return False
    getattr(strategy, _RUNNING).append(_Run(offsets, whole, tf.inside_function()))
    return True
