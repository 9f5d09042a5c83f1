"""``predict``: every example once, in the order of the data."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import DataError
from tfmultigpu.loops.inputs import check_steps, no_batches, pass_batches
from tfmultigpu.loops.step_cache import build, checked_strategy, kept
from tfmultigpu.steps.train import make_predict_step
from tfmultigpu.steps.value_agreement import check_values_alike
from tfmultigpu.strategies.scopes import check_backend

__all__ = ["predict"]

# Predictions that may wait on a device while it computes the next ones.
_AHEAD = 2


def predict(
    model: Any,
    data: Any,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    verify: bool | str = "first",
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
        verify: See ``make_predict_step``.

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
    strategy = checked_strategy(model, "predict", "predict_step")
    check_steps(steps)
    if isinstance(data, list) and any(hasattr(item, "__array__") for item in data):
        data = (tuple(data),)  # Several inputs, as in Keras; a tuple would be (x, y).
    batches = pass_batches(data, strategy, batch_size, steps)
    step = _predictor(model, strategy, batches.element_spec, verify)
    check_values_alike(strategy, model)
    waiting: deque[Any] = deque()
    outputs: list[Any] = []
    for batch in itertools.islice(batches, steps):
        waiting.append(step(batch))
        if len(waiting) > _AHEAD:
            outputs.append(_to_host(waiting.popleft()))
    outputs.extend(_to_host(output) for output in waiting)
    if not outputs:
        raise no_batches(data)
    return tf.nest.map_structure(_join, *outputs)


def _predictor(model: Any, strategy: tf.distribute.Strategy, spec: Any, verify: bool | str) -> Any:
    build(model, strategy, spec)
    key = strategy, tuple(id(one) for one in model.variables), verify
    proxy = weakref.proxy(model)
    return kept(model, "predict", key, lambda: make_predict_step(proxy, strategy, verify=verify))


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
