"""The feature that holds a step to what one device computes on the same global batch."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.accumulation.owners import outside_scopes
from tfmultigpu.addons.verification.advice import explain
from tfmultigpu.addons.verification.compare import Quantity, Rounding, of_terms, of_update, size
from tfmultigpu.addons.verification.locate import locate
from tfmultigpu.addons.verification.one_device import DryRun, OneDevice, cutter, dense
from tfmultigpu.addons.verification.outcome import Verification
from tfmultigpu.errors import ReplicaDependenceWarning, WorkerLostError
from tfmultigpu.steps.failures import line_on_memory
from tfmultigpu.steps.features import Call, Feature, Sees
from tfmultigpu.steps.program import Batch
from tfmultigpu.steps.warning import warn
from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.topology import per_replica
from tfmultigpu.strategies.worker_exchange import WorkerExchange

GATHERED_BYTES = 64 * 2**20
# Lines that Keras and TensorFlow put before what happened, and around it.
_AROUND = re.compile(
    r"Exception encountered when|Graph execution error|Detected at node|File \"|\[\[\{\{|<stack"
)
_Conclude = Callable[[Any, Any], Verification]  # Compares logs and tallies.
_log = logging.getLogger(__name__)


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
        rows, uneven = sum(counts), min(counts) < max(counts)
        if rows < max(len(counts), 2):
            reason = "the batch had fewer rows than there are replicas, so each computed all of it"
            self._note(Verification("not verified", 0, rows, reason))
            return call(batch)
        if self._sees == "uneven" and not uneven:
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

    def _note(self, outcome: Verification) -> None:
        """Keeps an outcome, unless a step before this one was different."""
        if self.verification is None or self.verification.outcome != "different":
            self.verification = outcome

    # Before the step ----------------------------------------------------------------------------

    def _prepare(self, batch: Batch) -> _Conclude:
        """Computes what one device would give; over several workers all call it."""
        structure, leaves, offsets = batch
        local = [tf.nest.pack_sequence_as(structure, shard) for shard in leaves]
        whole, reason, workers = None, "", self._exchange.workers
        if offsets is None:
            (whole,), (local, offsets) = local, self._cutter.cut(local[0])
        elif workers > 1:
            every = tf.nest.flatten(leaves, expand_composites=True)
            tensors = [tensor for tensor in every if tensor is not None]
            own = sum(t.shape.num_elements() * max(t.dtype.size, 1) for t in tensors)
            told = self._exchange("the size of a batch to verify", [own])
            if int(told.max()) * workers > GATHERED_BYTES:
                reason = "workers do not send each other so large a batch; check a smaller one"
        conclude: _Conclude | None = None
        try:
            conclude = None if reason else self._computed(local, offsets, whole)
        except WorkerLostError:
            raise
        except Exception as error:  # The user's code may raise anything; training goes on.
            reason = f"the forward pass fails outside of replicas, {_first_line_of(error)}"
            if isinstance(error, MemoryError) or line_on_memory(str(error)) is not None:
                reason = "one device has not enough memory for the whole batch; check a smaller one"
        if workers > 1 and bool(self._exchange("a reason not to verify", [bool(reason)]).any()):
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
        wanted = self._with_gradients and "gradient 0" in one
        gradients = DryRun(self._look)(local, offsets) if wanted else []
        updated = device.chosen if one.get("valid", True) else []
        before = {i: device.variables[i].numpy() for i in updated if f"updated {i}" in one}
        compared = functools.partial(self._compared, device, local, offsets, whole)
        return functools.partial(compared, one, gradients, before)

    def _joined(self, local: list[Any]) -> Any:
        """Returns all rows of a batch; over several workers a collective."""
        replicas = self._strategy.num_replicas_in_sync

        def joined(*parts: Any) -> Any:
            if parts[0] is None or replicas == 1:
                return parts[0]
            if len(local) < replicas:
                return gather_rows(self._strategy, per_replica(self._strategy, list(parts)))
            sparse = isinstance(parts[0], tf.SparseTensor)
            return tf.sparse.concat(0, list(parts)) if sparse else tf.concat(list(parts), 0)

        return tf.nest.map_structure(joined, *local)

    def _look(self, local: Any, offsets: Any) -> list[Any]:
        """The gradients of the replicas; traced."""
        gradient = self._step.look(self._cutter.shards(local, offsets))[2]
        first = self._strategy.experimental_local_results
        return [first(tensor)[0] for tensor in gradient.tensors]

    # After the step -----------------------------------------------------------------------------

    def _compared(
        self, device: OneDevice, local: list[Any], offsets: Any, whole: Any,
        one: Any, gradients: Any, before: Any, logs: Any, tallies: Any,
    ) -> Verification:  # fmt: skip
        rows, rounding = int(offsets[-1]), Rounding(all_layers(self._step.model))
        quantities = self._quantities(device, one, gradients, logs, tallies, rounding)
        found = [each for each in quantities if each.apart]
        for i, value in before.items() if not found else ():
            variable, gradient = device.variables[i], one[f"gradient {i}"]
            values = value, one[f"updated {i}"], variable.numpy()
            update = of_update(i, variable.path, gradient, values, rounding)
            found += [each for each in update if each.apart]
        if not self._on_any_worker(found):
            return Verification("same", rows, rows)
        still, again, *moved = device.moved(whole, rounding.compute)
        steady = [each for each in found if each.is_steady(still, again)]
        if not self._on_any_worker(steady):
            reason = (
                f"{found[0].name if found else 'a quantity'} differs between two runs on one "
                "device. Draw by keras.random with a keras.random.SeedGenerator, which both repeat"
            )
            return Verification("not verified", 0, rows, reason)
        found = [each for each in steady if each.is_beyond(still, moved, rounding.margin)]
        if not self._on_any_worker(found):
            return Verification("same", rows, rows)
        located = None
        search = functools.partial(locate, self._step, device, self._joined, local, offsets)
        try:
            located = outside_scopes(lambda: search(rounding))
        except WorkerLostError:
            raise
        except Exception:  # The difference itself is known.
            _log.warning("The layer that depends on the cut was not found.", exc_info=True)
        culprit, advice = explain(found, located, device)
        differences = tuple(each.difference for each in found)
        return Verification("different", rows, rows, "", differences, culprit, advice)

    def _quantities(
        self, device: OneDevice, one: Any, gradients: Any, logs: Any, tallies: Any, rounding: Any
    ) -> Iterator[Quantity]:
        outputs = [] if hasattr(device.twin, "trace") else dense(logs)
        for i, output in enumerate(outputs):
            expected, bound = one[f"output {i}"], rounding.of_sum(output.dtype)
            what = "an element" if expected.shape == output.shape else "the size"
            yield Quantity("output", i, f"{what} of output {i}", expected, [output.numpy()], bound)
        if "terms" in one:
            tally = tallies[""]
            pair = one["terms"], tally.terms.numpy()
            yield from of_terms(tally.layout, device.dtype, *pair, rounding)
        for i, variable in enumerate(device.states):
            # As it is read beside the replicas, then each copy.
            copies = [tf.convert_to_tensor(variable.value)]
            if variable.synchronization != "on_read":
                copies += self._strategy.experimental_local_results(variable.value)
            values, path = [copy.numpy() for copy in copies], variable.path
            if variable.trainable:
                name = f"the trained weight {path!r}, which a layer assigns,"
                yield Quantity("copy", i, name, values[0], values[1:], rounding.bound)
            else:
                bound = rounding.of_sum(variable.dtype)
                yield Quantity("state", i, f"the state {path!r}", one[f"state {i}"], values, bound)
        if "norm 0" in one:
            norm, scale = (float(value) for value in tallies[""].last)
            # Half precision overflows in a sum of more rows sooner: loss scaling skips such a step.
            if scale == 1.0 or np.isfinite([norm, one["norm 0"]]).all():
                bound = 4.0 * rounding.of_sum("float32")
                yield Quantity("norm", 0, "the norm of the gradient", one["norm 0"], [norm], bound)
        # A gradient that cancels to nothing is as exact as the numbers that cancel.
        every = [one[f"gradient {i}"] for i in range(len(gradients))]
        slack = rounding.bound * 1e-3 * max(map(size, every), default=0.0)
        for i, gradient in enumerate(gradients):
            name = f"the gradient of {device.variables[i].path!r}"
            yield Quantity("gradient", i, name, every[i], [gradient], rounding.bound, slack)

    def _on_any_worker(self, found: Sequence[Quantity]) -> bool:
        if self._exchange.workers == 1:
            return bool(found)
        return bool(self._exchange("what a verification found", [bool(found)]).any())


def _first_line_of(error: Exception) -> str:
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not _AROUND.match(line)]
    return f"{type(error).__name__}: {said[0] if said else ''}"
