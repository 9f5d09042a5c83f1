"""Sums over replicas in the middle of a forward or backward pass, in few seconds of tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

__all__ = ["short_sums"]


@contextmanager
def short_sums() -> Iterator[None]:
    """Makes ``all_reduce`` of this replica cheap to trace inside the context; replica context.

    ``tf.custom_gradient`` walks from the result of a function back to its arguments, in search of
    variables. The result of an ``all_reduce`` also depends on the arguments of the other replicas,
    where the walk does not stop: it visits all that these replicas have computed, for each sum
    again. With a sum in each layer, as ``BatchNormalization(synchronized=True)`` has three of, the
    seconds of a trace grow with the square of the depth. Here each replica gives its argument as a
    constant, at which a walk ends, and the gradient is stated beside it. Values and gradients are
    those of TensorFlow: the gradient of a sum over replicas is the sum over replicas.

    Replaces a public method of this one object, so Keras, layers of the user and this library all
    add this way. Re-entrant: inside another such context nothing changes.
    """
    context: Any = tf.distribute.get_replica_context()
    own = vars(context)  # Of this context alone.
    if context.num_replicas_in_sync == 1 or "all_reduce" in own:
        yield
        return
    original = context.all_reduce

    def all_reduce(reduce_op: Any, value: Any, options: Any = None) -> Any:
        flat = tf.nest.flatten(value)
        if any(isinstance(one, tf.IndexedSlices) for one in flat):
            return original(reduce_op, value, options)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def add(*tensors: Any) -> Any:
            added = original(reduce_op, [tf.stop_gradient(one) for one in tensors], options)
            return added, lambda *upstream: all_reduce(reduce_op, list(upstream), options)

        return tf.nest.pack_sequence_as(value, add(*[tf.convert_to_tensor(one) for one in flat]))

    own["all_reduce"] = all_reduce
    try:
        yield
    finally:
        del own["all_reduce"]
