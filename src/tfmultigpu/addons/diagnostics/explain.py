"""``explain``: a report on a program that uses one device, with the line to change."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.update import update_of
from tfmultigpu.addons.diagnostics.environment import redact
from tfmultigpu.addons.diagnostics.machine import inspect_machine
from tfmultigpu.addons.diagnostics.machine_checks import find_causes
from tfmultigpu.addons.diagnostics.program_checks import Program, find_mistakes, in_order
from tfmultigpu.addons.diagnostics.report import Report
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.data.cut import check_batched
from tfmultigpu.data.sharded_dataset import ShardedDataset
from tfmultigpu.devices.discovery import list_logical_devices
from tfmultigpu.devices.names import listed, parse_device_name
from tfmultigpu.errors import DataError, TfMultiGpuError
from tfmultigpu.strategies.process_state import process_state
from tfmultigpu.strategies.scopes import check_kinds
from tfmultigpu.strategies.topology import (
    describe,
    is_default,
    is_sharded,
    strategy_of,
    tf_variable,
)
from tfmultigpu.types import Optimizer, Strategy


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def explain(
    model: Any,
    optimizer: Optimizer | None = None,
    dataset: Any = None,
    strategy: Strategy | None = None,
) -> Report:
    """Reports why a program uses one device, with the line to change.

    Checks the machine, the strategy, the placement of variables, the optimizer and the first batch.
    Trains nothing and changes no variable. A one-shot generator lacks its first batch afterwards.

    Args:
        model: A Keras model; or a step of ``make_train_step`` or ``chain_steps``, which has its
            models, optimizers and strategy.
        optimizer: Its optimizer; None takes the compiled one.
        dataset: The training data: a ``tf.data.Dataset`` of global batches, or the result of
            ``distribute_dataset``. Other data is not read. Waits for its first batch.
        strategy: The strategy; None takes the current one, that of the model, or one of
            ``create_strategy`` that exists.

    Returns:
        The report: findings, the most serious first, then the facts behind them.

    Raises:
        TypeError: ``model`` is not a Keras model, ``optimizer`` not an optimizer or ``strategy``
            not a strategy.
        TfMultiGpuError: Called inside a ``tf.function``.

    Example:
        >>> import keras, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> report = tmg.explain(model)
        >>> print(str(report).splitlines()[0])  # doctest: +ELLIPSIS
        tfmultigpu explain: ...
    """
    if tf.inside_function():
        raise TfMultiGpuError(
            "explain was called inside a tf.function, where variables have no values to read. Call "
            "tmg.explain outside of it, before the loop."
        )
    serious = ("error", "gpus-hidden")  # Also where no driver tells how many GPUs are hidden.
    causes = find_causes(inspect_machine())
    causes = [cause for cause in causes if {cause.severity, cause.code} & {*serious}]
    if "keras-backend" in {cause.code for cause in causes}:
        return Report("tfmultigpu explain", tuple(causes), {})
    trained = [(model, optimizer)]
    if hasattr(model, "trained"):
        trained = [(part.model, part.optimizer) for part in model.trained]
        strategy = model.strategy
    strategy = _strategy_of(trained[0][0]) if strategy is None else strategy
    findings, facts = {str(cause): cause for cause in causes}, {}
    for each, own in trained:
        program = _inspect(each, own, dataset, strategy)
        findings |= {str(finding): finding for finding in find_mistakes(program)}
        facts[f"model {each.name}"] = {
            "strategy": program.strategy,
            "devices here": listed(list_logical_devices()),
            "variables outside its scope": f"{len(program.outside)} of {program.variables}",
            "copies of a weight": listed(program.copies),
            "optimizer's outside": f"{len(program.slots_outside)} of {program.slots}",
            "examples in a batch": "not read" if program.rows is None else str(program.rows),
        }
    found = tuple(findings.values()) or (in_order(program),)
    return Report(f"tfmultigpu explain: {program.replicas} replica(s)", found, facts)


def _strategy_of(model: Any) -> tf.distribute.Strategy:
    """Returns the strategy that a model is meant for."""
    own = tf.distribute.get_strategy() if tf.distribute.has_strategy() else strategy_of(model)
    living = process_state.living_strategies() if is_default(own) else ()
    return living[0] if living else own


def _inspect(model: Any, optimizer: Any, dataset: Any, strategy: tf.distribute.Strategy) -> Program:
    """Reads where the variables of a model and its optimizer are, and the first batch."""
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    check_kinds(model, strategy, *(() if optimizer is None else (optimizer,)))
    update = None if optimizer is None else update_of(optimizer)
    once = frozenset() if update is None else update.state  # Of owners, on one device each.
    slots = [v for v in getattr(optimizer, "variables", ()) if id(v) not in once]
    known = _compat.optimizer_trains(optimizer) if optimizer else []
    trained = model.trainable_variables
    mirrored = next((v for v in trained if not is_sharded(v)), None)
    copies = () if mirrored is None else strategy.experimental_local_results(tf_variable(mirrored))
    rows, problem = _read_batch(dataset, strategy)
    return Program(
        strategy=describe(strategy),
        replicas=strategy.num_replicas_in_sync,
        here=list_logical_devices("GPU") or list_logical_devices("CPU"),
        variables=len(model.variables) if model.built else 0,
        outside=_outside(model.variables, strategy),
        copies=tuple(parse_device_name(copy.device) for copy in copies if copy.device),
        slots=len(slots),
        slots_outside=_outside(slots, strategy),
        of_another_model=bool(known) and not {id(v) for v in known} & {id(v) for v in trained},
        rows=rows,
        problem=problem,
    )


def _outside(variables: list[Any], strategy: tf.distribute.Strategy) -> dict[str, str]:
    """Returns the variables created outside a scope, with the strategy that has each."""
    owners = {}
    for variable in variables:
        inner = tf_variable(variable)
        if not strategy.extended.variable_created_in_scope(inner):
            owner = getattr(inner, "distribute_strategy", None)
            name = str(getattr(variable, "path", variable.name))
            owners[name] = "no strategy" if owner is None else describe(owner)
    return owners


def _read_batch(dataset: Any, strategy: tf.distribute.Strategy) -> tuple[int | None, str]:
    """Returns the examples of the first batch, or the reason why it is not known."""
    if isinstance(dataset, ShardedDataset):
        if dataset.strategy is not strategy:
            return None, f"it was distributed for {describe(dataset.strategy)}."
        dataset = dataset.batches if dataset.preprocessing is None else None
    if not isinstance(dataset, tf.data.Dataset):
        return None, ""
    try:
        check_batched(dataset.element_spec)
        first = next(iter(dataset.take(1)), None)
        return 0 if first is None else int(count_rows(first)), ""
    except DataError as error:
        return None, redact(str(error), os.environ)
    except tf.errors.OpError as error:  # Its message may hold paths.
        return None, f"reading it fails with {type(error).__name__}."
