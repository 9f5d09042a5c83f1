"""Models before the first step: built in the scope of their strategy, and checked."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import ScopeError
from tfmultigpu.steps.features.remat import calling_once
from tfmultigpu.strategies.attached import attached
from tfmultigpu.strategies.scopes import all_layers, check_scope
from tfmultigpu.types import KerasLayer, KerasModel, Nested, Tensor

# Layers that are attributes of a model and that its call passes over: they are never built.
_passed_over: weakref.WeakSet[KerasLayer] = weakref.WeakSet()


def is_built(model: KerasModel) -> bool:
    """Returns whether a model and every layer that it calls have their variables.

    ``model.build`` of a subclass marks the model as built and none of its layers, and a layer may
    have been built before its model: neither tells that the model is built whole.
    """
    if not (model.built and model.variables):
        return False
    return all(layer.built or layer in _passed_over for layer in all_layers(model))


def prepare_model(
    model: KerasModel, strategy: tf.distribute.Strategy, batch_spec: Any, parts: int = 1
) -> None:
    """Checks that a model was created in the scope of a strategy; builds it if it is not built.

    Args:
        model: The model.
        strategy: The strategy.
        batch_spec: The type specs of a batch; None for a model that is built.
        parts: Into how many parts a step cuts a batch.
    """
    # A model without a call, such as a GAN, consists of parts that are built.
    has_call = getattr(model.__class__, "call", None) is not keras.Model.call
    # Without a batch nothing is known of the layers that are not built: they may be passed over.
    waits = batch_spec is None and model.built and model.variables
    if not is_built(model) and not waits and (has_call or not model.variables):
        # An add-on may have a say in where variables live.
        enter = attached(strategy).scope or strategy.scope
        with enter():
            _build(model, batch_spec)
    check_scope(model.variables, strategy, "model")
    stateful = [one.name for one in all_layers(model) if getattr(one, "stateful", False)]
    parts = max(parts, strategy.num_replicas_in_sync)
    if stateful and parts > 1:
        raise ScopeError(
            "A stateful layer carries the state of each row to the next batch, in which the row "
            "may be in another part.",
            f"layers {stateful}, and batches in {parts} parts",
            "Drop stateful=True; or train on one device, tmg.create_strategy(devices=1), without "
            "micro_batches and logical_replicas.",
        )


def call_on_shapes(model: KerasModel, specs: Any, **options: object) -> Nested:
    """Calls a model on shapes alone: returns symbolic outputs of Keras for type specs."""

    def tensor(spec: Any) -> Tensor:
        sparse = isinstance(spec, tf.SparseTensorSpec)
        return keras.KerasTensor(tuple(spec.shape), spec.dtype.name, sparse=sparse)

    with calling_once():
        return model(tf.nest.map_structure(tensor, specs), **options)


def _build(model: KerasModel, batch_spec: Any) -> None:
    try:
        inputs, _, _ = unpack_batch(batch_spec)
        if any(isinstance(spec, tf.RaggedTensorSpec) for spec in tf.nest.flatten(inputs)):
            # With symbolic ragged tensors Keras would try the layers on dense ones.
            model(tf.nest.map_structure(_one_row, inputs))
        else:
            call_on_shapes(model, inputs)
    except (AttributeError, TypeError, ValueError, RuntimeError, tf.errors.OpError) as error:
        # A model that was called, and whose call works on real tensors alone, is built whole.
        if not (model.built and model.variables):
            raise ScopeError(
                f"The model has no variables yet and could not be built from the batch: {error}",
                f"model {model.name!r}, batch {batch_spec}, whose first axis is examples: "
                "dataset.batch(global_batch_size)",
                "Or call it once inside the scope, which builds every layer: with "
                "strategy.scope(): model(x[:1]).",
            ) from error
    _passed_over.update(layer for layer in _compat.layers_inside(model) if not layer.built)


def _one_row(spec: Any) -> Nested:
    """Returns a row of zeros, as ragged as the spec, with eight along each open axis."""
    zeros = tf.zeros([1, *(size or 8 for size in spec.shape[1:])], spec.dtype)
    ragged: Any = tf.RaggedTensor
    options = {name: getattr(spec, name, None) for name in ("ragged_rank", "row_splits_dtype")}
    return ragged.from_tensor(zeros, **options) if options["ragged_rank"] else zeros
