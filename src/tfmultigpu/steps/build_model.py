"""Models before the first step: built in the scope of their strategy, and checked."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import ScopeError
from tfmultigpu.strategies.scopes import all_layers, check_scope


def is_built(model: Any) -> bool:
    """Returns whether a model has variables: ``model.build`` marks it as built without them."""
    return bool(model.built and model.variables)


def prepare_model(model: Any, strategy: tf.distribute.Strategy, batch_spec: Any = None) -> None:
    """Checks that a model was created in the scope of a strategy; builds it if it is not built."""
    # A model without a call, such as a GAN, consists of parts that are built.
    has_call = getattr(model.__class__, "call", None) is not keras.Model.call
    if not is_built(model) and (has_call or not model.variables):
        # An add-on may have a say in where variables live.
        with getattr(strategy, "tfmultigpu_scope", strategy.scope)():
            _build(model, batch_spec)
    check_scope(model.variables, strategy, "model")
    stateful = [one.name for one in all_layers(model) if getattr(one, "stateful", False)]
    if stateful and strategy.num_replicas_in_sync > 1:
        raise ScopeError(
            "A stateful layer carries the state of each row to the next batch, in which the row "
            f"may be on another replica. Received: layers {stateful}. Drop stateful=True, or train "
            "on one device: tmg.create_strategy(devices=1)."
        )


def symbolic(specs: Any) -> Any:
    """Returns symbolic tensors of Keras for type specs, to run a model on shapes alone."""

    def tensor(spec: Any) -> Any:
        sparse = isinstance(spec, tf.SparseTensorSpec)
        return keras.KerasTensor(tuple(spec.shape), spec.dtype.name, sparse=sparse)

    return tf.nest.map_structure(tensor, specs)


def _build(model: Any, batch_spec: Any) -> None:
    try:
        inputs, _, _ = unpack_batch(batch_spec)
        if any(isinstance(spec, tf.RaggedTensorSpec) for spec in tf.nest.flatten(inputs)):
            # With symbolic ragged tensors Keras would try the layers on dense ones.
            model(tf.nest.map_structure(_one_row, inputs))
        else:
            model(symbolic(inputs))
    except (AttributeError, TypeError, ValueError, RuntimeError, tf.errors.OpError) as error:
        raise ScopeError(
            f"The model has no variables yet and could not be built from the batch: {error} "
            f"Received: model {model.name!r}, batch {batch_spec}, whose first axis is examples: "
            "dataset.batch(global_batch_size). Or build it inside the scope: with "
            "strategy.scope(): model.build(input_shape)."
        ) from error


def _one_row(spec: Any) -> Any:
    """Returns a row of zeros, as ragged as the spec, with eight along each open axis."""
    zeros = tf.zeros([1, *(size or 8 for size in spec.shape[1:])], spec.dtype)
    ragged: Any = tf.RaggedTensor
    options = {name: getattr(spec, name, None) for name in ("ragged_rank", "row_splits_dtype")}
    return ragged.from_tensor(zeros, **options) if options["ragged_rank"] else zeros
