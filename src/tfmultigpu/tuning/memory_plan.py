"""Bytes on each device of a model, its gradients, optimizer state and activations, beforehand."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.accumulation.gradients import sum_dtype
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.owners import assign_owners, outside_scopes
from tfmultigpu.addons.sharding.variables import AT_LEAST, memory_of_devices, next_device
from tfmultigpu.arguments import check_count
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import DataError, ScopeError
from tfmultigpu.steps.recording import recording_calls, recording_devices
from tfmultigpu.strategies.topology import is_sharded, owner_of, strategy_devices

__all__ = ["MemoryPlan", "PlannedVariable", "plan_memory"]


@dataclasses.dataclass(frozen=True)
class PlannedVariable:
    """One variable of a plan.

    Attributes:
        path: Its path, which begins with the name of its layer.
        device: The device it lives on alone; None if each device has a copy.
        owner: The device that updates it.
        parameters: Bytes of the variable.
        gradients: Bytes of its gradient, added over the replicas; 0 if it is not trained.
        optimizer_state: Bytes that the optimizer keeps of it.
    """

    path: str
    device: str | None
    owner: str
    parameters: int
    gradients: int
    optimizer_state: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes that training takes on each device; ``str(plan)`` is for a person.

    Attributes:
        devices: The devices of the strategy; for the default strategy those of the variables.
        memory: Bytes of each device; None if they are not known.
        variables: The variables of the model.
        activations: Bytes on each device of the outputs of layers, which the backward pass needs;
            0 if no rows were given.
        largest: Bytes of the largest sharded variable. A replica holds copies of the few that it
            computes with, so two of them are counted.
    """

    devices: tuple[str, ...]
    memory: tuple[float, ...] | None
    variables: tuple[PlannedVariable, ...]
    activations: tuple[int, ...]
    largest: int

    def bytes_on(self, device: str) -> int:
        """Returns the bytes on a device: its variables, gradients, state and activations.

        Raises:
            ValueError: The plan has no such device.
        """
        if device not in self.devices:
            raise ValueError(
                f"The plan has no such device. Received: {device!r}; the plan has "
                f"{', '.join(self.devices)}."
            )
        return sum(self.parts_on(device))

    def check(self) -> None:
        """Checks that each device has the memory for its part.

        Raises:
            DataError: One has not; the message has the whole plan.
        """
        for device, memory in zip(self.devices, self.memory or (), strict=False):
            needed = self.bytes_on(device)
            if needed > memory:
                raise DataError(
                    f"{device} has not enough memory. Received: {_text(needed)} needed of "
                    f"{_text(memory)}. Take more devices, fewer rows, micro_batches=, or a smaller "
                    f"model.\n{self}"
                )

    def parts_on(self, device: str) -> tuple[int, int, int, int, int]:
        """Returns its bytes of parameters, gradients, optimizer state, copies and activations."""
        here = [one for one in self.variables if one.device in (None, device)]
        owned = [one for one in self.variables if one.owner == device]
        several = len(self.devices) > 1 and self.largest > 0
        return (
            sum(one.parameters for one in here),
            sum(one.gradients for one in owned),
            sum(one.optimizer_state for one in owned),
            2 * self.largest if several else 0,
            dict(zip(self.devices, self.activations, strict=True)).get(device, 0),
        )

    def __str__(self) -> str:
        """Returns a table of the devices, and one of the variables."""
        head = ("device", "parameters", "gradients", "state", "copies", "activations", "all", "of")
        rows: list[Sequence[str]] = [head]
        for i, device in enumerate(self.devices):
            columns = self.parts_on(device)
            memory = "?" if self.memory is None else _text(self.memory[i])
            texts = [_text(one) for one in (*columns, sum(columns))]
            rows.append((device, *texts, memory))
        each: list[Sequence[str]] = [("variable", "device", "parameters", "gradients", "state")]
        for one in self.variables:
            sizes = (one.parameters, one.gradients, one.optimizer_state)
            place = "each" if one.device is None else one.device
            each.append((one.path, place, *[_text(size) for size in sizes]))
        return f"{_table(rows)}\n\n{_table(each)}"


def plan_memory(
    model: Any,
    optimizer: Any = None,
    strategy: tf.distribute.Strategy | None = None,
    *,
    batch_spec: Any = None,
    rows: int = 0,
    at_least: int = AT_LEAST,
    memory: Mapping[str, float] | Sequence[float] | None = None,
) -> MemoryPlan:
    """Plans the bytes on each device before anything runs.

    It is for models made in ``sharded_variables``, and for layers placed by hand: with the default
    strategy, a variable is counted on the device that ``tf.device`` named when it was made.

    Args:
        model: A function that makes the model, with ``keras.Input`` or built. It is called to see
            its shapes, and no variable gets memory. Or a built model, whose variables are counted
            on the devices that they are on.
        optimizer: The optimizer; None counts no state.
        strategy: The strategy; None takes ``tf.distribute.get_strategy()``.
        batch_spec: The type specs of the features of a batch; None takes the inputs of the model.
        rows: Rows of a global batch, or of one micro-batch of all replicas, for activations.
        at_least: As for ``sharded_variables``.
        memory: As for ``sharded_variables``.

    Returns:
        The plan. Call ``plan.check()`` for an error if a device has not enough memory.

    Raises:
        ScopeError: The model has no variables without a batch.
        DataError: ``memory`` does not fit the devices.
        TypeError: ``rows`` or ``at_least`` is not a whole number, or the optimizer is none.
        ValueError: One of them is negative.

    Example:
        >>> import keras, tensorflow as tf, tfmultigpu as tmg
        >>> def build():
        ...     return keras.Sequential([keras.Input((256,)), keras.layers.Dense(256)])
        >>> strategy = tf.distribute.OneDeviceStrategy("CPU:0")
        >>> plan = tmg.tuning.plan_memory(build, keras.optimizers.Adam(), strategy, rows=16)
        >>> plan.bytes_on("CPU:0")
        1069056
    """
    import keras

    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    rows = check_count("rows", rows, 0)
    at_least = check_count("at_least", at_least, 0)
    devices = strategy_devices(strategy)
    if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "The optimizer is an object of Keras. Received: "
            f"{type(optimizer).__name__}. Write "
            "tmg.tuning.plan_memory(build, keras.optimizers.Adam(), strategy)."
        )
    slots = 0 if optimizer is None else slots_of_each_variable(optimizer)

    def build() -> MemoryPlan:
        with recording_devices() as made:
            built = model()
        return _plan(built, slots, devices, made, memory, batch_spec, rows, at_least)

    plan: MemoryPlan
    if not isinstance(model, type) and hasattr(model, "trainable_variables"):
        made = [] if devices else [(one, one.value.device, True) for one in model.variables]
        plan = _plan(model, slots, devices, made, memory, batch_spec, rows, None)
    else:
        plan = _without_memory(build)
    return plan


def slots_of_each_variable(optimizer: Any) -> int:
    """Returns how many variables of the shape of a variable an optimizer keeps beside it."""
    import keras

    def count() -> int:
        inner = unwrap_optimizer(optimizer)
        trial = type(inner).from_config(inner.get_config())
        trial.build([keras.Variable("zeros", shape=(2, 3), name="trial")])
        return sum(tuple(variable.shape) == (2, 3) for variable in trial.variables)

    return outside_scopes(count)


def _plan(
    model: Any,
    slots: int,
    devices: tuple[str, ...],
    made: Sequence[tuple[Any, str, bool]],
    memory: Any,
    batch_spec: Any,
    rows: int,
    at_least: int | None,
) -> MemoryPlan:
    """Returns the plan of a model.

    ``made`` has its variables, their devices if layers are by hand, and whether they were trained
    when they were made: what is frozen later, as for LoRA, is sharded as well.
    """
    if not model.variables:
        raise ScopeError(
            "The model has no variables yet, so their bytes are unknown. Received: model "
            f"{model.name!r}. Begin it with keras.Input(shape), or build it: "
            "model.build(input_shape)."
        )
    trained_first = {id(variable) for variable, _, trained in made if trained}
    found = {} if devices else {id(one): parse_device_name(device) for one, device, _ in made}
    by_hand = {id(one): found[id(one)] for one in model.variables if id(one) in found}
    replicas = len(devices) or 1
    devices = devices or tuple(dict.fromkeys(by_hand.values()))
    memory = memory_of_devices(devices, memory)
    trained = {id(variable) for variable in model.trainable_variables}
    sizes = [_bytes(variable.shape, variable.dtype) for variable in model.variables]
    alone: dict[int, int] = {}
    loads = [0] * len(devices)
    for i, variable in enumerate(model.variables):
        if by_hand:
            if len(devices) > 1:
                alone[i] = devices.index(by_hand[id(variable)])
        elif at_least is None:
            if is_sharded(variable):
                alone[i] = owner_of(variable, devices)
        elif len(devices) > 1 and id(variable) in trained_first and sizes[i] >= at_least:
            alone[i] = next_device(loads, memory, sizes[i])
            loads[alone[i]] += sizes[i]
    owners = assign_owners(sizes, len(devices), alone)
    planned = tuple(
        PlannedVariable(
            variable.path,
            devices[alone[i]] if i in alone else None,
            devices[owners[i]],
            sizes[i],
            _bytes(variable.shape, sum_dtype(variable.dtype)) if id(variable) in trained else 0,
            slots * sizes[i] if id(variable) in trained else 0,
        )
        for i, variable in enumerate(model.variables)
    )
    on_one = -(-rows // replicas)
    outputs = _activations(model, batch_spec, on_one, by_hand) if rows else {}
    everywhere = 0 if by_hand else outputs.get("", 0)
    activations = tuple(outputs.get(device, everywhere) for device in devices)
    # Layers placed by hand are computed where their variables are.
    largest = 0 if by_hand else max((sizes[i] for i in alone), default=0)
    return MemoryPlan(devices, memory, planned, activations, largest)


def _activations(
    model: Any, batch_spec: Any, rows: int, by_hand: Mapping[int, str]
) -> dict[str, int]:
    """Returns the bytes of the outputs of layers for a number of rows, by device.

    The device is that of the weights of the layer, or of the last layer before it that has any; an
    empty name if no layer was placed by hand.
    """
    inputs = batch_spec if batch_spec is not None else getattr(model, "inputs", None)
    if not inputs:
        raise ScopeError(
            "The shapes of the inputs are unknown, so activations cannot be estimated. Received: "
            f"model {model.name!r} without inputs. Give batch_spec=tf.TensorSpec(shape, dtype), or "
            "leave rows out."
        )
    if batch_spec is None and len(inputs) == 1:
        inputs = inputs[0]
    specs = tf.nest.map_structure(
        lambda one: tf.TensorSpec([rows, *tuple(one.shape)[1:]], one.dtype), inputs
    )
    sizes: dict[int, tuple[str, int]] = {}

    def forward(batch: Any) -> None:
        with recording_calls() as calls:
            model(batch, training=False)
        device = next(iter(by_hand.values()), "")
        for layer, result in calls:
            known = [by_hand[id(v)] for v in getattr(layer, "weights", ()) if id(v) in by_hand]
            device = known[0] if known and layer is not model else device
            for one in tf.nest.flatten(result):
                # A model returns what a layer in it returned, which counts once.
                if isinstance(one, tf.Tensor):
                    sizes.setdefault(id(one), (device, _bytes(one.shape, one.dtype)))

    traced: Any = tf.function(forward, autograph=False)
    traced.get_concrete_function(specs)  # In a graph no variable gets memory either.
    total: dict[str, int] = {}
    for device, size in sizes.values():
        total[device] = total.get(device, 0) + size
    return total


def _without_memory(function: Callable[[], Any]) -> Any:
    """Calls a function whose variables get no memory, and leaves random generators as they are."""
    import keras

    policy = keras.config.dtype_policy()
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    results: list[Any] = []
    errors: list[Exception] = []

    def call() -> None:
        # Keras keeps its settings, and a list of variables to initialize, for each thread.
        try:
            keras.config.set_dtype_policy(policy)
            with keras.StatelessScope(initialize_variables=False):
                results.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    if errors:
        raise errors[0]
    return results[0]


def _bytes(shape: Any, dtype: Any) -> int:
    known = [1 if size is None else int(size) for size in tuple(shape)]
    return math.prod(known) * int(tf.as_dtype(dtype).size)


def _text(size: float) -> str:
    for unit, name in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{int(size)} B"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
