"""Checking that models, optimizers and metrics live where the strategy wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import KerasBackendError, ScopeError
from tfmultigpu.outputs import unpack_batch

__all__ = ["check_backend", "check_scope", "prepare_model", "symbolic"]


def check_backend() -> None:
    """Checks that Keras runs on TensorFlow.

    Raises:
        KerasBackendError: It runs on something else.
    """
    import keras

    if keras.config.backend() != "tensorflow":
        raise KerasBackendError(
            "tf.distribute trains Keras models on the TensorFlow backend only. Received: the "
            f"{keras.config.backend()!r} backend. Before the first import of keras, set "
            'os.environ["KERAS_BACKEND"] = "tensorflow".'
        )


def prepare_model(model: Any, strategy: tf.distribute.Strategy, batch_spec: Any = None) -> None:
    """Checks that a model was created in the scope of a strategy, and builds it there if need be.

    Args:
        model: A Keras model.
        strategy: The strategy.
        batch_spec: Type specs of a batch, for a model that has no variables yet.

    Raises:
        ScopeError: The model was created outside the scope, or cannot be built from the batch.
    """
    if not model.built:
        with strategy.scope():
            _build(model, batch_spec)
    check_scope(model.variables, strategy, "model")


def symbolic(specs: Any) -> Any:
    """Returns Keras' symbolic tensors for type specs, for running a model on shapes alone."""
    import keras

    return tf.nest.map_structure(
        lambda spec: keras.KerasTensor(tuple(spec.shape), spec.dtype.name), specs
    )


def _build(model: Any, batch_spec: Any) -> None:
    try:
        inputs, _, _ = unpack_batch(batch_spec)
        model(symbolic(inputs))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ScopeError(
            f"The model has no variables yet and could not be built from the batch: {error} "
            f"Received: model {model.name!r}, batch {batch_spec}. Build it first, inside the "
            "scope: with strategy.scope(): model.build(input_shape)."
        ) from error


def check_scope(variables: Sequence[Any], strategy: tf.distribute.Strategy, what: str) -> None:
    """Checks that variables were created in the scope of a strategy.

    Args:
        variables: Keras or TensorFlow variables.
        strategy: The strategy.
        what: What they belong to, for the error.

    Raises:
        ScopeError: One was not.
    """
    for variable in variables:
        inner = getattr(variable, "value", variable)
        inner = variable if callable(inner) else inner
        if not strategy.extended.variable_created_in_scope(inner):
            name = getattr(variable, "path", variable.name)
            raise ScopeError(
                f"The {what} was created outside the scope of the strategy, so it lives on one "
                f"device and would be trained there alone. Received: variable {name!r} of the "
                f"{what}, and {type(strategy).__name__} with {strategy.num_replicas_in_sync} "
                f"replica(s). Create the {what} inside the scope:\n"
                "    with strategy.scope():\n"
                f"        {what} = ..."
            )
