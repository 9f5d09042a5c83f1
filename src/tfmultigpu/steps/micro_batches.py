"""Micro-batches: how many each replica computes, and how what they give is added."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.losses.held_assignments import Held
from tfmultigpu.steps.layer_states import assigned_in_each_pass
from tfmultigpu.steps.seeds import GlobalSeeds, seed_states

__all__ = ["MicroBatchSum", "Part", "micro_batch_counts"]


def micro_batch_counts(micro_batches: int | Sequence[int], replicas: int) -> tuple[int, ...]:
    """Returns the number of micro-batches of each replica.

    Args:
        micro_batches: One number for all, or one for each replica.
        replicas: How many there are, on all workers.

    Raises:
        ValueError: They are not positive whole numbers, or not as many as replicas.
    """
    if isinstance(micro_batches, np.ndarray):
        micro_batches = micro_batches.tolist()
    several = isinstance(micro_batches, Sequence) and not isinstance(micro_batches, str)
    given: Sequence[Any] = list(micro_batches) if several else [micro_batches]  # type: ignore[arg-type]
    if any(not isinstance(one, numbers.Integral) or one < 1 for one in given):
        raise ValueError(
            "micro_batches is a whole number, at least 1, or one such number for each replica. "
            f"Received: micro_batches={micro_batches!r}."
        )
    if several and len(given) != replicas:
        raise ValueError(
            "There must be one number of micro-batches for each replica, of all workers. Received: "
            f"micro_batches={micro_batches!r} for {replicas} replica(s). Write "
            "tmg.data.plan_micro_batches(shares, rows_in_memory), or one number for all."
        )
    counts = tuple(int(one) for one in given)
    return counts if several else counts * replicas


class Part(NamedTuple):
    """A micro-batch: ``number`` of ``count``, int64 scalars."""

    number: Any
    count: Any


@dataclasses.dataclass(frozen=True)
class MicroBatchSum:
    """Adds what one micro-batch of a replica gives to what those before gave; replica context.

    Attributes:
        replica: Computes a micro-batch, given the values that variables have before it: tensors,
            and the variables that it assigned.
        structure: Shape and dtype of each of these tensors.
        states: The Keras variables that it assigns.
        alike: The ``id`` of those of them that all micro-batches of a step must find alike: they
            take their part of the same draws, and use the same kernels.
        seeds: What it draws from.
        elsewhere: Places of tensors that are not added here, but returned as they are.
    """

    replica: Callable[..., tuple[list[tf.Tensor], Held]]
    structure: tuple[Any, ...]
    states: tuple[Any, ...]
    alike: frozenset[int]
    seeds: GlobalSeeds
    elsewhere: Collection[int] = ()

    @classmethod
    def like(
        cls,
        values: Sequence[tf.Tensor],
        held: Held,
        replica: Callable[..., tuple[list[tf.Tensor], Held]],
        model: Any,
        seeds: GlobalSeeds,
    ) -> MicroBatchSum:
        """Returns the addition of micro-batches that are like one that was traced.

        Args:
            values: The tensors of that one.
            held: The variables it assigned.
            replica: As above.
            model: The Keras model.
            seeds: As above.
        """
        alike = [v for v in seed_states(model, seeds) if v.synchronization != "on_read"]
        alike += assigned_in_each_pass(model)
        return cls(
            replica,
            tuple((value.shape, value.dtype) for value in values),
            tuple(held.variables),
            frozenset(id(variable) for variable in alike),
            seeds,
        )

    def begin(self) -> list[tf.Tensor]:
        """Returns the states as they are before the first micro-batch."""
        return [tf.identity(state.value) for state in self.states]

    def zeros(self) -> list[tf.Tensor]:
        """Returns the sums before the first micro-batch."""
        kept = [one for i, one in enumerate(self.structure) if i not in self.elsewhere]
        return [tf.zeros(shape, dtype) for shape, dtype in kept]

    def add(self, before: Sequence[Any], begin: Sequence[Any], *args: Any) -> list[tf.Tensor]:
        """Returns the sums with those of a micro-batch, then the states after it.

        Args:
            before: What was returned for the micro-batch before; zeros, then the states.
            begin: The states before the first one.
            args: For ``replica``.

        Raises:
            TfMultiGpuError: This one assigns other variables than the one that was looked at.
        """
        count = len(self.structure) - len(self.elsewhere)
        sums, states = iter(before[:count]), before[count:]
        pairs = zip(self.states, states, strict=True)
        values, held = self.replica([(v, x) for v, x in pairs if id(v) not in self.alike], *args)
        self._check(values, held)
        at_once = {id(variable) for variable in held.at_once}
        after = [held.current(state) for state in self.states]
        for state, value in zip(self.states, begin, strict=True):
            if id(state) in at_once & self.alike:
                state.assign(value)
        added = [
            value if i in self.elsewhere else next(sums) + value for i, value in enumerate(values)
        ]
        return [*added, *after]

    def _check(self, values: Sequence[tf.Tensor], held: Held) -> None:
        known = {id(state) for state in self.states}
        actual = tuple((value.shape, value.dtype) for value in values)
        if actual == self.structure and all(id(one) in known for one in held.variables):
            return
        raise TfMultiGpuError(
            "The model draws from another seed generator each time it is called, and micro-batches "
            "must all draw from the same. Received: seed generators "
            f"{self.seeds.used[-3:]}. Create each once, in the scope of the strategy, not in call "
            "or forward: seeds = keras.random.SeedGenerator(seed)."
        )
