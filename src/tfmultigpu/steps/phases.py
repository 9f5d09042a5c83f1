"""What happens to a global batch, in the order in which it happens.

A train step is one ``tf.function``. ``TrainStep.compute`` calls these functions in their order::

    phase = for_all_replicas(step, train_replica)     in replicas.py: cut, looped, traced once
    passes = phase(shards, trace)                     each replica: forward, backward -> Pass
    sums, passes = add_over_replicas(step, ...)       the one addition
    gradient, tally = divide(step, sums, shards, ...) the last division; penalties; features
    commit(strategy, trace, passes, shards, after)    what layers, draws and metrics assign
    update(step.update, gradient, after)              the one update of the optimizer
    advance(step.features, gradient, after)           the loss scale, for example

Up to ``divide`` nothing is assigned. What may raise is in ``after``, which every assignment waits
for: a step that raises leaves everything as it was. A batch was cut before, by ``data/partition``:
if it has fewer rows than replicas, each has all of them. Then the first replica counts, and the
others count nothing: in loss, gradient and metrics, and in what code of the user adds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import tensorflow as tf

from tfmultigpu.accumulation.gradients import check_gradients, global_norm, warn_of_variables
from tfmultigpu.accumulation.replicated import Replicated
from tfmultigpu.accumulation.targets import Target
from tfmultigpu.arguments import brief
from tfmultigpu.data.batch_format import NOT_ALIKE
from tfmultigpu.errors import LossError, TfMultiGpuError
from tfmultigpu.lists import by_id, map_present, present
from tfmultigpu.steps.assignments import (
    DeferredAssignments,
    assign,
    may_not_be_linear,
    noting_effects,
    number_of_operations,
)
from tfmultigpu.steps.batch_norm import noting_moments
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.objective import Forward, check_weights, penalty_of, stack
from tfmultigpu.steps.outputs import StepMetrics
from tfmultigpu.steps.replicas import OfReplicas, tracing_model
from tfmultigpu.steps.tally import Layout, Tally
from tfmultigpu.steps.values import Gradient, Pass, Rows, Shards, Trace
from tfmultigpu.strategies.row_lists import values_of, with_values
from tfmultigpu.strategies.topology import is_on_read, local_replicas, per_replica
from tfmultigpu.types import Scalar, Shard, Tensor


class Training(OfReplicas, Protocol):
    """What the phases of a train step need besides."""

    forward: Forward
    step_metrics: StepMetrics
    update: Replicated
    trained: list[Target]


# The loss scale -----------------------------------------------------------------------------------


def loss_factor(features: Sequence[Feature]) -> Any:
    """Returns what the loss is multiplied by, a scalar: the product of all features; None for 1."""
    product: Any = None
    for feature in features:
        factor = feature.loss_factor()
        if factor is None:
            continue
        factor = tf.convert_to_tensor(factor)
        if not factor.dtype.is_floating:  # A whole number, which scales no loss as it is.
            factor = tf.cast(factor, tf.float32)
        product = factor if product is None else product * tf.cast(factor, product.dtype)
    return product


# One replica --------------------------------------------------------------------------------------


def train_replica(
    step: Training,
    shard: Shard,
    rows: Rows,
    state: Any,
    factor: Scalar,
    total: Scalar,
    *,
    trace: Trace,
) -> Pass:
    """Goes forward and backward over the rows of one replica; changes no variable.

    Args:
        step: The step.
        shard: The rows, a batch.
        rows: Which rows of the global batch they are.
        state: The values that the variables ``trace.state`` seem to have before; () for their own.
        factor: What the loss is multiplied by; None for 1.
        total: The rows of the global batch, a float64 scalar.
        trace: Where what is found is noted.
    """
    values = [each.variable.value for each in step.trained]
    moments = noting_moments(trace.own_moments)
    with tracing_model(step, rows), moments, noting_effects() as effects:
        # Forward. The sum of each loss is divided here by what is known of its divisor.
        begin = number_of_operations()
        with (
            DeferredAssignments(trace.before(state), rows.counts()) as deferred,
            tf.GradientTape() as tape,
        ):
            terms, outputs = step.forward(shard, training=True)
            if not terms:
                raise LossError(
                    "There is nothing to minimise: no loss was given and no layer adds one.",
                    "loss=None",
                    "For fit write model.compile(loss='mse') or another loss, for a step "
                    "make_train_step(model, optimizer, 'mse'), or forward=f.",
                )
            layout = Layout.of(terms)
            targets = layout.targets(terms, total, rows.weight, factor)
        check_weights(layout, terms, values)
        # The loss of rows that do not count is zero, and so is each gradient that is linear in it.
        is_dropped = rows.counts() is not True and may_not_be_linear(begin)

        # Backward, where a layer may be called once more to save memory.
        with deferred:
            gradients = tuple(
                [_backward(step, tape, *target, values) for target in enumerate(targets)]
            )
            if rows.dealt is not None:
                gradients = _zeros_unless(rows.counts(), gradients)
            elif is_dropped:
                gradients = tuple([tuple(map_present(rows.counted, g)) for g in gradients])
            step.step_metrics.update(outputs)

    trace.note(layout, gradients, deferred)
    new_state = deferred.values_of(trace.state)
    with tf.control_dependencies([*effects, *new_state]):  # All checks have passed.
        stats = tf.identity(stack(terms, rows.weight))
    return Pass(gradients, stats, new_state)


def _backward(
    step: Training,
    tape: tf.GradientTape,
    number: int,
    target: tf.Tensor,
    values: Sequence[Any],
) -> tuple[Any, ...]:
    """Returns the gradients of a target, ready to be added."""
    # Only the first is of the tape: under a persistent one each loop of a layer would keep all
    # that it computes.
    by_graph = number > 0 or any(feature.colocates_gradients for feature in step.features)
    with ExitStack() as contexts:
        for feature in step.features:
            contexts.enter_context(feature.around_backward())
        gradients = (tf.gradients if by_graph else tape.gradient)(target, list(values))
        pairs = zip(step.trained, gradients, strict=True)
        return tuple([trained.addend(gradient) for trained, gradient in pairs])


def _zeros_unless(counts: Scalar, gradients: Any) -> Any:
    """Returns gradients; zeros, whatever they are, for rows that do not count."""
    flat: list[Tensor] = present(tf.nest.flatten(gradients))

    def zeros() -> list[Tensor]:
        return [with_values(leaf, tf.zeros_like(values_of(leaf))) for leaf in flat]

    turn = iter(tf.cond(counts, lambda: flat, zeros))
    return tf.nest.map_structure(lambda leaf: None if leaf is None else next(turn), gradients)


# After the passes of all replicas -----------------------------------------------------------------


def add_over_replicas(
    step: Training, passes: Sequence[Pass], shards: Shards, trace: Trace
) -> tuple[list[list[Any]], list[Pass]]:
    """Adds gradients, sums and weights over all replicas: the one addition.

    Returns:
        The sums, in the order of ``Pass.addends``: one list, or one for each replica of this
        process if they share no memory. And the passes, whose states are those to assign.
    """
    addends: list[list[Any]] = []
    for result in passes:
        # An add-on that has added up a gradient leaves None for it on the other replicas.
        existing = [result.gradients[target][number] for target, number in trace.places]
        addends.append([*existing, *result.shared, result.stats])
    sums = step.update.add(addends, [step.trained[number] for _, number in trace.places])
    return settle_states(step, passes, sums, shards, trace)


def settle_states(
    step: OfReplicas,
    passes: Sequence[Pass],
    sums: list[list[Any]],
    shards: Shards,
    trace: Trace,
) -> tuple[list[list[Any]], list[Pass]]:
    """Returns the sums without the states that logical replicas share, and passes that have them.

    What metrics add is assigned on the first replica alone, or it would be counted twice. Other
    states become the mean over the logical replicas that have rows.
    """
    count = len(trace.shared)
    if not count or step.logical_replicas is None:
        return sums, list(passes)
    with_rows = tf.minimum(shards.total, float(step.logical_replicas))
    places = {id(state): number for number, state in enumerate(trace.state)}
    settled: list[Pass] = []
    for number, result in enumerate(passes):
        values, totals = list(result.state), sums[number % len(sums)][-1 - count : -1]
        for state, total in zip(trace.shared, totals, strict=True):
            if is_on_read(state):
                if local_replicas(step.strategy)[number]:
                    total = tf.zeros_like(total)
            elif total.dtype.is_floating:
                total /= tf.cast(with_rows, total.dtype)
            else:
                first, of_all = tf.unstack(total)
                same = tf.reduce_all(of_all == first * step.logical_replicas)
                check = tf.raw_ops.Assert(condition=same, data=[NOT_ALIKE.text])
                with tf.control_dependencies([check]):
                    total = tf.identity(first)
            values[places[id(state)]] = tf.cast(total, state.dtype)
        settled.append(result._replace(state=tuple(values)))
    return [[*of_replica[: -1 - count], of_replica[-1]] for of_replica in sums], settled


def divide(
    step: Training,
    sums: list[list[Any]],
    shards: Shards,
    state: Sequence[Any],
    trace: Trace,
) -> tuple[Gradient, Tally]:
    """Turns sums over the global batch into its gradient and its tally: the last division.

    Replicas have divided by what is known before the addition, such as the number of rows. This
    happens where the sums are: once on the CPUs of one process and with owners, otherwise on each
    replica, alike.

    Args:
        step: The step.
        sums: What ``add_over_replicas`` returns.
        shards: The global batch.
        state: The new values of ``trace.state`` on one replica, of which the values of trained
            variables are used: they are alike on all replicas.
        trace: What the replicas found.
    """
    new = dict(zip(map(id, trace.state), state, strict=True))
    assigned = [new.get(id(each.variable)) for each in step.trained]

    def finish(*args: Any) -> Any:
        return _divide_here(step, trace, *args)

    gradient, (numbers, last) = step.update.where(
        finish, sums, shards.total, shards.factor, assigned
    )
    gradient = gradient._replace(variables=trace.updated)
    return gradient, Tally(trace.layout, numbers, last)


def _divide_here(
    step: Training,
    trace: Trace,
    sums: list[Any],
    total: Scalar,
    factor: Scalar,
    assigned: Sequence[Any],
) -> tuple[Gradient, tuple[Any, Any]]:
    """Divides where the sums are, by the functions below in their order.

    Returns:
        The gradient, whose ``variables`` are left out: ``strategy.run`` returns tensors only. Then
        the vectors of the tally.
    """
    layout = trace.layout
    assert layout is not None
    *gradient_sums, stats = sums
    sums_of_losses, weights = layout.unstack(stats)

    trained = _collect(step, trace, gradient_sums, assigned)
    keeps = _keeps_lists(step.features)
    for each in trained:
        each.settle(keeps)
    penalty = _regularize(step, trained, layout)
    _correct(trained, _corrections(trace, weights, total, factor))
    gradient = _gradient_of(trained, trace)
    norm = gradient.norm  # Features may clip the gradient.
    gradient = _ask_features(step, gradient)

    # The numbers of this step, for the logs.
    skipped = 0.0 if gradient.valid is None else ~gradient.valid
    tally = Tally.of_step(
        layout,
        sums_of_losses,
        weights,
        penalty,
        total,
        skipped=skipped,
        gradient_norm=norm,
        loss_scale=tf.ones([]) if factor is None else factor,
    )
    return _for_optimizer(trained, gradient), (tally.sums, tally.last)


def _collect(
    step: Training, trace: Trace, gradient_sums: Sequence[Tensor], assigned: Sequence[Any]
) -> list[Target]:
    """Returns each trained variable with the sums of its gradients: one for each target."""
    trained: list[Target] = []
    for each, value in zip(step.trained, assigned, strict=True):
        trained.append(dataclasses.replace(each, sums=[], assigned=value))
    for (target, number), gradient_sum in zip(trace.places, gradient_sums, strict=True):
        trained[number].sums.append((target, gradient_sum))
    return trained


def _keeps_lists(features: Sequence[Feature]) -> bool:
    """Returns whether no feature asks for a gradient as a tensor of the shape of its variable."""
    for feature in features:
        kind = type(feature)
        sees = kind.on_gradient is not Feature.on_gradient
        sees = sees or kind.after_update is not Feature.after_update
        if sees and not feature.takes_lists:
            return False
    return True


def _regularize(step: Training, trained: Sequence[Target], layout: Layout) -> Any:
    """Gives each variable the gradient of its penalty, and returns all penalties together.

    Penalties of variables that this step does not train are in the loss too. A loss that is whole
    has them.
    """
    if layout.is_whole:
        return tf.zeros([])
    known = {id(each.variable) for each in trained}
    trainable = step.update.targets_of(step.forward.model.trainable_variables)
    others = [each for each in trainable if id(each.variable) not in known]
    penalties: list[Tensor] = []
    for each in (*trained, *others):
        with each.placed():
            if (found := penalty_of(each.variable, each.assigned)) is not None:
                penalty, gradient = found
                each.penalize(gradient)
                penalties.append(penalty)
    return sum_in_order(penalties)


def sum_in_order(scalars: Sequence[Tensor]) -> Tensor:
    """Returns the sum of float32 scalars in their order, which TensorFlow may change in a chain."""
    return tf.reduce_sum(tf.stack(scalars)) if scalars else tf.zeros([])


def _corrections(
    trace: Trace, weights: Sequence[Tensor], total: Scalar, factor: Scalar
) -> list[Scalar]:
    """Returns what the sum of each target is multiplied by: the last division; None for 1."""
    layout = trace.layout
    assert layout is not None
    corrections = layout.corrections(trace.targets, weights, total)
    # What the loss was multiplied by is taken out as well.
    if factor is not None:
        for target, correction in enumerate(corrections):
            wide = 1.0 if correction is None else tf.cast(correction, tf.float32)
            corrections[target] = wide / factor
    return corrections


def _correct(trained: Sequence[Target], corrections: Sequence[Scalar]) -> None:
    """Makes the gradient of each variable, and checks that one reaches it."""
    for each in trained:
        with each.placed():
            each.finish(corrections)
    variables = [each.variable for each in trained]
    check_gradients(variables, [each.gradient for each in trained])
    warn_of_variables(variables, [each.variable for each in trained if each.gradient is None])


def _gradient_of(trained: Sequence[Target], trace: Trace) -> Gradient:
    """Returns the gradient of the global batch: of the variables that one reaches."""
    updated = [each for each in trained if each.gradient is not None]
    trace.note_updated([each.variable for each in updated])
    tensors = tuple(each.gradient for each in updated)
    norm = global_norm(tensors)
    return Gradient(tensors, norm, None, trace.updated)


def _ask_features(step: Training, gradient: Gradient) -> Gradient:
    """Has features change the gradient of the global batch, and decide about the update.

    In the order of ``steps/make``: loss scaling, clipping, then features of the user.
    """
    for feature in step.features:
        before, gradient = gradient, feature.on_gradient(gradient)
        if not isinstance(gradient, Gradient) or len(gradient.tensors) != len(before.tensors):
            raise TfMultiGpuError(
                f"{type(feature).__name__}.on_gradient must return the gradient, with all tensors.",
                brief(gradient),
                "Write return gradient._replace(tensors=tuple(tensors)).",
            )
        gradient = gradient.completed_by(before)
    return gradient


def _for_optimizer(trained: Sequence[Target], gradient: Gradient) -> Gradient:
    """Returns the gradient as the optimizer takes it: of its dtype, and a list if it can."""
    tensors: list[Tensor] = []
    updated = [each for each in trained if each.gradient is not None]
    for each, tensor in zip(updated, gradient.tensors, strict=True):
        tensors.append(tf.cast(each.taken(tensor), each.variable.dtype))
    return gradient._replace(tensors=tuple(tensors), variables=())


# Assignments --------------------------------------------------------------------------------------


def commit(
    strategy: tf.distribute.Strategy,
    trace: Trace,
    passes: Sequence[Pass],
    shards: Shards,
    after: Sequence[Any],
) -> None:
    """Assigns what layers, draws and metrics have computed, ``after`` all that may fail.

    Each replica does, also if the update is skipped.
    """
    if trace.state:
        values = per_replica(strategy, [result.state for result in passes])
        weights = per_replica(strategy, [rows.weight for rows in shards.rows])
        replica = functools.partial(
            assign,
            trace.state,
            replaced=trace.replaced,
            after=after,
            summed=by_id(trace.begin_at_zero),
        )
        strategy.run(replica, args=(values, weights))


def update(updates: Replicated, gradient: Gradient, after: Sequence[Any] = ()) -> None:
    """Makes one step of the optimizer; if the gradient is not valid, not even a count changes."""

    def apply() -> Any:
        updates.apply(gradient.tensors, list(gradient.variables), after)
        return tf.no_op()

    if gradient.valid is None:
        apply()
    else:
        tf.cond(gradient.valid, apply, tf.no_op)


def advance(features: Sequence[Feature], gradient: Gradient, after: Sequence[Any]) -> None:
    """Has features advance, also if the update is skipped; a step that raises advances nothing."""
    with tf.control_dependencies(after):
        for feature in features:
            feature.after_update(gradient)
