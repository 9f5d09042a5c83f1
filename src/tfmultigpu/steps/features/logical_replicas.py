"""Logical replicas: a step whose bits depend on how many there are, on any number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.gradients import sum_dtype
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import NOT_EVEN, with_dependencies
from tfmultigpu.errors import ReplicaDependenceWarning, TfMultiGpuError
from tfmultigpu.lists import by_id
from tfmultigpu.steps.batches import open_rows
from tfmultigpu.steps.features.feature import BoundStep, Feature
from tfmultigpu.steps.values import Pass, Phase, Rows, Shards, Trace
from tfmultigpu.strategies.collectives import adding_in_pairs, keeping_additions
from tfmultigpu.strategies.row_lists import added, is_list, unique
from tfmultigpu.strategies.topology import describe, is_on_read, local_replicas, strategy_devices
from tfmultigpu.types import Context, KerasVariable, Scalar, Shard, Tensor
from tfmultigpu.user_code import warn


class _Group(NamedTuple):
    """Neighbouring logical replicas of each device.

    Attributes:
        size: How many of each device.
        passes: For each replica of this process the sum of theirs.
    """

    size: int
    passes: list[Pass]


class LogicalReplicas(Feature):
    """Deals ``count`` logical replicas to the devices, which compute theirs one after the other.

    ::

        logical replica v:  rows B * v // count up to B * (v + 1) // count of a batch of B rows
        device r of N:      logical replicas r * count / N up to (r + 1) * count / N, by one
                            function that is called for each; added in pairs, neighbours first
        all devices:        these sums, added in pairs

    So all additions together are one binary tree, whose leaves are the logical replicas. Each of
    them begins with the state before the step. Floating-point state of layers becomes its mean over
    those that have rows, and what metrics add is added once.

    Attributes:
        count: How many there are.
        meets: Whether they were found to meet, each on a device of its own: no other number of
            devices computes that.
    """

    meets = False

    def __init__(self, count: int) -> None:
        self.count = count

    def bind(self, step: BoundStep) -> None:
        """Checks that each device has as many of them, or one device all."""
        self._step, self._strategy = step, step.strategy
        check_fits(self.count, step.strategy.num_replicas_in_sync)
        on_gpus = any("GPU" in device for device in strategy_devices(step.strategy))
        if on_gpus and not _compat.kernels_are_deterministic():
            warn(
                "Kernels of a GPU may add in any order, and then the bits of logical replicas are "
                "other ones at each run. Received: logical_replicas="
                f"{self.count} on {describe(step.strategy)}. Write at the start of the program, "
                "before the seed: tf.config.experimental.enable_op_determinism().",
                ReplicaDependenceWarning,
            )

    def on_one_device(self) -> Feature | None:
        """Returns the same for one device, which computes all of them; nothing if they meet."""
        return None if self.meets else LogicalReplicas(self.count)

    def around_trace(self) -> Context:
        """Has what replicas give be added in pairs."""
        return adding_in_pairs()

    def around_phase(self, phase: Phase) -> Phase:
        """Returns the function that computes the logical replicas of this process."""

        def dealt(shards: Shards, trace: Trace) -> list[Pass]:
            trace.note_logical(begin_at_zero=self._summed_states())
            groups: list[_Group] = []
            shards = self._checked(shards)
            for number in range(self.turns):
                before = [[done.stats for done in group.passes] for group in groups]
                part = self.part(shards, number, before)
                passes = phase(part, trace)
                self.meets |= trace.meets
                trace.note_shared(trace.shared or _shared_states(trace))
                group = _Group(1, self._given(number, passes, part.rows, trace))
                while groups and groups[-1].size == group.size:
                    group = _sum_of(groups.pop(), group)
                groups.append(group)
            while len(groups) > 1:  # One device may have any number.
                last = groups.pop()
                groups.append(_sum_of(groups.pop(), last))
            return groups[0].passes

        return dealt

    def _checked(self, shards: Shards) -> Shards:
        """Returns shards whose places are checked: who cuts must cut by row number alone."""
        replicas = self._strategy.num_replicas_in_sync
        if replicas == 1:
            return shards
        with tf.device("CPU:0"):
            firsts = tf.stack([rows.first for rows in shards.rows])
            total, numbers = shards.rows[0].total, local_replicas(self._strategy)
            even = tf.stack([total * number // replicas for number in numbers])
            fits = tf.reduce_all((firsts == even) | (total < replicas))
            check = tf.raw_ops.Assert(
                condition=fits, data=[NOT_EVEN.text, firsts], summarize=replicas
            )
        return shards._replace(local=with_dependencies([check], shards.local))

    @property
    def turns(self) -> int:
        """How many logical replicas a device computes, one after the other."""
        return self.count // int(self._strategy.num_replicas_in_sync)

    def part(self, shards: Shards, number: int, before: Sequence[Sequence[Tensor]]) -> Shards:
        """Returns the rows of a logical replica of each device, the ``number``-th in turn.

        Args:
            shards: The rows of each device.
            number: Which of them a device computes.
            before: For each turn before it, what each device has computed.
        """
        local: list[Shard] = []
        places: list[Rows] = []
        replicas = local_replicas(self._strategy)
        computed = list(zip(*before, strict=True)) or [()] * len(replicas)
        each = zip(replicas, shards.local, shards.rows, computed, strict=True)
        for replica, shard, rows, after in each:
            with tf.device("CPU:0"):  # Shapes are decided there.
                place, bounds = rows.of_logical(replica * self.turns + number, self.count)
                start, stop = (tf.cast(bound, tf.int32) for bound in bounds)
                place = tf.nest.map_structure(_hidden, place)
            # TensorFlow's threads of replicas wait for no control dependency.
            part = with_dependencies(after, partition.slice_rows(shard, start, stop))
            # One device may know the rows of a batch, and several do not.
            local.append(tf.nest.map_structure(open_rows, part))
            places.append(place)
        with tf.device("CPU:0"):
            total = _hidden(shards.total)
        return shards._replace(local=local, rows=places, total=total)

    def _summed_states(self) -> list[KerasVariable]:
        """Returns the variables of metrics, which are added up when they are read."""
        model: Any = self._step.model
        states: list[KerasVariable] = []
        for metric in (*self._step.metrics, *getattr(model, "metrics", ())):
            states += filter(is_on_read, metric.variables)
        return list(by_id(states).values())

    def _given(
        self, number: int, passes: list[Pass], rows: Sequence[Rows], trace: Trace
    ) -> list[Pass]:
        """Returns passes with what they give to the states that all logical replicas share."""
        shared = by_id(trace.shared)
        numbers = [i for i, state in enumerate(trace.state) if id(state) in shared]
        given: list[Pass] = []
        replicas = local_replicas(self._strategy)
        for replica, result, dealt in zip(replicas, passes, rows, strict=True):
            is_first = replica == number == 0
            with tf.device(result.stats.device):
                values: list[Tensor] = []
                for i in numbers:
                    values.append(_addend(trace.state[i], result.state[i], dealt, is_first))
                addends = [unique(one) if is_list(one) else one for one in result.addends]
            given.append(result.with_addends(addends)._replace(shared=tuple(values)))
        return given


def _addend(state: KerasVariable, value: Tensor, rows: Rows, is_first: bool) -> Tensor:
    """Returns what a logical replica adds to a state, of a dtype in which all of them fit."""
    if value.dtype.is_floating:
        return rows.counted(tf.cast(value, sum_dtype(value.dtype)))
    value = tf.cast(value, tf.int64)
    if is_on_read(state):
        return value * tf.cast(rows.counts(), tf.int64)
    # Of the first one, and of all, to see that they are alike.
    return tf.stack([value if is_first else tf.zeros_like(value), value])


def numbers_that_fit(count: int) -> list[int]:
    """Returns how many replicas can compute ``count`` logical replicas, the smallest first."""
    fits = [1]
    for number in range(2, count + 1):
        share, rest = divmod(count, number)
        if not rest and not share & (share - 1):
            fits.append(number)
    return fits


def check_fits(count: int, replicas: int) -> None:
    """Checks that so many replicas can compute ``count`` logical replicas."""
    fits = numbers_that_fit(count)
    if replicas not in fits:
        raise TfMultiGpuError(
            "Logical replicas are added in pairs, so each device computes 1, 2, 4, 8 ... of them, "
            "or one device all.",
            f"logical_replicas={count} on {replicas} replica(s)",
            f"Take one of {', '.join(map(str, fits))} replicas: tmg.create_strategy(devices="
            f"{max(n for n in fits if n <= replicas)}); or logical_replicas={replicas} or "
            f"{2 * replicas}, which gives other bits.",
        )


def _sum_of(left: _Group, right: _Group) -> _Group:
    """Adds what two groups of logical replicas give, of each replica on its device."""
    sums: list[Pass] = []
    for before, result in zip(left.passes, right.passes, strict=True):
        with tf.device(result.stats.device), keeping_additions():
            flat = list(map(added, _addends(before), _addends(result)))
        sums.append(_with_addends(result, flat)._replace(state=before.state))
    return _Group(left.size + right.size, sums)


def _addends(result: Pass) -> list[Any]:
    return [*result.shared, *result.addends]


def _with_addends(result: Pass, values: Sequence[Any]) -> Pass:
    count = len(result.shared)
    return result.with_addends(values[count:])._replace(shared=tuple(values[:count]))


def _hidden(number: Scalar) -> Scalar:
    """Returns a scalar that TensorFlow does not know where it is traced.

    Of a function that is called with a constant it makes another one, in which that is known.
    """
    return None if number is None else tf.compat.v1.placeholder_with_default(number, [])


def _shared_states(trace: Trace) -> list[KerasVariable]:
    """Returns the states to which all logical replicas contribute, in the order of ``state``."""
    seeds, shared = set(map(id, trace.seeds)), []
    known = set(map(id, trace.begin_at_zero))
    for state in trace.state:
        if is_on_read(state):
            if id(state) not in known or id(state) in trace.replaced:
                raise TfMultiGpuError(
                    "Logical replicas add to the state of a metric, and this one is assigned "
                    "another value, or belongs to no metric.",
                    f"{state.path!r}",
                    "Write variable.assign_add(values of rows), and divide in result(); or leave "
                    "logical_replicas out.",
                )
            shared.append(state)
        elif id(state) not in seeds and state.dtype != "string":
            if state.aggregation == "sum":
                raise TfMultiGpuError(
                    "A weight whose values are added over the replicas would be added for each "
                    "logical replica.",
                    f"{state.path!r} with aggregation='sum'",
                    "Leave aggregation out, which makes it the mean over logical replicas; or "
                    "count in a metric.",
                )
            shared.append(state)
    return shared
