"""``explain``: a report on a program that uses one device, or gives another result on several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.diagnostics.features import feature_findings
from tfmultigpu.addons.diagnostics.input_checks import (
    Input,
    input_findings,
    inspect_input,
    measure_input,
)
from tfmultigpu.addons.diagnostics.machine import inspect_machine
from tfmultigpu.addons.diagnostics.machine_checks import find_causes
from tfmultigpu.addons.diagnostics.placement import (
    Placement,
    optimizer_findings,
    placement_findings,
)
from tfmultigpu.addons.diagnostics.report import Finding, Report, ordered
from tfmultigpu.devices import list_logical_devices
from tfmultigpu.devices.names import listed
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.step import TrainStep
from tfmultigpu.strategies.scopes import check_kinds
from tfmultigpu.strategies.topology import strategy_devices, strategy_of
from tfmultigpu.types import Optimizer, Strategy

__all__ = ["explain"]

# The model itself has started the devices.
_NOT_HERE = {"started-before-cluster"}
_TRAINING = "use tmg.fit: Keras' own fit may fail or give another result on several replicas"


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def explain(
    model: Any,
    optimizer: Optimizer | None = None,
    dataset: Any = None,
    strategy: Strategy | None = None,
    *,
    seconds: float = 2.0,
    patience: float = 30.0,
) -> Report:
    """Reports why a program uses one device, or trains to another result on several.

    Checks the placement of variables, the optimizer and the dataset. Trains nothing and changes no
    variable. Reads the first batches of the dataset, which a one-shot generator then lacks.

    Args:
        model: A Keras model; or a step of ``make_train_step`` or ``chain_steps``, which has its
            models and optimizers.
        optimizer: Its optimizer; None takes the compiled one.
        dataset: The training data: a ``tf.data.Dataset`` of global batches, or the result of
            ``distribute_dataset``.
        strategy: The strategy; None takes the current one, or that of the model.
        seconds: Time limit for measuring the input against the model; 0 measures nothing.
        patience: Seconds to wait for a batch of the dataset.

    Returns:
        The report: findings, the most serious first, then the facts behind them.

    Raises:
        TypeError: ``model`` is not a Keras model, ``optimizer`` not an optimizer or ``strategy``
            not a strategy.
        ValueError: ``seconds`` is negative or ``patience`` is not positive.
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
    if isinstance(model, (TrainStep, ChainedStep)):
        if optimizer is not None:
            raise TypeError(
                "A step has its optimizer, so explain takes none beside it. Received: "
                f"optimizer={type(optimizer).__name__}. Write tmg.explain(step, dataset=data)."
            )
        return _explain_step(model, dataset, seconds, patience)
    given = () if optimizer is None else (optimizer,)
    check_kinds(model, tf.distribute.get_strategy() if strategy is None else strategy, *given)
    if not isinstance(seconds, Real) or not 0 <= seconds < math.inf:
        raise ValueError(
            "seconds must be a number from 0 on; 0 measures nothing. Received: "
            f"seconds={seconds!r}."
        )
    if not isinstance(patience, Real) or not 0 < patience < math.inf:
        raise ValueError(
            "patience must be a positive number of seconds to wait for a batch. Received: "
            f"patience={patience!r}."
        )
    if strategy is None:
        current = tf.distribute.has_strategy()
        strategy = tf.distribute.get_strategy() if current else strategy_of(model)
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    found = [
        finding
        for finding in find_causes(inspect_machine())
        if finding.severity == "error" and finding.code not in _NOT_HERE
    ]
    if any(finding.code == "keras-backend" for finding in found):
        return Report("tfmultigpu explain", ordered(found), {"strategy": _strategy_facts(strategy)})
    placement = Placement.of(model, strategy)
    found += [*strategy_findings(strategy), *placement_findings(placement)]
    found += optimizer_findings(optimizer, model, strategy, in_scope=placement.in_scope)
    in_place = not any(finding.severity == "error" for finding in found)
    facts = {"strategy": _strategy_facts(strategy), "model": placement.facts()}
    if optimizer is not None:
        facts["optimizer"] = _optimizer_facts(optimizer)
    several = strategy.num_replicas_in_sync > 1
    if several and getattr(model, "compiled", False):
        facts["training"] = {"by": _TRAINING}
    if dataset is not None:
        seen = inspect_input(dataset, patience)
        found += feature_findings(seen, model)
        if in_place and model.built and seconds > 0 and seen.problem is None:
            seen = measure_input(seen, model, strategy, seconds, patience)
        found += input_findings(seen, strategy)
        facts["dataset"] = _dataset_facts(seen)
    found += _nothing_wrong(found, strategy, dataset)
    title = f"tfmultigpu explain: {strategy.num_replicas_in_sync} replica(s)"
    if several:
        local = len(set(strategy_devices(strategy)))
        here = local < strategy.num_replicas_in_sync
        title += f" on {local} device(s){' here and others elsewhere' if here else ''}"
    return Report(title, ordered(found), facts)


def _explain_step(
    step: TrainStep | ChainedStep, dataset: Any, seconds: float, patience: float
) -> Report:
    """Returns the reports of the models of a step as one; the dataset is looked at once."""
    reports = []
    for model, optimizer, _ in step.trained:
        look = {"seconds": seconds, "patience": patience}
        reports.append(explain(model, optimizer, dataset, step.strategy, **look))
        dataset = None
    known = step.verification if isinstance(step, ChainedStep) else {"step": step.verification}
    verified = {name: outcome for name, outcome in known.items() if outcome is not None}
    findings = [*verification_findings(verified.values())]
    findings += [finding for report in reports for finding in report.findings]
    found = {str(finding): finding for finding in findings}
    severe = any(one.severity != "note" for one in found.values())
    kept = [one for one in found.values() if not severe or one.code != "in-order"]
    facts = {
        section if report is reports[0] else f"{section} of {one.model.name}": values
        for report, one in zip(reports, step.trained, strict=True)
        for section, values in report.facts.items()
        if section != "training" and (report is reports[0] or section != "strategy")
    }
    if verified:
        facts["verification"] = {name: str(outcome) for name, outcome in verified.items()}
    return Report(reports[0].title, ordered(kept), facts)


def verification_findings(outcomes: Iterable[Any]) -> Iterator[Finding]:
    """Reports verified steps that differ from one device."""
    for one in outcomes:
        if one.outcome == "different":
            cause = f"; the cause is {one.culprit}" if one.culprit else ""
            yield Finding(
                "error",
                "replica-dependence",
                "A verified step computed something else than one device: "
                f"{'; '.join(str(difference) for difference in one.differences[:3])}{cause}.",
                "The result depends on the number of replicas.",
                one.advice,
            )


def strategy_findings(strategy: tf.distribute.Strategy) -> Iterator[Finding]:
    """Reports a strategy of one replica on a machine with several devices."""
    if strategy.num_replicas_in_sync > 1:
        return
    gpus = list_logical_devices("GPU")
    here = gpus or list_logical_devices("CPU")
    if len(here) < 2:
        return
    used = strategy_devices(strategy)
    if not used:
        yield Finding(
            "error",
            "no-strategy",
            f"There is no strategy: the model is on one device, and {len(here)} are here: "
            f"{listed(here)}.",
            "Keras trains on the first GPU alone and takes the memory of all.",
            "strategy = tmg.create_strategy(), then build the model and the optimizer under "
            "with strategy.scope():",
        )
        return
    yield Finding(
        "error",
        "strategy-of-one",
        f"{type(strategy).__name__} has one replica, on {listed(used)}, and "
        f"{len(here)} devices are here: {listed(here)}.",
        "A strategy of one replica trains on one device, without a message.",
        f"strategy = tmg.create_strategy(devices={list(here)!r})",
    )


def _strategy_facts(strategy: tf.distribute.Strategy) -> dict[str, str]:
    return {
        "kind": type(strategy).__name__,
        "replicas": str(strategy.num_replicas_in_sync),
        "devices in this process": listed(strategy_devices(strategy)),
        "devices that are here": listed(list_logical_devices()),
    }


def _optimizer_facts(optimizer: Any) -> dict[str, str]:
    rate = optimizer.learning_rate
    if not hasattr(rate, "numpy"):  # Under a schedule, Keras returns a tensor or a number.
        return {"kind": type(optimizer).__name__, "learning rate": f"{float(rate):.6g}"}
    return {
        "kind": type(optimizer).__name__,
        "learning rate": f"{float(rate.numpy()):.6g}",
        "read it in a callback": "float(optimizer.learning_rate.numpy()), on any strategy",
    }


def _dataset_facts(seen: Input) -> dict[str, str]:
    facts = {"kind": seen.kind}
    if seen.examples is not None:
        facts["examples in a batch"] = str(seen.examples)
    if seen.stages is not None:
        facts["stages"] = " > ".join(seen.stages)
    if seen.seconds is not None and seen.compute is not None:
        facts["a batch is made in"] = f"{1e3 * seen.seconds:.1f} ms"
        facts["forward and backward take"] = f"{1e3 * seen.compute:.1f} ms"
    return facts


def _nothing_wrong(
    found: list[Finding], strategy: tf.distribute.Strategy, dataset: Any
) -> list[Finding]:
    """Describes a program in which no check found an error or a warning."""
    if any(one.severity != "note" or one.code == "model-not-built" for one in found):
        return []
    replicas = strategy.num_replicas_in_sync
    unread = dataset is None or any(one.code == "data-not-read" for one in found)
    checked = "Model and optimizer" if unread else "Model, optimizer and dataset"
    if replicas == 1:
        what = "The program uses the only device here: there is nothing to distribute."
        change = "print(tmg.doctor()) reports whether the machine has more"
    else:
        what = f"{checked} are on {replicas} replicas as they should be."
        change = (
            "If it is slow: print(tmg.tuning.profile_step(step, data)) names what to change first"
        )
    return [Finding("note", "in-order", what, "Each replica computes its part of a step.", change)]
