"""What code of the user adds over replicas in a step: of copies of a small batch one counts.

Such code knows nothing of copies. It calls ``all_reduce`` or ``all_gather``, reduces in a
``merge_call``, as each aggregated ``tf.Variable`` does when it is assigned, or adds to a variable
that TensorFlow sums when it is read. In each case zeros stand for the rows that another replica
counts, or they are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching, setting
from tfmultigpu.lists import of_type
from tfmultigpu.steps.values import Rows
from tfmultigpu.strategies.row_lists import values_of, with_values
from tfmultigpu.strategies.topology import per_replica
from tfmultigpu.types import Function, Nested, Tensor


@contextmanager
def counting_once(rows: Rows) -> Iterator[None]:
    """Has this replica give zeros to the others if they count its rows; in replica context.

    It also makes ``all_reduce`` cheap to trace. ``tf.custom_gradient`` walks from the result of a
    function back to its arguments, in search of variables, and through the arguments of other
    replicas to all that these have computed: a deep model with a sum in each layer takes minutes.
    Here each replica gives its argument as a constant, at which a walk ends, and the gradient is
    stated beside it: the sum over replicas.
    """
    context: Any = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1 or "all_reduce" in vars(context):
        yield
        return
    original, gather = context.all_reduce, context.all_gather
    replaced_merge: Function | None = vars(context).get("merge_call")

    def merge(*args: Any, **kwargs: Any) -> Any:
        # Asked at each call: who notes the operations of a replica wraps it in its class meanwhile.
        return (replaced_merge or type(context).merge_call.__get__(context))(*args, **kwargs)

    def all_reduce(reduce_op: object, value: Nested, options: object = None) -> Nested:
        flat: list[Tensor] = tf.nest.flatten(value)
        if of_type(flat, tf.IndexedSlices):
            return tf.nest.pack_sequence_as(value, reduced(reduce_op, flat, options))

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def add(*tensors: Tensor) -> Tensor:
            added = reduced(reduce_op, list(map(tf.stop_gradient, tensors)), options)
            # A list of rows, as tf.gather returns, would be added without a gradient of its own.
            return added, lambda *upstream: all_reduce(reduce_op, _as_tensors(upstream), options)

        return tf.nest.pack_sequence_as(value, add(*_as_tensors(flat)))

    def reduced(reduce_op: object, tensors: list[Tensor], options: object) -> list[Tensor]:
        given = [_given(rows, reduce_op, tensor) for tensor in tensors]
        with setting(context, merge_call=merge):
            sums: list[Tensor] = original(reduce_op, given, options)
            return sums

    def all_gather(value: Nested, axis: int, options: object = None) -> Nested:
        with setting(context, merge_call=merge):
            gathered = gather(value, axis, options)
        return tf.nest.map_structure(functools.partial(_first, rows, axis), value, gathered)

    def merge_call(
        function: Function, args: Sequence[Nested] = (), kwargs: Nested = None
    ) -> Nested:
        return merge(functools.partial(_merged, function, rows), (rows.weight, *args), kwargs)

    with ExitStack() as contexts:
        replaced = {"all_reduce": all_reduce, "all_gather": all_gather, "merge_call": merge_call}
        contexts.enter_context(setting(context, **replaced))
        for name, wrapper in (("assign", _assign), ("assign_add", _add), ("assign_sub", _add)):
            owner = _compat.variables_summed_when_read()
            contexts.enter_context(patching(owner, name, functools.partial(wrapper, rows)))
        yield


def _as_tensors(values: Sequence[Tensor]) -> list[Tensor]:
    return list(map(tf.convert_to_tensor, values))


def _given(rows: Rows, reduce_op: object, value: Tensor) -> Tensor:
    """Returns what a replica gives to a sum or a mean over all replicas."""
    value = rows.counted(value)
    if reduce_op not in (tf.distribute.ReduceOp.MEAN, "MEAN", "mean"):
        return value
    # The mean is over all replicas, and of copies only one is not zero.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    times = tf.where(rows.total < replicas, replicas, 1)
    return with_values(value, values_of(value) * tf.cast(times, value.dtype))


def _first(rows: Rows, axis: int, value: Tensor, gathered: Tensor) -> Tensor:
    """Returns what all replicas have gathered; of copies the first."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    with tf.device("CPU:0"):  # Shapes are decided there.
        sizes = tf.shape(gathered)
        size = tf.where(rows.total < replicas, tf.shape(value)[axis], sizes[axis])
        sizes = tf.tensor_scatter_nd_update(sizes, [[axis % len(gathered.shape)]], [size])
    # Not tf.gather, whose gradient is a list of rows: that of all_gather takes tensors.
    first = tf.slice(gathered, tf.zeros_like(sizes), sizes)
    first.set_shape(
        gathered.shape[:axis].concatenate([None]).concatenate(gathered.shape[axis + 1 :])
    )
    return first


def _merged(
    function: Function,
    rows: Rows,
    strategy: tf.distribute.Strategy,
    weights: Tensor,
    *args: Nested,
    **kwargs: Nested,
) -> Nested:
    """Calls a function of a ``merge_call``, in which reductions count one copy."""

    def given(reduce_op: object, value: Nested) -> Nested:
        if not isinstance(value, tf.distribute.DistributedValues):
            return value  # The same on each replica, which TensorFlow treats in its own way.
        parts: list[Tensor] = []
        local = strategy.experimental_local_results
        for part, weight in zip(local(value), local(weights), strict=True):
            with tf.device(part.device):
                parts.append(_given(rows._replace(weight=weight), reduce_op, part))
        return per_replica(strategy, parts)

    def reduce_to(
        original: Function, reduce_op: object, value: Nested, *args: object, **options: object
    ) -> Nested:
        value = tf.nest.map_structure(functools.partial(given, reduce_op), value)
        return original(reduce_op, value, *args, **options)

    def batch_reduce_to(
        original: Function, reduce_op: object, pairs: Nested, *args: object, **options: object
    ) -> Nested:
        pairs = [(given(reduce_op, value), destination) for value, destination in pairs]
        return original(reduce_op, pairs, *args, **options)

    def gather(original: Function, value: Nested, axis: int) -> Nested:
        first = tf.nest.map_structure(
            lambda one: strategy.experimental_local_results(one)[0], value
        )
        gathered = original(value, axis)
        return tf.nest.map_structure(functools.partial(_first, rows, axis), first, gathered)

    with (
        patching(strategy, "gather", gather),
        patching(strategy.extended, "reduce_to", reduce_to),
        patching(strategy.extended, "batch_reduce_to", batch_reduce_to),
    ):
        return function(strategy, *args, **kwargs)


def _assign(
    rows: Rows,
    original: Function,
    variable: tf.Variable,
    value: Tensor,
    *args: object,
    **kwargs: object,
) -> Tensor:
    """Assigns to the copy of a replica in a sum, which keeps its value if the rows do not count."""
    counts = rows.counts()
    if counts is not True and variable.aggregation == tf.VariableAggregation.SUM:
        before = variable.read_value()
        value = tf.where(counts, tf.cast(value, before.dtype), before)
    return original(variable, value, *args, **kwargs)


def _add(
    rows: Rows,
    original: Function,
    variable: tf.Variable,
    delta: Tensor,
    *args: object,
    **kwargs: object,
) -> Tensor:
    """Adds to the copy of a replica in a sum, or subtracts from it."""
    if variable.aggregation == tf.VariableAggregation.SUM:
        delta = rows.counted(tf.convert_to_tensor(delta, variable.dtype))
    return original(variable, delta, *args, **kwargs)
