"""The truth: loops of plain Keras and TensorFlow on one device. Nothing of this library is here."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from law.model import Batch, Training


def as_tensors(batch: Batch) -> Any:
    """Returns a batch as tensors; None stays None."""

    def as_tensor(array: Any) -> Any:
        return array if array is None or tf.is_tensor(array) else tf.convert_to_tensor(array)

    return tf.nest.map_structure(as_tensor, batch)


def specs_of(batch: Batch) -> Any:
    """Returns the specification of batches like this one, of any number of examples."""

    def spec_of(array: Any) -> Any:
        if isinstance(array, (tf.RaggedTensor, tf.SparseTensor)):
            return tf.data.Dataset.from_tensor_slices(array).batch(1).element_spec
        return tf.TensorSpec([None, *np.shape(array)[1:]], np.asarray(array).dtype)

    return tf.nest.map_structure(spec_of, batch)


class PlainLoop:
    """``train_once``, compiled for batches of any number of examples."""

    def __init__(self, training: Training, like: Batch, dense: bool = True) -> None:
        training.optimizer.build(training.model.trainable_variables)
        signature = [specs_of(like)]
        once = functools.partial(train_once, training, dense=dense)
        self._step = tf.function(once, input_signature=signature, autograph=False)

    def step(self, batch: Batch) -> dict[str, float]:
        """Trains on one batch and returns its loss and the norm of its gradient."""
        return {name: float(value) for name, value in self._step(as_tensors(batch)).items()}

    def train(self, batches: Iterable[Batch]) -> list[dict[str, float]]:
        return [self.step(batch) for batch in batches]


def train_once(training: Training, batch: Any, dense: bool = True) -> dict[str, Any]:
    """A tape, the losses of Keras with their own reductions, ``optimizer.apply``.

    Gradients of embeddings are summed by row first (``tf.convert_to_tensor``), as this library
    does, unless ``dense`` is false. Clipping, if any, is of the whole gradient.
    """
    with tf.GradientTape() as tape:
        if training.whole is not None:
            loss = training.whole(training.model, batch)
        else:
            x, y, weights = (*batch, None)[:3]
            outputs = training.model(x, training=True)
            loss = plain_loss(training.loss, y, outputs, weights)
        for extra in training.model.losses:
            loss += tf.reduce_sum(tf.cast(extra, loss.dtype))  # As Keras' compute_loss does.
        scaled = training.optimizer.scale_loss(loss)
    variables = training.model.trainable_variables
    pairs = zip(tape.gradient(scaled, variables), variables, strict=True)
    pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    gradients = [tf.convert_to_tensor(g) if dense else g for g, _ in pairs]
    scale = training.optimizer.scale_loss(tf.ones([]))  # Which an update may change.
    norm = tf.linalg.global_norm(gradients) / tf.cast(scale, gradients[0].dtype)
    if training.clip_norm is not None:
        gradients, _ = tf.clip_by_global_norm(gradients, training.clip_norm)
    training.optimizer.apply(gradients, [variable for _, variable in pairs])
    for name, metrics in training.metrics_by_output().items():
        for metric in metrics:
            if name is None:
                metric.update_state(y, outputs)
            else:
                metric.update_state(y[name], outputs[name])
    return {"loss": loss, "gradient_norm": norm}


def plain_loss(loss: Any, y: Any, outputs: Any, weights: Any = None) -> Any:
    """Returns what Keras' losses say of a whole batch, each by its own reduction, added."""
    if not isinstance(loss, dict):
        return loss(y, outputs, sample_weight=weights)
    weights = weights or {}
    return sum(loss[n](y[n], outputs[n], sample_weight=weights.get(n)) for n in loss)


def assert_values(
    actual: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    names: Iterable[str],
    rtol: float = 1e-7,
    atol: float = 1e-9,
) -> None:
    """Holds that values are those of one device."""
    for name, a, b in zip(names, actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=name)
