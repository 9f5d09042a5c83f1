"""Losses and metrics from ``model.compile``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import DataError, LossError
from tfmultigpu.losses.build_model import symbolic
from tfmultigpu.losses.objective import ModelLoss
from tfmultigpu.losses.outputs import match_outputs

__all__ = [
    "Compiled",
    "check_labels",
    "compile_arguments",
    "read_compiled",
]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Losses and metrics of a compiled model, each matched to its output.

    Attributes:
        losses: The ``loss`` argument of ``make_eval_step``.
        loss_weights: Its ``loss_weights`` argument.
        metrics: Its ``metrics`` argument: the model's own metric objects.
        weighted_metrics: Its ``weighted_metrics`` argument, likewise.
        arguments: The arguments of ``model.compile``; a new object after each compile.
        container: Keras' container of the metrics, or None.
    """

    losses: Any
    loss_weights: Any
    metrics: Any
    weighted_metrics: Any
    arguments: Any
    container: Any


def read_compiled(
    model: Any,
    strategy: tf.distribute.Strategy,
    batch_spec: Any,
    own_loss: ModelLoss | None = None,
) -> Compiled:
    """Returns the losses and metrics of a built model, resolved for a batch as in Keras.

    Creates the metrics that Keras would create in its first training, in the scope. They are the
    model's own: ``model.metrics`` holds them afterwards.

    Args:
        model: A Keras model, built and compiled.
        strategy: Its strategy.
        batch_spec: Type specs of a batch.
        own_loss: The ``compute_loss`` of the model, which replaces the compiled losses, or None.
    """
    arguments = compile_arguments(model)
    x, y_true, _ = unpack_batch(batch_spec)
    y_pred = _outputs(model, x)
    _check_flat(y_pred)
    losses: Any = own_loss
    weights = None
    if own_loss is None:
        losses, weights = _match_losses(model, arguments, y_true, y_pred)
    container: Any = None
    plain: list[list[Any]] = []
    weighted: list[list[Any]] = []
    keys = None
    # Keras keeps the metrics of the previous compile if the last one had none.
    if arguments.get("metrics") or arguments.get("weighted_metrics"):
        with strategy.scope():
            container, plain, weighted, keys = _compat.compiled_metrics(model, y_true, y_pred)
    return Compiled(
        losses,
        weights,
        _by_output(plain, y_pred, keys),
        _by_output(weighted, y_pred, keys),
        arguments,
        container,
    )


def _match_losses(model: Any, arguments: Any, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Returns the losses and loss weights of a compiled model, by output if there are several."""
    losses, weights = arguments.get("loss"), arguments.get("loss_weights")
    names = getattr(model, "output_names", None)
    outputs = match_outputs(
        y_true if _needing_labels(arguments) else None,
        y_pred,
        None,
        _by_key(losses, y_pred),
        _by_key(weights, y_pred),
        names,
    )
    each = [_resolve(output.loss, output.y_true, output.y_pred) for output in outputs]
    if len(outputs) == 1 and outputs[0].name is None:
        losses, weights = each[0], outputs[0].factor
    else:
        found = [(one.name, loss, one.factor) for one, loss in zip(outputs, each, strict=True)]
        losses = {name: loss for name, loss, _ in found if loss is not None} or None
        weights = {name: factor for name, loss, factor in found if losses and name in losses}
    return losses, weights


def check_labels(model: Any, batch_spec: Any) -> None:
    """Checks that batches have labels if the compiled losses or metrics need them."""
    needing = _needing_labels(compile_arguments(model))
    if needing and unpack_batch(batch_spec)[1] is None:
        raise DataError(
            f"The model was compiled with {' and '.join(needing)}, but the data has no labels. "
            f"Received: batches of {batch_spec}. Give (x, y) or (x, y, sample_weight)."
        )


def _needing_labels(arguments: Any) -> list[str]:
    return [one for one in ("loss", "metrics", "weighted_metrics") if arguments.get(one)]


def compile_arguments(model: Any) -> Any:
    """Returns the arguments of ``model.compile``.

    Raises:
        LossError: The model is not compiled.
    """
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


def _check_flat(y_pred: Any) -> None:
    outputs = list(y_pred.values()) if isinstance(y_pred, Mapping) else y_pred
    if isinstance(outputs, (list, tuple)):
        deep = [one for one in outputs if isinstance(one, (Mapping, list, tuple))]
        if deep:
            shapes = tf.nest.map_structure(lambda one: tuple(one.shape), y_pred)
            raise LossError(
                "The outputs of the model are nested structures, so losses and metrics cannot be "
                f"matched to them. Received: {shapes}. Return one flat dict of outputs, or give "
                "make_eval_step a forward. predict accepts any structure."
            )


def _by_key(values: Any, y_pred: Any) -> Any:
    """Returns a list of values for a dict of outputs as a dict, with the keys in Keras' order."""
    if isinstance(values, (list, tuple)) and isinstance(y_pred, Mapping):
        keys = list(y_pred) if len(y_pred) == 1 else sorted(y_pred)
        if len(values) == len(keys):
            return dict(zip(keys, values, strict=True))
    return values


def _by_output(lists: list[list[Any]], y_pred: Any, keys: list[str] | None) -> Any:
    """Returns the metrics of each output in the form that ``match_metrics`` takes."""
    if not any(lists):
        return ()
    if isinstance(y_pred, Mapping):
        keys = list(keys or sorted(y_pred))
        return dict(zip(keys, lists, strict=True))
    return lists if isinstance(y_pred, (list, tuple)) else lists[0]


def _resolve(loss: Any, y_true: Any, y_pred: Any) -> Any:
    """Returns the loss; "crossentropy" becomes the loss for the shapes of labels and outputs."""
    import keras

    if isinstance(loss, (list, tuple, Mapping)):
        raise LossError(
            f"An output can have only one loss. Received: {loss!r} for one output. Write one "
            "function that adds the losses and returns one value per example."
        )
    if not isinstance(loss, str) or loss.lower() not in ("crossentropy", "ce"):
        return loss
    labels, predictions = y_true.shape, y_pred.shape
    if predictions[-1] == 1:
        return keras.losses.BinaryCrossentropy()
    if len(labels) < len(predictions) or labels[-1] == 1:
        return keras.losses.SparseCategoricalCrossentropy()
    return keras.losses.CategoricalCrossentropy()
