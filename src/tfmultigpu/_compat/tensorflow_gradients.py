"""Custom gradients in a graph, and what ``keras.remat`` wraps in them."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

from tfmultigpu.types import Function

_CALLS = {
    "PartitionedCall",
    "StatefulPartitionedCall",
    "If",
    "StatelessIf",
    "Case",
    "StatelessCase",
}
_CALLS |= {"While", "StatelessWhile"}


def custom_gradients() -> tuple[Any, str]:
    """Returns the module and the name of what each custom gradient in a graph goes through.

    Private: ``tensorflow.python.ops.custom_gradient._graph_mode_decorator``, which is called with
    the function, its arguments, and those by name. ``keras.remat`` may have wrapped a function long
    before a step is made, and no public name is called when the function is. Without it what is
    computed again draws other numbers than the forward pass, and assigns again.
    """
    return pkgutil.resolve_name("tensorflow.python.ops.custom_gradient"), "_graph_mode_decorator"


def additions() -> tuple[Any, str]:
    """Returns the module and the name of what adds the gradients of a tensor with several readers.

    Private: ``tensorflow.python.ops.gen_math_ops.add_n``, which tapes, loops and ``tf.add_n`` call;
    a tape calls no public name. Without it three gradients or more are added in an order that
    depends on which memory is free, and a step with logical replicas may end with other bits.
    """
    return pkgutil.resolve_name("tensorflow.python.ops.gen_math_ops"), "add_n"


def may_not_be_linear(operation: Any) -> bool:
    """Returns whether the gradient of an operation may be no linear function of what it is given.

    Private: the attribute ``_gradient_op_type``, by which an operation has a gradient of the user,
    as by ``tf.custom_gradient``; no public name leads to it. A call of a function may have such
    operations in it. Without it the copies of a small batch would add to the gradient.
    """
    if operation.type in _CALLS:
        return True
    try:
        operation.get_attr("_gradient_op_type")
    except ValueError:
        return False
    return True


def rematerialized(function: Function) -> Function | None:
    """Returns what ``keras.remat`` wraps in the function of a custom gradient; None of others.

    Private: the name ``recompute_grad.<locals>.inner``, and its free variable ``f``. TensorFlow
    marks these functions in no other way. Without it each is left to TensorFlow, as above.
    """
    if getattr(function, "__qualname__", "") != "recompute_grad.<locals>.inner":
        return None
    inner: Function | None = inspect.getclosurevars(function).nonlocals.get("f")
    return inner
