"""``explain``: why a program uses one device, or gives another result on several."""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Real
from typing import Any

import tensorflow as tf

from tfmultigpu.devices.configure import list_logical_devices
from tfmultigpu.devices.names import listed
from tfmultigpu.diagnostics.features import feature_findings
from tfmultigpu.diagnostics.input_checks import Input, input_findings, look_at_input, measure_input
from tfmultigpu.diagnostics.keras_fit_checks import fit_findings, layer_findings, metric_findings
from tfmultigpu.diagnostics.machine import look_around
from tfmultigpu.diagnostics.machine_checks import find_causes
from tfmultigpu.diagnostics.placement import Placement, optimizer_findings, placement_findings
from tfmultigpu.diagnostics.report import Finding, Report, ordered
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps.verification import outcomes
from tfmultigpu.strategies.scopes import check_kinds
from tfmultigpu.strategies.topology import strategy_devices, strategy_of

__all__ = ["explain"]

# The devices have been started by the model itself.
_NOT_HERE = {"started-before-cluster"}


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def explain(
    model: Any,
    optimizer: Any = None,
    dataset: Any = None,
    strategy: tf.distribute.Strategy | None = None,
    *,
    seconds: float = 2.0,
    patience: float = 30.0,
) -> Report:
    """Say why a program uses one device only, or trains to another result on several.

    Looks where the variables really are, what the optimizer was made for, what Keras' ``fit`` could
    not run, and what the dataset yields. Trains nothing and changes no variable. A dataset is read
    from its beginning for a moment, which a one-shot generator would not forgive.

    Args:
        model: A Keras model, as the program made it.
        optimizer: Its optimizer; the one it was compiled with where None.
        dataset: What it is trained on: a ``tf.data.Dataset`` of global batches, or what
            ``distribute_dataset`` returned.
        strategy: The strategy meant; where None the current one, or that of the model.
        seconds: How long the input may be timed against the model; 0 measures nothing.
        patience: Seconds to wait for a batch of the dataset, which is said then to yield none.

    Returns:
        The report: findings, the most serious first, then what they were drawn from.

    Raises:
        TypeError: ``model`` is no Keras model, ``optimizer`` no optimizer or ``strategy`` no
            strategy.
        ValueError: ``seconds`` or ``patience`` is no number from 0 on.
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
            "explain looks at values, which are not there while a tf.function is traced. Call "
            "tmg.explain outside of it, before the loop."
        )
    given = () if optimizer is None else (optimizer,)
    check_kinds(model, tf.distribute.get_strategy() if strategy is None else strategy, *given)
    if not isinstance(seconds, Real) or not 0 <= seconds < math.inf:
        raise ValueError(
            "seconds is how long the input may be timed, 0 for not at all. Received: "
            f"seconds={seconds!r}."
        )
    if not isinstance(patience, Real) or not 0 < patience < math.inf:
        raise ValueError(
            f"patience is how many seconds to wait for a batch. Received: patience={patience!r}."
        )
    if strategy is None:
        current = tf.distribute.has_strategy()
        strategy = tf.distribute.get_strategy() if current else strategy_of(model)
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    found = [
        finding
        for finding in find_causes(look_around())
        if finding.severity == "error" and finding.code not in _NOT_HERE
    ]
    if any(finding.code == "keras-backend" for finding in found):
        return Report("tfmultigpu explain", ordered(found), {"strategy": _strategy(strategy)})
    placement = Placement.of(model, strategy)
    found += [*strategy_findings(strategy), *placement_findings(placement)]
    found += optimizer_findings(optimizer, model, strategy, in_scope=placement.in_scope)
    in_place = not any(finding.severity == "error" for finding in found)
    facts = {"strategy": _strategy(strategy), "model": placement.facts()}
    several = strategy.num_replicas_in_sync > 1
    if several:
        found += layer_findings(model)
        found += fit_findings(model, optimizer, strategy)
    if dataset is not None:
        seen = look_at_input(dataset, patience)
        found += feature_findings(seen, model)
        if several:
            found += metric_findings(model, strategy, seen.spec)
        if in_place and model.built and seconds > 0 and seen.problem is None:
            seen = measure_input(seen, model, strategy, seconds, patience)
        found += input_findings(seen, strategy)
        facts["dataset"] = _dataset(seen)
    found += verification_findings(model)
    if verified := outcomes(model):
        facts["verification"] = {f"step {i + 1}": str(one) for i, one in enumerate(verified)}
    found += _nothing(found, strategy, dataset)
    title = f"tfmultigpu explain: {strategy.num_replicas_in_sync} replica(s)"
    if several:
        local = len(set(strategy_devices(strategy)))
        here = local < strategy.num_replicas_in_sync
        title += f" on {local} device(s){' here and others elsewhere' if here else ''}"
    return Report(title, ordered(found), facts)


def verification_findings(model: Any) -> Iterator[Finding]:
    """Steps of this model that computed something else than one device."""
    for one in outcomes(model):
        if one.outcome == "different":
            cause = f"; the first that depends on the cut is {one.culprit}" if one.culprit else ""
            yield Finding(
                "error",
                "replica-dependence",
                "A verified step computed something else than one device: "
                f"{'; '.join(str(difference) for difference in one.differences[:3])}{cause}.",
                "The result depends on how a batch is cut, so on the number of replicas.",
                one.advice,
            )


def strategy_findings(strategy: tf.distribute.Strategy) -> Iterator[Finding]:
    """What is wrong with the strategy itself."""
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
            f"There is no strategy: the model lives on one device, and {len(here)} are here: "
            f"{listed(here)}.",
            "Keras trains on the first GPU alone and takes memory of all of them.",
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


def _strategy(strategy: tf.distribute.Strategy) -> dict[str, str]:
    return {
        "kind": type(strategy).__name__,
        "replicas": str(strategy.num_replicas_in_sync),
        "devices in this process": listed(strategy_devices(strategy)),
        "devices that are here": listed(list_logical_devices()),
    }


def _dataset(seen: Input) -> dict[str, str]:
    facts = {"kind": seen.kind}
    if seen.rows is not None:
        facts["rows of the first batch"] = str(seen.rows)
    if seen.stages is not None:
        facts["stages"] = " > ".join(seen.stages)
    if seen.seconds is not None and seen.compute is not None:
        facts["a batch is made in"] = f"{1e3 * seen.seconds:.1f} ms"
        facts["forward and backward take"] = f"{1e3 * seen.compute:.1f} ms"
    return facts


def _nothing(found: list[Finding], strategy: tf.distribute.Strategy, dataset: Any) -> list[Finding]:
    if any(one.severity != "note" or one.code == "model-not-built" for one in found):
        return []
    replicas = strategy.num_replicas_in_sync
    unread = dataset is None or any(one.code == "data-not-read" for one in found)
    looked = "model and optimizer" if unread else "model, optimizer and dataset"
    here = len(list_logical_devices("GPU")) or len(list_logical_devices("CPU"))
    if replicas == 1:
        what = f"One device is used, and {here} is here: there is nothing to distribute."
        change = "print(tmg.doctor()) says whether the machine has more"
    else:
        what = f"{looked.capitalize()} are on {replicas} replicas as they should be."
        change = (
            "Where it is slow: print(tmg.tuning.profile_step(step, data)) says what to change first"
        )
    return [Finding("note", "in-order", what, "Each replica computes its part of a step.", change)]
