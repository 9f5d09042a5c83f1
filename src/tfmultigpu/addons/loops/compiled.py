"""Losses and metrics from ``model.compile``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.addons.loops.metrics import EpochMetrics
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import DataError, LossError
from tfmultigpu.steps.build_model import symbolic


def read_compiled(
    model: Any, strategy: tf.distribute.Strategy, batch_spec: Any
) -> tuple[dict[str, Any], EpochMetrics]:
    """Returns what a compiled model gives to a step for such batches, and the metrics in its logs.

    Creates the metrics that Keras would create in its first training, in the scope. They are the
    model's own: ``model.metrics`` holds them afterwards.
    """
    check_labels(model, batch_spec)
    arguments = compile_arguments(model)
    x, y_true, _ = unpack_batch(batch_spec)
    y_pred = _outputs(model, x)
    given = {name: _by_key(arguments.get(name), y_pred) for name in ("loss", "loss_weights")}
    container = None
    # Keras keeps the metrics of the previous compile if the last one had none.
    if arguments.get("metrics") or arguments.get("weighted_metrics"):
        with strategy.scope():
            container, plain, weighted, keys = _compat.compiled_metrics(model, y_true, y_pred)
        given["metrics"] = _by_output(plain, y_pred, keys)
        given["weighted_metrics"] = _by_output(weighted, y_pred, keys)
    return given, EpochMetrics({}, container)


def check_labels(model: Any, batch_spec: Any) -> None:
    """Checks that batches have labels if the compiled losses or metrics need them."""
    arguments = compile_arguments(model)
    needing = [name for name in ("loss", "metrics", "weighted_metrics") if arguments.get(name)]
    if needing and unpack_batch(batch_spec)[1] is None:
        raise DataError(
            f"The model was compiled with {' and '.join(needing)}, but the data has no labels. "
            f"Received: batches of {batch_spec}. Give (x, y) or (x, y, sample_weight)."
        )


def compile_arguments(model: Any) -> Any:
    """Returns the arguments of ``model.compile``; a new object after each call of it."""
    if not getattr(model, "compiled", False):
        raise LossError(
            "The model is not compiled, so it has no loss and metrics. Received: "
            f"{type(model).__name__} {model.name!r}. In the scope, write model.compile(loss=..., "
            "metrics=[...]). Or give loss and metrics to a step: tmg.fit(model, data, step="
            "tmg.make_train_step(...)), or tmg.make_eval_step."
        )
    return _compat.compile_arguments(model)


def _outputs(model: Any, x: Any) -> Any:
    """Returns the symbolic outputs of a model for inputs of these types."""
    try:
        return model(symbolic(x), training=False)
    except Exception:  # A model that needs real tensors may raise anything: trace it instead.
        traced: Any = tf.function(lambda x: model(x, training=False), autograph=False)
        return traced.get_concrete_function(x).structured_outputs


def _by_key(values: Any, y_pred: Any) -> Any:
    """Returns a list of values for a dict of outputs as a dict, with the keys in Keras' order."""
    if isinstance(values, (list, tuple)) and isinstance(y_pred, Mapping):
        keys = list(y_pred) if len(y_pred) == 1 else sorted(y_pred)
        return dict(zip(keys, values, strict=True))
    return values


def _by_output(lists: list[list[Any]], y_pred: Any, keys: list[str] | None) -> Any:
    """Returns the metrics of each output in the form that a step takes."""
    if not any(lists):
        return ()
    if isinstance(y_pred, Mapping):
        return dict(zip(keys or sorted(y_pred), lists, strict=True))
    return lists if isinstance(y_pred, (list, tuple)) else lists[0]
