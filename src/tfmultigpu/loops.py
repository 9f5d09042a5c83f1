"""Whole passes over data with a compiled Keras model: ``evaluate`` and ``predict``."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.compiled import (
    Compiled,
    check_keeps_to,
    check_labels,
    compile_arguments,
    read_compiled,
    strategy_of,
)
from tfmultigpu.data import ShardedDataset, distribute_dataset
from tfmultigpu.errors import DataError, UnknownLengthError
from tfmultigpu.evaluation import EvalStep, Totals
from tfmultigpu.scopes import check_backend, check_kinds, prepare_model
from tfmultigpu.steps import make_eval_step, make_predict_step

__all__ = ["evaluate", "predict"]

# Batches in one call into TensorFlow: enough to hide what a call costs, few enough for Ctrl-C.
_BATCHES_PER_CALL = 32
# Predictions that may wait on a device while it computes the next ones.
_AHEAD = 2

# By model, the step made last for each purpose and what it was made for. A step knows its model by
# a proxy alone: a value that held its key would keep it for ever.
_steps: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def evaluate(
    model: Any,
    data: Any,
    *,
    batch_size: int | None = None,
    sample_weight: Any = None,
    steps: int | None = None,
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
    strategy = _check_model(model, "test_step", "compute_loss", "compute_metrics")
    _check_steps(steps)
    if sample_weight is not None:
        data = _with_weights(data, sample_weight)
    batches = _batches(data, strategy, batch_size, steps)
    check_labels(model, batches.element_spec)
    compiled, step = _evaluator(model, strategy, batches.element_spec)
    compiled.reset()
    totals: Totals | None = None
    left = steps
    iterator = iter(batches)
    while left is None or left > 0:
        asked = _BATCHES_PER_CALL if left is None else min(left, _BATCHES_PER_CALL)
        found = step.totals(iterator, asked)
        if found.steps:
            totals = found if totals is None else totals.plus(found)
        if found.steps < asked:
            break
        left = None if left is None else left - asked
    if totals is None:
        raise _no_batches(data)
    return _logs(step.report(totals), compiled)


def predict(
    model: Any, data: Any, *, batch_size: int | None = None, steps: int | None = None
) -> Any:
    """Predicts every example once, in the order of the data.

    Runs on the strategy in whose scope the model was created, one device where in none. Under
    several workers every worker calls it and gets all predictions. The model need not be compiled.

    Args:
        model: A Keras model.
        data: Arrays ``x``, a dict or a list of them for several inputs; or what
            ``distribute_dataset`` takes or returned. Of batches ``(x, y)`` or
            ``(x, y, sample_weight)`` only x is used.
        batch_size: Rows of a global batch, for arrays only; 32 where None.
        steps: Batches at most. None: all of them.

    Returns:
        Arrays of shape ``[examples, ...]`` in the structure of the model's outputs, with their
        dtypes (text as bytes); ragged and sparse outputs stay tensors.

    Raises:
        CompileError: The model replaces ``predict_step``.
        ScopeError: The model was created outside the scope.
        DataError: The data has no end and ``steps`` is None; or no batches; or is no data; or the
            outputs of different batches do not fit together.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> model.set_weights([np.ones((2, 1))])
        >>> tmg.predict(model, np.arange(6).reshape(3, 2)).tolist()
        [[1.0], [5.0], [9.0]]
    """
    check_backend()
    strategy = _check_model(model, "predict_step")
    _check_steps(steps)
    if isinstance(data, list) and any(hasattr(item, "__array__") for item in data):
        data = (tuple(data),)  # Several inputs, as in Keras; a tuple would be (x, y).
    batches = _batches(data, strategy, batch_size, steps)
    step = _predictor(model, strategy, batches.element_spec)
    waiting: deque[Any] = deque()
    outputs: list[Any] = []
    for batch in itertools.islice(batches, steps):
        waiting.append(step(batch))
        if len(waiting) > _AHEAD:
            outputs.append(_to_host(waiting.popleft()))
    outputs.extend(_to_host(output) for output in waiting)
    if not outputs:
        raise _no_batches(data)
    return tf.nest.map_structure(_join, *outputs)


def _check_model(model: Any, *methods: str) -> tf.distribute.Strategy:
    import keras

    if isinstance(model, keras.Model):
        strategy = strategy_of(model)
        check_keeps_to(model, *methods)
    else:
        strategy = tf.distribute.get_strategy()
        check_kinds(model, strategy)
        if "test_step" in methods:
            raise TypeError(
                f"evaluate takes a compiled keras.Model. Received: {type(model).__name__}, a layer."
            )
    return strategy


def _check_steps(steps: Any) -> None:
    if tf.inside_function():
        raise DataError(
            "evaluate and predict go over whole data and return numbers, so they cannot be part of "
            "a tf.function. Call them outside of it; inside, call the steps that "
            "tmg.make_eval_step and tmg.make_predict_step return."
        )
    if steps is not None and (not isinstance(steps, (int, np.integer)) or steps < 1):
        raise ValueError(f"steps is a whole number, at least 1, or None. Received: steps={steps}.")


def _batches(
    data: Any, strategy: tf.distribute.Strategy, batch_size: int | None, steps: int | None
) -> ShardedDataset:
    """Shards for the replicas; refuses data without end."""
    if isinstance(data, ShardedDataset):
        if data.strategy is not strategy:
            raise DataError(
                "The data was distributed for another strategy than the one the model was created "
                f"in. Received: {_name(data.strategy)}, and {_name(strategy)} of the model. Give "
                "the dataset itself, or distribute it for the strategy of the model."
            )
        if batch_size is not None:
            raise DataError(
                f"batch_size is for arrays. Received: batch_size={batch_size} with data that is "
                "already distributed."
            )
        batches = data
    else:
        if batch_size is None and _is_arrays(data):
            batch_size = 32
        batches = distribute_dataset(data, strategy, batch_size=batch_size)
    if steps is None and _has_no_end(data, batches):
        raise DataError(
            "The data has no end, so a pass over it would never finish. Received: "
            f"{type(data).__name__} and steps=None. Say how many batches: steps=100, or leave out "
            ".repeat()."
        )
    return batches


def _has_no_end(data: Any, batches: ShardedDataset) -> bool:
    if getattr(data, "num_batches", 0) is None:
        return True  # A PyDataset says so in this way.
    try:
        len(batches)
    except UnknownLengthError as error:
        return "infinite" in str(error)
    return False


def _is_arrays(data: Any) -> bool:
    if isinstance(data, (tf.data.Dataset, tf.data.Iterator, tf.distribute.DistributedDataset)):
        return False
    return all(
        leaf is None or hasattr(leaf, "__array__") or isinstance(leaf, (bool, int, float, str))
        for leaf in tf.nest.flatten(data)
    )


def _with_weights(data: Any, sample_weight: Any) -> Any:
    if not (isinstance(data, tuple) and len(data) == 2 and _is_arrays(data)):
        raise DataError(
            "sample_weight is for arrays (x, y). Received: sample_weight with data of type "
            f"{type(data).__name__}. A dataset yields the weights itself: (x, y, sample_weight)."
        )
    return (*data, sample_weight)


def _evaluator(
    model: Any, strategy: tf.distribute.Strategy, spec: Any
) -> tuple[Compiled, EvalStep]:
    def make() -> tuple[Compiled, EvalStep]:
        compiled = read_compiled(model, strategy, spec)
        step = make_eval_step(
            weakref.proxy(model),
            compiled.losses,
            strategy,
            metrics=compiled.metrics,
            weighted_metrics=compiled.weighted_metrics,
            loss_weights=compiled.loss_weights,
        )
        return compiled, step

    _build(model, strategy, spec)
    # Compiling again, freezing a layer or adding one is another evaluation.
    variables = tuple((id(one), one.trainable) for one in model.variables)
    key = strategy, id(compile_arguments(model)), variables
    found: tuple[Compiled, EvalStep] = _cached(model, "evaluate", key, make)
    return found


def _predictor(model: Any, strategy: tf.distribute.Strategy, spec: Any) -> Any:
    _build(model, strategy, spec)
    key = strategy, tuple(id(one) for one in model.variables)
    return _cached(model, "predict", key, lambda: make_predict_step(weakref.proxy(model), strategy))


def _build(model: Any, strategy: tf.distribute.Strategy, spec: Any) -> None:
    if not model.built:
        prepare_model(model, strategy, spec)


def _cached(model: Any, purpose: str, key: Any, make: Callable[[], Any]) -> Any:
    """The step made before for the same key, so that it is not traced again.

    What a key has the ``id`` of is kept alive by the step itself.
    """
    known = _steps.setdefault(model, {})
    if purpose not in known or known[purpose][0] != key:
        known[purpose] = key, make()
    return known[purpose][1]


def _logs(reported: Mapping[str, float], compiled: Compiled) -> dict[str, Any]:
    """What is returned, as Keras does it: the losses of outputs only where there are several."""
    outputs = {name: reported[name] for name in reported if name.endswith("_loss")}
    logs: dict[str, Any] = {"loss": reported["loss"], **(outputs if len(outputs) > 1 else {})}
    for name, value in compiled.results().items():
        logs.update(value if isinstance(value, Mapping) else {name: value})
    return {name: _number(logs[name]) for name in sorted(logs)}


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array


def _to_host(output: Any) -> Any:
    composite = (tf.RaggedTensor, tf.SparseTensor)
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or isinstance(leaf, composite) else leaf.numpy(), output
    )


def _join(*parts: Any) -> Any:
    if parts[0] is None:
        return None
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True)
    if isinstance(parts[0], tf.RaggedTensor):
        return tf.concat(parts, axis=0)
    shapes = {np.shape(part)[1:] for part in parts}
    if np.ndim(parts[0]) == 0:
        raise DataError(
            "Predictions are put together row by row, and this output has no rows: it is one "
            "number for a batch. Return one value per row."
        )
    if len(shapes) > 1:
        raise DataError(
            "The predictions of different batches differ in more than their number of rows, so "
            f"that they do not make one array. Received: rows of shapes {sorted(shapes)}. Pad the "
            "inputs to one length, or use make_predict_step and keep the batches apart."
        )
    return np.concatenate(parts)


def _no_batches(data: Any) -> DataError:
    return DataError(
        f"The data has no batches. Received: {type(data).__name__}. Check its source, or a "
        "filter or take() that leaves nothing."
    )


def _name(strategy: tf.distribute.Strategy) -> str:
    return f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replica(s)"
