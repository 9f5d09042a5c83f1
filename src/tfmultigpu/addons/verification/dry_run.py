"""Functions that run as if they had not: what they change is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import any_rows

__all__ = ["DryRun"]


class DryRun:
    """A traced function of batches that leaves all variables as they were.

    Only what its results need is run: no print or count of the user beside them. Variables that
    this changes all the same, such as the state of a generator, are put back.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Takes ``f(*batches)``, which returns a nested structure of tensors."""
        self._function = tf.function(function, autograph=False, reduce_retracing=True)
        self._pruned: dict[
            int, tuple[Any, Any]
        ] = {}  # The traced function is kept: ids are reused.

    def __call__(self, *batches: Any) -> Any:
        """Runs it; batches of other numbers of rows are not traced anew."""
        specs = tf.nest.map_structure(any_rows, batches)
        concrete = self._function.get_concrete_function(*specs)
        if id(concrete) not in self._pruned:
            self._pruned[id(concrete)] = concrete, _prune(concrete)
        pruned = self._pruned[id(concrete)][1]
        before = [(handle, _read(handle)) for handle in pruned.captured_inputs if _is_set(handle)]
        try:
            leaves = tf.nest.flatten(batches, expand_composites=True)
            return pruned(*[leaf for leaf in leaves if leaf is not None])
        finally:
            for handle, value in before:
                with tf.device(handle.device):
                    tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _prune(concrete: Any) -> Any:
    # ``wrap_function`` has the only public ``prune``, and no control dependencies: what reads a
    # variable would not wait for what assigns it. So the graph is that of the ``tf.function``.
    donor = tf.compat.v1.wrap_function(lambda: tf.zeros([]), [])
    wrapped = type(donor)(concrete.graph, donor._variable_holder)
    return wrapped.prune(wrapped.inputs, concrete.structured_outputs)


def _is_set(handle: Any) -> bool:
    """Returns whether a captured tensor is the handle of a variable with a value."""
    if handle.dtype != tf.resource or not getattr(handle, "_handle_data", None):
        return False
    if not handle._handle_data.is_set:
        return False
    with tf.device(handle.device):
        return bool(tf.raw_ops.VarIsInitializedOp(resource=handle))


def _read(handle: Any) -> Any:
    dtype = tf.as_dtype(handle._handle_data.shape_and_type[0].dtype)
    with tf.device(handle.device):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
