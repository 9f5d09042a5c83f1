"""Private attributes of TensorFlow that only this add-on needs; ``_compat`` has the others.

Each function names the attribute, why the public API is not enough, and what happens without it.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu.types import KerasVariable

_WRITES = ("assign", "scatter_", "batch_scatter", "_strided_slice_assign")
_around = threading.local()


def variable_on_device(
    strategy: tf.distribute.Strategy,
    device: str,
    value: Any,
    name: str,
    *,
    trainable: bool,
    check_write: Callable[[Any, str], None],
) -> Any:
    """Creates a variable of a strategy that lives on one of its devices alone.

    Private: the class ``ResourceVariable`` and its argument ``distribute_strategy``. In a scope the
    public ``tf.Variable`` makes a copy on each device, and outside it a variable belongs to no
    strategy. ``check_write`` is called before each write with the variable and the method's name.
    """
    with tf.init_scope(), tf.device(device):
        variable: KerasVariable = _variable_class()(
            initial_value=value, trainable=trainable, name=name, distribute_strategy=strategy
        )
    variable.begin(strategy, check_write)
    return variable


def path_of(name: str) -> str:
    """Returns the path of a Keras variable that is about to be created under a name.

    Private: ``keras.src.backend.common.name_scope.current_path``. The public ``variable.path``
    exists only afterwards. Without it an error has the name alone, such as 'kernel'.
    """
    from keras.src.backend.common import name_scope

    current_path: Any = getattr(name_scope, "current_path", lambda: "")
    return "/".join(part for part in (current_path(), name) if part)


@contextmanager
def reading_before_loops(graph: Any) -> Iterator[list[Any]]:
    """Has loops in a graph take the value of a ``variable_on_device``, not the variable.

    A loop of a layer, such as an LSTM's, would read its weights in each turn, and keep all
    that for the backward pass. Private: ``_read_variable_op`` of the class ``ResourceVariable``,
    and the classes of the graphs of loops. Without them each turn reads. Yields the operations that
    give loops these values, on the device of the loop; on this thread.
    """
    before = getattr(_around, "reads", None)
    _around.reads = graph, []
    try:
        yield _around.reads[1]
    finally:
        _around.reads = before


def _outermost_loop(graph: Any) -> Any:
    graphs: Any = importlib.import_module("tensorflow.python.ops.control_flow_v2_func_graphs")
    loops = graphs.WhileBodyFuncGraph, graphs.WhileCondFuncGraph
    inner: Any = tf.compat.v1.get_default_graph()
    outermost = None
    # A tf.function may be called again elsewhere, so nothing outside of it is taken into it.
    while inner is not graph and isinstance(inner, graphs.ControlFlowFuncGraph):
        outermost = inner if isinstance(inner, loops) else outermost
        inner = inner.outer_graph
    return outermost


@functools.cache
def _variable_class() -> Any:
    variables: Any = importlib.import_module("tensorflow.python.ops.resource_variable_ops")

    class VariableOnDevice(variables.ResourceVariable):  # type: ignore[misc]
        """Variable that loops read once, and whose writes are checked first."""

        check_write: Any = None  # There is none while it is initialized.

        def begin(
            self, strategy: tf.distribute.Strategy, check_write: Callable[[Any, str], None]
        ) -> None:
            """Has writes checked from now on."""
            self.check_write = check_write
            self.distribute_strategy = strategy  # As all other variables with a strategy have it.

        def take_identity(self, identity: str) -> str:
            """Changes its identity, if one is given, and returns it."""
            own: str = identity or vars(self)["_unique_id"]
            self._unique_id = own
            return own

        def _read_variable_op(self, no_copy: bool = False) -> Any:
            graph, operations = getattr(_around, "reads", None) or (None, [])
            loop = None if graph is None or tf.executing_eagerly() else _outermost_loop(graph)
            if loop is None:
                return super()._read_variable_op(no_copy)
            # Each time anew: a tape that is opened later sees only what is read after that.
            with loop.outer_graph.as_default():
                with tf.device(self.device):
                    value = super()._read_variable_op(no_copy)
                value = tf.identity(value)
            operations.append(value.op)
            return value

    for name in dir(VariableOnDevice):
        if name.startswith(_WRITES):
            setattr(VariableOnDevice, name, _checked(name, getattr(VariableOnDevice, name)))
    return VariableOnDevice


def _checked(name: str, write: Callable[..., Any]) -> Callable[..., Any]:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        if self.check_write is not None:
            self.check_write(self, name)
        return write(self, *args, **options)

    return checked  # type: ignore[no-any-return]


def replace_input(operation: Any, index: int, tensor: Any) -> None:
    """Gives an operation of a graph another tensor as one of its inputs.

    Private: ``operation._update_input``. A ``GradientTape`` gives the backward pass the tensors of
    the forward pass, and no public name changes that. Without it a copy of a weight of another
    device stays until the backward pass has used it.
    """
    operation._update_input(index, tensor)


def share_identity(variables: Sequence[Any]) -> str:
    """Gives variables the identity of the first, by which Keras finds what an optimizer keeps.

    Private: ``variable._unique_id``, which Keras asks of a variable of TensorFlow. Without it Keras
    knows no part of a table, and says so when it updates one.
    """
    identity = ""
    for variable in variables:
        identity = variable.take_identity(identity)
    return identity
