"""Causes why a program trains on one device: one function each, from facts to findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tfmultigpu.addons.diagnostics.report import Finding
from tfmultigpu.devices.names import listed

_SCOPE = "with strategy.scope():"


@dataclass(frozen=True)
class Program:
    """Facts about a model, its optimizer, its strategy and its data."""

    strategy: str
    replicas: int
    here: tuple[str, ...]  # The GPUs of this process; the CPUs, if it has none.
    variables: int = 0  # Of the model; 0 if it is not built.
    outside: Mapping[str, str] = field(default_factory=dict)  # Of the scope: strategies by name.
    copies: tuple[str, ...] = ()  # The devices of the copies of a trained variable.
    slots: int = 0  # Variables of the optimizer.
    slots_outside: Mapping[str, str] = field(default_factory=dict)
    of_another_model: bool = False  # The optimizer knows no variable of the model.
    rows: int | None = None  # Of the first batch; None if it was not read.
    problem: str = ""  # Why it was not read.


def find_mistakes(program: Program) -> list[Finding]:
    """Returns the findings about a program; pure."""
    checks = (_no_strategy, _model_scope, _optimizer_scope, _small_batch)
    return [finding for check in checks for finding in check(program)]


def in_order(program: Program) -> Finding:
    """Returns the finding about a program in which no check found anything."""
    checked = "Model and optimizer" if program.rows is None else "Model, optimizer and batch"
    what = f"{checked} are on {program.replicas} replica(s) as they should be."
    why = "Each replica computes its part of a step."
    change = "tmg.fit, not Keras' own; if it is slow: print(tmg.tuning.profile_step(step, data))"
    return Finding("note", "in-order", what, why, change)


def _no_strategy(seen: Program) -> Iterator[Finding]:
    if seen.replicas == 1 and len(seen.here) > 1 and not seen.outside:
        yield Finding(
            "error",
            "no-strategy",
            f"The model is on one device, by {seen.strategy}; here are {listed(seen.here)}.",
            "It trains on one device, without a message.",
            f"strategy = tmg.create_strategy(devices={list(seen.here)!r}), and {_SCOPE} around the "
            "model and the optimizer",
        )


def _model_scope(seen: Program) -> Iterator[Finding]:
    devices = listed(tuple(dict.fromkeys(seen.copies)))
    together = len(set(seen.copies)) < len(seen.copies)
    if not seen.variables:
        what = "The model has no variables yet, and the first call will create them."
        change = f"{_SCOPE} model.build(input_shape), or start the model with keras.Input"
    elif seen.outside:
        name, owner = next(iter(seen.outside.items()))
        what = (
            f"The model was created outside the scope of the strategy, {seen.strategy}: "
            f"{len(seen.outside)} of {seen.variables} variables, such as {name!r} on {devices}, "
            f"of {owner}."
        )
        change = f"{_SCOPE} model = ... (loading a saved model counts as creating it)"
    elif together:
        what = f"The {len(seen.copies)} copies of a weight are all on {devices}."
        change = f"strategy = tmg.create_strategy(devices={list(seen.here)!r}), which exist"
    elif "CPU" in devices and "GPU" in seen.here[0]:
        what = f"The weights are on {devices}, and GPUs are here: {listed(seen.here)}."
        change = "strategy = tmg.create_strategy(), and no tf.device('CPU:0') around the model"
    else:
        return
    why = "TensorFlow trains where the variables are, without a message, or fails without a text."
    yield Finding("error" if seen.variables else "note", "model-scope", what, why, change)


def _optimizer_scope(seen: Program) -> Iterator[Finding]:
    if seen.slots_outside:
        name, owner = next(iter(seen.slots_outside.items()))
        yield Finding(
            "error",
            "optimizer-scope",
            f"The optimizer was created outside the scope of the strategy, {seen.strategy}: "
            f"{len(seen.slots_outside)} of {seen.slots} variables, such as {name!r} of {owner}.",
            "Each replica then updates its own copy of the weights, and they drift apart.",
            f"{_SCOPE} optimizer = ..., and model.compile(optimizer, ...)",
        )
    elif seen.of_another_model:
        yield Finding(
            "error",
            "optimizer-scope",
            "The optimizer was built for another model: it knows no variable of this one.",
            "It fails at the first step, or updates the wrong model.",
            f"A new one: {_SCOPE} optimizer = ...",
        )


def _small_batch(seen: Program) -> Iterator[Finding]:
    change = f"dataset.batch({32 * seen.replicas}): the batch of a replica, times the replicas"
    if seen.problem:
        what = f"The dataset has no batch for this strategy: {seen.problem}"
        change = "tmg.distribute_dataset(dataset.batch(global_batch_size), strategy)"
    elif seen.rows == 0:
        what = "The dataset is empty: it has no batch, or its first batch has no examples."
        change = "Check that its files exist, and that drop_remainder does not drop the only batch"
    elif seen.rows is not None and seen.rows < seen.replicas:
        what = f"A batch has {seen.rows} example(s) for {seen.replicas} replicas."
    else:
        return
    why = "A replica without an example of its own is idle."
    yield Finding("error", "small-batch", what, why, change)
