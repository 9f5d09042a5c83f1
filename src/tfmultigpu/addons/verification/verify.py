"""The feature that holds a step to what one device computes on the same global batch."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.owners import outside_scopes
from tfmultigpu.addons.verification.advice import explain
from tfmultigpu.addons.verification.compare import (
    Quantity,
    Rounding,
    furthest,
    of_gradients,
    of_outputs,
    of_states,
    of_terms,
    of_update,
)
from tfmultigpu.addons.verification.locate import Located, locate
from tfmultigpu.addons.verification.one_device import DryRun, OneDevice, dense
from tfmultigpu.addons.verification.outcome import Verification
from tfmultigpu.addons.verification.stock_update import stock_update
from tfmultigpu.data import partition
from tfmultigpu.errors import ReplicaDependenceWarning, WorkerLostError
from tfmultigpu.steps.batches import BatchFunction
from tfmultigpu.steps.failures import line_on_memory
from tfmultigpu.steps.features import Call, Feature
from tfmultigpu.steps.program import Batch
from tfmultigpu.steps.warning import warn
from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.topology import local_replicas, per_replica
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["Verify"]

GATHERED_BYTES = 64 * 2**20
_PART_ROWS = 4
_log = logging.getLogger(__name__)
# Lines that Keras and TensorFlow put before what happened, and around it.
_AROUND = re.compile(
    r"Exception encountered when|Graph execution error|Detected at node|File \"|\[\[\{\{|<stack"
)

_Conclude = Callable[[Any, Any], Verification]  # Compares logs and tallies.


class Verify(Feature):
    """Compares what a step computes with what one device computes, changing nothing.

    Attributes:
        verification: The last outcome, or the first difference before it; None before the first.
        sees: Which batches it waits for: any, then those with a row for each replica, then those
            that do not divide evenly.
    """

    verification: Verification | None = None
    _device: OneDevice | None = None

    def __init__(self, verify: bool | str = "first") -> None:
        """Takes ``"first"``, True for every step, or ``"gradients"`` to compare these too."""
        self._always, self._with_gradients = verify is True, verify == "gradients"
        self._due, self.sees = True, "any"

    def bind(self, step: Any) -> None:
        """Takes the step."""
        self._step, self._strategy = step, step.strategy
        self._replicas = step.strategy.num_replicas_in_sync
        self._exchange = WorkerExchange(step.strategy)
        self._cutter = BatchFunction(self._look, step.strategy)

    def around_call(self, call: Call) -> Call:
        """Returns a call that verifies its batch, if that is due and shows something."""
        if not self._due:
            return call
        return functools.partial(self._call, call)

    def _call(self, call: Call, batch: Batch) -> Any:
        counts = self._step.rows_of(batch)
        rows, uneven = sum(counts), min(counts) != max(counts)
        if rows < max(self._replicas, 2):
            reason = "the batch had fewer rows than there are replicas, so each computed all of it"
            self._note(Verification("not verified", 0, rows, reason))
            if not self._always and self.sees == "any":
                self.sees = "cut"
            return call(batch)
        if self.sees == "uneven" and not uneven:
            return call(batch)
        conclude = outside_scopes(lambda: self._prepare(batch))
        logs, tallies = call(batch)
        try:
            outcome = conclude(logs, tallies)
        except WorkerLostError:
            raise
        except Exception as error:  # A check must not end a training that goes well.
            reason = f"the comparison failed, {_first_line_of(error)}"
            outcome = Verification("not verified", 0, rows, reason)
        self._note(outcome)
        if not self._always:
            self.sees = "uneven"
            self._due = outcome.outcome == "same" and self._replicas > 1 and not uneven
        if not self._due:
            self._device = None
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

    def _note(self, outcome: Verification) -> None:
        """Keeps an outcome, unless a step before this one was different."""
        if self.verification is None or self.verification.outcome != "different":
            self.verification = outcome

    # Before the step ----------------------------------------------------------------------------

    def _prepare(self, batch: Batch) -> _Conclude:
        """Computes what one device would give; over several workers all call it."""
        structure, leaves, offsets = batch
        local = [tf.nest.pack_sequence_as(structure, shard) for shard in leaves]
        whole = local[0] if offsets is None else None
        if whole is not None:
            local, offsets = self._cutter.cut(whole)
        reason, workers = "", self._exchange.workers
        if whole is None and workers > 1:
            tensors = tf.nest.flatten(leaves, expand_composites=True)
            own = sum(
                t.shape.num_elements() * max(t.dtype.size, 1) for t in tensors if t is not None
            )
            if int(self._exchange([own]).max()) * workers > GATHERED_BYTES:
                reason = "workers do not send each other so large a batch; check a smaller one"
        try:
            conclude = None if reason else self._computed(local, offsets, whole)
        except WorkerLostError:
            raise
        except Exception as error:  # The user's code may raise anything; training goes on.
            conclude, reason = None, _reason(error)
        if workers > 1 and bool(self._exchange([bool(reason)]).any()):
            reason = reason or "another worker could not compute the batch by itself"
        if conclude is None or reason:
            return lambda *_: Verification("not verified", 0, int(offsets[-1]), reason)
        return conclude

    def _computed(self, local: list[Any], offsets: Any, whole: Any) -> _Conclude:
        step, key = self._step, self._step.key()
        if self._device is None or self._device.key != key:
            self._device = OneDevice(step, key, all_gradients=self._with_gradients)
        device = self._device
        whole = self._joined(local) if whole is None else whole
        one = device(whole)
        wanted = self._with_gradients and device.variables
        gradients = DryRun(self._look)(local, offsets) if wanted else []
        chosen = [device.variables[i] for i in device.chosen]
        before = after = [variable.numpy() for variable in chosen]
        if chosen and one.get("valid", True):
            clipped = [one[f"clipped {i}"] for i in device.chosen]
            pairs = list(zip(chosen, clipped, strict=True))
            after = stock_update(unwrap_optimizer(step.optimizer), pairs)
        updates = list(zip(device.chosen, before, after, strict=False))

        compared = functools.partial(self._compared, local, offsets, whole)
        return functools.partial(compared, one, gradients, updates)

    def _joined(self, local: list[Any]) -> Any:
        """Returns all rows of a batch; over several workers a collective."""
        several_workers = len(local) < self._replicas

        def joined(*parts: Any) -> Any:
            if parts[0] is None:
                return None
            if several_workers:
                return gather_rows(self._strategy, per_replica(self._strategy, list(parts)))
            sparse = isinstance(parts[0], tf.SparseTensor)
            return tf.sparse.concat(0, list(parts)) if sparse else tf.concat(list(parts), 0)

        return tf.nest.map_structure(joined, *local) if self._replicas > 1 else local[0]

    def _look(self, local: Any, offsets: Any) -> list[Any]:
        """The gradients of the replicas; traced."""
        gradient = self._step.look(self._cutter.shards(local, offsets))[2]
        first = self._strategy.experimental_local_results
        return [first(tensor)[0] for tensor in gradient.tensors]

    # After the step -----------------------------------------------------------------------------

    def _compared(
        self, local: list[Any], offsets: Any, whole: Any, one: Any, gradients: Any, updates: Any,
        logs: Any, tallies: Any,
    ) -> Verification:  # fmt: skip
        device, rows = self._device, int(offsets[-1])
        assert device is not None
        rounding = Rounding(all_layers(self._step.model))
        quantities = self._of_step(one, logs, tallies, rounding)
        found = [each for each in quantities if each.apart]
        for number, before, after in updates:
            variable = device.variables[number]
            values, gradient = (before, after, variable.numpy()), one[f"gradient {number}"]
            found += of_update(number, variable.path, gradient, values, rounding)
        found += of_gradients(device.variables, one, gradients, rounding) if gradients else ()
        found = [each for each in found if each.apart]
        if not self._on_any_worker(found):
            return Verification("same", rows, rows)
        still, again, *moved = device.moved(whole, rounding.compute)
        steady = [
            each
            for each in found
            if each.key not in still or not furthest(still[each.key], again[each.key], each.bound)
        ]
        if not self._on_any_worker(steady):
            what = found[0].name if found else "a quantity of another worker"
            reason = (
                f"{what} differs between two runs on one device. Draw by keras.random with a "
                "keras.random.SeedGenerator, which both repeat"
            )
            return Verification("not verified", 0, rows, reason)
        found = [each for each in steady if each.beyond(still, moved, rounding.margin)]
        if not self._on_any_worker(found):
            return Verification("same", rows, rows)
        located = None
        try:
            located = outside_scopes(lambda: self._locate(local, offsets, rounding))
        except WorkerLostError:
            raise
        except Exception as error:  # The difference itself is known.
            _log.info("The layer was not found: %s", error)
        differences = tuple(each.difference for each in found)
        return Verification(
            "different", rows, rows, "", differences, *explain(found, located, device)
        )

    def _of_step(self, one: Any, logs: Any, tallies: Any, rounding: Rounding) -> Iterator[Quantity]:
        """Yields what a step tells by itself."""
        device = self._device
        assert device is not None
        if not hasattr(self._step, "trace"):
            yield from of_outputs(one, dense(logs), rounding)
            return
        tally = tallies[""]
        yield from of_terms(tally.layout, device.dtype, one["terms"], tally.terms.numpy(), rounding)
        yield from of_states(device.states, one, self._strategy, rounding)
        if "norm 0" in one:
            norm, scale = (float(value) for value in tally.last)
            # Half precision overflows in a sum of more rows sooner: loss scaling skips such a step.
            if scale == 1.0 or np.isfinite([norm, one["norm 0"]]).all():
                bound = 4.0 * rounding.of_sum("float32")
                yield Quantity("norm", 0, "the norm of the gradient", one["norm 0"], [norm], bound)

    def _locate(self, local: list[Any], offsets: Any, rounding: Rounding) -> Located:
        """Looks at the first rows of each replica."""
        counts = np.minimum(np.diff(offsets), _PART_ROWS)
        numbers = local_replicas(self._strategy)
        few = [
            partition.slice_rows(shard, 0, int(counts[number]))
            for number, shard in zip(numbers, local, strict=True)
        ]
        begins = tf.constant(np.insert(np.cumsum(counts), 0, 0), tf.int64)
        return locate(self._step, self._device, self._joined(few), few, begins, rounding)

    def _on_any_worker(self, found: Sequence[Quantity]) -> bool:
        if self._exchange.workers == 1:
            return bool(found)
        return bool(self._exchange([bool(found)]).any())


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError) or line_on_memory(str(error)) is not None:
        return "one device has not enough memory for the whole batch; check a smaller one in a test"
    return f"the forward pass fails outside of replicas, {_first_line_of(error)}"


def _first_line_of(error: Exception) -> str:
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not _AROUND.match(line)]
    return f"{type(error).__name__}: {said[0] if said else ''}"
