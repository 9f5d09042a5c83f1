"""Gradients of sharded variables, added over replicas and micro-batches where the variables are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.optimizers.gradients import sum_dtype
from tfmultigpu.steps.weight_reads import BackwardReads, keep_in_step
from tfmultigpu.strategies.collectives import add_on_device
from tfmultigpu.strategies.variable_sharding import is_sharded

__all__ = ["OwnedGradients"]


@dataclasses.dataclass(frozen=True)
class OwnedGradients:
    """The gradients of sharded variables among the tensors that a replica returns.

    Attributes:
        places: By their number among the tensors, the backward pass and the variable.
    """

    places: Mapping[int, tuple[int, Any]]

    @classmethod
    def of(cls, variables: Sequence[Any], present: Sequence[Sequence[bool]]) -> OwnedGradients:
        """Finds them.

        Args:
            variables: The trained variables.
            present: For each backward pass, which of them have a gradient.
        """
        used = [
            (number, variable)
            for number, one in enumerate(present)
            for variable, here in zip(variables, one, strict=True)
            if here
        ]
        return cls({i: one for i, one in enumerate(used) if is_sharded(one[1])})

    def zeros(self) -> list[tf.Tensor]:
        """Returns their sums before the first micro-batch."""
        zeros = []
        for _, variable in self.places.values():
            with tf.device(variable.value.device):
                zeros.append(tf.zeros(variable.shape, sum_dtype(variable.dtype)))
        return zeros

    def add(
        self,
        parts: Sequence[Sequence[Any]],
        replicas: Sequence[BackwardReads],
        dtype: tf.DType | None,
        before: Sequence[Any] = (),
    ) -> list[Any]:
        """Returns their sums, each on the device of its variable.

        Args:
            parts: The tensors of each replica.
            replicas: The reads of each replica.
            dtype: As ``reduce_dtype`` for ``sum_over_replicas``.
            before: The sums of the micro-batches before.
        """
        gradients: dict[tuple[int, int], list[Any]] = {}
        sums: dict[tuple[int, int], Any] = {}
        for turn, (i, (number, variable)) in enumerate(self.places.items()):
            key, device = (number, id(variable.value.handle)), variable.value.device
            gradients[key] = [one[i] for one in parts]
            sums[key] = add_on_device(gradients[key], device, dtype)
            if before:
                with tf.device(device):
                    sums[key] = before[turn] + sums[key]
        keep_in_step(replicas, gradients, sums)
        return list(sums.values())

    def without(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the other tensors of a replica."""
        return [one for i, one in enumerate(tensors) if i not in self.places]

    def put_back(self, others: Sequence[Sequence[Any]], sums: Sequence[Any]) -> list[list[Any]]:
        """Returns the tensors of each replica, the first with the sums and the rest with None.

        Args:
            others: The other tensors of each replica.
            sums: The sums.
        """
        found = []
        for replica, one in enumerate(others):
            own, rest = iter(sums if replica == 0 else [None] * len(sums)), iter(one)
            count = len(one) + len(sums)
            found.append([next(own if i in self.places else rest) for i in range(count)])
        return found
