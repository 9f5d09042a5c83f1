"""Loops that users write for plain ``tf.distribute``, and their truth on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from law.model import Batch, Training, regression, small
from law.pair import SEED, dataset_of
from law.plain import PlainLoop, assert_values


def build(strategy: tf.distribute.Strategy | None = None, optimizer: Any = None) -> Training:
    """Returns ``small`` with a built optimizer, in the scope of a strategy if one is given."""
    keras.utils.set_random_seed(SEED)
    with (strategy or tf.distribute.get_strategy()).scope():
        training = small(None if optimizer is None else optimizer())
        training.optimizer.build(training.model.trainable_variables)
    return training


def on_one_device(batches: Sequence[Batch], optimizer: Any = None) -> Training:
    """Returns ``small``, trained by a plain loop on one device."""
    training = build(optimizer=optimizer)
    PlainLoop(training, batches[0]).train(batches)
    return training


def hold(actual: Training, expected: Training) -> None:
    """Holds that every variable is that of one device."""
    assert_values(actual.values(), expected.values(), expected.variables())


def shards_of(batches: Sequence[Batch], strategy: Any, distribute: str) -> Iterator[Any]:
    """Returns the batches, distributed by TensorFlow ("tf") or by this library ("tmg")."""
    dataset = dataset_of(lambda: batches, batches[0])
    if distribute == "tf":
        return iter(strategy.experimental_distribute_dataset(dataset))
    return iter(tmg.distribute_dataset(dataset, strategy))


def windows(sizes: Sequence[Sequence[int]]) -> Iterator[list[Batch]]:
    """Returns batches of these sizes, window by window."""
    batches = iter(regression([size for window in sizes for size in window]))
    for window in sizes:
        yield [next(batches) for _ in window]


def merged(batches: Sequence[Batch]) -> Batch:
    """Returns one batch of all rows of some."""
    return tuple(np.concatenate(part) for part in zip(*batches, strict=True))


def apply_once(strategy: Any, optimizer: Any, gradients: Any, variables: Any) -> None:
    """Applies reduced gradients where the library wants it: outside, or on every replica."""
    try:
        tmg.apply_reduced_gradients(optimizer, gradients, variables)
    except RuntimeError:
        strategy.run(tmg.apply_reduced_gradients, args=(optimizer, gradients, variables))
