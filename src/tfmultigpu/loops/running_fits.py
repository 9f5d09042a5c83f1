"""Models that ``fit`` is training: an evaluation in between leaves their metrics alone."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu.loops.tracked_metrics import EpochMetrics

__all__ = ["keeping_metrics", "training"]

# The metrics of each running fit, by its model.
_metrics: weakref.WeakKeyDictionary[Any, EpochMetrics] = weakref.WeakKeyDictionary()


@contextmanager
def training(model: Any, metrics: EpochMetrics) -> Iterator[None]:
    """Marks a model as being trained in the context.

    Args:
        model: The model.
        metrics: The metrics in the logs of the training.
    """
    before = _metrics.get(model)
    _metrics[model] = metrics
    try:
        yield
    finally:
        if before is None:
            _metrics.pop(model, None)
        else:
            _metrics[model] = before


@contextmanager
def keeping_metrics(model: Any, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Keeps the metrics of a running ``fit`` of a model, which an evaluation would reset.

    In Keras the rest of the epoch is added to what the evaluation has left in them.
    """
    metrics = _metrics.get(model)
    if metrics is None:
        yield
        return
    parts = [
        part
        for one in metrics.variables
        for part in strategy.experimental_local_results(getattr(one, "value", one))
    ]
    values = [part.read_value() for part in parts]
    try:
        yield
    finally:
        for part, value in zip(parts, values, strict=True):
            part.assign(value)
