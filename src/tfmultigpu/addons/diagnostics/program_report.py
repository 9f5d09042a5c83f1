"""``explain``: a report on a program that uses one device, with the line to change."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.replicated import Replicated
from tfmultigpu.accumulation.update import update_of
from tfmultigpu.addons.diagnostics.machine import inspect_machine
from tfmultigpu.addons.diagnostics.machine_checks import find_causes
from tfmultigpu.addons.diagnostics.planned import OfPlan, findings_of
from tfmultigpu.addons.diagnostics.report import Finding, Report, redact
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.data.cut import check_batched
from tfmultigpu.data.sharded_dataset import ShardedDataset
from tfmultigpu.devices.discovery import list_logical_devices
from tfmultigpu.devices.names import listed, parse_device_name
from tfmultigpu.errors import DataError, ScopeError
from tfmultigpu.lists import by_id
from tfmultigpu.strategies.process_state import process_state
from tfmultigpu.strategies.row_parts import copies_of, sharded_of
from tfmultigpu.strategies.scopes import all_layers, check_kinds, check_scope, refuse_one_device
from tfmultigpu.strategies.topology import (
    describe,
    is_default,
    is_sharded,
    strategy_of,
    tf_variable,
)
from tfmultigpu.types import KerasModel, KerasOptimizer, KerasVariable, Optimizer, Scalar, Strategy

_SCOPE = "with strategy.scope():"
_MUCH = 2**20  # Bytes that a replica may copy in a step before it is worth a warning.
_MOST_SHOWN = 4  # Sharded variables, of which a model may have hundreds.


def explain(
    model: KerasModel,
    optimizer: Optimizer | None = None,
    dataset: Any = None,
    strategy: Strategy | None = None,
    *,
    plan: OfPlan | None = None,
) -> Report:
    """Reports why a program uses one device, with the line to change.

    Checks the machine, the strategy, the placement of variables, the optimizer and the first batch.
    Trains nothing and changes no variable. A one-shot generator loses its first batch.

    Args:
        model: A Keras model; or a step of ``make_train_step`` or ``chain_steps``, which has its
            models, optimizers and strategy. If the step has run once, the report also names the
            variables on one device that each replica copies in each step.
        optimizer: Its optimizer; None takes the optimizer of ``model.compile``.
        dataset: A ``tf.data.Dataset`` of global batches, or the result of ``distribute_dataset``;
            other data is not read.
        strategy: The strategy; None takes the current strategy, the model's, or an existing one of
            ``create_strategy``.
        plan: What ``plan_memory(step, batch)`` returned: then the report also says that the step
            will run out of memory, and which copies an option saves.

    Returns:
        The report: findings, the most serious first, then the facts behind them.

    Raises:
        TypeError: An argument is not of the kind that its name says.

    Example:
        >>> import keras, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> report = tmg.explain(model)
        >>> print(str(report).splitlines()[0])  # doctest: +ELLIPSIS
        tfmultigpu explain: ...
    """
    serious = {"error", "gpus-hidden"}  # Also where no driver tells how many GPUs are hidden.
    causes = []
    for cause in find_causes(inspect_machine()):
        if {cause.severity, cause.code} & serious:
            causes.append(cause)
    if any(cause.code == "keras-backend" for cause in causes):
        return Report("tfmultigpu explain", tuple(causes), {})
    trained = [(model, optimizer)]
    if hasattr(model, "train_steps"):
        trained = [(part.model, part.optimizer) for part in model.train_steps]
        strategy = model.strategy
        causes += _check_reads([model, *model.train_steps], strategy)
    if strategy is None:
        strategy = _strategy_of(trained[0][0])
    facts = {}
    for each, own in trained:
        if own is None:
            own = getattr(each, "optimizer", None)
        optimizers = []
        if own is not None:
            optimizers.append(own)
        check_kinds(each, strategy, *optimizers)
        copies = _devices_of_copies(each, strategy)
        causes.extend(_check_model(each, strategy, copies))
        causes.extend(_check_optimizer(each, own, strategy))
        causes.extend(_check_tables(each, own, strategy))
        facts[f"model {each.name}"] = {
            "strategy": describe(strategy),
            "devices here": listed(list_logical_devices()),
            "copies of a weight": listed(copies),
            **_places_of_sharded(each),
        }
    causes += [*_check_batch(dataset, strategy), *findings_of(plan)]
    findings = {str(cause): cause for cause in causes}
    replicas = strategy.num_replicas_in_sync
    if not findings:
        what = f"Everything that you passed is on every replica, {replicas} in all."
        why = "Each replica computes its shard of a batch. Pass dataset= to check the batches, too."
        change = "Train with tmg.fit. If it is slow: print(tmg.tuning.profile_step(step, data))"
        findings[""] = Finding("note", "in-order", what, why, change)
    return Report(f"tfmultigpu explain: {replicas} replica(s)", tuple(findings.values()), facts)


def _places_of_sharded(model: KerasModel) -> dict[str, str]:
    """Returns where the first sharded variables of a model are; nothing if there are none."""
    places: list[str] = []
    for variable in sharded_of(getattr(model, "variables", ())):
        device = parse_device_name(tf_variable(variable).device)
        places.append(f"{variable.path} of {tuple(variable.shape)} on {device}")
    if not places:
        return {}
    shown = "; ".join(places[:_MOST_SHOWN])
    more = len(places) - _MOST_SHOWN
    if more > 0:
        shown += f"; and {more} more"
    return {"sharded variables": shown}


def _strategy_of(model: KerasModel) -> tf.distribute.Strategy:
    """Returns the strategy that a model is meant for."""
    strategy = strategy_of(model)
    if tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
    if not is_default(strategy):
        return strategy
    living = process_state.living_strategies()
    if len(living) > 1:
        refuse_one_device("explain")  # None of them is guessed.
    if living:
        return living[0]
    return strategy


def _devices_of_copies(model: KerasModel, strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    for variable in model.trainable_variables:
        if not is_sharded(variable):
            copies = strategy.experimental_local_results(tf_variable(variable))
            return tuple(parse_device_name(copy.device) for copy in copies if copy.device)
    return ()


def _outside(
    variables: Sequence[KerasVariable], strategy: tf.distribute.Strategy, what: str
) -> str:
    """Returns what is said of the first variable outside the scope; empty without one."""
    try:
        check_scope(variables, strategy, what)
    except ScopeError as error:
        return f"{error.what} Received: {error.received}."
    return ""


def _check_model(
    model: KerasModel, strategy: tf.distribute.Strategy, copies: tuple[str, ...]
) -> Iterator[Finding]:
    here = list_logical_devices("GPU") or list_logical_devices("CPU")
    outside = _outside(model.variables, strategy, "model")
    create = f"strategy = tmg.create_strategy(devices={list(here)!r})"
    severity, code, devices = "error", "model-scope", listed(tuple(dict.fromkeys(copies)))
    if strategy.num_replicas_in_sync == 1 and len(here) > 1 and not outside:
        code = "no-strategy"
        if not is_default(strategy):
            severity = "note"  # The strategy of one device was asked for.
        what = f"The model is on one device, by {describe(strategy)}; here are {listed(here)}."
        change = f"{create}, and {_SCOPE} around the model and the optimizer"
    elif not (model.built and model.variables):  # As is_built of steps, which import Keras.
        severity = "note"
        what = "The model has no variables yet, and the first call will create them."
        change = f"{_SCOPE} model(x[:1]), which builds it; or start the model with keras.Input"
    elif outside:
        what = outside
        change = f"{_SCOPE} model = ... (loading a saved model counts as creating it)"
    elif len(set(copies)) < len(copies):
        what = f"The {len(copies)} copies of a weight are all on {devices}."
        change = f"{create}, which exist"
    elif "CPU" in devices and "GPU" in here[0]:
        what = f"The weights are on {devices}, and GPUs are here: {listed(here)}."
        change = "strategy = tmg.create_strategy(), and no tf.device('CPU:0') around the model"
    else:
        return
    why = "TensorFlow trains where the variables are, without a message, or fails without a text."
    yield Finding(severity, code, what, why, change)


def _check_optimizer(
    model: KerasModel, optimizer: KerasOptimizer, strategy: tf.distribute.Strategy
) -> Iterator[Finding]:
    if optimizer is None:
        return
    update = update_of(optimizer)
    once: Collection[int] = ()
    if update is not None:
        once = update.state  # Of owners, on one device each.
    of_replicas = [v for v in optimizer.variables if id(v) not in once]
    known = {id(v) for v in _compat.optimizer_trains(optimizer) or ()}
    new = [variable.path for variable in model.trainable_variables if id(variable) not in known]
    if what := _outside(of_replicas, strategy, "optimizer"):
        why = "Each replica then updates its own copy of the weights, and they drift apart."
    elif known and len(new) == len(model.trainable_variables):
        what = "The optimizer was built for another model: it knows no variable of this one."
        why = "It fails at the first step, or updates the wrong model."
    elif known and new:
        what = (
            f"The optimizer does not know {listed(new[:3])}, unfrozen or added after it was built."
        )
        why = "The next step of it is an error."
    else:
        return
    change = f"{_SCOPE} optimizer = ..., and model.compile(optimizer, ...)"
    yield Finding("error", "optimizer-scope", what, why, change)


def _check_tables(
    model: KerasModel, optimizer: KerasOptimizer, strategy: tf.distribute.Strategy
) -> Iterator[Finding]:
    """Finds tables of embeddings that an optimizer updates as a whole in each step."""
    import keras

    if optimizer is None:
        return
    update = Replicated(optimizer, strategy, "for a report")
    kinds = keras.layers.Embedding, keras.layers.ReversibleEmbedding
    layers = [layer for layer in all_layers(model) if isinstance(layer, kinds) and layer.built]
    tables = by_id(v for layer in layers for v in layer.trainable_variables)
    for table in tables.values():
        target = update.target_of(table)
        if target.takes == "rows" or not target.is_table:
            continue
        size = math.prod(table.shape) * tf.as_dtype(table.dtype).size
        kind = type(unwrap_optimizer(optimizer)).__name__
        what = f"{kind} updates all {table.shape[0]:,} rows of {table.path!r} in each step: it "
        what += f"writes {size:,} bytes, and as many for each number that it keeps of a weight."
        why = "It changes rows without a gradient too, or a penalty, an average or a decay does."
        change = (
            "keras.optimizers.Adagrad or SGD without momentum, which update the rows of a batch"
        )
        yield Finding("note", "whole-table", what, why, change)


def _check_reads(steps: Sequence[Scalar], strategy: tf.distribute.Strategy) -> Iterator[Finding]:
    """Finds what is on one device and read by all replicas, as the traces so far tell."""
    touched: dict[int, tf.Variable] = {}
    for step in steps:
        touched.update({id(variable): variable for variable in step.runner.touched.variables})
        for changed in step.changed_variables():  # What owners update is on one device each.
            for variable in copies_of(strategy, changed):
                touched.pop(id(variable), None)
    for key, variable in list(touched.items()):
        if strategy.extended.variable_created_in_scope(variable):
            del touched[key]
    if strategy.num_replicas_in_sync == 1 or not touched:
        return
    outside = sorted(touched.values(), key=_bytes, reverse=True)
    total, largest = sum(map(_bytes, outside)), outside[0]
    severity = "note"
    if total >= _MUCH:
        severity = "warning"
    what = f"Each replica copies {total:,} bytes in each step: what it reads of {len(outside)} "
    what += f"variable(s) on one device, the largest {largest.name.partition(':')[0]!r} on "
    what += f"{parse_device_name(largest.device)}."
    why = "They were created outside the scope of the strategy, so other replicas have no copy."
    change = f"{_SCOPE} teacher = ..., or whatever has this variable"
    yield Finding(severity, "copied-each-step", what, why, change)


def _bytes(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements() * variable.dtype.size)


def _check_batch(dataset: Any, strategy: tf.distribute.Strategy) -> Iterator[Finding]:
    replicas, rows, problem = strategy.num_replicas_in_sync, None, ""
    if isinstance(dataset, ShardedDataset):
        if dataset.strategy is not strategy:
            problem = f"it was distributed for {describe(dataset.strategy)}."
        dataset = None if dataset.preprocessing or problem else dataset.batches
    try:
        if isinstance(dataset, tf.data.Dataset):
            check_batched(dataset.element_spec)
            rows = 0
            for first in dataset.take(1):
                rows = int(count_rows(first))
    except DataError as error:
        problem = redact(str(error), os.environ)
    except tf.errors.OpError as error:  # Its message may hold paths.
        problem = f"reading it fails with {type(error).__name__}."
    why = "A step shares the examples of a global batch among the replicas, and there are none."
    if problem:
        what = f"The dataset has no batch for this strategy: {problem}"
        change = "tmg.distribute_dataset(dataset.batch(global_batch_size), strategy)"
    elif rows == 0:
        what = "The dataset is empty: it has no batch, or its first batch has no examples."
        change = "Check that its files exist, and that drop_remainder does not drop the only batch"
    elif rows is not None and rows < replicas:
        what = f"A batch has {rows} example(s) for {replicas} replicas."
        why = "Each replica then computes all of them, as one device does."
        change = f"dataset.batch({32 * replicas}), say: the global batch, 32 for each replica"
    else:
        return
    yield Finding("error", "small-batch", what, why, change)
