"""Micro-batches: how many each replica computes, and how what they give is added."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu.losses.held_assignments import Held
from tfmultigpu.steps.layer_states import assigned_in_each_pass
from tfmultigpu.steps.seeds import GlobalSeeds, seed_states

__all__ = ["MicroBatchSum", "OtherStructureError", "Part", "micro_batch_counts"]


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


class OtherStructureError(Exception):
    """What the replicas return, or assign, is not what a loop was prepared for.

    Attributes:
        structure: Shape and dtype of each tensor they return.
        states: The Keras variables they assign.
    """

    def __init__(self, structure: list[Any], states: list[Any]) -> None:
        """Takes what was found in place of what the loop was prepared for."""
        super().__init__(structure, states)
        self.structure, self.states = structure, states


class Part(NamedTuple):
    """A micro-batch: ``number`` of ``count``, int64 scalars."""

    number: Any
    count: Any


class MicroBatchSum:
    """Adds what one micro-batch of a replica gives to what those before gave; replica context.

    Attributes:
        replica: Computes a micro-batch, given the values that variables have before it.
        structure: Shape and dtype of each of the tensors it returns.
        states: Variables that it may assign, Keras variables.
        alike: The ``id`` of those of them that all micro-batches of a step must find alike: they
            take their part of the same draws, and use the same kernels.
        assigned: Whether each of the states is assigned; known once traced.
    """

    assigned: Sequence[bool] = ()

    def __init__(
        self,
        replica: Callable[..., tuple[list[tf.Tensor], Held]],
        model: Any,
        seeds: GlobalSeeds,
        maxima: Callable[[], int],
        structure: list[Any],
        states: list[Any],
    ) -> None:
        """Takes what computes a micro-batch, the model, its seeds, and what is carried along.

        Of as many tensors as ``maxima()`` says, the last but one, the largest is kept instead of
        the sum.
        """
        self.replica = replica
        self.structure = structure
        self._maxima = maxima
        alike = [v for v in seed_states(model, seeds) if v.synchronization != "on_read"]
        alike += assigned_in_each_pass(model)
        self.alike = {id(variable) for variable in alike}
        self.states = list({id(v): v for v in [*alike, *states]}.values())

    def begin(self) -> list[tf.Tensor]:
        """Returns the states as they are before the first micro-batch."""
        return [tf.identity(state.value) for state in self.states]

    def zeros(self) -> list[tf.Tensor]:
        """Returns the sums before the first micro-batch."""
        return [tf.zeros(shape, dtype) for shape, dtype in self.structure]

    def add(self, before: Sequence[Any], begin: Sequence[Any], *args: Any) -> list[tf.Tensor]:
        """Returns the sums with those of a micro-batch, then the states after it.

        Args:
            before: What was returned for the micro-batch before; zeros, then the states.
            begin: The states before the first one.
            args: For ``replica``.
        """
        sums, states = before[: len(self.structure)], before[len(self.structure) :]
        pairs = zip(self.states, states, strict=True)
        values, held = self.replica([(v, x) for v, x in pairs if id(v) not in self.alike], *args)
        known = {id(state) for state in self.states}
        more = [variable for variable in held.variables if id(variable) not in known]
        actual = [(value.shape, value.dtype) for value in values]
        if more or actual != self.structure:
            raise OtherStructureError(actual, [*self.states, *more])
        after = [held.current(state) for state in self.states]
        at_once = {id(variable) for variable in held.at_once}
        for state, value in zip(self.states, begin, strict=True):
            if id(state) in at_once & self.alike:
                state.assign(value)
        found = {id(variable) for variable in held.variables}
        self.assigned = [id(state) in found for state in self.states]
        end = len(values) - 1
        largest = range(end - self._maxima(), end)
        added = [
            tf.maximum(total, value) if i in largest else total + value
            for i, (total, value) in enumerate(zip(sums, values, strict=True))
        ]
        return [*added, *after]
