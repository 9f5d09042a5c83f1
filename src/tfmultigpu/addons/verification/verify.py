"""The feature that holds a step to what one device computes on the same global batch."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.accumulation.replicated import outside_scopes
from tfmultigpu.addons.verification.compare import Rounding, Verification, compared
from tfmultigpu.addons.verification.locate import explain, locate
from tfmultigpu.addons.verification.one_device import OneDevice, putting_back
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.errors import ReplicaDependenceWarning, WorkerLostError
from tfmultigpu.steps.batches import cut_batch
from tfmultigpu.steps.failures import line_on_memory
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.predict import join_rows
from tfmultigpu.steps.trace import warn
from tfmultigpu.steps.values import Batch, Call
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.worker_exchange import WorkerExchange

# Lines of an error that do not say what is wrong.
_OF_TRACEBACK = re.compile(r"File \"|Graph execution error|Detected at node|[Ss]tack trace")


class Verify(Feature):
    """Compares what a step computes with what one device computes, changing nothing.

    Attributes:
        verification: The last outcome, or the first difference before it; None before the first.
    """

    verification: Verification | None = None
    _device: OneDevice | None = None
    _kinds = 0
    _due = True  # Whether batches are seen; all are, until the first is verified,
    _later: Verification | None = None  # or the first uneven one is there, that this is said of.

    def __init__(self, verify: bool | str = "first") -> None:
        """Checks the ``"first"`` step, or each if True; ``"gradients"`` compares elements."""
        self._always = verify is True
        elements = verify == "gradients"
        self._measure = tf.identity if elements else lambda v: tf.norm(tf.cast(v, tf.float64))

    def bind(self, step: Any) -> None:
        """Keeps the step."""
        self._step, self._strategy = step, step.strategy
        self._exchange = WorkerExchange(step.strategy)

    def around_call(self, call: Call) -> Call:
        """Returns a call that verifies its batch, if that is due and shows something."""
        if (
            kinds := len(self._step.runner.functions)
        ) > self._kinds:  # Frozen layers, or synchronized.
            self._kinds, self._due = kinds, True
            self.verification = self._later = None
        return functools.partial(self._call, call) if self._due else call

    def _call(self, call: Call, batch: Batch) -> Any:
        _, local, offsets = batch
        replicas = self._strategy.num_replicas_in_sync
        rows = int(count_rows(local[0]) if offsets is None else offsets[-1])
        divides = rows % replicas == 0
        is_even = divides if offsets is None else np.ptp(np.diff(offsets)) == 0
        # With fewer rows than replicas each computes all of it, which shows nothing.
        if rows < max(replicas, 2) or (self._later and is_even):
            return call(batch)
        outcome, later = self._later, None
        if outcome is None:
            # A mean of equal means is right by chance, so the last row is left out.
            fewer = divides and 1 < replicas < rows and not (self._always and is_even)
            outcome = self._compared(batch, rows - fewer)
            if fewer and outcome.outcome != "same":  # Also of code that takes pairs of rows.
                later, outcome = outcome, self._compared(batch, rows)
                later = later if {later.outcome, outcome.outcome} == {"different", "same"} else None
        result = call(batch)
        self._later, self._due = later, bool(self._always or later)
        self._device = self._device if self._due else None
        if self.verification is None or self.verification.outcome != "different":
            self.verification = outcome
        if outcome.outcome == "different":
            warn(str(outcome), ReplicaDependenceWarning)
        elif outcome.reason:
            warn(
                f"The step could not be held to one device: {outcome.reason}. A result that "
                "depends on how the batch is cut would not be noticed. To leave the check out, "
                "write verify=False.",
                ReplicaDependenceWarning,
            )
        return result

    def _compared(self, batch: Batch, rows: int) -> Verification:
        """Compares the first rows of a batch, changing nothing; all workers call it."""
        expected, reason = _attempt(lambda: self._expected(batch, rows))
        told = self._exchange("a reason not to verify", [bool(reason)])
        outcome = None
        if not told.any():
            outcome, reason = _attempt(lambda: self._outcome(*expected))
        reason = reason or "another worker could not compute the batch by itself"
        return outcome or Verification("not verified", reason)

    def _expected(self, batch: Batch, rows: int) -> tuple[Any, ...]:
        """Returns what the first rows of the batch give on one device, and how to compare that."""
        structure, leaves, offsets = batch
        local = [tf.nest.pack_sequence_as(structure, shard) for shard in leaves]
        whole = local[0] if offsets is None else join_rows(self._strategy, local)
        whole = partition.slice_rows(whole, 0, rows)
        local, places = cut_batch(self._strategy, whole)
        shards = [tf.nest.flatten(shard) for shard in ([whole] if offsets is None else local)]
        cut = structure, shards, None if offsets is None else places
        compiled = self._step.runner.function.compiled(*cut)
        self._refuse_what_stays()
        device = self._device
        if device is None or device.key != self._step.key():
            device = OneDevice(self._step, self._measure)
        one = device.run(whole, compiled[0])
        self._device = device  # Not one that failed: TensorFlow could not trace it again.
        return device, one, whole, (local, places), compiled

    def _refuse_what_stays(self) -> None:
        """Raises an error if the step changes what cannot be put back; before anything runs."""
        for state in self._step.runner.touched.states:
            if state.kind == "python":
                raise _CannotVerifyError(
                    f"it runs Python code in {state.operation!r}, and what that remembers cannot "
                    "be put back. If it remembers nothing, write tf.numpy_function(function, "
                    "inputs, dtype, stateful=False)"
                )
            if state.kind == "other":
                raise _CannotVerifyError(
                    f"it changes a resource in {state.operation!r} that is not a variable, and "
                    "cannot be put back. Keep it in a tf.Variable or a table of "
                    "tf.lookup.experimental"
                )

    def _outcome(self, device: Any, one: Any, whole: Any, cut: Any, step: Any) -> Verification:
        compiled, args = step
        bounds = Rounding(all_layers(self._step.model))
        with putting_back(self._step, compiled):
            found = [q for q in compared(device, one, compiled(*args)[0], bounds) if q.apart]
        steady, beyond = [], []
        if found:
            still, again, *moved = device.moved(whole, compiled, bounds.compute)
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
        join, bound = functools.partial(join_rows, self._strategy), math.sqrt(bounds.compute)
        layer, _ = _attempt(lambda: locate(self._step, device, join, cut[0], cut[1], bound))
        culprit, advice = explain(beyond, layer, self._step)
        return Verification("different", "", tuple(map(str, beyond)), culprit, advice)


class _CannotVerifyError(Exception):
    """A reason for which a step is not compared with one device, known before it runs."""


def _attempt(function: Callable[[], Any]) -> tuple[Any, str]:
    """Returns what a part of the check returns, and why it failed: training continues."""
    try:
        return outside_scopes(function), ""
    except WorkerLostError:
        raise
    except _CannotVerifyError as reason:
        return None, str(reason)
    except tf.errors.OpError as error:
        if isinstance(error, tf.errors.ResourceExhaustedError) or line_on_memory(error.message):
            return None, (
                f"one device has not enough memory for the whole batch: {_essence(error)}. Check a "
                "smaller batch in a test"
            )
        # The warning is given once the replicas have computed the batch.
        return None, (
            f"one device fails on this batch, and the replicas do not: {_essence(error)}. What one "
            "device cannot compute is wrong in the program itself; on replicas it may go "
            "unnoticed, if shapes agree there by chance. Compare the shapes of labels, predictions "
            "and weights for one batch without a strategy"
        )
    except Exception as error:  # The code of the user may raise anything outside of replicas.
        return None, f"one device cannot compute it: {type(error).__name__}: {_essence(error)}"


def _essence(error: Exception) -> str:
    """Returns what an error says, without the lines of its traceback and of its graph."""
    message = re.sub(r"\x1b\[\d*m", "", str(error))
    said = []
    for line in message.splitlines():
        text = line.strip().partition("[[{{")[0].partition("[Op:")[0].strip()
        if text and not _OF_TRACEBACK.match(text):
            said.append(text)
    return " ".join(said)[:300].rstrip(".")
