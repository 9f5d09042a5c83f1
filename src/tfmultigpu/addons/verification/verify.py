"""The feature that holds a step to what one device computes on the same global batch."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.replicated import outside_scopes
from tfmultigpu.addons.verification.compare import Quantity, Rounding, Verification, compared
from tfmultigpu.addons.verification.locate import (
    Culprit,
    explain,
    explain_norms,
    locate,
    locate_bits,
)
from tfmultigpu.addons.verification.moments import OwnMoments
from tfmultigpu.addons.verification.one_device import Numbers, OneDevice
from tfmultigpu.addons.verification.putting_back import LARGE, Kept, contents_of
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.errors import ReplicaDependenceWarning, WorkerLostError
from tfmultigpu.lists import of_type, present
from tfmultigpu.steps.batches import cut_batch
from tfmultigpu.steps.failures import explaining_failures, line_on_memory
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.features.logical_replicas import LogicalReplicas
from tfmultigpu.steps.pace import saying_if_slow
from tfmultigpu.steps.predict import join_rows
from tfmultigpu.steps.program import Key, Program
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.steps.values import Batch, Call, Rows
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.worker_exchange import ElsewhereError, WorkerExchange
from tfmultigpu.types import Array, Context, Nested, Shard, Tensor
from tfmultigpu.user_code import warn

_log = logging.getLogger("tfmultigpu")
_Kind: TypeAlias = Literal["even", "uneven", "small"]  # Of a batch, by the rows of its replicas.

_SMALL = (
    "This is so for a batch of {rows} row(s): replicas or micro-batches have copies of the same "
    "rows then, and one of them counts. Code that adds over replicas divides by a count that it "
    "adds too, not by the number of replicas: total, rows = context.all_reduce('SUM', [total, "
    "rows]). Or leave such batches out: dataset.batch(size, drop_remainder=True)."
)
_BITS = (
    "With logical replicas each bit is to be as on one device. Known to change bits are code "
    "that draws or counts outside of Keras' variables (tf.random, numpy in tf.py_function), "
    "kernels of a GPU that add in any order (tf.config.experimental.enable_op_determinism() at the "
    "start of the program), GPUs of several types, and a library that picks a kernel by its time."
)
_REWRITTEN = (
    "both agree as they were traced, but TensorFlow rewrites one of them so that numbers round "
    "otherwise, for example (x + 1e5) - 1e5 to x. To round, write tf.round(128.0 * x) / 128.0"
)
# Lines of an error that do not say what is wrong.
_OF_TRACEBACK = re.compile(r"File \"|Graph execution error|Detected at node|<?[Ss]tack trace")


# What differs at all, what two runs on one device agree on, and what is more than rounding.
_Apart: TypeAlias = tuple[list[Quantity], list[Quantity], list[Quantity]]


class Verify(Feature):
    """Compares what a step computes with what one device computes, changing nothing.

    ::

        rows  = as many as one replica holds, which do not divide evenly
        one   = one device computes them
        other = the step computes them, cut for the replicas
        everything that they change is put back; then the step computes its batch

    Attributes:
        verification: The last outcome, or the first difference before it; None before the first.
    """

    verification: Verification | None = None
    _device: OneDevice | None = None
    _moments: OwnMoments | None = None
    _keys: Sequence[Key] = ()  # Of what it has seen, of this version.
    _due = True  # Whether batches are seen; all are, until the first is verified,
    # or the first of a kind is there that something is said of.
    _later: Mapping[_Kind, Verification] = types.MappingProxyType({})
    _saw_small = False  # Whether a batch of which replicas have copies was verified.
    _saw_update = False  # Whether an update was the same; of other rows it would be.

    def __init__(self, verify: bool | str = "first") -> None:
        """Checks the ``"first"`` step, or each if True; ``"gradients"`` compares elements."""
        self._always = verify is True
        self._measure: Callable[[tf.Variable], Any] = self._norm
        if verify == "gradients":
            self._measure = tf.identity

    def bind(self, step: Any) -> None:
        """Keeps the step."""
        self._step, self._strategy = step, step.strategy
        self._exchange, self._kept = WorkerExchange(step.strategy), Kept(step)

    def on_one_device(self) -> Feature | None:
        """Returns itself, for the switch; on one device it compares nothing."""
        return self if self._moments is not None else None

    def around_model(self, rows: Rows) -> Context:
        """Returns the context in which moments of a replica's own rows have a switch."""
        return nullcontext() if self._moments is None else self._moments.switched()

    @property
    def _is_exact(self) -> bool:
        """Whether one device computes the same logical replicas, so that bits are compared."""
        dealt = of_type(self._step.features, LogicalReplicas)
        return any(not feature.meets for feature in dealt)

    def around_call(self, call: Call) -> Call:
        """Returns a call that verifies its batch, if that is due and shows something."""
        key = self._step.runner.programs.key
        if key not in self._keys:  # Other settings, variables, or layers that are frozen.
            self._keys = [seen for seen in self._keys if seen.version == key.version] + [key]
            self._due, self._saw_small = True, False
            self.verification, self._later = None, {}
            self._make_switch()
        if not self._due:
            return call
        return functools.partial(self._call, call)

    def _make_switch(self) -> None:
        """Makes the switch before a trace, if layers have moments of their own rows.

        Not in ``bind``: workers make a variable together, and by now have compared their programs.
        """
        step = self._step
        is_cut = isinstance(step, TrainStep) and step.logical_replicas is None
        norms = of_type(all_layers(step.model), keras.layers.BatchNormalization)
        is_cut = is_cut and self._strategy.num_replicas_in_sync > 1
        if is_cut and self._moments is None and not all(norm.synchronized for norm in norms):
            self._moments = OwnMoments(self._strategy)

    def _call(self, call: Call, batch: Batch) -> Nested:
        rows, kind = self._kind_of(batch)
        later = dict(self._later)
        found = present([later.pop(kind, None)])
        # Of one row on one device, or of a small batch once more, there is nothing to see.
        is_seen = rows == self._strategy.num_replicas_in_sync == 1
        is_seen = is_seen or (kind == "small" and self._saw_small and not self._always)
        if not found and (self._later or is_seen):
            return call(batch)
        if not found:
            replicas = self._strategy.num_replicas_in_sync
            with saying_if_slow(
                "The first step takes longer, because TensorFlow makes a graph of your Python "
                f"code for {replicas} replica(s), and the check computes some rows on one device",
                "To leave the check out, write verify=False.",
            ):
                with explaining_failures(self._strategy):
                    # It has to be traced anyway.
                    program, _ = self._step.runner.programs.of_batch(batch)
                with self._kept.keeping():
                    found, later = self._verified(batch, program, rows, kind)
        result = call(batch)
        self._later = later
        if kind == "small":
            self._saw_small = True
        else:
            self._due = bool(self._always or later)
        if not self._due:
            self._device = None
        if found and (self.verification is None or self.verification.outcome != "different"):
            self.verification = found[0]
        for outcome in found:
            _warn_of(outcome)
        return result

    def _kind_of(self, batch: Batch) -> tuple[int, _Kind]:
        """Returns the rows of a batch, and how replicas and micro-batches share them."""
        _, local, offsets = batch
        replicas, parts = self._strategy.num_replicas_in_sync, self._step.parts
        if offsets is None:
            rows = int(count_rows(local[0]))
            least, most = rows // replicas, -(-rows // replicas)
        else:
            rows, counts = int(offsets[-1]), np.diff(offsets)
            least, most = int(counts.min()), int(counts.max())
        if rows < replicas or least < min(parts // replicas, most):
            return rows, "small"
        return rows, "even" if least == most else "uneven"

    def _sizes(self, rows: int, *, is_even: bool) -> list[int]:
        """Returns how many rows of a batch to compare, and how many if those show a difference.

        A mean of equal means is right by chance, so the first number does not divide evenly, if
        one can be had. Code that takes rows in pairs is right with the second alone.
        """
        if self._always and is_even:
            return [rows]
        parts = self._step.parts
        if parts == 1:
            return [rows]
        most = rows
        if not self._always:
            held = -(-rows // parts)  # By a replica, at one time.
            most = min(rows, max(held, parts + 1))
        even = most - most % parts
        uneven = most
        if most == even:
            uneven = most - 1
        sizes = []
        if uneven >= parts:
            sizes.append(uneven)
        if is_even and even >= parts:
            sizes.append(even)
        return sizes or [most]

    def _verified(
        self, batch: Batch, program: Program, rows: int, kind: _Kind
    ) -> tuple[list[Verification], dict[_Kind, Verification]]:
        """Verifies a batch; all workers call it.

        Returns:
            What to say now, first what counts as the outcome; and what to say of the first batch
            of another kind.
        """
        self._saw_update = False
        norms = program.trace.own_moments
        if not norms or self._is_exact or self._strategy.num_replicas_in_sync == 1:
            return self._outcomes(batch, rows, kind)
        # They are as everybody knows them. What else there is shows without them.
        said = [explain_norms(norms)]
        if self._moments is None:  # Logical replicas that meet.
            return said, {}
        with self._moments.left_out():
            outcomes, later = self._outcomes(batch, rows, kind)
        return [*said, *[each for each in outcomes if each != Verification("same")]], later

    def _outcomes(
        self, batch: Batch, rows: int, kind: _Kind
    ) -> tuple[list[Verification], dict[_Kind, Verification]]:
        """Compares a batch, with other numbers of rows where that shows more."""
        if kind == "small":
            return present([self._of_copies(batch, rows)]), {}
        later: dict[_Kind, Verification] = {}
        sizes = self._sizes(rows, is_even=kind == "even")
        first = self._compared_twice(batch, sizes[0])
        if first.verification.outcome == "same" or len(sizes) == 1:
            outcome = self._located(first)
        else:
            size = sizes[1]
            if first.verification.outcome == "not verified":
                # What a replica holds may agree by chance with another shape.
                size = min(2 * size, rows)
            second = self._compared_twice(batch, size)
            outcomes = first.verification.outcome, second.verification.outcome
            if outcomes == ("different", "same"):
                later["uneven"] = self._located(first)
            outcome = self._located(second)
        if outcome.outcome == "same" and not (self._always or self._saw_small):
            for size in self._small_sizes(batch, rows):
                small = self._of_copies(batch, size)
                if small is not None and small.outcome == "different":
                    later["small"] = small
        return [outcome], later

    def _norm(self, variable: tf.Variable) -> Any:
        """Returns the norm; of a large variable a piece at a time, for float64 takes more room."""
        if (variable.shape.num_elements() or 0) * variable.dtype.size < LARGE:
            return np.linalg.norm(variable.numpy().astype(np.float64))
        squares = tf.zeros([], tf.float64)
        with tf.device(variable.device):
            for piece in contents_of(self._step, variable.handle, variable.dtype).pieces():
                squares += tf.reduce_sum(tf.square(tf.cast(piece, tf.float64)))
            return tf.sqrt(squares)

    def _small_sizes(self, batch: Batch, rows: int) -> list[int]:
        """Returns of how many rows replicas, and then micro-batches, would have copies."""
        replicas, parts = self._strategy.num_replicas_in_sync, self._step.parts
        if replicas == 1 or partition.fixed_offsets(batch[1][0][0]) is not None:
            return []  # None, or all batches of the data are of one size.
        sizes = [replicas - 1]
        if self._is_exact:  # A logical replica without rows is one on any device.
            sizes = []
        if (replicas < parts or self._is_exact) and 1 < parts <= rows:
            sizes.append(parts - 1)
        return sizes

    def _of_copies(self, batch: Batch, rows: int) -> Verification | None:
        """Returns the outcome for so few rows that replicas have copies; None if nothing shows."""
        comparison = self._compared(batch, rows)
        outcome, one = comparison.verification, comparison.one
        if outcome.outcome != "different" or one is None:
            return None if outcome.reason else outcome
        culprit, _ = explain(comparison.beyond, Culprit(), one.device)
        advice = _BITS if self._is_exact else _SMALL.format(rows=rows)
        return dataclasses.replace(outcome, culprit=culprit, advice=advice)

    # One comparison -----------------------------------------------------------------------------

    def _compared_twice(self, batch: Batch, rows: int) -> _Comparison:
        """Compares the first rows of a batch, again from other states if these are zero.

        A state of zero hides what it is multiplied by: N times 0 is 0.
        """
        comparison = self._compared(batch, rows)
        device = self._device
        if comparison.verification.outcome != "same" or device is None or not device.has_zeros():
            return comparison
        with device.beginning_at_ones():
            again = self._compared(batch, rows)
        return again if again.verification.outcome == "different" else comparison

    def _compared(self, batch: Batch, rows: int) -> _Comparison:
        """Compares the first rows of a batch, changing nothing; all workers call it."""
        one, reason = _attempt(functools.partial(self._whole, batch, rows))
        if reason:
            return _Comparison(Verification("not verified", reason))
        apart = functools.partial(self._found, one, one.numbers)
        numbers, reason = _attempt(lambda: self._exchange.together("a comparison", apart))
        if reason:
            return _Comparison(Verification("not verified", reason), one)
        return self._agreed(one, numbers)

    def _whole(self, batch: Batch, rows: int) -> _One:
        """Returns what the first rows of the batch give on one device, and how to compare that.

        All workers call it. Code of the user fails in a trace, maybe on one worker alone: then none
        has run anything yet, and the next collective finds all of them alike.
        """
        traced = functools.partial(self._traced, batch, rows)
        one = self._exchange.together("a trace for one device", traced)
        run = functools.partial(self._run, one)
        return self._exchange.together("what one device computes", run)

    def _traced(self, batch: Batch, rows: int) -> _One:
        """Returns the first rows of the batch, with what computes them traced."""
        step, (structure, leaves, offsets) = self._step, batch
        local = [tf.nest.pack_sequence_as(structure, shard) for shard in leaves]
        whole = local[0]
        if offsets is not None:
            whole = join_rows(self._strategy, local)
        whole = partition.slice_rows(whole, 0, rows)
        local, places = cut_batch(self._strategy, whole)
        cut = structure, [tf.nest.flatten(whole)], None
        if offsets is not None:
            cut = structure, list(map(tf.nest.flatten, local)), places
        program, arguments = step.runner.programs.of_batch(cut)
        _refuse_what_stays(step)
        device = self._device
        if device is None or device.key != step.key():
            device = OneDevice(step, self._measure, self._kept)
        device.computation(whole, program)
        return _One(device, {}, whole, local, places, program, arguments, not self._saw_update)

    def _run(self, one: _One) -> _One:
        """Returns it with what one device computes."""
        device = one.device
        try:
            numbers = device.run(one.whole, one.program, updates=one.updates)
        except tf.errors.CancelledError:  # Of a function that is called TensorFlow loses errors.
            device = OneDevice(device.step, self._measure, self._kept, by_itself=True)
            numbers = device.run(one.whole, one.program, updates=one.updates)
        self._device = device  # Not one that failed: TensorFlow could not trace it again.
        return dataclasses.replace(one, device=device, numbers=numbers)

    def _without_rewriting(self, one: _One) -> list[Quantity]:
        """Returns what differs beyond rounding if TensorFlow runs what was traced as it is."""
        with _compat.without_rewriting():
            again = one.device.run(one.whole, one.program, updates=one.updates)
            return self._found(one, again, scales=False)[2]

    def _agreed(self, one: _One, numbers: _Apart) -> _Comparison:
        """Returns what all workers make of what differs on each; all workers call it."""
        found, _, beyond = numbers
        told = self._exchange("what a verification found", [len(each) for each in numbers])
        told = told.max(axis=0)
        if told[2] and not self._is_exact:
            # TensorFlow may rewrite the same code in two ways, which round differently.
            again = functools.partial(self._without_rewriting, one)
            remain, reason = _attempt(lambda: self._exchange.together("a second look", again))
            if not reason and not self._exchange("what remains of it", [len(remain)]).any():
                return _Comparison(Verification("not verified", _REWRITTEN), one)
        outcome = Verification("different", "", tuple(map(str, beyond)))
        if not told[2]:
            outcome = Verification("same", one.device.left_out)
            self._saw_update = True
        if told[0] and not told[1]:
            name = found[0].name if found else "a quantity"
            reason = (
                f"{name} differs between two runs on one device. Draw by keras.random with a "
                "keras.random.SeedGenerator, which both repeat; for tf.concat([fake, real], 0) by "
                "one draw for each part"
            )
            outcome = Verification("not verified", reason)
        return _Comparison(outcome, one, beyond)

    def _found(self, one: _One, numbers: Numbers, *, scales: bool = True) -> _Apart:
        """Runs the step, and returns what differs from the numbers of one device."""
        device = one.device
        bounds = Rounding(all_layers(device.step.model), exact=self._is_exact)
        draws = any(s.kind == "draws" for s in self._step.runner.touched.states)
        with self._kept.putting_back(one.program.run) as before:
            device.begin(before, one.program)
            logs = one.program.run(*one.arguments)[0]
            quantities = [q for q in compared(device, numbers, logs, bounds) if q.apart or draws]
        found = [quantity for quantity in quantities if quantity.apart]
        if draws and not found:
            # Each trace of a seed of ``tf.random`` begins with the same number: the next differs.
            again = device.run(one.whole, one.program, updates=one.updates)
            return [q for q in quantities if not q.is_steady(numbers, again)], [], []
        if not found:
            return [], [], []
        scales = scales and not self._is_exact
        still, again, *moved = device.moved(
            one.whole, one.program, bounds.compute, scales=scales, updates=one.updates
        )
        steady = [each for each in found if each.is_steady(still, again)]
        beyond = [each for each in steady if each.is_beyond(still, moved, bounds.margin)]
        return found, steady, beyond

    def _located(self, comparison: _Comparison) -> Verification:
        """Returns the outcome, of a difference with what it comes from; all workers call it."""
        outcome, one = comparison.verification, comparison.one
        if outcome.outcome != "different" or one is None:
            return outcome
        if self._is_exact:
            found, _ = _attempt(lambda: locate_bits(self._step, one.device, one.whole))
            culprit, _ = explain(comparison.beyond, found or Culprit(), one.device)
            return dataclasses.replace(outcome, culprit=culprit, advice=_BITS)
        join = functools.partial(join_rows, self._strategy)
        bound = math.sqrt(Rounding(all_layers(self._step.model)).compute)
        with _compat.without_rewriting():
            found, _ = _attempt(
                lambda: locate(self._step, one.device, join, one.local, one.places, bound)
            )
        culprit, advice = explain(comparison.beyond, found or Culprit(), one.device)
        return dataclasses.replace(outcome, culprit=culprit, advice=advice)


@dataclasses.dataclass(frozen=True)
class _One:
    """What one device computed, and how the step computes the same.

    Attributes:
        device: The step on one device.
        numbers: What it computed, by name.
        whole: The rows in one piece.
        local: The shard of each replica of this process.
        places: The offsets of all shards.
        program: The step.
        arguments: The rows as it takes them.
        updates: Whether what the update changes is compared.
    """

    device: OneDevice
    numbers: Numbers
    whole: Shard
    local: list[Shard]
    places: Array
    program: Program
    arguments: list[Tensor]
    updates: bool


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """The outcome of a comparison, without what a difference comes from.

    Attributes:
        verification: The outcome.
        one: What one device computed; None if it could not.
        beyond: What differs by more than rounding.
    """

    verification: Verification
    one: _One | None = None
    beyond: Sequence[Quantity] = ()


def _warn_of(outcome: Verification) -> None:
    if outcome.outcome == "different":
        warn(str(outcome), ReplicaDependenceWarning)
    elif outcome.outcome == "same" and outcome.reason:
        _log.warning("%s", outcome)
    elif outcome.reason:
        warn(
            f"The step could not be compared with one device: {outcome.reason}. So a result that "
            "depends on how the batch is cut would go unnoticed. To leave the check out, write "
            "verify=False.",
            ReplicaDependenceWarning,
        )


def _refuse_what_stays(step: Any) -> None:
    """Raises an error if the step changes what cannot be put back; before anything runs."""
    for state in step.runner.touched.states:
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
    except ElsewhereError:
        return None, "another worker could not compute the batch by itself"
    except tf.errors.OpError as error:
        if isinstance(error, tf.errors.ResourceExhaustedError) or line_on_memory(error.message):
            return None, (
                f"one device has not enough memory for as many rows as a replica has: "
                f"{_essence(error)}. Check a smaller batch in a test"
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
        text = line.strip().partition("[[")[0].partition("[Op:")[0].strip()
        if text and not _OF_TRACEBACK.match(text):
            said.append(text)
    return " ".join(said)[:300].rstrip(".")
