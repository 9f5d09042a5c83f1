"""Methods of Keras on one model object, replaced for a time by functions of this library."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu.loops.evaluate import evaluate
from tfmultigpu.loops.own_methods import own_methods
from tfmultigpu.loops.predict import predict
from tfmultigpu.types import Verify

__all__ = [
    "evaluating_in_callbacks",
    "evaluation_methods",
    "like_keras",
    "replace_methods",
    "restore_methods",
]

_log = logging.getLogger("tfmultigpu")
_NOTHING = object()


def replace_methods(model: Any, methods: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Puts functions in the place of methods of one model object.

    Returns:
        The state that ``restore_methods`` takes to undo it.
    """
    before = {name: vars(model).get(name, _NOTHING) for name in methods}
    vars(model).update(methods)  # Not by setattr, with which Keras would track them.
    return before


def restore_methods(model: Any, before: Mapping[str, Any]) -> None:
    """Undoes ``replace_methods``."""
    for name, value in before.items():
        if value is _NOTHING:
            vars(model).pop(name, None)
        else:
            vars(model)[name] = value


def evaluation_methods(
    model: Any, arguments: Callable[[str], Mapping[str, Any]]
) -> dict[str, Callable[..., Any]]:
    """Returns ``evaluate`` and ``predict`` of this library as methods, which hold the model weakly.

    Args:
        model: The model.
        arguments: From the name of the method to further arguments, asked at each call.
    """
    known = weakref.ref(model)

    def method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return like_keras(name)(lambda **given: function(known(), **given, **arguments(name)))

    return {"evaluate": method("evaluate", evaluate), "predict": method("predict", predict)}


@contextmanager
def evaluating_in_callbacks(
    model: Any, strategy: tf.distribute.Strategy, verify: Verify
) -> Iterator[None]:
    """Makes ``evaluate`` and ``predict`` of a model on several replicas run those of this library.

    Callbacks call ``self.model.evaluate``. Keras' own gives other numbers on several replicas, and
    would run a ``test_step`` on the rows of each replica alone. Methods that a class or an object
    defines itself are left alone.

    Args:
        model: The model that ``fit`` trains.
        strategy: Its strategy.
        verify: See ``make_eval_step``.
    """
    own = own_methods(model, "evaluate", "predict")
    if strategy.num_replicas_in_sync == 1 or own:
        yield
        return

    def arguments(name: str) -> dict[str, Any]:
        _say_once()
        return {"verify": verify}

    before = replace_methods(model, evaluation_methods(model, arguments))
    try:
        yield
    finally:
        restore_methods(model, before)


@functools.cache
def _say_once() -> None:
    _log.warning("In callbacks of tmg.fit, model.evaluate and model.predict run those of tmg.")


def like_keras(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a function the arguments of a method of Keras, which it takes by name."""
    import keras

    signature = inspect.signature(getattr(keras.Model, name))
    own = list(signature.parameters.values())[1:]  # Without self.
    own = [one for one in own if one.kind is not inspect.Parameter.VAR_KEYWORD]
    signature = signature.replace(parameters=own)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            unknown = [one for one in kwargs if one not in signature.parameters]
            if unknown:
                raise TypeError(
                    f"model.{name} runs tmg.{name} here, which takes the public arguments of "
                    f"Keras. Received: {unknown[0]}={kwargs[unknown[0]]!r}. Give "
                    "arguments of tmg.fit to fit_here: with tmg.fit_here(model, micro_batches=2)."
                )
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            given["callbacks"] = () if given["callbacks"] is None else given["callbacks"]
            return function(**given)

        call.__name__ = name
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
