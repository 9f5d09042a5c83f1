"""Callbacks of an evaluation or a prediction, and the hooks that serve them."""

from __future__ import annotations

import functools
import time
from typing import Any

import tensorflow as tf

from tfmultigpu.data.sharded_dataset import ShardedDataset
from tfmultigpu.loops.callbacks import BatchHooks, adapt_callbacks, check_are_callbacks, to_list
from tfmultigpu.loops.evaluation_passes import EvaluationPasses
from tfmultigpu.loops.evaluator import Evaluator
from tfmultigpu.loops.inputs import length, no_batches
from tfmultigpu.loops.worker_agreement import any_worker, has_several_workers, is_chief, union

__all__ = ["evaluated", "make_hooks", "pass_callbacks"]


def pass_callbacks(
    callbacks: Any,
    model: Any,
    strategy: tf.distribute.Strategy,
    *,
    data: Any,
    batches: ShardedDataset,
    steps: int | None,
    verbose: int | str,
) -> Any:
    """Returns the ``keras.callbacks.CallbackList`` of one pass, with a progress bar if asked for.

    Args:
        callbacks: A callback, a sequence of them, or a ``CallbackList``.
        model: The model.
        strategy: Its strategy.
        data: The data of the user.
        batches: The data as shards.
        steps: The largest number of batches, or None.
        verbose: 0, 1, 2 or ``"auto"``; only the chief prints.

    Raises:
        TypeError: An item is not a callback.
        ValueError: ``verbose`` has another value.
    """
    import keras

    if verbose not in (0, 1, 2, "auto"):
        raise ValueError(f"verbose must be 0, 1, 2 or 'auto'. Received: verbose={verbose!r}.")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.set_model(model)
        return callbacks
    given = to_list(callbacks)
    check_are_callbacks(given)
    if getattr(model, "optimizer", None) is not None:
        adapt_callbacks(given, model.optimizer)
    known = [most for most in (steps, length(data, batches)) if most is not None]
    verbose = verbose if is_chief(strategy) else 0
    return keras.callbacks.CallbackList(
        given,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=1,
        steps=min(known, default=None),
        model=model,
    )


def make_hooks(
    callbacks: Any, mode: str, model: Any, strategy: tf.distribute.Strategy
) -> BatchHooks:
    """Returns the batch hooks of an evaluation or a prediction, ready for its first batch.

    Args:
        callbacks: A ``CallbackList``.
        mode: ``"test"`` or ``"predict"``.
        model: The model, whose ``stop_evaluating`` or ``stop_predicting`` a callback may set.
        strategy: Its strategy.
    """
    several = has_several_workers(strategy)
    attribute = {"test": "stop_evaluating", "predict": "stop_predicting"}[mode]

    def stopping() -> bool:
        wanted = bool(getattr(model, attribute, False))
        return any_worker(strategy, wanted) if several else wanted

    hooks = BatchHooks(
        callbacks,
        mode,
        steps_per_call=None,
        # Several workers have no common clock, so their callbacks are never called by time.
        elapsed=float if several else time.perf_counter,
        agree=functools.partial(union, strategy),
        stopping=stopping,
    )
    hooks.begin_epoch(stopping())
    return hooks


def evaluated(
    evaluator: Evaluator,
    passes: EvaluationPasses,
    steps: int | None,
    callbacks: Any,
    model: Any,
    strategy: tf.distribute.Strategy,
    data: Any,
) -> dict[str, Any]:
    """Evaluates a model and calls the test hooks of callbacks; returns the logs.

    Args:
        evaluator: The evaluator of the model.
        passes: The data as shards; one pass is read.
        steps: The largest number of batches, or None.
        callbacks: A ``CallbackList``.
        model: The model.
        strategy: Its strategy.
        data: The data of the user, for an error.

    Raises:
        DataError: There are no batches.
    """
    model.stop_evaluating = False
    callbacks.on_test_begin()
    logs = evaluator(passes, steps, make_hooks(callbacks, "test", model, strategy))
    if logs is None:
        raise no_batches(data)
    callbacks.on_test_end(logs)
    return logs
