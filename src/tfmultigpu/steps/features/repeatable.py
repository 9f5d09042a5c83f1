"""What a rematerialized function may do: what gives the same if it is called once more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.lists import present
from tfmultigpu.types import Function, Nested

Value: TypeAlias = Nested  # A tensor, or what else a function is given and gives.

# How the names of stateful operations begin that give the same once more, or do no harm.
_REPEATABLE = (
    *("ReadVariableOp", "ResourceGather", "Collective", "Nccl", "CudnnRNN"),
    *("Assert", "CheckNumerics", "Print"),
)


@contextmanager
def noting_operations() -> Iterator[list[Any]]:
    """Yields a list that has, at the end, the operations that this replica has made meanwhile.

    Replicas that meet, in a synchronized layer, take turns in one graph.
    """
    graph: Value = tf.compat.v1.get_default_graph()
    operations: list[Any] = []
    begin = len(graph.get_operations())

    def meet(original: Function, *args: Value, **kwargs: Value) -> Value:
        nonlocal begin
        operations.extend(graph.get_operations()[begin:])
        result = original(*args, **kwargs)
        begin = len(graph.get_operations())
        return result

    with patching(tf.distribute.ReplicaContext, "merge_call", meet):
        yield operations
    operations.extend(graph.get_operations()[begin:])


def check_effects(function: Function, operations: Sequence[Any]) -> None:
    """Checks that a function does nothing that a second call would do once more, or otherwise."""
    kinds = sorted({operation.type for operation in _effects(operations)})
    if kinds:
        raise TfMultiGpuError(
            "keras.remat calls a function once more in the backward pass, and this one does what "
            "cannot be repeated: a draw that is not Keras', an assignment in a loop or to a "
            "variable of TensorFlow, a table or a Python function.",
            f"{', '.join(kinds)} in {_name(function)}",
            "Do it outside and pass the result: keras.remat(function)(x, result). Draw by a "
            "keras.random.SeedGenerator.",
        )


def check_captures(
    function: Function,
    operations: Sequence[Any],
    inputs: Sequence[Value],
    trained: Sequence[Value],
) -> None:
    """Checks that no gradient is lost in a tensor that a function does not get as an argument.

    Args:
        function: The function.
        operations: What it has made.
        inputs: The tensors that it got.
        trained: The values that are trained.
    """
    made, given = set(operations), set(map(id, inputs))
    strange: dict[int, Value] = {}
    for operation in operations:
        for tensor in operation.inputs:
            is_own = tensor.op in made or id(tensor) in given
            # What has no inputs is a constant, or not computed by the model.
            if not is_own and tensor.dtype.is_floating and tensor.op.inputs:
                strange[id(tensor)] = tensor
    if not strange or not trained or not _depends(list(strange.values()), trained):
        return
    for tensor in strange.values():
        if _depends([tensor], trained):
            raise TfMultiGpuError(
                "A function in keras.remat uses a tensor that it does not get as an argument, and "
                "TensorFlow would give that tensor no gradient.",
                f"a tensor of shape {tuple(tensor.shape)}, {tensor.name!r}, in {_name(function)}",
                "Make it an argument: keras.remat(function)(x, tensor).",
            )


def not_the_same(function: Function, how: str) -> TfMultiGpuError:
    """Returns the error of a function that does something else when it is called once more."""
    return TfMultiGpuError(
        "keras.remat calls a function once more in the backward pass, and then this one does "
        f"something else: {how}.",
        _name(function),
        "It keeps something in Python, as the cells of RNN layers keep masks. Wrap the whole "
        "layer: keras.remat(layer)(x).",
    )


def _depends(tensors: list[Value], trained: Sequence[Value]) -> bool:
    return bool(present(tf.gradients(tensors, list(trained))))


def _effects(operations: Sequence[Any]) -> Iterator[Any]:
    for operation in operations:
        if not operation.op_def.is_stateful or operation.type.startswith(_REPEATABLE):
            continue
        inside = _compat.graphs_inside(operation)
        if not inside:
            yield operation
        for graph in inside:
            yield from _effects(graph.get_operations())


def _name(function: Function) -> str:
    owner = getattr(function, "__self__", function)
    if isinstance(owner, keras.Operation):
        return f"{type(owner).__name__} {owner.name!r}"
    return getattr(function, "__qualname__", repr(function))
