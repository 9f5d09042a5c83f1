"""Checks of the placement of variables against a strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.update import update_of
from tfmultigpu.addons.diagnostics.report import Finding
from tfmultigpu.devices import list_logical_devices
from tfmultigpu.devices.names import listed, parse_device_name
from tfmultigpu.strategies.topology import is_sharded, strategy_devices

__all__ = [
    "Placement",
    "optimizer_findings",
    "placement_findings",
]

_SCOPE = "with strategy.scope():"


@dataclass(frozen=True)
class Placement:
    """The placement of a model's variables.

    Attributes:
        built: The model has its variables.
        total: Number of variables.
        outside: Names of the variables created outside the scope of the strategy.
        other: The other strategy they were created under, if any.
        alone: The device of each sharded variable.
        copies: The devices of the copies of the first variable that is not sharded, if any.
        asked: The devices of the strategy in this process.
        gpus: The logical GPUs of this process.
    """

    built: bool
    total: int = 0
    outside: tuple[str, ...] = ()
    other: str = ""
    alone: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any, strategy: tf.distribute.Strategy) -> Placement:
        """Reads the placement of a model."""
        variables = list(model.variables)
        names, other = outside_of(variables, strategy)
        alone = [variable for variable in variables if is_sharded(variable)]
        trained = [v for v in variables if getattr(v, "trainable", False)]
        first = next((v for v in trained if not is_sharded(v)), *trained[:1] or [None])
        return cls(
            built=bool(model.built) and bool(variables),
            total=len(variables),
            outside=names,
            other=other,
            alone=tuple(place for one in alone for place in devices_of(one, strategy)),
            copies=() if first is None else devices_of(first, strategy),
            asked=strategy_devices(strategy) or list_logical_devices()[-1:],
            gpus=list_logical_devices("GPU"),
        )

    @property
    def in_scope(self) -> bool:
        """True if every variable was created in the scope."""
        return not self.outside

    def facts(self) -> dict[str, str]:
        """Returns the placement for a report."""
        if not self.built:
            return {"built": "no"}
        facts = {
            "variables": str(self.total),
            "created in the scope": str(self.total - len(self.outside)),
            "copies of a weight": f"{len(self.copies)}, on {listed(self.copies)}",
        }
        if self.alone:
            counts = [f"{self.alone.count(one)} on {one}" for one in sorted(set(self.alone))]
            facts["sharded variables"] = ", ".join(counts)
        return facts


def outside_of(
    variables: Sequence[Any], strategy: tf.distribute.Strategy
) -> tuple[tuple[str, ...], str]:
    """Returns the names of variables created outside a scope, and their other strategy."""
    names, other = [], ""
    for variable in variables:
        inner = getattr(variable, "value", variable)
        inner = variable if callable(inner) else inner
        if strategy.extended.variable_created_in_scope(inner):
            continue
        names.append(str(getattr(variable, "path", variable.name)))
        found = getattr(inner, "distribute_strategy", None)
        if found is not None and found is not strategy:
            count = found.num_replicas_in_sync
            other = f"{type(found).__name__} with {count} replica(s)"
    return tuple(names), other


def devices_of(variable: Any, strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the devices that the copies of a variable are on."""
    inner = getattr(variable, "value", variable)
    values = strategy.experimental_local_results(inner)
    return tuple(parse_device_name(value.device) for value in values if value.device)


def placement_findings(seen: Placement) -> Iterator[Finding]:
    """Reports misplaced variables of a model; pure."""
    if not seen.built:
        yield Finding(
            "note",
            "model-not-built",
            "The model has no variables yet, so their placement is unknown.",
            "The first call creates them, on the device of that call.",
            f"{_SCOPE} model.build(input_shape), or start the model with keras.Input",
        )
        return
    if seen.outside and seen.other:
        yield Finding(
            "error",
            "other-strategy",
            f"The model was created under another strategy, {seen.other}: "
            f"{len(seen.outside)} of {seen.total} variables, such as {seen.outside[0]!r}.",
            "A model trains only on the devices of the strategy it was created under.",
            f"Create one strategy, and under it, {_SCOPE} the model and the optimizer.",
        )
    elif seen.outside:
        yield Finding(
            "error",
            "model-scope",
            f"The model was created outside the scope of the strategy: {len(seen.outside)} of "
            f"{seen.total} variables, such as {seen.outside[0]!r}, are on "
            f"{listed(tuple(dict.fromkeys(seen.copies)))} alone.",
            "fit trains on that one device, without a message, or fails with an AssertionError "
            "without text.",
            f"{_SCOPE} model = ... (loading a saved model counts as creating it)",
        )
    devices = tuple(dict.fromkeys(seen.copies))
    if not seen.outside and len(devices) < len(seen.copies):
        yield Finding(
            "error",
            "copies-together",
            f"The {len(seen.copies)} copies of each weight are on {listed(devices)}: the strategy "
            f"was made for {listed(seen.asked)}, and not all of these exist.",
            "TensorFlow uses the CPU for a missing device, without a message, or waits for ever.",
            "strategy = tmg.create_strategy(devices=[...]), with devices that exist",
        )
    on_cpu = devices and all(name.startswith("CPU") for name in devices)
    if seen.gpus and on_cpu:
        yield Finding(
            "error",
            "variables-on-cpu",
            f"The weights are on {listed(devices)}, and {len(seen.gpus)} GPU(s) are here: "
            f"{listed(seen.gpus)}.",
            "TensorFlow computes on the CPU, or copies the weights to a GPU at every step.",
            "strategy = tmg.create_strategy(), and no tf.device('CPU:0') around the model",
        )


def optimizer_findings(
    optimizer: Any, model: Any, strategy: tf.distribute.Strategy, *, in_scope: bool
) -> Iterator[Finding]:
    """Reports a misplaced optimizer, or one of another model."""
    if optimizer is None or not hasattr(optimizer, "variables"):
        return
    update = update_of(optimizer)
    once = frozenset() if update is None else update.state
    everywhere = [variable for variable in optimizer.variables if id(variable) not in once]
    names, other = outside_of(everywhere, strategy)
    if names:
        under = f", under {other}" if other else ""
        yield Finding(
            "error",
            "optimizer-scope",
            f"The optimizer was created outside the scope of the strategy{under}: "
            f"{len(names)} of {len(optimizer.variables)} variables, such as {names[0]!r}.",
            "Each replica then updates its copy of the weights by itself and counts steps twice, "
            "so replicas drift apart without a message."
            if in_scope
            else "It is on one device, as the model is.",
            f"{_SCOPE} optimizer = ..., and model.compile(optimizer, ...)",
        )
    known = {id(variable) for variable in _compat.optimizer_trains(optimizer)}
    unknown = [one for one in model.trainable_variables if id(one) not in known]
    if known and unknown and len(unknown) == len(model.trainable_variables):
        yield Finding(
            "error",
            "optimizer-of-another-model",
            "The optimizer was built for the variables of another model: it knows none of the "
            f"{len(unknown)} of this one.",
            "It fails at the first step, or updates the wrong model.",
            f"Create a new one: {_SCOPE} optimizer = ...",
        )
