"""Validation after epochs of training."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any

from tfmultigpu.arguments import check_count
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.data.passes import Replay, read_over, replay_of
from tfmultigpu.data.sources import tensors_of_arrays
from tfmultigpu.loops.array_batches import shard_arrays
from tfmultigpu.loops.evaluation_passes import EvaluationPasses
from tfmultigpu.loops.inputs import (
    check_steps,
    checked_batch_size,
    is_arrays,
    no_batches,
    pass_batches,
)
from tfmultigpu.loops.pass_callbacks import evaluated
from tfmultigpu.loops.program import Program
from tfmultigpu.types import Verify

__all__ = ["Validation"]


@dataclasses.dataclass(frozen=True)
class Validation:
    """Validation data of a model, and the epochs to validate after.

    Attributes:
        data: The data of the user.
        passes: The data as shards for the replicas.
        steps: The largest number of batches, or None.
        frequency: Epochs between validations, or a list of epochs, counted from 1.
        program: What to validate with.
        verify: See ``make_eval_step``.
    """

    data: Any
    passes: EvaluationPasses
    steps: int | None
    frequency: Any
    program: Program
    verify: Verify

    @classmethod
    def of(
        cls,
        data: Any,
        frequency: Any,
        program: Program,
        batch_size: int | None,
        steps: int | None,
        verify: Verify,
    ) -> Validation | None:
        """Checks the arguments of the user; returns None if there is no validation data.

        Raises:
            DataError: The data does not fit the model.
            TypeError: ``frequency`` is neither a whole number nor a list of epochs.
            ValueError: ``frequency`` is less than 1.
        """
        if data is None:
            return None
        check_steps(steps, "validation_steps")
        if isinstance(frequency, str) or not isinstance(frequency, Collection):
            check_count("validation_freq", frequency, other="a list of epochs counted from 1")
        passes = _passes(data, program, batch_size, steps)
        program.check_validation(passes.batches.element_spec)
        return cls(data, passes, steps, frequency, program, verify)

    def is_due(self, epoch: int) -> bool:
        """Returns whether to validate after an epoch, counted from 0."""
        if isinstance(self.frequency, Collection):
            return epoch + 1 in self.frequency
        return (epoch + 1) % int(self.frequency) == 0

    def skip(self, epoch: int) -> None:
        """Skips the pass after an epoch that a resumed run has finished, if one was due.

        A reshuffled dataset counts its passes, so the skipped pass is begun too.
        """
        if self.is_due(epoch) and self.passes.per_pass is None:
            batches = self._replay.batches
            read_over(self.passes.begin().source, self.steps if batches is None else batches)

    @functools.cached_property
    def _replay(self) -> Replay:
        return replay_of(self.passes.batches.batches)

    def __call__(self, callbacks: Any) -> dict[str, Any]:
        """Evaluates the model; returns the logs with ``val_`` before their names."""
        spec = self.passes.batches.element_spec
        evaluator = self.program.make_evaluator(spec, self.verify)
        model, strategy = self.program.model, self.program.strategy
        logs = evaluated(evaluator, self.passes, self.steps, callbacks, model, strategy, self.data)
        return {f"val_{name}": value for name, value in logs.items()}


def _passes(
    data: Any, program: Program, batch_size: int | None, steps: int | None
) -> EvaluationPasses:
    model, strategy = program.model, program.strategy
    if not is_arrays(data):
        name = "validation_steps"
        return EvaluationPasses(pass_batches(model, "", data, strategy, None, steps, name))
    arrays, size = tensors_of_arrays(data), checked_batch_size(batch_size)
    rows = int(count_rows(arrays))
    if not rows:
        raise no_batches(data)
    batches = shard_arrays(model, "validation on arrays", strategy, arrays, size)
    return EvaluationPasses(batches, math.ceil(rows / size))
