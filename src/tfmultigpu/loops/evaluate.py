"""``evaluate``: loss and metrics of a compiled model, exact over every example."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfmultigpu.data.sharded_dataset import ShardedDataset
from tfmultigpu.loops.compiled import Compiled, check_labels, compile_arguments, read_compiled
from tfmultigpu.loops.inputs import check_steps, length, no_batches, pass_batches, with_weights
from tfmultigpu.loops.step_cache import build, checked_strategy, kept
from tfmultigpu.steps.evaluate import EvalStep, Totals
from tfmultigpu.steps.train import make_eval_step
from tfmultigpu.steps.value_agreement import check_values_alike
from tfmultigpu.strategies.scopes import check_backend

__all__ = ["REPLACED", "Evaluator", "Watch", "as_keras", "evaluate", "make_evaluator"]

# Methods of Keras that would be called in an evaluation by Keras.
REPLACED = ("test_step", "compute_loss", "compute_metrics")
# Batches in one call into TensorFlow: enough to hide what a call costs, few enough for Ctrl-C.
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

    Runs on the strategy in whose scope the model was created, one device where in none. Under
    several workers every worker calls it and gets everything.

    Args:
        model: A Keras model, compiled. Its metrics are reset, and hold their state afterwards.
        data: Arrays ``(x, y)`` or ``(x, y, sample_weight)``, each one array or a structure of them;
            or what ``distribute_dataset`` takes: a ``tf.data.Dataset`` or ``PyDataset`` of global
            batches, a function that returns a generator of them; or what it returned.
        batch_size: Rows of a global batch, for arrays only; 32 where None.
        sample_weight: Weights beside arrays ``(x, y)``.
        steps: Batches at most. None: all of them.
        verify: See ``make_eval_step``.

    Returns:
        ``"loss"``, for several losses that of each output, and the metrics, with the names of
        ``model.evaluate(return_dict=True)``: floats, arrays where a metric is one. Each loss is its
        sum over the whole data, divided once: what all of it in one batch would give.

    Raises:
        CompileError: The model is not compiled, or replaces ``test_step``, ``compute_loss`` or
            ``compute_metrics``.
        ScopeError: The model, or a metric it was compiled with, was created outside the scope.
        DataError: The data has no end and ``steps`` is None; or no batches; or is no data.
        LossError: The losses do not fit the outputs, or are not one value per example.
        MetricError: A metric cannot be added over replicas.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> model.set_weights([np.ones((2, 1))])
        >>> model.compile(loss="mse", metrics=["mae"])
        >>> tmg.evaluate(model, (np.ones((5, 2)), np.zeros((5, 1))))
        {'loss': 4.0, 'mae': 2.0}
    """
    check_backend()
    strategy = checked_strategy(model, "evaluate", *REPLACED)
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
    """Evaluates whole data with what a model was compiled with.

    Attributes:
        compiled: What that is.
        step: The step made of it.
    """

    compiled: Compiled
    step: EvalStep

    def __call__(
        self, batches: ShardedDataset, steps: int | None, watch: Watch | None = None
    ) -> dict[str, Any] | None:
        """Goes over the data.

        Args:
            batches: Shards for the replicas.
            steps: Batches at most, or None.
            watch: Who is told of batches while it goes on, or None.

        Returns:
            The logs; None where there were no batches.
        """
        self.compiled.reset()
        # Where it is known how many there are, nobody is told of a batch that does not come.
        limits = [most for most in (steps, length(batches, batches)) if most is not None]
        steps = min(limits, default=None)
        totals: Totals | None = None
        done = 0
        iterator = iter(batches)
        while steps is None or done < steps:
            asked = _BATCHES_PER_CALL if steps is None else min(steps - done, _BATCHES_PER_CALL)
            if watch is not None:
                asked = watch.before(done, asked)
            found = self.step.totals(iterator, asked)
            if found.steps:
                totals = found if totals is None else totals.plus(found)
                done += found.steps
                if watch is not None:
                    watch.ran(found.steps)
                    watch.after(done - 1, functools.partial(self._logs, totals))
            if found.steps < asked or (watch is not None and watch.stopped()):
                break
        return None if totals is None else self._logs(totals)

    def _logs(self, totals: Totals) -> dict[str, Any]:
        return as_keras(self.step.report(totals), self.compiled.results())


class Watch(Protocol):
    """Who is told of batches while an evaluation goes on."""

    def before(self, batch: int, steps: int) -> int:
        """Is told the next batch, and returns how many of ``steps`` batches to do in one call."""

    def ran(self, steps: int) -> None:
        """Is told how many batches were done."""

    def after(self, batch: int, logs: Callable[[], dict[str, Any]]) -> None:
        """Is told the last batch that was done; ``logs()`` are those of all so far."""

    def stopped(self) -> bool:
        """Returns whether to leave out the batches that are left."""


def make_evaluator(
    model: Any, strategy: tf.distribute.Strategy, spec: Any, verify: bool | str
) -> Evaluator:
    """Returns what evaluates a compiled model on batches of these types; kept with the model."""

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
    # Compiling again, freezing a layer or adding one is another evaluation.
    variables = tuple((id(one), one.trainable) for one in model.variables)
    key = strategy, id(compile_arguments(model)), variables, verify
    evaluator: Evaluator = kept(model, "evaluate", key, make)
    return evaluator


def as_keras(losses: Mapping[str, float], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs as Keras has them: the losses of outputs only where there are several."""
    outputs = {name: losses[name] for name in losses if name.endswith("_loss")}
    logs: dict[str, Any] = {"loss": losses["loss"], **(outputs if len(outputs) > 1 else {})}
    for name, value in metrics.items():
        logs.update(value if isinstance(value, Mapping) else {name: value})
    return {name: _number(logs[name]) for name in sorted(logs)}


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array
