"""Private names of the graphs of TensorFlow: what they do, how they run, and their gradients."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import tensorflow as tf

from tfmultigpu.types import Function, Options, Tensor


def is_stateful(operation: str) -> bool:
    """Returns whether operations of a type change something, or read what others change.

    Private: ``tensorflow.python.framework.op_def_registry``. An operation of a graph has its
    ``op_def``; those in the functions that it calls are only names. Without it they are not seen.
    """
    definition = _definition_of(operation)
    return definition is not None and definition.is_stateful


def types_of_inputs(operation: str) -> list[tf.DType]:
    """Returns the dtypes of the inputs of a type of operations; private as above."""
    definition = _definition_of(operation)
    arguments = () if definition is None else definition.input_arg
    return [tf.as_dtype(argument.type) for argument in arguments if argument.type]


def _definition_of(operation: str) -> Any:
    try:
        get: Function = pkgutil.resolve_name("tensorflow.python.framework.op_def_registry:get")
    except (ImportError, AttributeError):
        return None
    return get(operation)


@contextmanager
def waiting_for(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Has all that is computed and assigned in the context wait for tensors, but for scalars.

    Private: ``operation._add_control_inputs``. With ``tf.control_dependencies`` the learning rate
    and the powers of Adam, a dozen scalars for each variable, wait as well, and are not folded.
    Without it no step is traced.
    """
    gate, graph = tf.group(*tensors), tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    for new in graph.get_operations()[before:]:
        assigns = new.op_def.is_stateful and new.type != "ReadVariableOp"
        if new.type != "Placeholder" and (assigns or any(t.shape.rank != 0 for t in new.outputs)):
            add_control_inputs(new, [gate])


def add_control_inputs(operation: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Has an operation of a graph wait for others.

    Private: ``operation._add_control_inputs``. ``tf.control_dependencies`` must be known when the
    operation is made, and Keras reads a weight before it says what it is for. Without
    it no step is traced that reads sharded variables, or keeps its batch.
    """
    operation._add_control_inputs(list(others))


def graphs_inside(operation: Any) -> list[Any]:
    """Returns the graphs of the functions that an operation calls, such as the body of a loop.

    Private: ``graph._get_function``. The public ``graph.as_graph_def()`` copies the whole graph.
    Without it a loop that draws or assigns is seen as a whole, and not what in it does.
    """
    look_up = getattr(operation.graph, "_get_function", lambda _: None)
    names = [attr.name for attr in operation.op_def.attr if attr.type == "func"]
    functions = [look_up(operation.get_attr(name).name) for name in names]
    return [function.graph for function in functions if function is not None]


def operations_of(graph: Any) -> Iterator[Any]:
    """Yields the operations of a graph, and of the functions that they call."""
    for operation in graph.get_operations():
        yield operation
        for inside in graphs_inside(operation):
            yield from operations_of(inside)


def called_as_whole() -> Options:
    """Returns arguments of ``tf.function`` with which its calls stay calls of one function.

    Private: ``_noinline`` and ``_nospecialize``, attributes of functions that no page of TensorFlow
    lists, and the sets of ``attributes`` that say which of them ``tf.function`` takes. Without the
    first TensorFlow puts the operations of a function in place of each call, and optimizes each of
    them. Without the second it makes a copy for each call of which an output is not read, and
    prepares each copy: calls on one device cost as much as those on several.
    """
    attributes = {"_noinline": True}
    path = "tensorflow.python.eager.polymorphic_function.attributes"
    with suppress(ImportError):
        module: Any = importlib.import_module(path)
        sets = [name for name in vars(module) if name.endswith("_ALLOWLIST")]
        for name in sets:
            setattr(module, name, getattr(module, name) | {"_nospecialize"})
        if sets:
            attributes["_nospecialize"] = True
    return {"experimental_attributes": attributes}


@contextmanager
def without_rewriting() -> Iterator[None]:
    """Has functions that this thread calls run as they were traced.

    Private: ``function_call_options`` of ``tensorflow.python.eager.context``, for one thread. The
    public ``tf.config.optimizer.set_experimental_options`` is for the process, and to put it back
    makes TensorFlow prepare each function once more. Without it the context changes nothing.
    """
    try:
        context: Any = pkgutil.resolve_name("tensorflow.python.eager.context:context")()
        before = context.function_call_options
        config: Any = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    except (ImportError, AttributeError):
        yield
        return
    options = tf.compat.v1.GraphOptions(rewrite_options={"disable_meta_optimizer": True})
    config.graph_options.MergeFrom(options)

    def use(options: Any) -> None:
        context.function_call_options = options

    use(type(before)(before.executor_type, config))
    try:
        yield
    finally:
        use(before)


def kernels_are_deterministic() -> bool:
    """Returns whether ``tf.config.experimental.enable_op_determinism`` was called.

    Private: ``tensorflow.python.framework.config.is_op_determinism_enabled``; the public module can
    only switch it on. Without it True is returned, and no warning says that kernels of a GPU may
    add in any order.
    """
    config: Any = importlib.import_module("tensorflow.python.framework.config")
    ask: Any = getattr(config, "is_op_determinism_enabled", lambda: True)
    return bool(ask())


# Gradients ----------------------------------------------------------------------------------------


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
