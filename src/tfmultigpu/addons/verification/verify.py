"""The feature that holds a step to what one device computes on the same global batch."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.owners import outside_scopes
from tfmultigpu.addons.verification.advice import explain
from tfmultigpu.addons.verification.dry_run import DryRun
from tfmultigpu.addons.verification.global_batch import counts_of, first_rows, join, size_in_bytes
from tfmultigpu.addons.verification.locate import locate
from tfmultigpu.addons.verification.one_device import OneDevice
from tfmultigpu.addons.verification.outcome import Verification
from tfmultigpu.addons.verification.quantities import gradients, quantities, updates
from tfmultigpu.addons.verification.rounding import (
    Deviation,
    Rounding,
    beyond_rounding,
    deviations,
    furthest,
)
from tfmultigpu.errors import ReplicaDependenceWarning, WorkerLostError
from tfmultigpu.steps.batches import BatchFunction
from tfmultigpu.steps.failures import line_on_memory
from tfmultigpu.steps.features import Call, Feature
from tfmultigpu.steps.warning import warn
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["Verify"]

GATHERED_BYTES = 64 * 2**20
_PART_ROWS = 4


@dataclasses.dataclass(frozen=True)
class _Expected:
    """What a step is held to, known before it runs.

    Attributes:
        local: The rows of each replica of this process.
        offsets: Their offsets.
        whole: All rows; None where they are not put together.
        numbers: What one device computes.
        gradients: What the replicas compute for the gradients, if they are compared.
        before: The variables whose update is compared, as they are.
        after: The same after an update on one device; empty if it cannot be made there.
        reason: Why nothing can be compared.
    """

    local: list[Any]
    offsets: Any
    whole: Any = None
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradients: list[Any] | None = None
    before: Sequence[Any] = ()
    after: Sequence[Any] = ()
    reason: str = ""

    @property
    def rows(self) -> int:
        """The rows of the global batch."""
        return int(self.offsets[-1])


class Verify(Feature):
    """Compares what a step computes with what one device computes, changing nothing.

    Attributes:
        verification: The last outcome, or the first difference before it; None before the first.
        sees: Which batches it waits for: any, then those of a row or more for each replica, then
            those that do not divide evenly.
    """

    verification: Verification | None = None
    _device: OneDevice | None = None

    def __init__(self, verify: bool | str = "first") -> None:
        """Takes ``"first"``, True for every step, or ``"gradients"`` to compare these too."""
        self._always, self._with_gradients = verify is True, verify == "gradients"
        self._due, self.sees = True, "any"

    def bind(self, step: Any) -> None:
        """Takes the step."""
        self._step = step
        self._replicas = step.strategy.num_replicas_in_sync
        self._exchange = WorkerExchange(step.strategy)

    def around_call(self, call: Call) -> Call:
        """Returns a call that verifies its batch, if that is due and it shows something."""
        if not self._due or tf.inside_function():
            return call
        return functools.partial(self._call, call)

    def _call(self, call: Call, batch: Any) -> Any:
        counts = counts_of(batch, self._replicas)
        rows, uneven = sum(counts), min(counts) != max(counts)
        if rows < max(self._replicas, 2):
            reason = "the batch had fewer rows than there are replicas, so each computed all of it"
            self._note(Verification("not verified", 0, rows, reason))
            if self.sees == "any" and not self._always:
                self.sees = "cut"
            return call(batch)
        if self.sees == "uneven" and not uneven:
            return call(batch)
        expected = outside_scopes(lambda: self._expect(batch))
        result = call(batch)
        self._conclude(expected, *result)
        if not self._always:
            self.sees = "uneven"
            self._due = not uneven and self._replicas > 1 and not expected.reason
        if not self._due:
            self._device = None
        return result

    def _note(self, outcome: Verification) -> None:
        """Keeps an outcome, unless a step before this one was different."""
        if self.verification is None or self.verification.outcome != "different":
            self.verification = outcome

    # Before the step ----------------------------------------------------------------------------

    def _expect(self, batch: Any) -> _Expected:
        """Computes what one device would give; over several workers all call it."""
        structure, leaves, offsets = batch
        local = [tf.nest.pack_sequence_as(structure, shard) for shard in leaves]
        whole = local[0] if offsets is None else None
        if whole is not None:
            local, offsets = BatchFunction(self._nothing, self._step.strategy).cut(whole)
        expected = _Expected(local, offsets, whole)
        if whole is None and self._exchange.workers > 1:
            largest = int(self._exchange([size_in_bytes(local)]).max())
            if largest * self._exchange.workers > GATHERED_BYTES:
                reason = "workers do not send each other so large a batch; check a smaller one"
                return dataclasses.replace(expected, reason=reason)
        try:
            expected = self._computed(expected)
        except WorkerLostError:
            raise
        except Exception as error:  # The user's code may raise anything; training goes on.
            expected = dataclasses.replace(expected, reason=_reason(error))
        if self._exchange.workers > 1:
            failed = bool(self._exchange([bool(expected.reason)]).any())
            if failed and not expected.reason:
                reason = "another worker could not compute the batch by itself"
                expected = dataclasses.replace(expected, reason=reason)
        return expected

    def _computed(self, expected: _Expected) -> _Expected:
        step, key = self._step, self._step.key()
        if self._device is None or self._device.key != key:
            self._device = OneDevice(step, key, all_gradients=self._with_gradients)
        device = self._device
        whole = join(step.strategy, expected.local) if expected.whole is None else expected.whole
        numbers = device(whole)
        replicas = None
        if self._with_gradients and device.variables:
            cutter = BatchFunction(self._nothing, step.strategy)

            def look(local: Any, offsets: Any) -> Any:
                gradient = step.look(cutter.shards(local, offsets))[2]
                first = step.strategy.experimental_local_results
                return [first(tensor)[0] for tensor in gradient.tensors]

            tensors = DryRun(look)(expected.local, expected.offsets)
            replicas = [tensor.numpy() for tensor in tensors]
        before = [device.variables[i].numpy() for i in device.chosen]
        return dataclasses.replace(
            expected, whole=whole, numbers=numbers, gradients=replicas, before=before,
            after=device.updated(numbers),
        )  # fmt: skip

    # After the step -----------------------------------------------------------------------------

    def _conclude(self, expected: _Expected, logs: Any, tallies: Any) -> None:
        reason = expected.reason
        if not reason:
            try:
                reason = self._compare(expected, logs, tallies)
            except (WorkerLostError, ReplicaDependenceWarning):
                raise
            except Exception as error:  # A check must not end a training that goes well.
                reason = f"the comparison failed, {_first_line_of(error)}"
        if reason:
            self._note(Verification("not verified", 0, expected.rows, reason))
            warn(
                f"The step could not be held to one device: {reason}. A result that depends on how "
                "the batch is cut would not be noticed. To leave the check out, write verify=False.",
                ReplicaDependenceWarning,
            )

    def _compare(self, expected: _Expected, logs: Any, tallies: Any) -> str:
        """Compares, and warns of what differs; returns why it cannot be known."""
        device, one = self._device, expected.numbers
        assert device is not None
        rounding = Rounding(all_layers(self._step.model))
        found = deviations(quantities(device, one, logs, tallies, rounding))
        if expected.gradients is not None:
            found += deviations(gradients(device, one, expected.gradients, rounding))
        if expected.after:
            found += deviations(updates(device, one, expected.before, expected.after, rounding))
        if not self._on_any_worker(found):
            self._note(Verification("same", expected.rows, expected.rows))
            return ""
        still, again, *moved = device.moved(expected.whole, rounding.compute)
        steady = [
            each
            for each in found
            if (key := each.quantity.key) not in still
            or furthest(still[key], again[key], each.quantity.bound) is None
        ]
        if self._on_any_worker(found) and not self._on_any_worker(steady):
            return (
                f"{found[0].difference.quantity} differs between two runs on one device. Draw by "
                "keras.random with a keras.random.SeedGenerator, which both repeat"
            )
        found = beyond_rounding(steady, still, moved, rounding.margin)
        if not self._on_any_worker(found):
            self._note(Verification("same", expected.rows, expected.rows))
            return ""
        self._report(found, expected, rounding)
        return ""

    def _on_any_worker(self, found: Sequence[Deviation]) -> bool:
        if self._exchange.workers == 1:
            return bool(found)
        return bool(self._exchange([bool(found)]).any())

    def _report(self, found: Sequence[Deviation], expected: _Expected, rounding: Rounding) -> None:
        assert self._device is not None
        step, device, located = self._step, self._device, None
        part = first_rows(step.strategy, expected.local, expected.offsets, _PART_ROWS)
        try:
            located = outside_scopes(lambda: locate(step, device, *part, rounding))
        except WorkerLostError:
            raise
        except Exception:  # The user's code may raise anything; the difference itself is known.
            pass
        culprit, advice = explain(found, located, device)
        differences = tuple(each.difference for each in found)
        self.verification = Verification(
            "different", expected.rows, expected.rows, "", differences, culprit, advice
        )
        warn(str(self.verification), ReplicaDependenceWarning)

    def _nothing(self, _: Any) -> None:
        """Stands for a function that a ``BatchFunction`` does not call."""


_AROUND = re.compile(
    r"Exception encountered when|Graph execution error|Detected at node|File \"|\[\[\{\{|<stack"
)


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError) or line_on_memory(str(error)) is not None:
        return "one device has not enough memory for the whole batch; check a smaller one in a test"
    return f"the forward pass fails outside of replicas, {_first_line_of(error)}"


def _first_line_of(error: Exception) -> str:
    """Returns what happened, without what Keras and TensorFlow put before it and around it."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not _AROUND.match(line)]
    return f"{type(error).__name__}: {said[0] if said else ''}"
