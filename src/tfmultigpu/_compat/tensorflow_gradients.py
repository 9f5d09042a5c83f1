"""Custom gradients in a graph, and what ``keras.remat`` wraps in them."""

from __future__ import annotations

import inspect
import pkgutil

from tfmultigpu.types import Function, Untyped


def custom_gradients() -> tuple[Untyped, str]:
    """Returns the module and the name of what each custom gradient in a graph goes through.

    Private: ``tensorflow.python.ops.custom_gradient._graph_mode_decorator``, which is called with
    the function, its arguments, and those by name. ``keras.remat`` may have wrapped a function long
    before a step is made, and no public name is called when the function is. Without it what is
    computed again draws other numbers than the forward pass, and assigns again.
    """
    return pkgutil.resolve_name("tensorflow.python.ops.custom_gradient"), "_graph_mode_decorator"


def rematerialized(function: Function) -> Function | None:
    """Returns what ``keras.remat`` wraps in the function of a custom gradient; None of others.

    Private: the name ``recompute_grad.<locals>.inner``, and its free variable ``f``. TensorFlow
    marks these functions in no other way. Without it each is left to TensorFlow, as above.
    """
    if getattr(function, "__qualname__", "") != "recompute_grad.<locals>.inner":
        return None
    inner: Function | None = inspect.getclosurevars(function).nonlocals.get("f")
    return inner
