"""One device and N replicas of one training: the same model, optimizer and global batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from law.model import ALL, FEATURES, Batch, Training, batches_of, everything
from law.plain import PlainLoop, assert_values, specs_of

SEED = 3
LOGS = {"rtol": 5e-7, "atol": 1e-9}  # Logs are float32.


def assert_logs(actual: Any, expected: Any, what: object = "") -> None:
    """Holds that logs have the names and values of others."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, **LOGS, err_msg=f"{what} {name}")


def assert_replicas_agree(strategy: tf.distribute.Strategy, variables: Iterable[Any]) -> None:
    """Holds that the copies of each variable are the same, bit for bit."""
    for variable in variables:
        first, *others = strategy.experimental_local_results(variable.value)
        for other in others:
            np.testing.assert_array_equal(other.numpy(), first.numpy(), variable.path)


@functools.cache
def strategy_of(replicas: int) -> tf.distribute.Strategy:
    """Returns the strategy of the first ``replicas`` virtual devices, one for each number."""
    kind = os.environ.get("TEST_DEVICES", "CPU")  # tests/conftest.py divides a GPU.
    return tmg.create_strategy(devices=[f"{kind}:{i}" for i in range(replicas)])


def dataset_of(batches: Callable[[], Iterable[Batch]], like: Batch) -> tf.data.Dataset:
    """Returns a dataset that yields whatever ``batches()`` returns when a pass begins."""
    return tf.data.Dataset.from_generator(lambda: iter(batches()), output_signature=specs_of(like))


def known(batches: Sequence[Any]) -> tf.data.Dataset:
    """Returns a dataset of these batches whose length Keras knows."""
    data = dataset_of(lambda: batches, batches[0])
    return data.apply(tf.data.experimental.assert_cardinality(len(batches)))


def step_of(training: Training, strategy: tf.distribute.Strategy, **options: Any) -> Any:
    """Returns our step of a training that was built in the scope of the strategy."""
    return tmg.make_train_step(
        training.model,
        training.optimizer,
        training.loss,
        strategy,
        metrics=training.metrics,
        forward=training.forward,
        clip_norm=training.clip_norm,
        **options,
    )


class Pair:
    """One device and N replicas that were built alike, traced once, and can be set back.

    Args:
        build: Makes the training; called once for one device, and once in the strategy's scope.
        like: A batch whose structure all batches have.
        strategy: The strategy, or a number of replicas.
        shares: For ``distribute_dataset``.
        sharded: Whether the model has sharded variables.
        options: For ``make_train_step``.
    """

    def __init__(
        self,
        build: Callable[[], Training],
        like: Batch,
        strategy: tf.distribute.Strategy | int,
        *,
        shares: Sequence[float] | None = None,
        sharded: bool = False,
        **options: Any,
    ) -> None:
        self.strategy = strategy_of(strategy) if isinstance(strategy, int) else strategy
        keras.utils.set_random_seed(SEED)
        self.truth = build()
        self.plain = PlainLoop(self.truth, like)
        keras.utils.set_random_seed(SEED)
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(self.strategy.scope())
            if sharded:
                scopes.enter_context(tmg.sharded_variables(at_least=0))
            self.ours = build()
        self.step = step_of(self.ours, self.strategy, **options)
        self._batches: Sequence[Batch] = [like]
        source = dataset_of(lambda: self._batches, like)
        self.data = tmg.distribute_dataset(source, self.strategy, shares=shares)
        self.start = self.truth.values()

    def reset(self) -> None:
        """Sets both back to where they began."""
        self.truth.assign(self.start)
        self.ours.assign(self.start)

    def shards(self, batches: Sequence[Batch]) -> Iterator[Any]:
        """Returns one pass over these batches, each distributed over the replicas."""
        self._batches = batches
        return iter(self.data)

    def hold(self, batches: Sequence[Batch], steps: int | None = None) -> None:
        """Holds step by step, then ``steps`` a call: logs, every variable, every replica's copy."""
        self.reset()
        expected = self.plain.train(batches)
        for shards, log in zip(self.shards(batches), expected, strict=True):
            logs = self.step(shards)
            for name, value in log.items():
                np.testing.assert_allclose(logs[name], value, **LOGS, err_msg=name)
        self.assert_same()
        if steps is None:
            return
        self.ours.assign(self.start)
        iterator, left = self.shards(batches), len(batches)
        while left:
            ran = int(self.step.run(iterator, steps)["steps"])
            assert ran == min(steps, left)
            left -= ran
        assert int(self.step.run(iterator, steps)["steps"]) == 0
        self.assert_same()

    def assert_same(self, **tolerance: float) -> None:
        """Holds that every variable is that of one device, on every replica."""
        names = self.truth.variables()
        assert_values(self.ours.values(), self.truth.values(), names, **tolerance)
        assert_replicas_agree(self.strategy, self.ours.model.trainable_variables)


def covering() -> list[frozenset[str]]:
    """Returns 12 sets of features in which each two are on-on, on-off, off-on and off-off.

    The design of Plackett and Burman: https://en.wikipedia.org/wiki/Plackett-Burman_design
    """
    first = [sign == "+" for sign in "++-+++---+-"]
    rows = [first[-i:] + first[:-i] for i in range(11)] + [[False] * 11]
    return [frozenset(f for f, on in zip(FEATURES, row, strict=True) if on) for row in rows]


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to cut the work, with the features that are on meanwhile."""

    replicas: int
    on: frozenset[str] = ALL
    shares: tuple[float, ...] | None = None
    norm: bool = False
    sharded: bool = False
    optimizer: str = "SGD"
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        words = [f"N={self.replicas}", f"{len(self.on)} features"]
        words += [f"shares={self.shares}"] * bool(self.shares)
        words += ["synchronized norm"] * self.norm + ["sharded variables"] * self.sharded
        return ", ".join([*words, *(f"{name}={value}" for name, value in self.options)])

    def pair(self, strategy: tf.distribute.Strategy | int | None = None) -> Pair:
        """Builds the pair of this row."""
        return Pair(
            functools.partial(
                everything, self.on, self.norm, getattr(keras.optimizers, self.optimizer)
            ),
            batches_of([1], on=self.on)[0],
            strategy or self.replicas,
            shares=self.shares,
            sharded=self.sharded,
            **dict(self.options),
        )


@functools.cache
def pair_of(row: Row) -> Pair:
    """Returns the pair of a row, traced once in this process."""
    return row.pair()
