"""One small model in which every feature can be on at once, its batches, and a few smaller ones.

Everything is float64: there a difference of 1e-7 is never rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

FEATURES = ("l2", "activity", "add_loss", "dropout", "noise", "mask", "weights", "clip", "ema",
            "decay", "metrics")  # fmt: skip
ALL = frozenset(FEATURES)
REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")
LARGEST = 12  # examples of a drawn batch
FLOAT = {"dtype": "float64"}

_random = np.random.default_rng(23)
_X = _random.normal(size=(5 * LARGEST, 4))
_Y = _random.normal(size=(5 * LARGEST, 2))
_IDS = _random.integers(1, 7, (5 * LARGEST, 3)).astype("int32")
_TAGS = _random.normal(size=(5 * LARGEST, 3, 2))

Batch = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Training:
    """All that one training is made of.

    Attributes:
        model: A built Keras model.
        optimizer: Its optimizer, not built.
        loss: A Keras loss, or a dict of them by output.
        metrics: Keras metrics, a list, or a dict of lists by output.
        clip_norm: Largest norm of the global gradient, or None.
        forward: For our step, in place of a loss.
        whole: ``f(model, batch) -> scalar``, the loss of a batch as one writes it for one device;
            where no Keras loss says it. What layers add is added.
        watched: More variables that training may change, such as those of a metric in a layer.
    """

    model: Any
    optimizer: Any
    loss: Any
    metrics: Any = ()
    clip_norm: float | None = None
    forward: Any = None
    whole: Any = None
    watched: Sequence[Any] = ()

    def metrics_by_output(self) -> dict[Any, list[Any]]:
        return self.metrics if isinstance(self.metrics, dict) else {None: list(self.metrics)}

    def variables(self) -> dict[str, Any]:
        """Returns every variable that training may change, by a name for messages."""
        metrics = [m for group in self.metrics_by_output().values() for m in group]
        owners = (self.model, self.optimizer, *metrics)
        variables = [(owner, variable) for owner in owners for variable in owner.variables]
        variables += [(self, variable) for variable in self.watched]
        return {f"{n} {type(o).__name__} {v.path}": v for n, (o, v) in enumerate(variables)}

    def values(self) -> list[np.ndarray]:
        return [np.asarray(variable.numpy()) for variable in self.variables().values()]

    def assign(self, values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self.variables().values(), values, strict=True):
            variable.assign(value)


class AddsLoss(keras.layers.Layer):
    """Adds a mean over the examples of its batch to the loss."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * tf.reduce_mean(tf.reduce_sum(tf.square(x), -1)))
        return x


def everything(on: frozenset[str] = ALL, norm: bool = False, optimizer: Any = None) -> Training:
    """Returns a model of four outputs, each with a loss of another reduction.

    Args:
        on: The features of ``FEATURES`` that are on.
        norm: A synchronized BatchNormalization layer, which excludes micro-batches.
        optimizer: A class of Keras optimizers; SGD with momentum if None.
    """
    layers = keras.layers
    x = keras.Input((4,), dtype="float64", name="x")
    ids = keras.Input((3,), dtype="int32", name="ids")
    hidden = layers.Dense(
        5,
        "tanh",
        kernel_regularizer="l2" if "l2" in on else None,
        activity_regularizer="l1" if "activity" in on else None,
        # An average of kernels of this norm has another one: it must be constrained again.
        kernel_constraint="unit_norm" if "ema" in on else None,
        **FLOAT,
    )(x)
    if "add_loss" in on:
        hidden = AddsLoss(**FLOAT)(hidden)
    if norm:
        hidden = layers.BatchNormalization(synchronized=True, epsilon=0.1, **FLOAT)(hidden)
    if "dropout" in on:
        hidden = layers.Dropout(0.3, seed=1, **FLOAT)(hidden)
    if "noise" in on:
        hidden = layers.GaussianNoise(0.1, seed=2, **FLOAT)(hidden)
    embedded = layers.Embedding(7, 3, mask_zero="mask" in on, **FLOAT)(ids)
    outputs = {name: layers.Dense(2, name=name, **FLOAT)(hidden) for name in REDUCTIONS}
    outputs["tags"] = layers.Dense(2, name="tags", **FLOAT)(embedded)
    loss = {name: keras.losses.Huber(reduction=name, **FLOAT) for name in REDUCTIONS}
    loss["tags"] = keras.losses.Huber(reduction="mean_with_sample_weight", **FLOAT)
    options: dict[str, Any] = {"weight_decay": 0.1} if "decay" in on else {}
    if "ema" in on:
        options |= {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}
    make = optimizer or keras.optimizers.SGD
    metrics = {}
    if "metrics" in on:
        metrics = {
            "sum": [keras.metrics.MeanAbsoluteError(name="error", **FLOAT)],
            "sum_over_batch_size": [keras.metrics.MeanSquaredError(name="squared", **FLOAT)],
        }
    if make is keras.optimizers.SGD:
        options["momentum"] = 0.9
    return Training(
        keras.Model({"x": x, "ids": ids}, outputs),
        make(0.05, **options),
        loss,
        metrics,
        1.0 if "clip" in on else None,
    )


def batches_of(
    sizes: Sequence[int],
    weights: Sequence[float] = (1.0,),
    hidden: Sequence[int] = (),
    on: frozenset[str] = ALL,
) -> list[Batch]:
    """Returns batches of ``everything``.

    Args:
        sizes: The number of examples of each batch.
        weights: The sample weights, cycled, in another order for each output.
        hidden: Which tokens a mask hides: those at ``i % 3`` of the examples ``n`` with
            ``(n + i) % 5 == 0``, for each ``i`` of them.
        on: The features that are on.
    """
    batches = []
    start = 0
    for size in sizes:
        rows = np.arange(start, start + size)

        def weights_of(output: int, rows: Any = rows) -> np.ndarray:
            return np.array([weights[(row + 7 * output) % len(weights)] for row in rows])

        ids = _IDS[rows].copy()
        for i in hidden:
            ids[(rows + i) % 5 == 0, i % 3] = 0
        by_output: dict[str, Any] = {r: weights_of(n) for n, r in enumerate(REDUCTIONS)}
        by_output["tags"] = np.stack([weights_of(3), weights_of(4), weights_of(5)], 1)
        labels = dict.fromkeys(REDUCTIONS, _Y[rows]) | {"tags": _TAGS[rows]}
        batch = {"x": _X[rows], "ids": ids}, labels, by_output
        batches.append(batch if "weights" in on else batch[:2])
        start += size
    return batches


def cut(arrays: Any, sizes: Iterable[int]) -> list[Any]:
    """Returns batches of these sizes, one after the other, of arrays in any structure."""
    ends = np.cumsum([0, *sizes])
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    return [tf.nest.map_structure(lambda array, s=s: array[s], arrays) for s in parts]


def regression(sizes: Sequence[int]) -> list[Batch]:
    """Returns batches ``(x, y)`` of 4 and 2 numbers an example, for ``small``."""
    return cut((_X, _Y), sizes)


def small(optimizer: Any = None, loss: Any = None, **more: Any) -> Training:
    """Returns two Dense layers under SGD, whose steps a wrong scale changes visibly."""
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,), dtype="float64"), layers.Dense(5, "tanh", **FLOAT),
         layers.Dense(2, **FLOAT)]
    )  # fmt: skip
    if optimizer is None:
        optimizer = keras.optimizers.SGD(0.1)
    return Training(model, optimizer, loss or keras.losses.MeanSquaredError(**FLOAT), **more)
