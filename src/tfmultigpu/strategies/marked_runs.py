"""Tells replicas in ``strategy.run`` which rows of the global batch they have.

A batch of ``distribute_dataset`` is marked with the offsets of its shards. ``create_strategy``, or
the first such dataset, replaces ``run`` on the strategy object. The new one finds the mark and
keeps it while the replicas run. What runs, and how, does not change; shards of another number of
replicas, of which TensorFlow would drop some, are refused.
"""

from __future__ import annotations

import types
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import DataError, TfMultiGpuError
from tfmultigpu.strategies.collectives import REDUCED
from tfmultigpu.strategies.topology import describe, local_replicas

# Attributes of the tensors of a batch: the offsets of its shards; that they have all rows; or, if
# shards may be without rows, the tensor that is whole on every replica then.
OFFSETS, WHOLE, COPIES = "_tfmultigpu_offsets", "_tfmultigpu_whole", "_tfmultigpu_copies"
_RUNNING = "_offsets_of_run"
_UNMARKED = None, None, True


def keep_offsets_of_runs(strategy: tf.distribute.Strategy) -> None:
    """Has ``run`` of this strategy object keep the offsets of the batch it is called with."""
    if _RUNNING not in vars(strategy):
        setattr(strategy, _RUNNING, [_UNMARKED])
        strategy.run = types.MethodType(_run, strategy)


def offsets_of_run(strategy: tf.distribute.Strategy) -> tuple[Any, Any]:
    """Returns the offsets of all shards of the batch that ``strategy.run`` is called with now.

    If one replica has it all, returns a tensor of it instead, as the second of two values.
    """
    offsets, whole, in_function = getattr(strategy, _RUNNING, [_UNMARKED])[-1]
    return (None, None) if tf.inside_function() and not in_function else (offsets, whole)


def _run(strategy: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    # AutoGraph converts this, and so the function of the user.
    running = getattr(strategy, _RUNNING)
    running.append(_mark_of(strategy, args, kwargs) or running[-1])
    try:
        results = type(strategy).run(strategy, function, *args, **kwargs)
    finally:
        running.pop()
    return results


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _mark_of(strategy: Any, *arguments: Any) -> tuple[Any, Any, bool] | None:
    """Returns the mark of a batch among the arguments of ``run``, and where ``run`` is called."""
    leaves = tf.nest.flatten(arguments)
    offsets = next((getattr(leaf, OFFSETS) for leaf in leaves if hasattr(leaf, OFFSETS)), None)
    whole = next((leaf for leaf in leaves if hasattr(leaf, WHOLE)), None)
    kind, count = tf.distribute.DistributedValues, len(local_replicas(strategy))
    cut = [strategy.experimental_local_results(leaf) for leaf in leaves if isinstance(leaf, kind)]
    fits = all(len(shards) == count and not isinstance(shards[0], kind) for shards in cut)
    if not fits or (whole is not None and count > 1):
        raise DataError(
            "The batch was cut for another strategy, so rows would be lost, or be on every replica."
            f" Received: the run of {describe(strategy)}, and a batch for another number of them. "
            "Give both the same strategy: tmg.distribute_dataset(dataset, strategy)."
        )
    if count < strategy.num_replicas_in_sync and any(hasattr(leaf, REDUCED) for leaf in leaves):
        raise TfMultiGpuError(
            "An optimizer in strategy.run would add gradients over the workers once more. Received:"
            " those of GradientAccumulator.reduce as its arguments. Write after strategy.run: "
            "tmg.apply_reduced_gradients(optimizer, gradients, variables)."
        )
    return None if offsets is None and whole is None else (offsets, whole, tf.inside_function())
