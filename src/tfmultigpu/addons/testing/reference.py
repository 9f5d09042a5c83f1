"""Training on one device. It imports nothing of this library: what it tests is elsewhere."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Training:
    """Model, optimizer and loss, and every option that changes the weights.

    Attributes:
        model: A Keras model.
        optimizer: A Keras optimizer.
        loss: A Keras loss, its name, a function, or a dict or list of them.
        metrics: Keras metrics, updated without sample weights; for several outputs a dict.
        weighted_metrics: Keras metrics, updated with sample weights.
        loss_weights: None, or a dict or list of numbers, one per output.
        forward: ``f(model, batch, training) -> LossSum`` in place of ``loss``.
        clip_norm: Largest global norm of the gradient.
    """

    model: Any
    optimizer: Any
    loss: Any = None
    metrics: Any = ()
    weighted_metrics: Any = ()
    loss_weights: Any = None
    forward: Any = None
    clip_norm: float | None = None

    def values(self) -> list[tuple[str, Any]]:
        """Returns names and values of the variables; of copies that differ, one that does."""
        alike = {id(v) for v in [*self.model.trainable_variables, *self.optimizer.variables]}
        metrics = tf.nest.flatten([self.metrics, self.weighted_metrics])
        values = []
        for owner in [self.model, self.optimizer, *metrics]:
            for variable in () if owner is None else owner.variables:
                first = value = variable.numpy()
                if id(variable) in alike:
                    for copy in getattr(variable.value, "values", ()):
                        if not np.array_equal(copy.numpy(), first, equal_nan=True):
                            value = copy.numpy()
                            break
                path = getattr(variable, "path", variable.name)
                values.append((f"{type(owner).__name__}: {path}", value))
        return values


class OneDevice:
    """Trains on one device with a tape, the loss of ``compile`` and ``optimizer.apply``."""

    def __init__(self, training: Training) -> None:
        """Keeps a training whose variables were created outside of any strategy."""
        self.training = training
        # Keras' own loss of all outputs, in a model without layers that would add theirs.
        self._compiled = keras.Model() if training.loss is not None else None
        if self._compiled is not None:
            self._compiled.output_names = getattr(training.model, "output_names", None)
            weights = training.loss_weights
            if isinstance(weights, dict) and isinstance(training.loss, dict):
                weights = dict.fromkeys(training.loss, 1.0) | weights
            metrics = _as_list(training.metrics), _as_list(training.weighted_metrics)
            self._compiled.compile("sgd", training.loss, weights, *metrics)
        traced: Any = functools.partial(tf.function, reduce_retracing=True, autograph=False)
        self.step = traced(self._train)
        self.evaluate = traced(lambda batch: self._loss(batch, training=False)[0])
        self.predict = traced(lambda batch: training.model(_unpack(batch)[0], training=False))

    def build(self, batch: Any) -> None:
        """Creates the variables of model and optimizer."""
        if not self.training.model.built:
            self.training.model(_unpack(batch)[0])
        self.training.optimizer.build(self.training.model.trainable_variables)

    def _loss(self, batch: Any, *, training: bool) -> tuple[Any, Any]:
        """Returns the loss and the outputs of the model."""
        this, (x, y, weight) = self.training, _unpack(batch)
        loss, outputs = tf.zeros([]), None
        if this.forward is not None:
            pair = this.forward(this.model, batch, training)
            loss = tf.math.divide_no_nan(pair.sum, pair.weight)
        else:
            outputs = this.model(x, training=training)
            if self._compiled is not None:
                if isinstance(weight, dict) and isinstance(outputs, dict):
                    weight = {name: weight.get(name) for name in outputs}
                loss = self._compiled.compute_loss(x, y, outputs, weight)
        return loss + sum(tf.cast(extra, loss.dtype) for extra in this.model.losses), outputs

    def _train(self, batch: Any) -> dict[str, Any]:
        """Trains on one batch; returns ``"loss"`` and ``"gradient_norm"``, before clipping."""
        this = self.training
        with tf.GradientTape() as tape:
            loss, outputs = self._loss(batch, training=True)
            target = this.optimizer.scale_loss(loss)
        variables = this.model.trainable_variables
        gradients, trained = [], []
        for gradient, variable in zip(tape.gradient(target, variables), variables, strict=True):
            if gradient is not None:
                gradients.append(tf.convert_to_tensor(gradient))
                trained.append(variable)
        wide = [tf.cast(gradient, tf.float64) for gradient in gradients]
        norm = tf.linalg.global_norm([*wide, tf.zeros([], tf.float64)])
        scale = tf.cast(this.optimizer.scale_loss(tf.ones([])), tf.float64)
        if this.clip_norm is not None:
            limit = tf.cast(this.clip_norm, tf.float64) / tf.maximum(norm, this.clip_norm)
            gradients = [gradient * tf.cast(limit, gradient.dtype) for gradient in gradients]
        if gradients:
            this.optimizer.apply(gradients, trained)
        if self._compiled is not None:
            x, y, weight = _unpack(batch)
            self._compiled.compute_metrics(x, y, outputs, weight)
        return {"loss": loss, "gradient_norm": norm / scale}


def _as_list(metrics: Any) -> Any:
    """Returns metrics as Keras takes them: None for none."""
    return [metrics] if isinstance(metrics, keras.metrics.Metric) else metrics or None


def _unpack(batch: Any) -> tuple[Any, Any, Any]:
    parts = batch if isinstance(batch, tuple) else (batch,)
    x, y, weight = (*parts, None, None)[:3]
    return x, y, weight
