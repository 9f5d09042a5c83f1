"""The feature that holds a step to what one device computes on the same global batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.replicated import outside_scopes
from tfmultigpu.addons.verification.compare import Rounding, Verification, compared
from tfmultigpu.addons.verification.locate import explain, locate
from tfmultigpu.addons.verification.one_device import DryRun, OneDevice, cutter
from tfmultigpu.errors import ReplicaDependenceWarning, WorkerLostError
from tfmultigpu.steps.evaluate import join_rows
from tfmultigpu.steps.features import Call, Feature, Sees
from tfmultigpu.steps.program import Batch
from tfmultigpu.steps.trace import warn
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.worker_exchange import WorkerExchange

GATHERED_BYTES = 64 * 2**20


class Verify(Feature):
    """Compares what a step computes with what one device computes, changing nothing.

    Attributes:
        verification: The last outcome, or the first difference before it; None before the first.
    """

    verification: Verification | None = None
    _device: OneDevice | None = None
    _kinds = 0

    def __init__(self, verify: bool | str = "first") -> None:
        """Takes ``"first"``, True for every step, or ``"gradients"`` to compare these too."""
        self._always, self._with_gradients = verify is True, verify == "gradients"
        self._sees: Sees = "all"

    def bind(self, step: Any) -> None:
        """Takes the step."""
        self._step, self._strategy = step, step.strategy
        self._exchange = WorkerExchange(step.strategy)
        self._cutter = cutter(step.strategy)

    @property
    def sees(self) -> Sees:  # type: ignore[override]
        """The batches that are verified: all, those of uneven shards, or none any more."""
        if self._step.kinds > self._kinds:  # Layers were frozen, or synchronized.
            self._kinds, self._sees, self.verification = self._step.kinds, "all", None
        return self._sees

    def around_call(self, call: Call) -> Call:
        """Returns a call that verifies its batch, if that is due and shows something."""
        return call if self.sees == "none" else functools.partial(self._call, call)

    def _call(self, call: Call, batch: Batch) -> Any:
        counts = self._step.rows_of(batch)
        uneven = min(counts) < max(counts)
        # With fewer rows than replicas each computes all of it, which shows nothing.
        if sum(counts) < max(len(counts), 2) or (self._sees == "uneven" and not uneven):
            return call(batch)
        expected, reason = _attempt(lambda: self._expected(batch))
        told = self._exchange("a reason not to verify", [bool(reason)])
        logs, tallies = call(batch)
        outcome = None
        if not told.any():
            outcome, reason = _attempt(lambda: self._outcome((logs, tallies), *expected))
        reason = reason or "another worker could not compute the batch by itself"
        outcome = outcome or Verification("not verified", reason)
        if self.verification is None or self.verification.outcome != "different":
            self.verification = outcome
        if not self._always:
            due = outcome.outcome == "same" and not uneven and len(counts) > 1
            self._sees, self._device = "uneven" if due else "none", self._device if due else None
        if outcome.outcome == "different":
            warn(str(outcome), ReplicaDependenceWarning)
        elif outcome.reason:
            warn(
                f"The step could not be held to one device: {outcome.reason}. A result that "
                "depends on how the batch is cut would not be noticed. To leave the check out, "
                "write verify=False.",
                ReplicaDependenceWarning,
            )
        return logs, tallies

    # Before the step ----------------------------------------------------------------------------

    def _expected(self, batch: Batch) -> tuple[Any, ...]:
        """Computes what one device gives; over several workers all call it."""
        structure, leaves, offsets = batch
        local = [tf.nest.pack_sequence_as(structure, shard) for shard in leaves]
        if offsets is None:
            (whole,), (local, offsets) = local, self._cutter.cut(local[0])
        else:
            self._check_size(leaves)
            whole = join_rows(self._strategy, local)
        step, key = self._step, self._step.key()
        if self._device is None or self._device.key != key:
            self._device = OneDevice(step, key, with_gradients=self._with_gradients)
        one = self._device.run(whole)
        first = self._strategy.experimental_local_results

        def of_replicas(local: Any, offsets: Any) -> list[Any]:
            gradient = step.look(self._cutter.shards(local, offsets))[2]
            return [first(tensor)[0] for tensor in gradient.tensors]

        gradients = DryRun(of_replicas)(local, offsets) if "gradient 0" in one else []
        return self._device, whole, local, offsets, one, gradients

    def _check_size(self, leaves: Any) -> None:
        tensors = [t for t in tf.nest.flatten(leaves, expand_composites=True) if t is not None]
        own = sum(math.prod(t.shape) * max(t.dtype.size, 1) for t in tensors)
        told = self._exchange("the size of a batch to verify", [own])
        if len(told) > 1 and int(told.max()) * len(told) > GATHERED_BYTES:
            raise ValueError("workers do not send each other so large a batch")

    # After the step -----------------------------------------------------------------------------

    def _outcome(
        self, results: Any, device: OneDevice, whole: Any, local: Any, offsets: Any, one: Any,
        gradients: Any,
    ) -> Verification:  # fmt: skip
        bounds = Rounding(all_layers(self._step.model))
        found = [each for each in compared(device, one, gradients, results, bounds) if each.apart]
        steady, beyond = [], []
        if found:
            still, again, *moved = device.moved(whole, bounds.compute)
            steady = [each for each in found if each.is_steady(still, again)]
            beyond = [each for each in steady if each.is_beyond(still, moved, bounds.margin)]
        numbers = [len(found), len(steady), len(beyond)]
        told = self._exchange("what a verification found", numbers).max(axis=0)
        if told[0] and not told[1]:
            reason = (
                f"{found[0].name if found else 'a quantity'} differs between two runs on one "
                "device. Draw by keras.random with a keras.random.SeedGenerator, which both repeat"
            )
            return Verification("not verified", reason)
        if not told[2]:
            return Verification("same")
        bound = math.sqrt(bounds.compute)
        join = functools.partial(join_rows, self._strategy)
        layer, _ = _attempt(lambda: locate(self._step, device, join, local, offsets, bound))
        culprit, advice = explain(beyond, layer, self._step)
        return Verification("different", "", tuple(map(str, beyond)), culprit, advice)


def _attempt(function: Callable[[], Any]) -> tuple[Any, str]:
    """Returns what a part of the check returns, and why it failed: training goes on."""
    try:
        return outside_scopes(function), ""
    except WorkerLostError:
        raise
    except Exception as error:  # The code of the user may raise anything outside of replicas.
        return None, (
            f"{type(error).__name__}: {str(error)[:500]}. If one device has not enough memory for "
            "the whole batch, check a smaller one"
        )
