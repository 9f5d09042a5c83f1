"""Batch normalization over the rows of all replicas: in whole models, and behind masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.arguments import brief
from tfmultigpu.strategies.scopes import all_layers, check_backend
from tfmultigpu.types import Function, KerasLayer, KerasModel, Nested, Tensor


def synchronize_batch_norm(model: KerasModel) -> KerasModel:
    """Makes every ``BatchNormalization`` in a model normalize by the rows of all replicas.

    That is what ``BatchNormalization(synchronized=True)`` does, for models that you did not write,
    such as the models of ``keras.applications``. If moving statistics differ between replicas, all
    take the first replica's. Existing steps notice at their next call; functions that Keras'
    own ``fit`` has compiled do not change.

    Args:
        model: A Keras model or layer, built or not. Layers inside layers are found too.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is neither a Keras model nor a layer.
        TfMultiGpuError: Keras does not run on TensorFlow.

    Example:
        >>> import keras, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
        >>> tmg.synchronize_batch_norm(model).layers[0].synchronized
        True
    """
    check_backend(model)
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            f"model must be a Keras model or layer. Received: {brief(model)}. Only their layers "
            "can be changed: write tmg.synchronize_batch_norm(model)."
        )
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
            for variable in layer.non_trainable_variables:
                variable.assign(tf.convert_to_tensor(variable.value))  # To every replica.
    return model


def moments_of_replicas(
    original: Function, layer: KerasLayer, inputs: Nested, mask: Tensor
) -> Tensor:
    """Returns mean and variance over what the masks of all replicas leave of their rows.

    Keras synchronizes without a mask only. Here each sum of its formula is one over replicas.
    """
    context = tf.distribute.get_replica_context()

    def over_replicas(add: Function, *args: object, **kwargs: object) -> Tensor:
        return context.all_reduce(tf.distribute.ReduceOp.SUM, add(*args, **kwargs))

    if mask is None or context is None or not layer.synchronized:
        return original(layer, inputs, mask)
    with patching(*_compat.sum_in_moments(), over_replicas):
        return original(layer, inputs, mask)


@contextmanager
def noting_moments(layers: list[KerasLayer]) -> Iterator[None]:
    """Adds each layer that takes the moments of the rows of this replica alone; replica context."""

    def moments(original: Function, layer: KerasLayer, inputs: Nested, mask: Tensor) -> Tensor:
        if not layer.synchronized and id(layer) not in map(id, layers):
            layers.append(layer)
        return original(layer, inputs, mask)

    with patching(*_compat.moments_of_batch(), moments):
        yield
