"""``plan_memory``: the memory of a train step by device, from shapes."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import keras
import tensorflow as tf

from tfmultigpu.accumulation.replicated import assign_owners
from tfmultigpu.addons.tuning.live_bytes import least_bytes
from tfmultigpu.addons.tuning.memory_plan import (
    DeviceMemory,
    MemoryOption,
    Plan,
    fullest_of,
)
from tfmultigpu.addons.tuning.memory_probe import probe_peak
from tfmultigpu.addons.tuning.one_device_trace import OneDeviceTrace, trace_one_device
from tfmultigpu.addons.tuning.state_shapes import bytes_of, state_of
from tfmultigpu.addons.tuning.undone import rows_of_whole
from tfmultigpu.arguments import brief
from tfmultigpu.data.batch_format import checked_rows, count_rows
from tfmultigpu.data.spread import AT_LEAST, next_device, rows_of_devices
from tfmultigpu.devices.discovery import known_memory
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.lists import by_id, of_type, present
from tfmultigpu.steps import ChainedStep, TrainStep
from tfmultigpu.steps.batches import spec_of
from tfmultigpu.steps.failures import explaining_failures
from tfmultigpu.steps.features.logical_replicas import LogicalReplicas
from tfmultigpu.steps.features.micro_batches import MicroBatches
from tfmultigpu.steps.features.xla import CompileByXla
from tfmultigpu.steps.values import Batch
from tfmultigpu.strategies.row_parts import copies_of, whole_of
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.topology import is_mirrored, strategy_devices
from tfmultigpu.types import KerasVariable, Shard


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A variable that is trained, or the rows of a table on one device.

    Attributes:
        size: Its bytes.
        shape: Its shape.
        is_table: Whether its rows can be divided over devices.
        state: The bytes that the optimizer keeps of it.
        gradient: The bytes of its gradient, as it is added.
        is_rows: Whether that is a list of rows.
        by_rows: Whether the update reads and writes these rows alone.
        home: The number of the device that alone has it; None if each has a copy.
        owner: The number of the device that alone updates it; None if each does.
    """

    size: int
    shape: tuple[int, ...]
    is_table: bool
    state: int
    gradient: int
    is_rows: bool
    by_rows: bool
    home: int | None
    owner: int | None


@dataclasses.dataclass(frozen=True)
class _Setting:
    """Options of a step that decide about memory.

    Attributes:
        parts: Into how many micro-batches the rows of a replica are cut.
        turns: How many logical replicas a device computes in turn.
    """

    parts: int
    turns: int

    @property
    def windows(self) -> int:
        """How many sums of gradients there are at one time, besides the last one."""
        # Of pairs, pairs of pairs and so on one is there for each bit of their number.
        held = max(number.bit_count() for number in range(self.turns))
        return held + (self.parts > 1)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def plan_memory(
    step: TrainStep | ChainedStep,
    batch: Shard,
    *,
    memory: float | None = None,
    probe: bool = False,
) -> Plan:
    """Counts the bytes that a train step takes on each device, and what other options change.

    Nothing runs, and no GPU is needed: on ``split_device("CPU:0", parts=4)`` it plans a step for
    four GPUs. Model and optimizer are built, if they are not, as the first step would build them.
    Of a chain each variable counts once, and what its steps need in turn counts as the largest.

    Args:
        step: The result of ``make_train_step`` or ``chain_steps``.
        batch: A batch as ``step(batch)`` takes it.
        memory: The bytes of each device that you plan for, such as ``24 * 1024**3``. None means
            what the devices of the step have, if that is known; of a CPU it is not.
        probe: Whether to train on the first 1/16 and 1/8 of the batch, which must be whole, and
            undo it: so the peak of a step is known, and between which sizes the largest batch is
            that fits. It needs devices that count their memory, such as GPUs.

    Returns:
        The plan; ``print`` it.

    Raises:
        TypeError: ``step`` is not a train step.
        ValueError: ``memory`` is not more than 0.
        DataError: The batch has no rows, or was distributed for another strategy; or for a probe
            it is not a whole one.
        TfMultiGpuError: A probe was asked for on devices that do not count their memory.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        >>> step = tmg.make_train_step(model, keras.optimizers.Adam(), "mse")
        >>> plan = tmg.plan_memory(step, (np.ones((8, 3)), np.ones((8, 4))))
        >>> plan.devices[0].parameters, plan.devices[0].gradients
        (64, 64)
    """
    if not isinstance(step, (TrainStep, ChainedStep)):
        raise TypeError(
            "plan_memory takes a train step. Write plan_memory(tmg.make_train_step(model, "
            f"optimizer, loss), batch). Received: step={brief(step)}."
        )
    if memory is not None and not memory > 0:
        raise ValueError(
            "memory is the bytes of each device. Write memory=24 * 1024**3. Received: "
            f"memory={memory!r}."
        )
    with ExitStack() as entered:
        for lock in step.runner.locks:
            entered.enter_context(lock)
        structure, local, offsets = step.runner.batches.read(batch)
        with explaining_failures(step.strategy):
            read = structure, list(map(checked_rows, local)), offsets
        step.runner.settle(lambda: spec_of(read))
        counting = _Counting(step, read, memory)
        plan = counting.plan()
        if not probe:
            return plan
        rows_of_whole("plan_memory", batch)
        known = [each.memory for each in plan.devices if each.memory is not None]
        whole = tf.nest.map_structure(tf.convert_to_tensor, batch)
        smallest = min(known, default=None)
        names = [each.device for each in plan.devices]
        peak = probe_peak(
            step,
            whole,
            names,
            at_once=plan.rows_at_once,
            cuts=counting.cuts,
            memory=smallest,
            least_of=counting.least_of,
            traces=counting.traces,
        )
        return dataclasses.replace(plan, peak=peak)


class _Counting:
    """The count of a step for one batch."""

    def __init__(self, step: TrainStep | ChainedStep, batch: Batch, memory: float | None) -> None:
        self._step, self._strategy = step, step.strategy
        names = strategy_devices(self._strategy) or (parse_device_name(tf.zeros([]).device),)
        self._devices = names
        self._memory = [memory or known_memory(name) for name in names]
        self._global_rows, self._rows = _rows_of(batch, self._strategy.num_replicas_in_sync)
        structure, local, _ = batch
        self._like = tf.nest.pack_sequence_as(structure, local[0])
        self._setting = self._set(_setting_of(step))
        self._at_once = self._rows_at_once(self._setting)
        self.traces = self._traced(self._at_once)
        self._least = self._least_of(self.traces)
        self._units = self._units_of(self.traces)

    def plan(self) -> Plan:
        """Returns the plan."""
        now = self._as_it_is()
        options = [self._option(now, *other) for other in self._others()]
        options.sort(key=lambda option: option.change)
        # Of what no shape tells.
        options.append(
            MemoryOption("keras.remat", 0, now, "fewer activations, some computed twice")
        )
        return Plan(
            _name_of(self._step),
            self._global_rows,
            self._at_once,
            now,
            tuple(options),
            self._most_rows(now),
        )

    @property
    def cuts(self) -> int:
        """Into how many parts all devices together cut a batch."""
        return int(self._setting.turns * self._setting.parts * self._strategy.num_replicas_in_sync)

    def _set(self, asked: _Setting) -> _Setting:
        """Returns a setting for these rows: of fewer than micro-batches, one of each row."""
        rows = self._rows_at_once(_Setting(1, asked.turns))
        return dataclasses.replace(asked, parts=max(1, min(asked.parts, rows)))

    def _rows_at_once(self, setting: _Setting) -> int:
        """Returns the rows of a micro-batch of a logical replica of a device."""
        of_turn = -(-self._rows // setting.turns)
        return -(-of_turn // setting.parts)

    # What one device computes -------------------------------------------------------------------

    def _traced(self, rows: int) -> list[OneDeviceTrace]:
        """Returns a trace of each step for so many rows at once."""
        return trace_one_device(self._step, self._like, rows)

    def least_of(self, rows: int) -> int:
        """Returns what so many rows at once need at least, besides what is kept."""
        if rows == self._at_once:
            return self._least
        return self._least_of(self._traced(rows))

    def _least_of(self, traces: Sequence[OneDeviceTrace]) -> int:
        """Returns the bytes that the largest step of some traces needs at least."""
        # Gradients of several replicas, or parts, may be added as soon as they are known.
        keeps = self._setting == _Setting(1, 1) and self._strategy.num_replicas_in_sync == 1
        needs: list[int] = []
        for trace, part in zip(traces, self._step.train_steps, strict=True):
            if of_type(part.features, CompileByXla):
                needs.append(0)  # XLA fuses operations, and nobody knows what it keeps.
                continue
            graph = trace.function.graph
            needs.append(least_bytes(graph, graph.outputs, keeps_outputs=keeps))
        return max(needs)

    def _most_rows(self, now: Sequence[DeviceMemory]) -> int | None:
        """Returns the rows of a global batch of which more do not fit for sure."""
        rooms = [each.memory - each.kept for each in now if each.memory is not None]
        spare = [each.memory - each.whatever_the_batch for each in now if each.memory is not None]
        if not rooms:
            return None
        room, of_one = min(rooms), self.least_of(1)
        if of_one > room or min(spare) < 0:
            return 0
        # What an operation needs grows evenly with the rows, and the largest of all ever faster:
        # for more rows than were traced it is at least on the line through one row and these.
        rows = max(self._at_once, 2)
        while (least := self.least_of(rows)) > of_one:
            at_once = int(1 + (room - of_one) * (rows - 1) / (least - of_one))
            if at_once >= rows or rows == 2:
                return at_once * self.cuts
            rows = max(at_once, 2)
        return None

    # As it is -----------------------------------------------------------------------------------

    def _units_of(self, traces: Sequence[OneDeviceTrace]) -> list[list[_Unit]]:
        """Returns what each step trains, with the gradients of its trace."""
        pairs = zip(self._step.train_steps, traces, strict=True)
        return [self._units_of_step(step, trace) for step, trace in pairs]

    def _units_of_step(self, step: TrainStep, trace: OneDeviceTrace) -> list[_Unit]:
        gradients = {id(each.target.variable): each for each in trace.gradients}
        embeddings = by_id(
            variable
            for layer in all_layers(step.model)
            if type(layer) is keras.layers.Embedding
            for variable in layer.trainable_variables
        )
        whole = list(by_id(whole_of(target.variable) for target in step.trained).values())
        states = dict(zip(map(id, whole), state_of(step.optimizer, whole), strict=True))
        units: list[_Unit] = []
        for target in step.trained:
            table, size = whole_of(target.variable), bytes_of([target.variable])
            gradient = gradients.get(id(target.variable))
            state = states[id(table)] * size // max(bytes_of([table]), 1)
            owner = None
            if target.device is not None:
                owner = self._devices.index(parse_device_name(target.device))
            units.append(
                _Unit(
                    size,
                    tuple(target.variable.shape),
                    id(table) in embeddings,
                    state,
                    0 if gradient is None else gradient.size,
                    gradient is not None and gradient.is_rows,
                    target.takes == "rows",
                    owner if target.is_sharded else None,
                    owner,
                )
            )
        return units

    def _as_it_is(self) -> tuple[DeviceMemory, ...]:
        """Returns the bytes of each device, of the variables that are there."""
        parameters, state = Counter[str](), Counter[str]()
        optimizers: dict[int, KerasVariable] = {}
        for part in self._step.train_steps:
            optimizers |= by_id(part.optimizer.variables)
        metrics = [variable for each in self._step.metrics for variable in each.variables]
        changed = by_id([*self._step.changed_variables(), *metrics])
        copies: dict[int, tf.Variable] = {}
        of_state: dict[int, tf.Variable] = {}
        for trace in self.traces:  # Also what Keras does not know: a tf.Variable in a layer.
            copies |= by_id(trace.copies(self._strategy))
        for key, variable in changed.items():
            there = of_state if key in optimizers else copies
            there |= by_id(copies_of(self._strategy, variable))
        for key, copy in (copies | of_state).items():
            places = state if key in of_state else parameters
            places[parse_device_name(copy.device)] += bytes_of([copy])
        in_step = self._in_step(self._units, self._setting)
        devices: list[DeviceMemory] = []
        for name, memory, of_step in zip(self._devices, self._memory, in_step, strict=True):
            device = dataclasses.replace(
                of_step,
                parameters=parameters[name],
                optimizer_state=state[name],
                memory=None if memory is None else int(memory),
            )
            devices.append(self._with_least(device))
        return tuple(devices)

    def _with_least(self, device: DeviceMemory) -> DeviceMemory:
        """Returns a device with what it needs at least, for the rows of the largest shard."""
        # Of a table a sum has each row once, and nobody knows how many rows these are.
        sums = 0 if device.tables else device.windows
        in_step = max(self._least + sums, device.gradients)
        return dataclasses.replace(device, at_least=device.kept + in_step)

    def _in_step(self, steps: Sequence[Sequence[_Unit]], setting: _Setting) -> list[DeviceMemory]:
        """Returns what is there in a step: of the steps of a chain, the largest of each."""
        devices: list[DeviceMemory] = []
        for number, name in enumerate(self._devices):
            each = [_in_step(units, setting, number) for units in steps]
            largest = Counter[str]()
            for of_step in each:
                largest |= of_step
            devices.append(DeviceMemory(name, **largest))
        return devices

    # Otherwise ----------------------------------------------------------------------------------

    def _option(
        self,
        now: Sequence[DeviceMemory],
        write: str,
        why: str,
        steps: Sequence[Sequence[_Unit]],
        setting: _Setting,
    ) -> MemoryOption:
        """Returns what an option changes: of the variables what is trained, and of the step all."""
        devices: list[DeviceMemory] = []
        in_step = self._in_step(steps, setting)
        for number, (before, of_step) in enumerate(zip(now, in_step, strict=True)):
            parameters, state = before.parameters, before.optimizer_state
            for sign, units in ((-1, self._units), (1, steps)):
                parameters += sign * _parameters(units, number)
                state += sign * _state(units, number)
            devices.append(
                dataclasses.replace(
                    of_step, parameters=parameters, optimizer_state=state, memory=before.memory
                )
            )
        change = fullest_of(devices).together - fullest_of(now).together
        return MemoryOption(write, change, tuple(devices), why)

    def _others(self) -> Iterator[tuple[str, str, list[list[_Unit]], _Setting]]:
        """Yields what the other options would make of the units and of the setting."""
        setting, units = self._setting, self._units
        replicas = self._strategy.num_replicas_in_sync
        parts = 2 * setting.parts
        if -(-self._rows // setting.turns) >= parts:
            why = f"one more sum of gradients, 1/{parts} of activations"
            other = _Setting(parts, setting.turns)
            yield f"micro_batches={parts}", why, self._units_with(other), other
        turns = 2 * setting.turns
        why = f"more sums of gradients, 1/{turns} of activations"
        other = self._set(_Setting(setting.parts, turns))
        yield f"logical_replicas={turns * replicas}", why, self._units_with(other), other
        flat = [unit for of_step in units for unit in of_step]
        sharded = any(unit.home is not None for unit in flat)
        if not is_mirrored(self._strategy) or sharded:
            return
        if any(unit.owner is not None for unit in flat):
            each = []
            for of_step in units:
                each.append([dataclasses.replace(unit, owner=None) for unit in of_step])
            yield "shard_update=False", "all of the optimizer state on each device", each, setting
        else:
            each = self._owned(units)
            yield "shard_update=True", "a part of the state and gradients on each", each, setting
        why = "a part of each large variable, and copies"
        yield "sharded_variables", why, self._spread(), setting

    def _units_with(self, setting: _Setting) -> list[list[_Unit]]:
        """Returns the units of another setting: a list of rows is as long as its part."""
        if not any(unit.is_rows for units in self._units for unit in units):
            return self._units
        return self._units_of(self._traced(self._rows_at_once(setting)))

    def _owned(self, steps: Sequence[Sequence[_Unit]]) -> list[list[_Unit]]:
        """Returns the units with the owners that an update gives them."""
        owned: list[list[_Unit]] = []
        for units in steps:
            sizes = [math.prod(unit.shape) for unit in units]
            fixed = {i: unit.home for i, unit in enumerate(units) if unit.home is not None}
            owners = assign_owners(sizes, len(self._devices), fixed)
            pairs = zip(units, owners, strict=True)
            owned.append([dataclasses.replace(unit, owner=owner) for unit, owner in pairs])
        return owned

    def _spread(self) -> list[list[_Unit]]:
        """Returns the units as ``sharded_variables`` puts them on devices that hold no others."""
        loads = [0] * len(self._devices)
        known = present(self._memory)
        memory = known if len(known) == len(loads) else None
        spread: list[list[_Unit]] = []
        for units in self._units:
            of_step: list[_Unit] = []
            for unit in units:
                of_step += _placed(unit, loads, memory)
            spread.append(of_step)
        return self._owned(spread)


def _placed(unit: _Unit, loads: list[int], memory: Sequence[float] | None) -> list[_Unit]:
    """Returns a unit where ``sharded_variables`` puts it, and adds it to the loads."""
    if unit.size < AT_LEAST:
        return [unit]
    rows = rows_of_devices(unit, loads, memory)
    if rows is None:
        number = next_device(loads, memory, unit.size)
        loads[number] += unit.size
        return [dataclasses.replace(unit, home=number)]
    parts: list[_Unit] = []
    for number, count in enumerate(rows):
        if not count:
            continue

        def share(size: int, count: int = count) -> int:
            return size * count // unit.shape[0]

        size = share(unit.size)
        loads[number] += size
        parts.append(
            dataclasses.replace(
                unit,
                size=size,
                shape=(count, *unit.shape[1:]),
                state=share(unit.state),
                gradient=share(unit.gradient),
                home=number,
            )
        )
    return parts


def _parameters(steps: Sequence[Sequence[_Unit]], device: int) -> int:
    return sum(u.size for units in steps for u in units if u.home in (None, device))


def _state(steps: Sequence[Sequence[_Unit]], device: int) -> int:
    return sum(u.state for units in steps for u in units if _place(u) in (None, device))


def _place(unit: _Unit) -> int | None:
    """Returns the number of the device where a unit is updated; None if on each."""
    return unit.owner if unit.home is None else unit.home


def _in_step(units: Sequence[_Unit], setting: _Setting, device: int) -> Counter[str]:
    """Returns what is there in a step on a device, by the name of its column."""
    sums = Counter[str]()
    for unit in units:
        place = _place(unit)
        is_here = place in (None, device)
        if unit.is_rows:
            sums["tables"] += unit.gradient
        elif is_here:
            sums["gradients"] += unit.gradient
        # Each replica adds its own, but what is on one device alone is added there.
        if setting.windows and unit.home in (None, device):
            sums["windows"] += setting.windows * unit.gradient
        if not is_here:
            # Of a table of which rows are updated alone, these alone are sent.
            sent = unit.gradient if unit.is_rows and unit.by_rows else unit.size
            sums["copies"] = max(sums["copies"], sent)
    return sums


def _setting_of(step: TrainStep | ChainedStep) -> _Setting:
    """Returns the setting of a step; of a chain the most parts and turns of any step."""
    parts, turns = [1], [1]
    for part in step.train_steps:
        parts += [feature.count for feature in of_type(part.features, MicroBatches)]
        turns += [feature.turns for feature in of_type(part.features, LogicalReplicas)]
    return _Setting(max(parts), max(turns))


def _rows_of(batch: Batch, replicas: int) -> tuple[int, int]:
    """Returns the rows of a batch, and of its largest shard; small batches are on each replica."""
    _, local, offsets = batch
    if offsets is not None:
        of_shards = list(map(int, map(count_rows, local)))
        return int(offsets[-1]), max(of_shards)
    rows = int(count_rows(local[0]))
    return rows, -(-rows // replicas) if rows >= replicas else rows


def _name_of(step: Any) -> str:
    if isinstance(step, ChainedStep):
        return f"the chain {', '.join(step.names)}"
    return f"a step of {step.model.name!r}"
