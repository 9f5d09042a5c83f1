"""Models before the first step: several as one, built in the scope of their strategy, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import ScopeError
from tfmultigpu.strategies.scopes import all_layers, check_scope

_LENGTH = 8


def prepare_model(model: Any, strategy: tf.distribute.Strategy, batch_spec: Any = None) -> None:
    """Checks that a model was created in the scope of a strategy; builds it if it is not built."""
    if not model.built and (has_call(model) or not model.variables):
        # An add-on may have a say in where variables live.
        with getattr(strategy, "tfmultigpu_scope", strategy.scope)():
            _build(model, batch_spec)
    check_scope(model.variables, strategy, "model")
    if strategy.num_replicas_in_sync > 1:
        _check_layers(model)


def has_call(model: Any) -> bool:
    """Returns whether a model can be called itself, and not only its parts, as those of a GAN."""
    import keras

    return getattr(model.__class__, "call", None) is not keras.Model.call


def _check_layers(model: Any) -> None:
    """Raises an error for layers that give another result on several replicas."""
    import keras

    layers = all_layers(model)
    stateful = [one.name for one in layers if getattr(one, "stateful", False)]
    if stateful:
        raise ScopeError(
            "A stateful layer carries the state of each row to the next batch, in which the row "
            f"may be on another replica. Received: layers {stateful}. Drop stateful=True, or train "
            "on one device: tmg.create_strategy(devices=1)."
        )
    for one in layers:
        # Keras makes the input of a Sequential from the first batch; its layers take any other.
        inputs = [] if isinstance(one, keras.Sequential) else getattr(one, "inputs", None) or []
        fixed = [t for t in inputs if isinstance(t, keras.KerasTensor) and (t.shape or [None])[0]]
        if fixed:
            name, (rows, *shape) = fixed[0].name, fixed[0].shape
            raise ScopeError(
                f"An input of the model takes {rows} rows only, and a replica gets other numbers "
                f"of rows. Received: input {name!r} of model {one.name!r} with batch_shape="
                f"{(rows, *shape)}. Leave the batch open: keras.Input(shape={tuple(shape)})."
            )


def symbolic(specs: Any) -> Any:
    """Returns symbolic tensors of Keras for type specs, to run a model on shapes alone."""
    import keras

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
            f"Received: model {model.name!r}, batch {batch_spec}. Build it inside the scope: with "
            "strategy.scope(): model.build(input_shape)."
        ) from error


def _one_row(spec: Any) -> Any:
    """Returns one row of zeros; an axis of unknown length gets a fixed one."""
    row = [1, *(_LENGTH if size is None else size for size in spec.shape[1:])]
    zeros = tf.zeros(row, spec.dtype)
    ragged_rank = getattr(spec, "ragged_rank", None)
    if ragged_rank is not None:
        ragged: Any = tf.RaggedTensor
        return ragged.from_tensor(
            zeros, ragged_rank=ragged_rank, row_splits_dtype=spec.row_splits_dtype
        )
    return tf.sparse.from_dense(zeros) if isinstance(spec, tf.SparseTensorSpec) else zeros


def as_model(model: Any) -> Any:
    """Returns a model as it is, and a list, tuple or dict of models as one Keras model."""
    import keras

    several = model.values() if isinstance(model, Mapping) else model
    parts = list(several) if isinstance(model, (Mapping, list, tuple)) else []
    if not parts or not all(isinstance(part, keras.layers.Layer) for part in parts):
        return model
    if unbuilt := [part.name for part in parts if not part.built]:
        raise ScopeError(
            "One of several models has no variables yet, and a batch does not tell what it is "
            f"given. Received: {unbuilt}. Build it inside the scope: with strategy.scope(): "
            "model.build(input_shape)."
        )
    group = keras.Model(name="_".join(part.name for part in parts))
    group.parts = parts  # Keras tracks the layers in a list.
    group.built = True
    return group
