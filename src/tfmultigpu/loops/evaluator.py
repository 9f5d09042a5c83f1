"""Evaluation of a model over a pass of data, and its logs."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.loops.callbacks import BatchHooks
from tfmultigpu.loops.compiled import compile_arguments, read_compiled
from tfmultigpu.loops.evaluation_passes import EvaluationPasses
from tfmultigpu.loops.inputs import length
from tfmultigpu.loops.own_loss import own_loss
from tfmultigpu.loops.step_cache import build, get_or_make
from tfmultigpu.loops.tracked_metrics import EpochMetrics, with_own_metrics
from tfmultigpu.losses.objective import MeanKey, is_loss
from tfmultigpu.steps.evaluate import EvalStep
from tfmultigpu.steps.train import make_eval_step
from tfmultigpu.types import Verify

__all__ = ["Evaluator", "as_keras", "as_list", "distinct", "make_evaluator"]

# Batches in one call into TensorFlow: enough to hide the cost of a call, few enough for Ctrl-C.
_BATCHES_PER_CALL = 32


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluation of a model; that of a compiled model is cached with it.

    Attributes:
        metrics: The metrics in the logs.
        step: The eval step.
    """

    metrics: EpochMetrics
    step: EvalStep

    def __call__(
        self, passes: EvaluationPasses, steps: int | None, hooks: BatchHooks | None = None
    ) -> dict[str, Any] | None:
        """Evaluates the model on one pass over the data.

        Args:
            passes: The data.
            steps: The largest number of batches, or None.
            hooks: The batch hooks of callbacks, or None.

        Returns:
            The logs; None if there were no batches.
        """
        self.metrics.reset()
        # With a known length no hook is called for a batch that does not come.
        known = passes.per_pass or length(passes.batches, passes.batches)
        limits = [most for most in (steps, known) if most is not None]
        steps = min(limits, default=None)
        totals: Any = None
        done = 0
        iterator = passes.begin()
        while steps is None or done < steps:
            asked = _BATCHES_PER_CALL if steps is None else min(steps - done, _BATCHES_PER_CALL)
            if hooks is not None:
                asked = hooks.before(done, asked)
            found = self._run(iterator, asked)
            passes.took(found.steps)
            if found.steps:
                totals = found if totals is None else totals.plus(found)
                done += found.steps
                if hooks is not None:
                    hooks.ran(found.steps)
                    hooks.after(done - 1, functools.partial(self._logs, totals))
            if found.steps < asked or (hooks is not None and hooks.stopped()):
                break
        return None if totals is None else self._end_logs(totals)

    def _run(self, iterator: Any, steps: int) -> Any:
        """Returns what some batches add, with ``steps`` and ``plus`` as ``Totals`` has them."""
        return self.step.totals(iterator, steps)

    def _end_logs(self, totals: Any) -> dict[str, Any]:
        """Returns the logs after the last batch."""
        return self._logs(totals)

    def _logs(self, totals: Any) -> dict[str, Any]:
        """Returns the logs of the batches so far."""
        logs = self.step.report(totals)
        values: dict[str, Any] = {
            n: v for n, v in logs.items() if isinstance(n, MeanKey) and not is_loss(n)
        }
        losses = {name: value for name, value in logs.items() if name not in values}
        return as_keras(losses, distinct(logs, values, self.metrics.results()))


def make_evaluator(
    model: Any, strategy: tf.distribute.Strategy, spec: Any, verify: Verify
) -> Evaluator:
    """Returns the cached ``Evaluator`` of a compiled model for batches of these types."""

    def make() -> Evaluator:
        own = own_loss(model, strategy, spec)
        compiled = read_compiled(model, strategy, spec, None if own is None else own.loss)
        step = make_eval_step(
            weakref.proxy(model),
            compiled.losses,
            strategy,
            metrics=compiled.metrics,
            weighted_metrics=compiled.weighted_metrics,
            loss_weights=compiled.loss_weights,
            verify=verify,
        )
        return Evaluator(with_own_metrics(compiled, () if own is None else own.metrics), step)

    build(model, strategy, spec)
    # A new compile, a new layer or a frozen layer needs a new step.
    variables = tuple((id(one), one.trainable) for one in model.variables)
    key = strategy, id(compile_arguments(model)), variables, verify
    evaluator: Evaluator = get_or_make(model, "evaluate", key, make)
    return evaluator


def distinct(
    taken: Mapping[str, Any], values: Mapping[str, Any], metrics: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of ``forward`` and the results of metrics as one dict.

    Raises:
        ValueError: A metric has the name of a value or of a loss.
    """
    if both := sorted(taken.keys() & metrics.keys()):
        raise ValueError(
            "A metric has the name of a loss or of a value of forward, so one of them would be "
            f"lost. Received: {both}. Give the metric another name: keras.metrics.Mean(name=...)."
        )
    return {**values, **metrics}


def as_keras(losses: Mapping[str, float], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the logs of Keras: with the losses of outputs only if there are several.

    Args:
        losses: The loss, and that of each output; or those of several steps.
        metrics: Other values, by name.
    """
    logs: dict[str, Any] = {n: losses[n] for n in losses if n == "loss" or n.endswith("_loss")}
    if len(logs) == 2 and "loss" in logs:
        logs = {"loss": losses["loss"]}
    for name, value in metrics.items():
        logs.update(value if isinstance(value, Mapping) else {name: value})
    return {name: _number(logs[name]) for name in sorted(logs)}


def as_list(model: Any, logs: Mapping[str, Any]) -> Any:
    """Returns logs as ``model.evaluate`` of Keras does without ``return_dict``.

    Args:
        model: The model.
        logs: The logs by name.

    Returns:
        A list: the loss, compiled metrics, losses of outputs, then the rest by name. A single value
        by itself.
    """
    names = []
    for metric in model.metrics:
        inner = getattr(metric, "metrics", None)  # Of the container of compiled metrics.
        names += [metric.name] if inner is None else [one.name for one in inner]
    outputs = getattr(model, "output_names", None) or []
    # Keras tracks these only once it has trained or evaluated the model itself.
    names += [f"{name}_loss" for name in outputs]
    first = [name for name in dict.fromkeys(names) if name in logs]
    values = [logs[name] for name in [*first, *sorted(set(logs) - set(first))]]
    return values[0] if len(values) == 1 else values


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array
