"""The function of a replica, traced for the first one and called by all.

TensorFlow traces, optimizes and prepares what ``strategy.run`` runs once for each replica, although
replicas differ in their rows, their variables and their device alone. So one trace serves all
(``strategies/called_by_all``), and each replica gives its own::

    first replica:  function = trace of replica(shard, rows, ...)
    each replica:   function(own shard, own rows, ..., own copies of the variables)

Of several functions that fail TensorFlow may lose the error, and report only that others were
cancelled: a ``Runner`` then traces for each replica, and runs the batch again. A call ends as a
whole, so it is the default where gradients need not be sent.

Replicas that add up something within the function, or do something else by their number, need a
trace each: ``Trace.why_each`` says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import tensorflow as tf

from tfmultigpu import _compat, _patch
from tfmultigpu._patch import patching, setting
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.lists import present
from tfmultigpu.steps.features.feature import Feature
from tfmultigpu.steps.other_states import Touched
from tfmultigpu.steps.values import Shards, Trace
from tfmultigpu.strategies.called_by_all import (
    AS_WRITTEN,
    PAYS_FROM_VARIABLES,
    REWRITTEN,
    call,
    call_on_replica,
)
from tfmultigpu.strategies.collectives import replicas_share_memory
from tfmultigpu.strategies.row_parts import sharded_of
from tfmultigpu.strategies.topology import kind_of, local_replicas
from tfmultigpu.types import Context, KerasModel, Tensor
from tfmultigpu.user_code import OURS

# Files through which a question for the number of replicas passes.
_PASSING = (_patch.__file__, inspect.getsourcefile(tf.distribute.ReplicaContext))


class NeedsEachError(Exception):
    """The first trace has found out why each replica needs one of its own.

    Keras adds words to errors, so the reason is read from ``TracedOnce.why_each``.
    """


def why_each(
    strategy: tf.distribute.Strategy, features: Sequence[Feature], model: KerasModel
) -> str:
    """Returns why each replica needs a trace of its own, as far as it is known before one.

    Returns:
        A reason, for a person; "" if one trace may serve all.
    """
    replicas = len(local_replicas(strategy))
    if replicas == 1:
        return "this process has one replica"
    if replicas < strategy.num_replicas_in_sync:
        return "there are several workers"
    if not kind_of(strategy).may_trace_once:
        return f"{type(strategy).__name__} has a way of its own"
    for feature in features:
        if type(feature).around_replica is not Feature.around_replica:
            return f"{type(feature).__name__} changes the function of each replica"
        if feature.colocates_gradients:
            return f"{type(feature).__name__} computes on several devices"
    if sharded_of(model.variables):
        return "variables are sharded, and each replica reads those of the others in its own turn"
    if any(feature.traces_once for feature in features):
        return ""
    if not replicas_share_memory(strategy):
        return "gradients are sent while others are computed, unless OneTrace() is a feature"
    if len(model.variables) < PAYS_FROM_VARIABLES:
        return f"the model has fewer than {PAYS_FROM_VARIABLES} variables, so that it hardly pays"
    return ""


class TracedOnce:
    """A function for ``strategy.run`` that the first replica traces and all call.

    Attributes:
        why_each: Why each replica needs a trace of its own; "" if one serves all.
        meets: Whether that is because replicas meet in it.
        advice: The line to write in place of what needs it; "" if that is not one line.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        replica: Callable[..., Any],
        shards: Shards,
        *,
        logical: int | None = None,
    ) -> None:
        """Begins without a trace.

        Args:
            strategy: The strategy.
            replica: The function of one replica.
            shards: What it will be called with, for the shapes that all replicas share.
            logical: How many logical replicas call it, if they do.
        """
        self.why_each, self.advice, self.meets, self._logical = "", "", False, logical
        self._strategy, self._replica = strategy, replica
        self._specs = _specs_of(shards)
        self._function: Any = None

    def __call__(self, *args: Any, trace: Trace) -> Any:
        """Calls the function on one replica; the first replica comes first.

        Raises:
            NeedsEachError: Each replica needs a trace of its own.
        """
        if self._function is None:
            self._function = self._traced(trace)
            trace.functions.append(self._function)
        context: Any = tf.distribute.get_replica_context()
        number = tf.get_static_value(context.replica_id_in_sync_group)
        number %= len(local_replicas(self._strategy))  # In this process, or on one device.
        config = REWRITTEN if self._logical is None else AS_WRITTEN
        outputs = call_on_replica(self._strategy, self._function, number, tensors_in(args), config)
        return packed(self._function.structured_outputs, outputs)

    def _traced(self, trace: Trace) -> Any:
        """Returns the concrete function."""
        touched = Touched()

        adding: Context = nullcontext()
        if self._logical is not None:
            adding = patching(*_compat.additions(), _two_at_a_time)

        def run(*args: Any) -> Any:
            with self._alone(trace), touched.noting(), adding:
                return self._replica(*args, trace=trace)

        function = tf.function(run, autograph=False, **_compat.called_as_whole())
        concrete = function.get_concrete_function(*self._specs)
        if self.why_each:  # A layer has caught the error.
            self._refuse(self.why_each)
        # Replicas that call one function would draw the same numbers.
        if any(state.kind == "draws" for state in touched.states):
            self._refuse("it draws random numbers by tf.random, not by keras.random")
        if self._logical is not None:
            why, self.advice = _why_not_again(touched, concrete.graph)
            if why:
                self._refuse(why)
        return concrete

    @contextmanager
    def _alone(self, trace: Trace) -> Iterator[None]:
        """Refuses what waits for the other replicas, or tells one replica from another."""
        context: Any = tf.distribute.get_replica_context()

        def merge_call(*_: Any, **__: Any) -> None:  # All ways to add up come here.
            self.meets = True
            self._refuse("replicas add up something in it, such as the moments of a batch")

        def number(original: Any, asked: Any) -> None:
            self._refuse("it asks for the number of its replica")

        def count(original: Any, asked: Any) -> Any:
            if not _asked_by_us():
                if self._logical is not None:
                    return self._logical
                trace.note_counting()
            return original(asked)

        with (
            setting(context, merge_call=merge_call),
            patching(tf.distribute.ReplicaContext, "replica_id_in_sync_group", number),
            # A context asks its strategy.
            patching(tf.distribute.Strategy, "num_replicas_in_sync", count),
        ):
            yield

    def _refuse(self, why: str) -> NoReturn:
        self.why_each = why
        raise NeedsEachError(why)


def _why_not_again(touched: Touched, graph: Any) -> tuple[str, str]:
    """Returns why a second call would find another state or have other bits, and what to write.

    Args:
        touched: What the function touches.
        graph: The trace.

    Returns:
        Two texts: "" for a function that may be called again, and for no line of its own.
    """
    if touched.tables:
        return "it writes to a table, and the next one would find what it wrote", ""
    if touched.assigns:
        return "it assigns a variable at once, and the next one would find another value", ""
    for state in touched.states:
        if state.kind == "python":
            return (
                f"it runs Python code in {state.operation!r}, which may remember something",
                "If it remembers nothing, write tf.numpy_function(function, inputs, dtype, "
                "stateful=False).",
            )
        if state.kind == "other":
            return f"it changes a resource in {state.operation!r} that is not a variable", ""
    for operation in _compat.operations_of(graph):
        advice = _line_for_order(operation)
        if advice:
            return f"threads add in any order in {operation.name!r}", advice
    return "", ""


def _line_for_order(operation: Any) -> str:
    """Returns the line to write for a kernel of a CPU that adds in any order; "" for another.

    The kernels of TensorFlow 2.21 and their gradients were run many times, with large inputs.
    """
    if operation.type == "CropAndResizeGradImage" and not _compat.kernels_are_deterministic():
        return (
            "It is the gradient of tf.image.crop_and_resize. Write at the start of the program: "
            "tf.config.experimental.enable_op_determinism()."
        )
    if operation.type in ("Bincount", "DenseBincount") and operation.outputs[0].dtype.is_floating:
        return "Write tf.math.unsorted_segment_sum(weights, values, size)."
    return ""


def _two_at_a_time(original: Any, inputs: Sequence[Tensor], name: str | None = None) -> Tensor:
    """Adds tensors in their order: of three ``AddN`` takes one first whose memory is free then."""
    total, *others = inputs
    for addend in others:
        total = original([total, addend], name)
    return total


def needs_one_function(
    strategy: tf.distribute.Strategy, count: int, why: str, *, meets: bool = False, advice: str = ""
) -> TfMultiGpuError:
    """Returns the error of ``count`` logical replicas that cannot all call one function.

    Args:
        strategy: The strategy.
        count: How many there are.
        why: Why each replica needs a trace of its own.
        meets: Whether that is because replicas meet.
        advice: The line to write, if there is one for this reason.
    """
    replicas = strategy.num_replicas_in_sync
    advice = advice or (
        "Draw by keras.random with a keras.random.SeedGenerator, and assign weights of Keras, not "
        "a tf.Variable: both in call itself, not in a tf.function, a branch or a loop of it. Ask "
        "for no number of a replica. Or leave logical_replicas out."
    )
    if meets:
        advice = (
            f"What meets needs {count} replicas at one time: "
            f'tmg.split_device("GPU:0", parts={count // replicas}), for each device before '
            "anything else; or leave out what meets, as a plain BatchNormalization normalizes "
            "the rows of a logical replica alike on any number of devices."
        )
    return TfMultiGpuError(
        f"All logical replicas are calls of one function, and here that is not possible: {why}.",
        f"logical_replicas={count} on {replicas} replica(s)",
        advice,
    )


def _asked_by_us() -> bool:
    """Returns whether it is code of this package that asks how many replicas there are."""
    frame = inspect.currentframe()
    passing = (__file__, *_PASSING)
    while frame is not None and frame.f_code.co_filename in passing:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


def serves_one_device(known: Trace, shards: Shards) -> bool:
    """Returns whether the function of a replica serves for a whole batch on one device.

    Args:
        known: The trace of the same step on replicas.
        shards: The batch in one piece.
    """
    if not known.functions or known.counts_replicas:
        return False
    specs, _ = known.functions[0].structured_input_signature
    return _fit(_whole(specs, shards), specs)


def call_on_one_device(known: Trace, shards: Shards) -> Any:
    """Returns what a replica would return for a whole batch, with the first copy of each variable.

    Args:
        known: A trace that ``serves_one_device``.
        shards: The batch in one piece.
    """
    function = known.functions[0]
    specs, _ = function.structured_input_signature
    if tf.inside_function():
        graph: Any = tf.compat.v1.get_default_graph()
        for variable in function.variables:
            graph.watch_variable(variable)  # As a read would.
    outputs = call(function, tensors_in(_whole(specs, shards)), function.captured_inputs)
    return packed(function.structured_outputs, outputs)


def _whole(specs: Any, shards: Shards) -> tuple[Any, ...]:
    """Returns the arguments of the function of a replica for a batch in one piece."""
    (local,), (rows,), (state,) = shards.local, shards.rows, shards.state
    parts = None if specs[1].parts is None else tf.ones([], tf.int64)
    rows = rows._replace(weight=tf.ones([], tf.float64), parts=parts)
    return local, rows, state, shards.factor, shards.total


def _fit(args: Any, specs: Any) -> bool:
    """Returns whether a function that was traced for some specs can be called with arguments."""
    try:
        tf.nest.assert_same_structure(args, specs, expand_composites=True)
    except (TypeError, ValueError):
        return False
    flat = zip(
        tf.nest.flatten(args, expand_composites=True),
        tf.nest.flatten(specs, expand_composites=True),
        strict=True,
    )
    for tensor, spec in flat:
        if (tensor is None) != (spec is None):
            return False
        if spec is not None and not spec.is_compatible_with(tensor):
            return False
    return True


def _specs_of(shards: Shards) -> tuple[Any, ...]:
    """Returns the type specs of the arguments: what the specs of all replicas have in common."""
    common: Any = None
    for local, rows, state in zip(shards.local, shards.rows, shards.state, strict=True):
        specs = tf.nest.map_structure(spec_of, (local, rows, state))
        common = specs if common is None else tf.nest.map_structure(_common, common, specs)
    return (*common, spec_of(shards.factor), spec_of(shards.total))


def spec_of(value: Any) -> Any:
    """Returns the type spec of a value; None of None."""
    return None if value is None else tf.type_spec_from_value(value)


def _common(spec: Any, other: Any) -> Any:
    if spec is None:
        return None
    common = spec.most_specific_common_supertype([other])
    assert common is not None, f"{spec} and {other} are shards of one batch"
    return common


def tensors_in(structure: Any) -> list[Any]:
    """Returns the tensors of a structure, without those that are None."""
    return present(tf.nest.flatten(structure, expand_composites=True))


def packed(structure: Any, tensors: Sequence[Any]) -> Any:
    """Returns tensors in place of the tensors of a structure, or of specs, in which None stays."""
    turn = iter(tensors)
    flat = tf.nest.flatten(structure, expand_composites=True)
    filled = [None if leaf is None else next(turn) for leaf in flat]
    return tf.nest.pack_sequence_as(structure, filled, expand_composites=True)
