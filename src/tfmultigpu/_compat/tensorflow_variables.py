"""Variables of TensorFlow, found by the handles that a function has of them."""

from __future__ import annotations

import tensorflow as tf

from tfmultigpu.types import ConcreteFunction, Function, Tensor


def variables_of(concrete: ConcreteFunction) -> list[tuple[Tensor, tf.DType]]:
    """Returns the handle and the dtype of each variable that a concrete function can assign.

    Private: ``_handle_data`` of a resource, which tells the dtype of a variable. ``variables`` of a
    function leaves out those that it only assigns.
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
