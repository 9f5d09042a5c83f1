"""One device against N replicas: the same model, optimizer and batches on both.

For models that law has not, most of them float32: ``ByHand`` is its plain loop, ``Replicated`` our
step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from law.model import Training
from law.pair import assert_replicas_agree, dataset_of
from law.plain import as_tensors, specs_of, train_once

import tfmultigpu as tmg
from tfmultigpu.strategies.process_state import process_state

SEED = 7


@functools.cache
def strategy_of(replicas: int) -> tf.distribute.Strategy:
    """One strategy for each number of replicas: two on one process must not share collectives."""
    if replicas == 1:
        return tf.distribute.get_strategy()
    return unused_strategy(replicas)


def unused_strategy(replicas: int) -> tf.distribute.Strategy:
    """A new strategy, for what depends on the variables that are alive on it: their places."""
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    process_state.ignore(strategy)  # One device is meant where none is given.
    return strategy


@dataclasses.dataclass(frozen=True)
class Result:
    """What training left behind.

    Attributes:
        weights: All variables of the model.
        losses: The loss of each step.
        iterations: What the optimizer counted.
        logs: All logs of each step (none by hand).
    """

    weights: list[np.ndarray]
    losses: list[float]
    iterations: int
    logs: list[dict[str, float]] = dataclasses.field(default_factory=list)


class _Trained:
    """A model and an optimizer that can be set back to where they began."""

    def __init__(self, build: Callable[[], Any], optimizer: Callable[[], Any]) -> None:
        keras.utils.set_random_seed(SEED)
        self.model = build()
        self.optimizer = optimizer()
        self._start: list[np.ndarray] | None = None

    def variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]

    def reset(self) -> None:
        if self._start is None:
            self._start = [variable.numpy() for variable in self.variables()]
        for variable, value in zip(self.variables(), self._start, strict=True):
            variable.assign(value)

    def result(self, losses: Sequence[float], logs: Sequence[dict[str, float]] = ()) -> Result:
        weights = [variable.numpy() for variable in self.model.variables]
        return Result(weights, list(losses), int(self.optimizer.iterations.numpy()), list(logs))


class ByHand(_Trained):
    """``law.plain``, which is the truth: nothing in it is ours.

    Args:
        build: Makes the model.
        optimizer: Makes the optimizer.
        loss: ``f(y_true, y_pred, sample_weight) -> scalar``; a Keras loss is one.
        clip_norm: For ``tf.clip_by_global_norm``.
        dense: Whether the gradient of an embedding is summed by row, as a dense one would be.
    """

    def __init__(
        self,
        build: Callable[[], Any],
        optimizer: Callable[[], Any],
        loss: Callable[..., Any],
        *,
        clip_norm: float | None = None,
        dense: bool = True,
    ) -> None:
        super().__init__(build, optimizer)
        self._loss = loss
        self._training = Training(self.model, self.optimizer, loss, clip_norm=clip_norm)
        self._dense = dense
        self._compiled: Any = None

    def train(self, batches: Sequence[Any]) -> Result:
        if self._compiled is None:
            self.model(batches[0][0])  # builds it, as any forward pass does
            self.optimizer.build(self.model.trainable_variables)
            signature = [specs_of(batches[0])]
            self._compiled = tf.function(self.step, input_signature=signature, autograph=False)
        self.reset()
        return self.result([float(self._compiled(as_tensors(batch))) for batch in batches])

    def step(self, batch: Any) -> Any:
        return train_once(self._training, batch, self._dense)["loss"]


class _Whole:
    """A model whose output is the loss of a batch."""

    def __init__(self, model: Any, loss: Callable[[Any, Any], Any], variables: Any) -> None:
        self._model, self._loss, self._variables = model, loss, variables

    @property
    def losses(self) -> list[Any]:
        return self._model.losses

    @property
    def trainable_variables(self) -> list[Any]:
        return self._variables or self._model.trainable_variables

    def __call__(self, batch: Any, training: bool) -> Any:
        return self._loss(self._model, batch)


def train_by_hand(
    model: Any, optimizer: Any, loss: Callable[[Any, Any], Any], batches: Any, variables: Any = None
) -> list[float]:
    """Trains by ``law.plain``; ``loss(model, batch)`` is the number to minimise.

    Losses that layers add are added. Returns the loss of each batch.
    """
    whole = _Whole(model, loss, variables)
    training = Training(whole, optimizer, lambda y_true, value, sample_weight=None: value)
    return [float(train_once(training, (batch, None))["loss"]) for batch in batches]


class Replicated(_Trained):
    """Our step on N replicas; ``options`` go to ``make_train_step``."""

    def __init__(
        self,
        replicas: int | tf.distribute.Strategy,
        build: Callable[[], Any],
        optimizer: Callable[[], Any],
        loss: Any,
        **options: Any,
    ) -> None:
        self.strategy = strategy_of(replicas) if isinstance(replicas, int) else replicas
        with self.strategy.scope():
            super().__init__(build, optimizer)
        self.step = tmg.make_train_step(self.model, self.optimizer, loss, self.strategy, **options)

    def train(self, batches: Iterable[Any], step: Callable[[Any], Any] | None = None) -> Result:
        """Trains from the beginning on whole batches, or on shards from a distributed dataset."""
        if self.model.built:
            self.reset()  # else the first step builds it, from the seed
        step = self.step if step is None else step
        logs = [plain(step(batch)) for batch in batches]
        self.assert_replicas_agree()
        return self.result([log["loss"] for log in logs], logs)

    def assert_replicas_agree(self) -> None:
        trained = [*self.model.trainable_variables, *self.optimizer.variables]
        assert_replicas_agree(self.strategy, trained)


def graph_of(step: Any, batch: Any) -> tf.Graph:
    """The graph of a step that is built: where and when it computes what."""
    graphs: list[tf.Graph] = []

    @tf.function
    def look() -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        return step(batch)

    step(batch)
    look()
    return graphs[0]


def plain(logs: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items()}


def difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """The largest difference of any weight; NaN is never equal."""
    assert len(one) == len(other)
    largest = [
        np.max(np.abs(a.astype("float64") - b.astype("float64")), initial=0.0)
        for a, b in zip(one, other, strict=True)
    ]
    return float(np.max(largest))


def assert_same(
    result: Result, truth: Result, *, weights: float = 1e-6, loss: float = 1e-6, what: object = ""
) -> None:
    """Holds weights, the loss of every step and the step count to those of one device."""
    apart = difference(result.weights, truth.weights)
    assert apart <= weights, f"{what}: weights differ by {apart:.2e}, allowed {weights:.0e}"
    np.testing.assert_allclose(result.losses, truth.losses, rtol=loss, atol=loss, err_msg=str(what))
    assert result.iterations == truth.iterations, what


def cut(arrays: Sequence[np.ndarray], sizes: Iterable[int]) -> list[tuple[np.ndarray, ...]]:
    """Batches of these sizes, read one after the other and again from the start."""
    rows, batches, start = len(arrays[0]), [], 0
    for size in sizes:
        if start + size > rows:
            start = 0
        batches.append(tuple(array[start : start + size] for array in arrays))
        start += size
    return batches


def as_dataset(batches: Sequence[tuple[np.ndarray, ...]]) -> tf.data.Dataset:
    """A dataset that yields exactly these global batches."""
    return dataset_of(lambda: batches, batches[0])


def hold(
    replicas: int,
    build: Callable[[], Any],
    optimizer: Callable[[], Any],
    loss: Any,
    batches: Sequence[Any],
    *,
    tolerance: float = 1e-6,
    clip_norm: float | None = None,
    **options: Any,
) -> Result:
    """Trains on one device by hand and on replicas, and holds one to the other."""
    expected = ByHand(build, optimizer, loss, clip_norm=clip_norm).train(batches)
    run = Replicated(replicas, build, optimizer, loss, clip_norm=clip_norm, **options)
    result = run.train(batches)
    assert_same(result, expected, weights=tolerance, loss=tolerance)
    return result
