"""``evaluate``: loss and metrics of a compiled model, exact over every example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu._patch import setting
from tfmultigpu.addons.loops.cache import checked_strategy
from tfmultigpu.addons.loops.compiled import compile_arguments
from tfmultigpu.addons.loops.feed import Feed
from tfmultigpu.addons.loops.hooks import Hooks
from tfmultigpu.addons.loops.inputs import Reading, check_steps, feed_of, source_of
from tfmultigpu.addons.loops.loop import EvaluationCallbacks, Loop
from tfmultigpu.addons.loops.methods import (
    around,
    as_method,
    in_one_thread,
    refuse_own_methods,
    run_keras,
)
from tfmultigpu.addons.loops.prediction import predict
from tfmultigpu.addons.loops.program import Program
from tfmultigpu.recorder import noting
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.strategies.scopes import check_backend
from tfmultigpu.types import Function, KerasModel, Model, Nested, Scalar, Verbose, Verify


@in_one_thread
def evaluate(
    model: Model,
    data: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Verbose = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = (),
    return_dict: bool = False,
    *,
    x: Any = None,
    logical_replicas: int | None = None,
    verify: Verify = "first",
) -> Nested:
    """Computes loss and metrics of a compiled model, exactly, over every example.

    Runs on the strategy in whose scope the model was created, or else on one device. All workers
    must call it, and all get the result.

    Args:
        model: A compiled Keras model. Its metrics are reset, and hold their state afterwards.
        data: Arrays, datasets or functions, as for ``fit``.
        y: Labels, if ``data`` is arrays of inputs only.
        batch_size: Examples in a global batch, for arrays only; None means 32.
        verbose: 0, 1 (a progress bar), 2 (a line) or ``"auto"``, which is 1. Only the chief prints.
        sample_weight: Sample weights for arrays ``(x, y)``.
        steps: The largest number of batches; None means all.
        callbacks: Keras callbacks, whose ``on_test_...`` hooks are called.
        return_dict: Whether to return a dict with the names of the logs.
        x: Keras' name of ``data``.
        logical_replicas: See ``make_eval_step``.
        verify: See ``make_eval_step``.

    Returns:
        What ``model.evaluate`` of Keras returns: the loss, or a list of the loss and the metrics.
        With ``return_dict=True`` a dict of them by name, with the loss of each output if there are
        several. Values are floats, or arrays if the result of a metric is an array. Each loss is
        its sum over all data, divided once, as if the data were one batch.

    Raises:
        LossError: The model is not compiled; it replaces ``test_step`` or another method that
            Keras calls; or losses or metrics do not work on replicas.
        ScopeError: The model or one of its metrics was created outside the scope.
        DataError: The data is empty, has no end and no ``steps``, or does not fit.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> model.set_weights([np.ones((2, 1))])
        >>> model.compile(loss="mse", metrics=["mae"])
        >>> loss, mae = tmg.evaluate(model, np.ones((5, 2)), np.zeros((5, 1)), verbose=0)
        >>> loss, mae
        (4.0, 2.0)
    """
    check_backend(model, callbacks)
    strategy = checked_strategy(model, "evaluate")
    compile_arguments(model)
    refuse_own_methods(model, "evaluate")
    steps = check_steps(steps)
    source = source_of("evaluate", data, x=x, y=y, sample_weight=sample_weight)
    reading = Reading("evaluation", batch_size, steps)
    with feed_of(model, strategy, source, reading) as feed:
        hooks = Hooks(callbacks, model, strategy, verbose=verbose, steps=feed.steps)
        options = {"logical_replicas": logical_replicas}
        program = Program(model, strategy, verify=verify, options=options)
        loop = program.evaluation_loop(hooks, feed)
        check_values_alike(strategy, model)
        with _keeping_metrics(model, strategy):
            logs = _run(model, EvaluationCallbacks(hooks, loop), steps)
    # Keras knows the order of losses only where it has built them itself.
    return logs if return_dict else _as_list(model, logs)


def _as_list(model: KerasModel, logs: Mapping[str, Scalar]) -> Scalar | list[Scalar]:
    """Returns logs as ``model.evaluate`` of Keras does without ``return_dict``.

    That is the loss, compiled metrics, losses of outputs, then the rest by name; a single value by
    itself. A name that is among the metrics twice, weighted and not, is there twice.
    """
    names: list[str] = []
    for metric in model.metrics:
        # The container of compiled metrics has several.
        names += [each.name for each in getattr(metric, "metrics", [metric])]
    # Keras tracks these only once it has trained or evaluated the model itself.
    others = [f"{name}_loss" for name in getattr(model, "output_names", None) or []]
    others += sorted(logs)
    names += [name for name in dict.fromkeys(others) if name not in names]
    values = [logs[name] for name in names if name in logs]
    if len(values) == 1:
        return values[0]
    return values


def _run(
    model: KerasModel, callbacks: EvaluationCallbacks, steps: int | None, **more: Any
) -> dict[str, Any]:
    """Runs the loop of Keras that evaluates."""
    loop = callbacks.evaluation
    assert loop is not None
    with setting(model, **around(loop)), noting("validation", model.name):
        logs = run_keras(
            model, "evaluate", loop.feed, callbacks, steps=steps, return_dict=True, **more
        )
    return dict(logs)


@contextmanager
def _keeping_metrics(model: KerasModel, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Keeps the metrics of a running ``fit``; in Keras an evaluation in between resets them."""
    copies: list[tf.Variable] = []
    if isinstance(vars(model).get("train_function"), Loop):
        for metric in model.metrics:
            for variable in metric.variables:
                copies += strategy.experimental_local_results(variable.value)
    values = [copy.read_value() for copy in copies]
    try:
        yield
    finally:
        for copy, value in zip(copies, values, strict=True):
            copy.assign(value)


def evaluation_methods(
    model: KerasModel,
    verify: Verify,
    logical_replicas: int | None,
    callbacks: EvaluationCallbacks,
) -> dict[str, Any]:
    """Returns ``evaluate`` and ``predict`` as methods of a model in ``fit``, which it calls too.

    Keras' own give other numbers on several replicas.
    """

    def ours(name: str, function: Function, **options: object) -> Function:
        def call(model: KerasModel, **arguments: Nested) -> Nested:
            refuse_own_methods(model, name, name)
            return function(model, **arguments)

        return as_method(model, name, call, verify=verify, **options)

    evaluates = ours("evaluate", evaluate, logical_replicas=logical_replicas)

    def validates(*args: object, **arguments: Nested) -> Nested:
        if isinstance(arguments.get("x"), Feed):
            return _run(model, callbacks, arguments["steps"], _use_cached_eval_dataset=True)
        return evaluates(*args, **arguments)

    return {"evaluate": validates, "predict": ours("predict", predict)}
