"""Running a function on every replica: traced once for all if it can be, or for each.

``phases.py`` has the function of a replica that trains; steps that evaluate or predict have others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.lists import by_id
from tfmultigpu.steps.assignments import deferred_here, noting_additions
from tfmultigpu.steps.failures import new_variable
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.global_rows import standing_at
from tfmultigpu.steps.objective import undivided_losses
from tfmultigpu.steps.sums_of_users import counting_once
from tfmultigpu.steps.traced_once import (
    TracedOnce,
    call_on_one_device,
    needs_one_function,
    serves_one_device,
    why_each,
)
from tfmultigpu.steps.values import Phase, Replica, Rows, Shards, Trace
from tfmultigpu.strategies.row_parts import sharded_of
from tfmultigpu.strategies.topology import per_replica
from tfmultigpu.types import Function, KerasLayer, KerasModel, KerasVariable, Nested
from tfmultigpu.user_code import place_of_user


class OfReplicas(Protocol):
    """What the phases of every step need to know of it."""

    strategy: tf.distribute.Strategy
    features: tuple[Feature, ...]
    model: KerasModel
    beside: dict[int, KerasLayer]
    logical_replicas: int | None


def for_all_replicas(
    step: OfReplicas, replica: Replica, features: Sequence[Feature] | None = None
) -> Phase:
    """Returns the function of all replicas, as features of the step cut, loop or compile it.

    ::

        for each feature: replica = feature.around_replica(replica)
        phase = each replica of this process computes its shard by replica, traced once if it can be
        for each feature: phase = feature.around_phase(phase)
    """
    if features is None:
        features = step.features
    for feature in features:
        replica = feature.around_replica(replica)
    phase: Phase = functools.partial(traced_once, step, replica)
    for feature in features:
        phase = feature.around_phase(phase)
    return phase


def traced_once(
    step: OfReplicas, replica: Callable[..., Any], shards: Shards, trace: Trace
) -> list[Any]:
    """Runs a function on every replica of this process, by one trace if that can serve all.

    ::

        first replica: function = trace of replica
        each replica:  function(own shard, own rows, ...), with its own copies of the variables
    """
    if step.logical_replicas is not None:
        return _each_logical(step, step.logical_replicas, replica, shards, trace)
    if trace.known is not None and serves_one_device(trace.known, shards):
        trace.note_known()
        return [call_on_one_device(trace.known, shards)]
    trace.note_why_each(why_each(step.strategy, step.features, step.model))
    if not trace.why_each:
        once = TracedOnce(step.strategy, replica, shards)
        try:
            return on_replicas(step.strategy, once, shards, trace)
        except Exception:
            if not once.why_each:
                raise
            trace.note_why_each(once.why_each)
    return on_replicas(step.strategy, replica, shards, trace)


def _each_logical(
    step: OfReplicas, count: int, replica: Callable[..., Any], shards: Shards, trace: Trace
) -> list[Any]:
    """Runs the function of a logical replica on every replica: one function, however many call it.

    Micro-batches after the first call a second one, which is given the states before.
    """
    is_first = not shards.state[0]
    if trace.known is not None and not trace.once:
        trace.note_known()
    once = trace.once.get(is_first)
    if once is None and not trace.meets and not trace.finds_error:
        if sharded_of(step.model.variables):
            why = "variables are sharded, and a replica reads those of the others in its own turn"
            raise needs_one_function(step.strategy, count, why)
        once = trace.once[is_first] = TracedOnce(step.strategy, replica, shards, logical=count)
    if once is not None:
        try:
            return on_replicas(step.strategy, once, shards, trace)
        except Exception as error:
            if not once.why_each:
                raise
            if not once.meets or count != step.strategy.num_replicas_in_sync:
                raise needs_one_function(
                    step.strategy, count, once.why_each, meets=once.meets, advice=once.advice
                ) from error
            trace.note_meeting(once.why_each)
            trace.once.clear()
    return on_replicas(step.strategy, replica, shards, trace)


def on_replicas(
    strategy: tf.distribute.Strategy, replica: Callable[..., Any], shards: Shards, trace: Trace
) -> list[Any]:
    """Runs a function on every replica of this process; returns the result of each."""
    local, rows, state = (
        per_replica(strategy, each) for each in (shards.local, shards.rows, shards.state)
    )

    def run(*args: Any) -> Any:
        return replica(*args, trace=trace)

    # TensorFlow's own: the replicas know their rows, and look for no mark of a batch.
    arguments = (local, rows, state, shards.factor, shards.total)
    result = type(strategy).run(strategy, run, args=arguments)

    # TensorFlow returns one structure, whose leaves hold the values of all replicas.
    copies = len(shards.local)
    leaves: list[Sequence[Any]] = []
    for leaf in tf.nest.flatten(result):
        values = strategy.experimental_local_results(leaf)
        leaves.append(values if len(values) == copies else values * copies)  # None is one.
    return [tf.nest.pack_sequence_as(result, each) for each in zip(*leaves, strict=True)]


@contextmanager
def tracing_model(step: OfReplicas, rows: Rows) -> Iterator[None]:
    """Enters, on a replica, the contexts in which the code of the user is traced."""
    with (
        counting_once(rows),
        noting_additions(),
        standing_at(rows),
        undivided_losses(),
        _noting_calls(step.model, step.beside),
        ExitStack() as contexts,
    ):
        if step.strategy.num_replicas_in_sync > 1:
            contexts.enter_context(_refusing_new_variables())
        for feature in step.features:
            contexts.enter_context(feature.around_model(rows))
        yield


@contextmanager
def _refusing_new_variables() -> Iterator[None]:
    """Refuses variables that code of the user creates in the context, on a replica of several.

    TensorFlow would fail with an error about placeholders, or Keras about a stateless scope. What
    works stays: Keras creates a variable with an initializer after that code, as for a metric that
    builds itself, and a ``tf.function`` of the user's creates its own before its second trace.
    """

    def create(original: Function, **options: object) -> Nested:
        if deferred_here() is not None:
            raise new_variable(_described(options.get("name")))
        return original(**options)

    def begin(original: Function, variable: KerasVariable, *args: object, **kwargs: object) -> None:
        initial = args[0] if args else kwargs.get("initializer")
        is_value = not (callable(initial) or isinstance(initial, str))
        if is_value and deferred_here() is not None:
            raise new_variable(_described(kwargs.get("name")))
        original(variable, *args, **kwargs)

    with tf.variable_creator_scope(create), patching(keras.Variable, "__init__", begin):
        yield


def _described(name: object) -> str:
    what = f"variable {name!r}" if name else "a variable"
    return f"{what}, created in {place_of_user()}"


@contextmanager
def _noting_calls(model: KerasModel, called: dict[int, KerasLayer]) -> Iterator[None]:
    """Adds the layers that are called in the context and are not in the model, by their ``id``."""
    inside = by_id(_compat.layers_inside(model))

    def call(original: Function, layer: KerasLayer, *args: object, **kwargs: object) -> Nested:
        # The model may be a weak reference to this layer.
        if isinstance(layer, keras.Layer) and id(layer) not in inside and layer != model:
            called[id(layer)] = layer
        return original(layer, *args, **kwargs)

    with patching(keras.Operation, "__call__", call):
        yield
