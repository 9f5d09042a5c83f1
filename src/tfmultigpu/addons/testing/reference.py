"""Reference loop on one device. It imports nothing of this library: what it tests is elsewhere."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

__all__ = ["OneDevice", "Training"]


@dataclasses.dataclass(frozen=True)
class Training:
    """Model, optimizer and loss, and every option that changes the weights.

    Attributes:
        model: A Keras model.
        optimizer: A Keras optimizer.
        loss: A Keras loss, its name, a function, or a dict or list of them; see
            ``make_train_step``.
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

    def variables(self) -> dict[str, Any]:
        """Returns the variables of model, optimizer and metrics, by unique names."""
        named: dict[str, Any] = {}
        metrics = tf.nest.flatten([self.metrics, self.weighted_metrics])
        for owner in (self.model, self.optimizer, *metrics):
            for variable in () if owner is None else owner.variables:
                name = path = f"{type(owner).__name__}: {getattr(variable, 'path', variable.name)}"
                copy = 1
                while name in named:
                    copy += 1
                    name = f"{path} ({copy})"
                named[name] = variable
        return named


class OneDevice:
    """Trains on one device with a gradient tape, a Keras loss and ``optimizer.apply``.

    Converts the sparse gradients of embeddings to dense ones.

    Attributes:
        training: The training.
    """

    def __init__(self, training: Training) -> None:
        """Takes a training whose variables were created outside of any strategy."""
        self.training = training
        self._losses = tf.nest.map_structure(
            lambda loss: None if loss is None else _keras_loss(loss), training.loss
        )
        traced: Any = functools.partial(tf.function, reduce_retracing=True, autograph=False)
        self._step, self._evaluation = traced(self._train), traced(self._evaluate)
        self._prediction = traced(lambda batch: self._call(batch, training=False)[2])

    def build(self, batch: Any) -> None:
        """Creates the variables of model and optimizer."""
        if not self.training.model.built:
            self.training.model(_unpack(batch)[0])
        self.training.optimizer.build(self.training.model.trainable_variables)

    def step(self, batch: Any) -> dict[str, Any]:
        """Trains on one batch; returns ``"loss"`` and ``"gradient_norm"``, before clipping."""
        return dict(self._step(batch))

    def evaluate(self, batch: Any) -> Any:
        """Returns the loss of a batch, without training."""
        return self._evaluation(batch)

    def predict(self, batch: Any) -> Any:
        """Returns the model's predictions for a batch."""
        return self._prediction(batch)

    def _call(self, batch: Any, *, training: bool) -> tuple[Any, Any, Any]:
        x, y, weight = _unpack(batch)
        return y, weight, self.training.model(x, training=training)

    def _loss(self, batch: Any, *, training: bool) -> tuple[Any, Any, Any, Any]:
        this = self.training
        if this.forward is not None:
            pair = this.forward(this.model, batch, training)
            y, weight, outputs = None, None, None
            loss = tf.math.divide_no_nan(pair.sum, pair.weight)
        else:
            y, weight, outputs = self._call(batch, training=training)
            loss = tf.zeros([])
            for part in _by_output(outputs, this.model, y, weight, self._losses, this.loss_weights):
                y_pred, y_true, sample_weight, function, factor = part
                if function is not None:
                    value = function(y_true, y_pred, sample_weight=sample_weight)
                    loss = tf.cast(loss, _wider(loss, value)) + (
                        tf.cast(value, _wider(loss, value)) * (1.0 if factor is None else factor)
                    )
        for extra in this.model.losses:
            loss += tf.cast(extra, loss.dtype)
        return loss, y, weight, outputs

    def _train(self, batch: Any) -> dict[str, Any]:
        this = self.training
        with tf.GradientTape() as tape:
            loss, y, weight, outputs = self._loss(batch, training=True)
            target = this.optimizer.scale_loss(loss)
        variables = this.model.trainable_variables
        pairs = zip(tape.gradient(target, variables), variables, strict=True)
        found = [(tf.convert_to_tensor(g), v) for g, v in pairs if g is not None]
        scale = tf.cast(target, tf.float32) / tf.cast(loss, tf.float32)
        scale = 1.0 if target is loss else tf.where(tf.math.is_finite(scale), scale, 1.0)
        wide = [tf.cast(gradient, tf.float64) for gradient, _ in found]
        norm = tf.linalg.global_norm(wide) if wide else tf.zeros([], tf.float64)
        gradients = [gradient for gradient, _ in found]
        if this.clip_norm is not None:
            limit = tf.cast(this.clip_norm, tf.float64) / tf.maximum(norm, this.clip_norm)
            gradients = [gradient * tf.cast(limit, gradient.dtype) for gradient in gradients]
        if gradients:
            this.optimizer.apply(gradients, [variable for _, variable in found])
        for metrics, weighted in ((this.metrics, False), (this.weighted_metrics, True)):
            for part in _by_output(outputs, this.model, y, weight, None, None, metrics):
                y_pred, y_true, sample_weight, *_, chosen = part
                for metric in tf.nest.flatten(chosen):
                    if metric is not None:
                        extra = {"sample_weight": sample_weight} if weighted else {}
                        metric.update_state(y_true, y_pred, **extra)
        return {"loss": loss, "gradient_norm": norm / tf.cast(scale, tf.float64)}

    def _evaluate(self, batch: Any) -> Any:
        return self._loss(batch, training=False)[0]


def _keras_loss(loss: Any) -> Any:
    """Returns a loss as a ``keras.losses.Loss``, as ``compile`` makes one of a name or function."""
    import keras

    function = keras.losses.get(loss) if isinstance(loss, str) else loss
    if isinstance(function, keras.losses.Loss):
        return function
    if function is getattr(keras.losses, "circle", None):
        return keras.losses.Circle()

    class OfFunction(keras.losses.Loss):  # type: ignore[misc]
        """Function of values for each example; its arguments get the same rank, as in Keras."""

        def call(self, y_true: Any, y_pred: Any) -> Any:
            if not tf.nest.is_nested(y_true) and not tf.nest.is_nested(y_pred):
                y_true, y_pred = _fit_rank(y_true, y_pred), _fit_rank(y_pred, y_true)
            return function(y_true, y_pred)

    return OfFunction(name="loss")


def _fit_rank(values: Any, other: Any) -> Any:
    """Adds or removes a last axis of size 1 if the rank differs by one."""
    rank, wanted = values.shape.rank, other.shape.rank
    if None in (rank, wanted) or abs(rank - wanted) != 1:
        return values
    if rank == 1 and other.shape[-1] == 1:
        return values[..., None]
    return tf.squeeze(values, -1) if rank > wanted > 1 and values.shape[-1] == 1 else values


def _unpack(batch: Any) -> tuple[Any, Any, Any]:
    x, y, weight = (*(batch if isinstance(batch, tuple) else (batch,)), None, None)[:3]
    return x, y, weight


def _by_output(outputs: Any, model: Any, *others: Any) -> list[tuple[Any, ...]]:
    """Groups arguments by output: by name in a dict, by index in a list."""
    if isinstance(outputs, Mapping):
        names = list(outputs)
        return [(outputs[n], *(_pick(o, n, names.index(n)) for o in others)) for n in names]
    if isinstance(outputs, (list, tuple)):
        names = list(getattr(model, "output_names", None) or range(len(outputs)))
        return [
            (output, *(_pick(o, names[i], i) for o in others)) for i, output in enumerate(outputs)
        ]
    return [(outputs, *(_only(other) for other in others))]


def _pick(structure: Any, name: Any, index: int) -> Any:
    if isinstance(structure, Mapping):
        return structure.get(name)
    if isinstance(structure, (list, tuple)):
        return structure[index] if structure else None
    return structure


def _only(structure: Any) -> Any:
    if isinstance(structure, Mapping):
        return next(iter(structure.values()))
    return structure


def _wider(one: Any, other: Any) -> Any:
    return max(one.dtype, other.dtype, key=lambda dtype: dtype.size)
