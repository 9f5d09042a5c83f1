"""``fit_here``: ``model.fit``, ``evaluate`` and ``predict`` of other people's code run ours."""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tfmultigpu.errors import LossError
from tfmultigpu.loops.fit import fit
from tfmultigpu.loops.mlflow_logging import is_of_mlflow
from tfmultigpu.loops.model_methods import (
    evaluation_methods,
    like_keras,
    replace_methods,
    restore_methods,
)
from tfmultigpu.loops.worker_agreement import is_chief
from tfmultigpu.strategies.scopes import check_backend
from tfmultigpu.strategies.topology import describe, strategy_of

__all__ = ["fit_here"]

_log = logging.getLogger("tfmultigpu")
_lock = threading.RLock()
_NAMES = ("fit", "evaluate", "predict")
# The options of the contexts that each model is in, the innermost last; and what its methods were.
_entered: weakref.WeakKeyDictionary[Any, list[Mapping[str, Any]]] = weakref.WeakKeyDictionary()
_before: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


@contextmanager
def fit_here(model: Any, **options: Any) -> Iterator[Any]:
    """Makes ``model.fit``, ``evaluate`` and ``predict`` of one model object run those of ``tmg``.

    For code that calls these methods itself: a tuner, a callback that calls
    ``self.model.evaluate``, a notebook. They take the arguments of Keras and return what Keras
    returns. Other models, also clones of this one, are not changed, nor is any class. After the
    block, also after an error, everything is as before.

    Args:
        model: A Keras model.
        **options: Arguments of ``fit`` that Keras does not have, such as ``micro_batches``,
            ``clip_norm`` or ``forward``; ``verify`` applies to all three.

    Yields:
        The model.

    Raises:
        LossError: The class of the model, or a library other than MLflow, has replaced one of
            the methods, which would be passed over.
        TypeError: It is not a model, or an option is unknown.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> with tmg.fit_here(model):
        ...     history = model.fit(np.ones((5, 2)), np.ones((5, 1)), verbose=0)
        >>> list(history.history)
        ['loss']
    """
    check_backend()
    import keras

    if not isinstance(model, keras.Model):
        raise TypeError(
            f"fit_here takes a keras.Model. Received: {type(model).__name__}. Write "
            "with tmg.fit_here(model): ..."
        )
    _check_options(options)
    _check_methods(model)
    frame = dict(options)
    with _lock:
        frames = _entered.setdefault(model, [])
        if not frames:
            _before[model] = replace_methods(model, _methods(model))
        frames.append(frame)
    strategy = strategy_of(model)
    if len(frames) == 1 and is_chief(strategy):
        _log.warning(
            "fit, evaluate and predict of model %r run those of tfmultigpu in this block, on %s.",
            model.name,
            describe(strategy),
        )
    try:
        yield model
    finally:
        with _lock:
            frames[:] = [one for one in frames if one is not frame]
            if not frames:
                restore_methods(model, _before.pop(model))


def _methods(model: Any) -> dict[str, Callable[..., Any]]:
    """Returns the methods that stand on the model; they hold it weakly."""
    known = weakref.ref(model)

    @like_keras("fit")
    def fit_method(**given: Any) -> Any:
        valid = given.pop("validation_data")
        given["validation_data"] = tuple(valid) if isinstance(valid, list) else valid
        return fit(cast(Any, known()), **{**given, **_options(known())})

    def arguments(name: str) -> dict[str, Any]:
        options = _options(known())
        if name == "evaluate":
            _check_evaluates(options)
        return {"verify": options["verify"]} if "verify" in options else {}

    return {"fit": fit_method, **evaluation_methods(model, arguments)}


def _options(model: Any) -> dict[str, Any]:
    _check_methods(model)
    return dict(_entered[model][-1])


def _check_options(options: Mapping[str, Any]) -> None:
    import keras

    theirs = inspect.signature(keras.Model.fit).parameters
    taken = {*theirs, "model", "data"}
    own = [name for name in inspect.signature(fit).parameters if name not in taken]
    unknown = [name for name in options if name not in own]
    if unknown:
        raise TypeError(
            f"fit_here takes the arguments of tmg.fit that Keras does not have: {', '.join(own)}. "
            f"Received: {unknown[0]}={options[unknown[0]]!r}. Give arguments of Keras to model.fit."
        )


def _check_evaluates(options: Mapping[str, Any]) -> None:
    """Checks that the compiled losses are what the block trains with.

    Raises:
        LossError: They are not.
    """
    own = [name for name in ("forward", "step") if options.get(name) is not None]
    if own:
        raise LossError(
            "model.evaluate runs tmg.evaluate inside tmg.fit_here, which computes compiled losses. "
            f"Received: fit_here with {own[0]}, whose loss it does not know. Write step = "
            "tmg.make_eval_step(model, None, strategy, forward=forward); logs = step.run(iter("
            "tmg.distribute_dataset(data, strategy)), steps)."
        )


def _check_methods(model: Any) -> None:
    """Checks that nobody but Keras has defined the methods of the model's class.

    Raises:
        LossError: Somebody has.
    """
    import keras

    home = str(Path(keras.__file__).parent)
    for name in _NAMES:
        method = getattr(type(model), name)
        if is_of_mlflow(method):  # fit logs to it.
            continue
        code = getattr(method, "__code__", None)
        if code is None or not code.co_filename.startswith(home):
            where = "an unknown place" if code is None else code.co_filename
            raise LossError(
                f"model.{name} is not that of Keras, so fit_here would pass over what it does "
                f"beside training. Received: {type(model).__name__}.{name}, defined in {where}. "
                "Call tmg.fit inside it, and without fit_here."
            )
