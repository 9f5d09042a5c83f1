"""Finds in the trace of a step effects and new variables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.errors import ScopeError
from tfmultigpu.steps.assignments import deferred_here
from tfmultigpu.types import Function, KerasVariable, Nested
from tfmultigpu.user_code import place_of_user


@contextmanager
def refusing_new_variables() -> Iterator[None]:
    """Refuses variables that code of the user creates in the context, on a replica of several.

    TensorFlow would fail with an error about placeholders, or Keras about a stateless scope. What
    works stays: Keras creates a variable with an initializer after that code, as for a metric that
    builds itself, and a ``tf.function`` of the user's creates its own before its second trace.
    """

    def create(original: Function, **options: object) -> Nested:
        if deferred_here() is not None:
            raise new_variable(_described(options.get("name")))
        return original(**options)

    def begin(original: Function, variable: KerasVariable, *args: object, **kwargs: object) -> None:
        initial = args[0] if args else kwargs.get("initializer")
        is_value = not (callable(initial) or isinstance(initial, str))
        if is_value and deferred_here() is not None:
            raise new_variable(_described(kwargs.get("name")))
        original(variable, *args, **kwargs)

    with tf.variable_creator_scope(create), patching(keras.Variable, "__init__", begin):
        yield


def _described(name: object) -> str:
    what = f"variable {name!r}" if name else "a variable"
    return f"{what}, created in {place_of_user()}"


def new_variable(received: str) -> ScopeError:
    """Returns the error for code of the user that creates a variable in a step."""
    return ScopeError(
        "A variable is created in a step, where each replica and each trace would create another.",
        received,
        "Create it once, before the step: in __init__ of a loss, metric or model, or in build "
        "of a layer, which is made in the scope:\n"
        "    with strategy.scope():\n"
        "        scale = keras.Variable(1.0, trainable=False)",
    )


@contextmanager
def noting_effects() -> Iterator[list[Any]]:
    """Yields a list that has, at the end, the operations of the context that may fail or change."""
    effects: list[Any] = []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield effects
    for made in graph.get_operations()[before:]:
        if made.op_def.is_stateful and made.type != "ReadVariableOp":
            effects.append(made)


def number_of_operations() -> int:
    """Returns how many operations the current graph has."""
    return len(tf.compat.v1.get_default_graph().get_operations())


def may_not_be_linear(begin: int) -> bool:
    """Returns whether gradients through the operations made since may not be linear.

    Args:
        begin: The ``number_of_operations`` before.
    """
    operations = tf.compat.v1.get_default_graph().get_operations()
    return any(map(_compat.may_not_be_linear, operations[begin:]))
