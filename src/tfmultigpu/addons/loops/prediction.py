"""``predict``: every example once, in the order of the data."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.loops.cache import build_if_needed, checked_strategy, get_or_make
from tfmultigpu.addons.loops.hooks import Hooks
from tfmultigpu.addons.loops.inputs import check_steps, feed_of, labelled
from tfmultigpu.addons.loops.loop import no_batches
from tfmultigpu.addons.loops.methods import OfLoop, refuse_own_methods, run_keras
from tfmultigpu.errors import DataError
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.make import make_predict_step
from tfmultigpu.strategies.scopes import check_backend
from tfmultigpu.types import Model, Scalar, Verbose, Verify

# Outputs that may stay on the device while it computes the next ones.
_AHEAD = 2


def predict(
    model: Model,
    data: Any = None,
    *,
    x: Any = None,
    batch_size: int | None = None,
    steps: int | None = None,
    callbacks: Any = (),
    verbose: Verbose = "auto",
    verify: Verify = "first",
) -> Any:
    """Predicts every example once, in the order of the data.

    Runs on the strategy whose scope the model was created in, or else on one device. All workers
    must call it, and all get every prediction. The model need not be compiled.

    Args:
        model: A Keras model.
        data: An array ``x``, or a dict or list of arrays for several inputs; or an argument or
            result of ``distribute_dataset``. Batches ``(x, y)`` or ``(x, y, sample_weight)`` are
            valid too; only x is used.
        x: Another name for ``data``, as in Keras.
        batch_size: Examples in a global batch, for arrays only; None means 32.
        steps: The largest number of batches; None means all.
        callbacks: Keras callbacks, whose ``on_predict_...`` hooks are called.
        verbose: 0, 1 (a progress bar), 2 (a line) or ``"auto"``, which is 1. Only the chief prints.
        verify: See ``make_predict_step``.

    Returns:
        Arrays of shape ``[examples, ...]`` in the structure of the model's outputs, with their
        dtypes (text as bytes). Ragged and sparse outputs stay tensors.

    Raises:
        LossError: The model replaces ``predict_step``.
        ScopeError: The model was created outside the scope.
        DataError: The data is empty, has no end and no ``steps``, or does not fit; or the outputs
            of the batches have different shapes.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> model.set_weights([np.ones((2, 1))])
        >>> tmg.predict(model, np.arange(6).reshape(3, 2), verbose=0).tolist()
        [[1.0], [5.0], [9.0]]
    """
    check_backend(model, callbacks)
    strategy = checked_strategy(model, "predict")
    refuse_own_methods(model, "predict")
    check_steps(steps)
    data = labelled(data, x, None, None, "predict")
    if isinstance(data, list) and any(tf.is_tensor(i) or hasattr(i, "__array__") for i in data):
        data = (tuple(data),)  # Several inputs, as in Keras; a tuple would be (x, y).
    with feed_of(model, "prediction", data, strategy, batch_size, steps) as feed:
        build_if_needed(model, strategy, feed.element_spec)
        proxy: Any = weakref.proxy(model)
        key = strategy, tuple(id(variable) for variable in proxy.variables), verify
        step = get_or_make(
            model, "predict", key, lambda: make_predict_step(proxy, strategy, verify=verify)
        )
        check_values_alike(strategy, model)
        hooks = Hooks(callbacks, model, strategy, verbose=verbose, epochs=1, steps=feed.steps)
        waiting: deque[Any] = deque()
        outputs: list[Any] = []
        hooks.read(feed)

        def run(_: Any) -> tuple[()]:
            hooks.outputs = step(next(feed.iterator))
            waiting.append(hooks.outputs)
            if len(waiting) > _AHEAD:
                outputs.append(_to_host(waiting.popleft()))
            return ()  # Keras would keep outputs on the device, and make ragged what does not fit.

        of_loop = OfLoop(
            model, predict_function=run, make_predict_function=lambda: run, steps_per_execution=1
        )
        try:
            run_keras(model, "predict", feed, steps=feed.steps, callbacks=hooks, of_loop=of_loop)
        except UnboundLocalError:  # Of Keras, without data.
            if waiting:
                raise
    outputs.extend(_to_host(output) for output in waiting)
    if not outputs:
        raise no_batches(data)
    return tf.nest.map_structure(_join, *outputs)


def _to_host(output: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, output
    )


def _join(*parts: Scalar) -> Any:
    if parts[0] is None:
        return None
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True)
    if isinstance(parts[0], tf.RaggedTensor):
        return tf.concat(parts, axis=0)
    shapes = sorted({np.shape(part)[1:] for part in parts})
    if np.ndim(parts[0]) and len(shapes) == 1:
        return np.concatenate(parts)
    what = f"examples of shapes {shapes}" if np.ndim(parts[0]) else "one value per batch"
    raise DataError(
        "The predictions of the batches do not make one array.",
        what,
        "Return one value per example, and pad the inputs to one length; or use "
        "tmg.make_predict_step and keep the batches apart.",
    )
