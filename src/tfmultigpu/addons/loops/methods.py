"""Keras' own methods on one model object: called, and replaced for a time."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from tfmultigpu.addons.loops.loop import Loop

_MARK = "_of_tfmultigpu"
_ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")


def marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that ``is_ours`` knows."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(call, _MARK, True)
    return call


def is_ours(method: Any) -> bool:
    """Returns whether a function stands on a model only for a time, in place of its method."""
    return bool(getattr(method, _MARK, False))


@contextmanager
def as_keras_made_it(model: Any) -> Iterator[None]:
    """Takes our functions off a model for a time."""
    ours = {name: vars(model).pop(name) for name, value in [*vars(model).items()] if is_ours(value)}
    try:
        yield
    finally:
        vars(model).update(ours)


def around(loop: Loop) -> dict[str, Any]:
    """Returns what the loop of Keras needs around our functions, as attributes of the model.

    It would build again what ``train_step`` of Keras needs, which may fail, and read and reset
    metrics that nothing updates. Private: ``_symbolic_build``; without it Keras builds.
    """
    replicas = loop.feed.batches.strategy.num_replicas_in_sync
    refused = _ON_BATCH if replicas > 1 else _ON_BATCH[:2]
    return {
        "steps_per_execution": 1,
        "_symbolic_build": marked(lambda **_: None),
        "reset_metrics": marked(lambda: loop.reset()),
        "get_metrics_result": marked(lambda: dict(loop.logs)),
        **{name: marked(functools.partial(_refuse, name)) for name in refused},
    }


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"model.{name} of Keras would put the rows of its batch into the metrics and the replicas "
        f"of the loop that runs. Received: {name} in a callback. Write self.model.evaluate(x, y) "
        "or self.model.predict(x) there; to train, a step of tmg.make_train_step."
    )


def run_keras(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Runs Keras' own ``fit``, ``evaluate`` or ``predict``.

    That is below ``keras.Model``, whose methods MLflow and others replace, and without the filter
    of tracebacks, which drops the causes of errors.
    """
    import keras

    method = getattr(super(keras.Model, model), name)
    with warnings.catch_warnings():
        # Data of unknown length has ended: that is how it is told to Keras.
        warnings.filterwarnings("ignore", "Your input ran out of data; interrupting training")
        return inspect.unwrap(method.__func__)(model, *args, **kwargs)


def as_method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function, which takes arguments by name, as a method of Keras."""
    import keras

    signature = inspect.signature(getattr(keras.Model, name))
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD][1:]
    signature = signature.replace(parameters=own)

    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown := kwargs.keys() - signature.parameters.keys():
            raise TypeError(
                f"model.{name} runs tmg.{name} here, which takes the public arguments of Keras. "
                f"Received: {sorted(unknown)}. Give arguments of tmg.fit to "
                "tmg.prepare(model, micro_batches=2)."
            )
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(**{**bound.arguments, "callbacks": bound.arguments["callbacks"] or ()})

    method = marked(call)
    method.__name__ = name
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method
