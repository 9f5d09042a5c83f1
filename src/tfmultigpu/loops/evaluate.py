"""``evaluate``: loss and metrics of a compiled model, exact over every example."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.data.sharded_dataset import ShardedDataset
from tfmultigpu.loops.callbacks import BatchHooks
from tfmultigpu.loops.compiled import check_labels, compile_arguments, read_compiled
from tfmultigpu.loops.inputs import check_steps, length, no_batches, pass_batches, with_weights
from tfmultigpu.loops.step_cache import build, checked_strategy, get_or_make
from tfmultigpu.loops.tracked_metrics import EpochMetrics
from tfmultigpu.losses.objective import MeanKey, is_loss
from tfmultigpu.steps.evaluate import EvalStep, Totals
from tfmultigpu.steps.train import make_eval_step
from tfmultigpu.steps.value_agreement import check_values_alike
from tfmultigpu.strategies.scopes import check_backend

__all__ = ["UNUSED_METHODS", "Evaluator", "as_keras", "evaluate", "make_evaluator"]

# Methods that Keras calls in an evaluation, and this library does not.
UNUSED_METHODS = ("test_step", "compute_loss", "compute_metrics")
# Batches in one call into TensorFlow: enough to hide the cost of a call, few enough for Ctrl-C.
_BATCHES_PER_CALL = 32


def evaluate(
    model: Any,
    data: Any,
    *,
    batch_size: int | None = None,
    sample_weight: Any = None,
    steps: int | None = None,
    verify: bool | str = "first",
) -> dict[str, Any]:
    """Computes loss and metrics of a compiled model, exactly, over every example.

    Runs on the strategy whose scope the model was created in, or else on one device. All workers
    must call it, and all get the result.

    Args:
        model: A compiled Keras model. Its metrics are reset, and hold their state afterwards.
        data: Arrays ``(x, y)`` or ``(x, y, sample_weight)``, each an array or a structure of
            arrays; or a ``tf.data.Dataset`` or ``PyDataset`` of global batches, a function that
            returns a generator of them, or a result of ``distribute_dataset``.
        batch_size: Examples in a global batch, for arrays only; None means 32.
        sample_weight: Sample weights for arrays ``(x, y)``.
        steps: The largest number of batches; None means all.
        verify: See ``make_eval_step``.

    Returns:
        ``"loss"``, the loss of each output if there are several, and the metrics, with the names of
        ``model.evaluate(return_dict=True)``. Values are floats, or arrays if a metric is one. Each
        loss is its sum over all data, divided once, as if the data were one batch.

    Raises:
        CompileError: The model is not compiled, or replaces ``test_step``, ``compute_loss`` or
            ``compute_metrics``.
        ScopeError: The model or one of its metrics was created outside the scope.
        DataError: The data is infinite and ``steps`` is None, is empty, or is of an unknown kind.
        LossError: The losses do not fit the outputs, or are not one value per example.
        MetricError: A metric cannot be summed over replicas.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> model.set_weights([np.ones((2, 1))])
        >>> model.compile(loss="mse", metrics=["mae"])
        >>> tmg.evaluate(model, (np.ones((5, 2)), np.zeros((5, 1))))
        {'loss': 4.0, 'mae': 2.0}
    """
    check_backend()
    strategy = checked_strategy(model, "evaluate", *UNUSED_METHODS)
    check_steps(steps)
    if sample_weight is not None:
        data = with_weights(data, sample_weight)
    batches = pass_batches(data, strategy, batch_size, steps)
    check_labels(model, batches.element_spec)
    evaluator = make_evaluator(model, strategy, batches.element_spec, verify)
    check_values_alike(strategy, model)
    logs = evaluator(batches, steps)
    if logs is None:
        raise no_batches(data)
    return logs


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
        self, batches: ShardedDataset, steps: int | None, hooks: BatchHooks | None = None
    ) -> dict[str, Any] | None:
        """Evaluates the model on the data.

        Args:
            batches: Shards for the replicas.
            steps: The largest number of batches, or None.
            hooks: The batch hooks of callbacks, or None.

        Returns:
            The logs; None if there were no batches.
        """
        self.metrics.reset()
        # With a known length no hook is called for a batch that does not come.
        limits = [most for most in (steps, length(batches, batches)) if most is not None]
        steps = min(limits, default=None)
        totals: Totals | None = None
        done = 0
        iterator = iter(batches)
        while steps is None or done < steps:
            asked = _BATCHES_PER_CALL if steps is None else min(steps - done, _BATCHES_PER_CALL)
            if hooks is not None:
                asked = hooks.before(done, asked)
            found = self.step.totals(iterator, asked)
            if found.steps:
                totals = found if totals is None else totals.plus(found)
                done += found.steps
                if hooks is not None:
                    hooks.ran(found.steps)
                    hooks.after(done - 1, functools.partial(self._logs, totals))
            if found.steps < asked or (hooks is not None and hooks.stopped()):
                break
        return None if totals is None else self._logs(totals)

    def _logs(self, totals: Totals) -> dict[str, Any]:
        logs = self.step.report(totals)
        values: dict[str, Any] = {
            n: v for n, v in logs.items() if isinstance(n, MeanKey) and not is_loss(n)
        }
        losses = {name: value for name, value in logs.items() if name not in values}
        return as_keras(losses, {**values, **self.metrics.results()})


def make_evaluator(
    model: Any, strategy: tf.distribute.Strategy, spec: Any, verify: bool | str
) -> Evaluator:
    """Returns the cached ``Evaluator`` of a compiled model for batches of these types."""

    def make() -> Evaluator:
        compiled = read_compiled(model, strategy, spec)
        step = make_eval_step(
            weakref.proxy(model),
            compiled.losses,
            strategy,
            metrics=compiled.metrics,
            weighted_metrics=compiled.weighted_metrics,
            loss_weights=compiled.loss_weights,
            verify=verify,
        )
        return Evaluator(compiled, step)

    build(model, strategy, spec)
    # A new compile, a new layer or a frozen layer needs a new step.
    variables = tuple((id(one), one.trainable) for one in model.variables)
    key = strategy, id(compile_arguments(model)), variables, verify
    evaluator: Evaluator = get_or_make(model, "evaluate", key, make)
    return evaluator


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


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array
