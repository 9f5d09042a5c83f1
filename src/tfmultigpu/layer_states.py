"""State that layers change by themselves when they are called, and what replicas make of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import ReplicaDependenceWarning
from tfmultigpu.scopes import all_layers

__all__ = ["assigned_in_each_pass", "may_be_assigned", "warn_about_copies"]

_EQUAL = 1e-5


def assigned_in_each_pass(model: Any) -> list[Any]:
    """Returns variables that a forward pass computes anew from themselves, Keras variables.

    ``SpectralNormalization`` divides its kernel by an estimate that each pass in training improves.
    Micro-batches must all begin with the same values, or one step would do that several times.
    """
    import keras

    return [
        variable
        for layer in all_layers(model)
        if isinstance(layer, keras.layers.SpectralNormalization)
        for variable in (layer.vector_u, layer.kernel)
    ]


def may_be_assigned(model: Any) -> list[Any]:
    """Returns the variables that layers are most likely to assign, Keras variables: no weights."""
    frozen = {id(v) for layer in all_layers(model) if not layer.trainable for v in layer.weights}
    return [v for v in model.non_trainable_variables if id(v) not in frozen]


def warn_about_copies(
    strategy: tf.distribute.Strategy, model: Any, assigned: Sequence[Any]
) -> bool:
    """Warns where a layer gave a variable another value on each replica.

    A collective on several workers: all of them must call it.

    Args:
        strategy: The strategy.
        model: The model.
        assigned: The Keras variables that its layers assigned to while they were called.

    Returns:
        Whether there was something to warn about; the same on all workers.
    """
    variables = _of_layers_unknown(model, assigned)
    if strategy.num_replicas_in_sync == 1 or not variables:
        return False
    found = strategy.experimental_local_results(_differences(strategy, variables))[0].numpy()
    names = [variable.path for variable, apart in zip(variables, found, strict=True) if apart]
    if names:
        warnings.warn(
            "A layer computes a state from the rows it is given, and every replica is given "
            f"others: its copies on {strategy.num_replicas_in_sync} replicas now differ, and only "
            f"one is saved. Received: variables {names[:5]}. In call, add sums over the replicas "
            "before they are assigned: context = tf.distribute.get_replica_context(); "
            "total, count = context.all_reduce('SUM', [total, count]).",
            ReplicaDependenceWarning,
            stacklevel=5,
        )
    return bool(names)


def _of_layers_unknown(model: Any, assigned: Sequence[Any]) -> list[Any]:
    """What layers assigned, but for batch normalization, which is looked at when a step is made."""
    import keras

    known = {
        id(variable)
        for layer in all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in layer.variables
    }
    weights = {id(variable) for variable in model.weights}  # The states of seeds are none of them.
    found = {id(variable): variable for variable in assigned}
    return [one for key, one in found.items() if key in weights and key not in known]


def _differences(strategy: tf.distribute.Strategy, variables: list[Any]) -> Any:
    """For each variable whether its copies differ, on every replica alike."""

    def compare() -> Any:
        context = tf.distribute.get_replica_context()
        own = tf.stack([_fingerprint(variable.value) for variable in variables])
        mean = context.all_reduce("MEAN", own)
        apart = tf.cast(tf.abs(own - mean) > _EQUAL * (1.0 + tf.abs(mean)), tf.float64)
        return context.all_reduce("SUM", apart)

    return tf.function(lambda: strategy.run(compare), autograph=False)()


def _fingerprint(value: Any) -> Any:
    """One number that depends on every element and its place."""
    flat = tf.reshape(tf.cast(value, tf.float64), [-1])
    places = tf.linspace(tf.constant(1.0, tf.float64), 2.0, tf.maximum(tf.size(flat), 1))
    return tf.reduce_sum(flat * places)
