"""Calling on each replica a function that was traced for the first one.

A trace takes in variables as resources, which are arguments of each call: each replica gives its
copies. A function that is called, not inlined, runs on the device of its caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.types import Tensor


def _config(**rewrites: int) -> bytes:
    graph: Any = tf.compat.v1.GraphOptions(rewrite_options=rewrites)
    written: bytes = tf.compat.v1.ConfigProto(graph_options=graph).SerializeToString()
    return written


_OPTIONS: Any = tf.compat.v1.GraphOptions().rewrite_options
# TensorFlow rewrites each function twice, for each replica. The second time makes no step faster,
# and costs a tenth of the first step of eight replicas.
REWRITTEN = _config(meta_optimizer_iterations=_OPTIONS.ONE)
# TensorFlow makes one addition of several that it knows the shapes of, in the order of their names,
# or begins with one whose memory is free: other bits in each trace, and in each call.
AS_WRITTEN = _config(meta_optimizer_iterations=_OPTIONS.ONE, arithmetic_optimization=_OPTIONS.OFF)
# A small function gains nothing, and a call costs each replica of it some 0.1 ms.
PAYS_FROM_VARIABLES = 30


def call_on_replica(
    strategy: tf.distribute.Strategy,
    function: Any,
    number: int,
    tensors: Sequence[Tensor] = (),
    config: bytes = REWRITTEN,
) -> list[Tensor]:
    """Calls a function of the first replica with the copies of the variables of another one.

    Args:
        strategy: The strategy.
        function: What was traced for the first replica, with ``_compat.called_as_whole()``.
        number: The number of the replica in this process.
        tensors: The arguments of the function.
        config: How TensorFlow runs it; ``AS_WRITTEN`` adds in the order of the program.

    Returns:
        The outputs, in the order of ``function.outputs``.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    captured: list[Tensor] = []
    for tensor in function.captured_inputs:
        variable = _compat.variable_of_handle(tensor)
        if variable is not None:
            copy = strategy.experimental_local_results(variable)[number]
            graph.watch_variable(copy)  # As a read would.
            tensor = copy.handle
        captured.append(tensor)
    return call(function, tensors, captured, config)


def call(
    function: Any, tensors: Sequence[Tensor], captured: Sequence[Tensor], config: bytes = REWRITTEN
) -> list[Tensor]:
    """Calls a function with tensors in place of the captured ones of its trace."""
    outputs: list[Tensor] = tf.raw_ops.StatefulPartitionedCall(
        args=[*tensors, *captured],
        Tout=[tensor.dtype for tensor in function.outputs],
        f=function,
        config_proto=config,
    )
    return outputs
