"""Variables of TensorFlow: found by the handles in a function, and made of others."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from tfmultigpu.types import Function, Tensor


def variables_of(concrete: Any) -> list[tuple[Tensor, tf.DType]]:
    """Returns the handle and the dtype of each variable that a concrete function can assign.

    Private: ``_handle_data`` of a resource, which tells the dtype of a variable. ``variables`` of a
    function leaves out those that it only assigns. Without it none is found.
    """
    handles = [tensor for tensor in concrete.captured_inputs if tensor.dtype == tf.resource]
    found = []
    for handle in handles:
        data = getattr(handle, "_handle_data", None)
        with tf.device(handle.device):
            if data and data.is_set and tf.raw_ops.VarIsInitializedOp(resource=handle):
                dtype = tf.as_dtype(data.shape_and_type[0].dtype)
                found.append((handle, dtype))
    return found


def is_variable_handle(handle: Tensor) -> bool:
    """Returns whether a resource is a variable, not a table, a queue or an iterator.

    Private: ``_handle_data`` of a resource, as above. Without it every resource would be a
    variable.
    """
    data = getattr(handle, "_handle_data", None)
    return bool(data and data.is_set) or not hasattr(handle, "_handle_data")


def variable_of_handle(handle: Tensor) -> tf.Variable | None:
    """Returns the variable of a strategy one of whose copies has a handle; None for another tensor.

    Private: ``handle._distributed_container``. A function captures the handles of the copies on one
    replica, and no public name leads from there to the other copies. Without it each replica needs
    a trace of its own.
    """
    container: Function = getattr(handle, "_distributed_container", lambda: None)
    variable: tf.Variable | None = container()
    return variable


def variables_summed_when_read() -> Any:
    """Returns the class of variables with a value on each replica, combined when they are read.

    Private: ``tensorflow.python.distribute.values.SyncOnReadVariable``; ``tf.Variable`` makes one
    under a strategy, and no public name is called when it is assigned. Without it each replica adds
    the rows of a small batch, of which all have a copy.
    """
    return pkgutil.resolve_name("tensorflow.python.distribute.values:SyncOnReadVariable")


class ComposedVariable(tf.Variable):
    """A variable made of others, of which Keras and TensorFlow ask what they ask of their own.

    Private: ``_unique_id``, by which Keras finds what an optimizer keeps of a variable;
    ``_distribute_strategy``, by which a strategy knows its variables; and
    ``_export_to_saved_model_graph``, which writes one to a SavedModel. The public class says
    nothing of them. Without them an optimizer has no slots of the variable, the strategy does not
    take it for one of its own, and TensorFlow says in words of its own that it cannot be exported.
    """

    def take_place(
        self,
        identity: str,
        strategy: tf.distribute.Strategy,
        refuse_export: Callable[[], NoReturn],
    ) -> None:
        """Sets the identity, the strategy in whose scope it is, and who raises for a SavedModel."""
        self._unique_id = identity
        self._distribute_strategy = self.distribute_strategy = strategy
        self.refuse_export = refuse_export

    def _export_to_saved_model_graph(self, *_: object, **__: object) -> NoReturn:
        self.refuse_export()


def is_for_checkpoints(attribute: str) -> bool:
    """Returns whether TensorFlow keeps something for checkpoints in attributes of that name.

    Private: the prefix ``_self_`` of attributes that TensorFlow sets in each object which a
    checkpoint may hold; no public name lists them. Without it an optimizer that was restored would
    seem to have other settings, and its steps would be traced once more.
    """
    return attribute.startswith("_self_")
