"""Batch normalization over the rows of all replicas: in whole models, and behind masks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmultigpu.strategies.scopes import all_layers, check_backend

__all__ = ["masked_moments", "synchronize_batch_norm"]


def synchronize_batch_norm(model: Any) -> Any:
    """Makes every ``BatchNormalization`` in a model normalize by the rows of all replicas.

    That is what ``BatchNormalization(synchronized=True)`` does, for models one did not write, such
    as those of ``keras.applications``. Trained weights stay as they are; moving statistics that
    differ between replicas become those of the first. Steps made before notice at the next call.
    What Keras' own ``fit`` has compiled does not change.

    Args:
        model: A Keras model or layer, built or not. Layers inside layers are found too.

    Returns:
        The same model.

    Raises:
        TypeError: It is not a Keras model or layer.
        KerasBackendError: Keras does not run on TensorFlow.

    Example:
        >>> import keras, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
        >>> tmg.synchronize_batch_norm(model).layers[0].synchronized
        True
    """
    import keras

    check_backend()
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            f"model must be a Keras model or layer. Received: {model!r}. Only their layers can be "
            "changed: write tmg.synchronize_batch_norm(model)."
        )
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
            for variable in layer.non_trainable_variables:
                variable.assign(tf.convert_to_tensor(variable.value))  # To every replica.
    return model


def masked_moments(original: Any, layer: Any, inputs: Any, mask: Any) -> Any:
    """Returns mean and variance over what the masks of all replicas leave.

    Keras synchronizes ``BatchNormalization(synchronized=True)`` only where there is no mask. This
    is its formula for one device, with each sum added over the replicas before it is divided.

    Args:
        original: What Keras computes them by, for a layer without mask or not synchronized.
        layer: The ``BatchNormalization``.
        inputs: What it normalizes, at least float32.
        mask: Which elements count, of the shape of the inputs without the last axis; or None.
    """
    context = tf.distribute.get_replica_context()
    alone = context is None or context.num_replicas_in_sync == 1
    if mask is None or alone or not layer.synchronized:
        return original(layer, inputs, mask)
    import keras

    rank = inputs.shape.rank
    axes = [axis for axis in range(rank) if axis != layer.axis % rank]
    counted = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))

    def total(values: Any) -> Any:
        return tf.reduce_sum(values, axes, keepdims=True)

    kept = tf.where(counted, inputs, tf.zeros_like(inputs))
    sums = [total(kept), total(tf.cast(counted, inputs.dtype))]
    sum_of_inputs, count = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
    count += keras.config.epsilon()  # As Keras does: nothing may be left.
    mean = sum_of_inputs / count
    apart = tf.where(counted, inputs - mean, tf.zeros_like(inputs))
    squares = context.all_reduce(tf.distribute.ReduceOp.SUM, total(tf.square(apart)))
    return tf.squeeze(mean, axes), tf.squeeze(squares / count, axes)
