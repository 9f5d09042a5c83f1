"""``predict``: every example once, in the order of the data."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu.addons.loops.cache import build_if_needed, checked_strategy, get_or_make
from tfmultigpu.addons.loops.feed import Feed
from tfmultigpu.addons.loops.hooks import Hooks
from tfmultigpu.addons.loops.inputs import Reading, check_steps, feed_of, source_of
from tfmultigpu.addons.loops.loop import no_batches
from tfmultigpu.addons.loops.methods import OfLoop, refuse_own_methods, run_keras
from tfmultigpu.errors import DataError
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.make import make_predict_step
from tfmultigpu.steps.predict import PredictStep
from tfmultigpu.strategies.scopes import check_backend
from tfmultigpu.types import KerasModel, Model, Nested, Shard, Verbose, Verify

# Outputs that may stay on the device while it computes the next ones.
_AHEAD = 2


def predict(
    model: Model,
    data: Any = None,
    batch_size: int | None = None,
    verbose: Verbose = "auto",
    steps: int | None = None,
    callbacks: Any = (),
    *,
    x: Any = None,
    verify: Verify = "first",
) -> Nested:
    """Predicts every example once, in the order of the data.

    Runs on the strategy in whose scope the model was created, or else on one device. All workers
    must call it, and all get every prediction. The model need not be compiled.

    Args:
        model: A Keras model.
        data: An array ``x``, or a dict or list of arrays for several inputs; or an argument or
            result of ``distribute_dataset``. Batches ``(x, y)`` or ``(x, y, sample_weight)`` are
            valid too; only x is used.
        batch_size: Examples in a global batch, for arrays only; None means 32.
        verbose: 0, 1 (a progress bar), 2 (a line) or ``"auto"``, which is 1. Only the chief prints.
        steps: The largest number of batches; None means all.
        callbacks: Keras callbacks, whose ``on_predict_...`` hooks are called.
        x: Keras' name of ``data``.
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
    steps = check_steps(steps)
    source = source_of("predict", data, x=x)
    if isinstance(source.data, list) and any(map(_is_array, source.data)):
        # Several inputs, as in Keras; a tuple would be (x, y).
        source = dataclasses.replace(source, data=(tuple(source.data),))
    with feed_of(model, strategy, source, Reading("prediction", batch_size, steps)) as feed:
        step = _step_of(model, strategy, feed, verify)
        check_values_alike(strategy, model)
        hooks = Hooks(callbacks, model, strategy, verbose=verbose, steps=feed.steps)
        loop = PredictionLoop(feed, step)
        of_loop = OfLoop(
            model, predict_function=loop, make_predict_function=lambda: loop, steps_per_execution=1
        )
        of_callbacks = PredictionCallbacks(hooks, loop)
        try:
            run_keras(model, "predict", feed, of_callbacks, steps=feed.steps, of_loop=of_loop)
        except UnboundLocalError:  # Of Keras, without data.
            if loop.output is not None:
                raise
    outputs = loop.outputs()
    if not outputs:
        raise no_batches(source.data)
    return tf.nest.map_structure(_join, *outputs)


def _is_array(item: object) -> bool:
    return tf.is_tensor(item) or hasattr(item, "__array__")


def _step_of(
    model: KerasModel, strategy: tf.distribute.Strategy, feed: Feed, verify: Verify
) -> PredictStep:
    """Returns a step that predicts such batches: the last one, if it fits."""
    build_if_needed(model, strategy, feed.element_spec)
    proxy: KerasModel = weakref.proxy(model)

    def make() -> PredictStep:
        return make_predict_step(proxy, strategy, verify=verify)

    key = strategy, tuple(map(id, proxy.variables)), verify
    step: PredictStep = get_or_make(model, "predict", key, make)
    return step


class PredictionLoop:
    """``model.predict_function``: keeps the outputs, a few of them on the device.

    Keras would keep all on the device, and make ragged what does not fit.

    Attributes:
        feed: The data.
        output: The outputs of the last batch.
    """

    def __init__(self, feed: Feed, step: PredictStep) -> None:
        self.feed, self._step = feed, step
        self.output: Shard = None
        self._on_device: deque[Shard] = deque()
        self._on_host: list[Shard] = []

    def __call__(self, feed: Feed) -> tuple[()]:
        """Predicts the next batch."""
        assert self.feed.iterator is not None
        self.output = self._step(next(self.feed.iterator))
        self._on_device.append(self.output)
        if len(self._on_device) > _AHEAD:
            self._on_host.append(_to_host(self._on_device.popleft()))
        return ()

    def outputs(self) -> list[Shard]:
        """Returns the outputs of all batches, in order."""
        return [*self._on_host, *map(_to_host, self._on_device)]


class PredictionCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of a prediction, as the loop of Keras calls them."""

    def __init__(self, hooks: Hooks, loop: PredictionLoop) -> None:
        # ``hooks`` has given its callbacks their model and their parameters.
        super().__init__(hooks.callbacks)
        self._hooks, self._loop = hooks, loop

    def on_predict_begin(self, logs: Any = None) -> None:
        """Begins the pass, once its callbacks know that it begins."""
        super().on_predict_begin(logs)
        self._loop.feed.begin_epoch()

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Calls the hooks with the outputs, which Keras is not given."""
        super().on_predict_batch_end(batch, {"outputs": self._loop.output})
        self._hooks.agree_on_stopping("stop_predicting")


def _to_host(output: Shard) -> Shard:
    """Returns outputs as arrays; what has none, such as a ragged tensor, stays as it is."""

    def to_host(leaf: Shard) -> Shard:
        return leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf

    return tf.nest.map_structure(to_host, output)


def _join(*parts: Shard) -> Shard:
    """Returns one output of all batches."""
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
