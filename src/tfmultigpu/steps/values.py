"""What travels through a step: rows, shards, what a replica gives, the gradient, the trace.

::

    rows of a replica -> Pass        forward and backward; changes no variable
    all Passes -> sums               added once, over micro-batches and replicas
    sums -> Gradient, Tally          divided once
    Gradient -> variables            updated once

``steps/phases.py`` has the functions that do it, in this order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.lists import by_id, present
from tfmultigpu.steps.assignments import DeferredAssignments
from tfmultigpu.steps.tally import Layout, Tallies, layouts_of
from tfmultigpu.strategies.row_lists import is_list, with_values
from tfmultigpu.types import KerasLayer, KerasVariable, Nested, Scalar, Tensor


class Rows(NamedTuple):
    """The place of a replica's rows in the global batch, as scalars.

    Attributes:
        first: The number of the first row, int64.
        count: How many rows there are here, int64.
        total: The rows of the global batch, int64.
        weight: What each row counts, float64: 1; or 0 if another replica, or another micro-batch,
            counts the same rows. None for 1.
        parts: The micro-batches that have rows of their own, int64; None if the shard is computed
            in one piece.
        dealt: How many logical replicas have rows of their own, int64; None if there is one, or
            each replica computes its rows at one time.
    """

    first: Scalar
    count: Scalar
    total: Scalar
    weight: Scalar = None
    parts: Scalar = None
    dealt: Scalar = None

    def cut(self, number: Scalar, parts: Scalar) -> Rows:
        """Returns the place of one of ``parts`` micro-batches of these rows."""
        start, stop = partition.part_bounds(self.count, parts, number)
        weight = partition.part_weight(self.count < parts, number)
        if self.weight is not None:
            weight = self.weight * weight
        counting = partition.counting_parts(self.count, parts)
        return self._replace(
            first=self.first + start, count=stop - start, weight=weight, parts=counting
        )

    def of_logical(self, number: Scalar, count: int) -> tuple[Rows, tuple[Scalar, Scalar]]:
        """Returns the place of a logical replica, and where its rows begin and end among these.

        Of fewer rows than logical replicas some have none. They compute a row of this replica, as
        a layer needs one, and count nothing.

        Args:
            number: The number of the logical replica, of all of them; its rows are among these.
            count: How many there are.
        """
        begin, end = (self.total * (number + n) // count for n in (0, 1))
        has_rows = end > begin
        start = tf.minimum(begin, self.first + self.count - 1) - self.first
        size = tf.where(has_rows, end - begin, tf.ones_like(end))
        weight = tf.cast(has_rows, tf.float64)
        dealt = None if count == 1 else tf.minimum(self.total, count)
        rows = Rows(self.first + start, size, self.total, weight, None, dealt)
        return rows, (start, start + size)

    def share(self, replicas: int) -> Scalar:
        """Returns the part of each replica and micro-batch that counts, together 1."""
        counting = self.dealt
        if counting is None:
            counting = partition.counting_parts(self.total, replicas)
        if self.parts is not None:
            counting *= self.parts
        return 1.0 / tf.cast(counting, tf.float64)

    def counts(self) -> Scalar:
        """Returns whether these rows count here, a bool or a bool scalar."""
        if self.weight is None:
            return True
        known = tf.get_static_value(self.weight)
        if known is None:
            return self.weight > 0
        return bool(known > 0)

    def counted(self, value: Tensor) -> Tensor:
        """Returns a tensor, or a list of rows, with zeros in place of what does not count here.

        They do not depend on the value, which may be NaN: code of the user has computed it from a
        gradient of zero.
        """
        counts = self.counts()
        if counts is True:
            return value
        if is_list(value):
            return with_values(value, self.counted(value.values))
        if value.dtype in (tf.float32, tf.float64):  # In the memory of the value, if it can be.
            return tf.math.multiply_no_nan(value, tf.cast(self.weight, value.dtype))
        return tf.where(counts, value, tf.zeros_like(value))


class Shards(NamedTuple):
    """A global batch, or a micro-batch of it, as this process computes it: all a replica is given.

    Attributes:
        local: For each replica of this process its rows, a structure of tensors.
        rows: The place of each.
        state: For each replica the values that assigned variables have before; () for their own.
        factor: What the loss is multiplied by before the backward pass, a scalar; None for 1.
        total: The rows of the global batch, a float64 scalar.
    """

    local: list[Nested]
    rows: list[Rows]
    state: list[tuple[Tensor, ...]]
    factor: Scalar
    total: Scalar

    @classmethod
    def of(
        cls, local: list[Nested], offsets: Tensor, numbers: Sequence[int], replicas: int
    ) -> Shards:
        """Returns the shards of the replicas ``numbers``; offsets as ``partition`` gives them."""
        with tf.device("CPU:0"):  # Shapes are decided there; nothing waits for a GPU.
            total = offsets[-1]
            places: list[Rows] = []
            weights: list[Scalar] = [None]
            if replicas > 1:
                # Of a batch smaller than the replicas each has a copy, and the first one counts.
                first = tf.ones([], tf.float64)
                others = partition.part_weight(total < replicas, 1)
                weights = [others if number else first for number in numbers]
            for number, shard, weight in zip(numbers, local, weights, strict=True):
                places.append(Rows(offsets[number], count_rows(shard), total, weight))
            return cls(local, places, [()] * len(local), None, tf.cast(total, tf.float64))

    def cut(self, number: Scalar, parts: Scalar) -> Shards:
        """Returns one of ``parts`` micro-batches."""
        local = [partition.cut_part(shard, parts, number) for shard in self.local]
        with tf.device("CPU:0"):
            return self._replace(local=local, rows=[rows.cut(number, parts) for rows in self.rows])


class Pass(NamedTuple):
    """The result of a replica for some rows: only tensors, to be added, looped and compiled.

    Attributes:
        gradients: For each target of the backward pass, for each trained variable: the gradient of
            a sum, at least float32, or None.
        stats: ``[2 * terms]``: the sum of each term of the loss, then the weight of each; float32,
            or float64 if one of them is.
        state: The new values of ``Trace.state``, in its order.
        shared: What logical replicas add of these values, in the order of ``Trace.shared``.
    """

    gradients: tuple[tuple[Tensor, ...], ...]
    stats: Tensor
    state: tuple[Tensor, ...]
    shared: tuple[Tensor, ...] = ()

    @property
    def addends(self) -> list[Tensor]:
        """What is added over micro-batches and replicas: the gradients that exist, then stats."""
        return [*present(tf.nest.flatten(self.gradients)), self.stats]

    def with_addends(self, values: Sequence[Tensor]) -> Pass:
        """Returns the same with other tensors in place of ``addends``."""
        turn = iter(values)
        gradients = tf.nest.map_structure(
            lambda gradient: None if gradient is None else next(turn), self.gradients
        )
        return self._replace(gradients=gradients, stats=next(turn))


class Gradient(NamedTuple):
    """The gradient of the global batch, between the one division and the one update.

    Attributes:
        tensors: For each variable that has a gradient a tensor of its shape, of the dtype of the
            sum: at least float32.
        norm: The norm of all together, a scalar.
        valid: Whether there is an update, a bool scalar; None if nothing can forbid it.
        variables: The Keras variables that they are for.
        finite: Whether all numbers of it are finite, a bool scalar; None if nothing asks.
    """

    tensors: tuple[Tensor, ...]
    norm: Scalar
    valid: Scalar = None
    variables: tuple[KerasVariable, ...] = ()
    finite: Scalar = None

    def completed_by(self, before: Gradient) -> Gradient:
        """Returns the same, with what a feature left out that made a new gradient of ``before``.

        An update that was forbidden stays forbidden.
        """
        left_out: dict[str, Any] = {}
        for name, default in self._field_defaults.items():
            if getattr(self, name) is default:
                left_out[name] = getattr(before, name)
        whole = self._replace(**left_out)
        if before.valid is None or whole.valid is before.valid:
            return whole
        return whole._replace(valid=tf.logical_and(before.valid, whole.valid))


@dataclasses.dataclass(eq=False)
class Trace:
    """What the code of the user turned out to do, the same on every replica.

    Who traces a step makes one and hands it from phase to phase.

    Attributes:
        layout: The terms of the loss; None before the first replica.
        places: Which gradients exist: for each the number of its target and of its variable
            among the trained ones, in the order of ``Pass.addends``.
        targets: How many targets the backward pass has.
        state: The Keras variables that layers, draws and metrics assign.
        replaced: The ids of those to which values were not only added.
        seeds: The variables among them that draws took seeds from: every micro-batch finds them as
            the first one does, and takes its rows of the same draws.
        updated: The trained variables that have a gradient, of a target or a penalty.
        why_each: Why the function of a replica is traced for each; "" if one trace serves all.
        meets: Whether as many replicas as logical ones add up something within the function.
        finds_error: Whether it is traced for each replica because TensorFlow has lost an error.
        functions: Those that replicas call, which live as long as the graph of the calls.
        counts_replicas: Whether something in them asks how many replicas there are.
        own_moments: Layers that normalize by the moments of the rows of their replica alone.
        once: What logical replicas call: for the first micro-batch (True), and for others.
        begin_at_zero: The variables that are zero for each logical replica, which adds to them.
        shared: The variables of ``state`` to which all logical replicas contribute.
        known: The trace of the same step on replicas, whose function serves one device as well.
        logs_last: Whether what only the last step has in its logs is read: the norm of the
            gradient and the loss scale.
        inside: Whether it is made inside a ``tf.function`` of the user, of whose calls nobody
            knows.
        layouts: What the numbers of each tally are, by the name of the tally.
    """

    layout: Layout | None = None
    places: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    targets: int = 0
    state: list[KerasVariable] = dataclasses.field(default_factory=list)
    replaced: set[int] = dataclasses.field(default_factory=set)
    seeds: list[KerasVariable] = dataclasses.field(default_factory=list)
    updated: tuple[KerasVariable, ...] = ()
    why_each: str = ""
    meets: bool = False
    finds_error: bool = False
    functions: list[Any] = dataclasses.field(default_factory=list)
    counts_replicas: bool = False
    own_moments: list[KerasLayer] = dataclasses.field(default_factory=list)
    once: dict[bool, Any] = dataclasses.field(default_factory=dict)
    begin_at_zero: Sequence[KerasVariable] = ()
    shared: Sequence[KerasVariable] = ()
    known: Trace | None = None
    logs_last: bool = True
    inside: bool = False
    layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)

    def note_layouts(self, tallies: Tallies) -> None:
        """Notes what the numbers of each tally are."""
        self.layouts = layouts_of(tallies)

    def note_logical(self, *, begin_at_zero: Sequence[KerasVariable]) -> None:
        """Notes the variables that are zero for each logical replica."""
        self.begin_at_zero = begin_at_zero

    def note_shared(self, variables: Sequence[KerasVariable]) -> None:
        """Notes the variables to which all logical replicas contribute."""
        self.shared = variables

    def before(self, state: Sequence[Tensor]) -> list[tuple[KerasVariable, Tensor]]:
        """Returns variables with the values that they seem to have for a replica.

        Args:
            state: The values of ``self.state``; () for their own.
        """
        zeros: list[tuple[KerasVariable, Tensor]] = []
        for variable in self.begin_at_zero:
            zeros.append((variable, tf.zeros(variable.shape, variable.dtype)))
        return [*zeros, *zip(self.state, state, strict=False)]

    def note_why_each(self, why: str) -> None:
        """Notes why the function of a replica is traced for each; the first reason stays."""
        self.why_each = self.why_each or why

    def note_meeting(self, why: str) -> None:
        """Notes that replicas add up something within the function of a logical replica."""
        self.meets, self.why_each = True, why

    def note_counting(self) -> None:
        """Notes that something asks how many replicas there are."""
        self.counts_replicas = True

    def note_state(self, variables: Sequence[KerasVariable]) -> None:
        """Notes the variables that are assigned, before a replica has been traced."""
        self.state = list(variables)

    def note_updated(self, variables: Sequence[KerasVariable]) -> None:
        """Notes the trained variables that have a gradient."""
        self.updated = tuple(variables)

    def note_known(self) -> None:
        """Notes what ``known`` has found, whose function was called in place of a trace."""
        known = self.known
        assert known is not None
        self.layout, self.places, self.targets = known.layout, known.places, known.targets
        self.state, self.seeds, self.once = known.state, known.seeds, dict(known.once)
        self.replaced = set(known.replaced)

    def note(
        self, layout: Layout, gradients: Sequence[Sequence[Tensor]], deferred: DeferredAssignments
    ) -> None:
        """Notes what one replica found, and what it would assign.

        Raises:
            TfMultiGpuError: It is something else than another replica or micro-batch found.
        """
        self.replaced |= deferred.replaced
        places: list[tuple[int, int]] = []
        for target, of_target in enumerate(gradients):
            for number, gradient in enumerate(of_target):
                if gradient is not None:
                    places.append((target, number))
        if self.layout is None:
            self.layout, self.places, self.state = layout, places, list(deferred.variables)
            self.targets = len(gradients)
            return
        known = by_id(self.state)
        strange = [variable.path for variable in deferred.variables if id(variable) not in known]
        if strange or places != self.places:
            raise TfMultiGpuError(
                "The model does something else each time that it is traced, and replicas and "
                "micro-batches must all do the same.",
                f"{strange or 'other gradients'}",
                "Create seed generators, metrics and variables once, in the scope of the "
                "strategy, not in call or forward: seeds = keras.random.SeedGenerator(seed).",
            )


# Cross-replica: a Pass for each replica of this process.
Phase = Callable[[Shards, Trace], list[Pass]]
# In a replica: replica(shard, rows, state, factor, total, trace=trace).
Replica = Callable[..., Pass]
# A structure, the leaves of each shard, and offsets; without offsets one whole batch.
Batch = tuple[Any, list[list[Any]], Any]
# Python: from a batch to the logs, and the tally of each step of a chain.
Call = Callable[[Batch], tuple[dict[str, Any], Tallies]]
