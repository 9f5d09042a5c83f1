"""Evaluating after epochs of training."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.data.passes import Replay, read_over, replay_of
from tfmultigpu.data.sharded_dataset import ShardedDataset
from tfmultigpu.loops.callbacks import BatchHooks
from tfmultigpu.loops.compiled import check_labels
from tfmultigpu.loops.evaluate import make_evaluator
from tfmultigpu.loops.inputs import check_steps, is_arrays, no_batches, pass_batches
from tfmultigpu.loops.worker_agreement import of_any, on_any, several_workers

__all__ = ["Validation"]


@dataclasses.dataclass(frozen=True)
class Validation:
    """What is evaluated after which epochs.

    Attributes:
        data: What the user gave.
        batches: The same as shards for the replicas.
        steps: Batches at most, or None.
        frequency: After each how many epochs, or after which, counted from 1.
        model: The model.
        strategy: Where it lives.
        verify: See ``make_eval_step``.
    """

    data: Any
    batches: ShardedDataset
    steps: int | None
    frequency: Any
    model: Any
    strategy: tf.distribute.Strategy
    verify: bool | str

    @classmethod
    def of(
        cls,
        data: Any,
        frequency: Any,
        model: Any,
        strategy: tf.distribute.Strategy,
        batch_size: int | None,
        steps: int | None,
        verify: bool | str,
    ) -> Validation | None:
        """Checks what the user gave; None where there is nothing to validate with.

        Raises:
            DataError: It is no data for this model.
            TypeError: ``frequency`` is neither a whole number nor epochs.
            ValueError: ``frequency`` is less than 1.
        """
        if data is None:
            return None
        check_steps(steps, "validation_steps")
        if isinstance(frequency, str) or not isinstance(frequency, Collection):
            check_count("validation_freq", frequency, other="a list of epochs counted from 1")
        size = batch_size if is_arrays(data) else None
        batches = pass_batches(data, strategy, size, steps, "validation_steps")
        check_labels(model, batches.element_spec)
        return cls(data, batches, steps, frequency, model, strategy, verify)

    def is_due(self, epoch: int) -> bool:
        """Returns whether to evaluate after an epoch, counted from 0."""
        if isinstance(self.frequency, Collection):
            return epoch + 1 in self.frequency
        return (epoch + 1) % int(self.frequency) == 0

    def pass_over(self, epoch: int) -> None:
        """Begins the pass after an epoch that a run which is resumed had before, if it had one.

        A dataset that is shuffled anew in each pass counts its passes.
        """
        if self.is_due(epoch):
            batches = self._replay.batches
            read_over(iter(self.batches).source, self.steps if batches is None else batches)

    @functools.cached_property
    def _replay(self) -> Replay:
        return replay_of(self.batches.batches)

    def __call__(self, callbacks: Any) -> dict[str, Any]:
        """Evaluates, and returns the logs with ``val_`` before their names."""
        spec = self.batches.element_spec
        evaluator = make_evaluator(self.model, self.strategy, spec, self.verify)
        self.model.stop_evaluating = False
        callbacks.on_test_begin()
        logs = evaluator(self.batches, self.steps, self._watch(callbacks))
        if logs is None:
            raise no_batches(self.data)
        callbacks.on_test_end(logs)
        return {f"val_{name}": value for name, value in logs.items()}

    def _watch(self, callbacks: Any) -> BatchHooks:
        several = several_workers(self.strategy)

        def stopping() -> bool:
            wanted = bool(self.model.stop_evaluating)
            return on_any(self.strategy, wanted) if several else wanted

        hooks = BatchHooks(
            callbacks,
            "test",
            steps_per_call=None,
            # Workers have no clock in common: there nobody is called only because time went by.
            elapsed=float if several else time.perf_counter,
            agree=functools.partial(of_any, self.strategy),
            stopping=stopping,
        )
        hooks.begin_epoch(stopping())
        return hooks
