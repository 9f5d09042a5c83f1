"""``evaluate``: loss and metrics of a compiled model, exact over every example."""

from __future__ import annotations

from typing import Any

from tfmultigpu.loops.compiled import compile_arguments
from tfmultigpu.loops.evaluation_passes import EvaluationPasses
from tfmultigpu.loops.evaluator import as_list
from tfmultigpu.loops.inputs import check_steps, labelled, pass_batches, with_weights
from tfmultigpu.loops.keras_methods import arrays_as_in_keras
from tfmultigpu.loops.own_loss import runs_as_in_keras
from tfmultigpu.loops.pass_callbacks import evaluated, pass_callbacks
from tfmultigpu.loops.program import evaluator_of
from tfmultigpu.loops.running_fits import keeping_metrics
from tfmultigpu.loops.step_cache import checked_strategy
from tfmultigpu.steps.value_agreement import check_values_alike
from tfmultigpu.strategies.scopes import check_backend
from tfmultigpu.types import Model, Verbose, Verify

__all__ = ["evaluate"]


def evaluate(
    model: Model,
    data: Any = None,
    y: Any = None,
    *,
    x: Any = None,
    batch_size: int | None = None,
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = (),
    verbose: Verbose = "auto",
    return_dict: bool = True,
    verify: Verify = "first",
) -> Any:
    """Computes loss and metrics of a compiled model, exactly, over every example.

    Runs on the strategy whose scope the model was created in, or else on one device. All workers
    must call it, and all get the result.

    Args:
        model: A compiled Keras model. Its metrics are reset, and hold their state afterwards.
        data: Arrays ``(x, y)`` or ``(x, y, sample_weight)``, each an array or a structure of
            arrays; or a ``tf.data.Dataset`` or ``PyDataset`` of global batches, a function that
            returns a generator of them, or a result of ``distribute_dataset``.
        y: Labels, if ``data`` is arrays of inputs only.
        x: Another name for ``data``, as in Keras.
        batch_size: Examples in a global batch, for arrays only; None means 32.
        sample_weight: Sample weights for arrays ``(x, y)``.
        steps: The largest number of batches; None means all.
        callbacks: Keras callbacks, whose ``on_test_...`` hooks are called.
        verbose: 0, 1 (a progress bar), 2 (a line) or ``"auto"``, which is 1. Only the chief prints.
        return_dict: Whether to return a dict. False returns the list of Keras: the loss first; a
            single number if there is only one.
        verify: See ``make_eval_step``.

    Returns:
        ``"loss"``, the loss of each output if there are several, and the metrics, with the names of
        ``model.evaluate(return_dict=True)``. Values are floats, or arrays if a metric is one. Each
        loss is its sum over all data, divided once, as if the data were one batch.

    Raises:
        LossError: The model is not compiled; or it replaces ``test_step`` or another method of
            Keras that cannot run on several replicas.
        ScopeError: The model or one of its metrics was created outside the scope.
        DataError: The data is infinite and ``steps`` is None, is empty, or is of an unknown kind.
        LossError: The losses do not fit the outputs, or are not one value per example.
        LossError: A metric cannot be summed over replicas.
        TypeError: An argument is not of its type.
        ValueError: ``verbose`` has a value that it cannot have.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> model.set_weights([np.ones((2, 1))])
        >>> model.compile(loss="mse", metrics=["mae"])
        >>> tmg.evaluate(model, (np.ones((5, 2)), np.zeros((5, 1))), verbose=0)
        {'loss': 4.0, 'mae': 2.0}
    """
    check_backend()
    strategy = checked_strategy(model, "evaluate")
    compile_arguments(model)
    runs_as_in_keras(model, strategy, "evaluate")
    check_steps(steps)
    data = labelled(data, x, y, "evaluate")
    if sample_weight is not None:
        data = with_weights(data, sample_weight)
    data = arrays_as_in_keras(model, data)
    batches = pass_batches(model, "evaluation of arrays", data, strategy, batch_size, steps)
    evaluator = evaluator_of(model, strategy, batches.element_spec, verify)
    check_values_alike(strategy, model)
    listed = pass_callbacks(
        callbacks, model, strategy, data=data, batches=batches, steps=steps, verbose=verbose
    )
    passes = EvaluationPasses(batches)
    with keeping_metrics(model, strategy):
        logs = evaluated(evaluator, passes, steps, listed, model, strategy, data)
    return logs if return_dict else as_list(model, logs)
