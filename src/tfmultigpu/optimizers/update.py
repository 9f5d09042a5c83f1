"""One optimizer update from gradients that are already summed over the replicas."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.errors import ScopeError, TfMultiGpuError
from tfmultigpu.optimizers.gradients import is_overwritten
from tfmultigpu.optimizers.loss_scaling import unwrap_optimizer
from tfmultigpu.optimizers.sharded import (
    ShardedUpdate,
    UpdatePlan,
    owned_variables,
    plan_update,
    shard_update,
)
from tfmultigpu.strategies.scopes import check_scope
from tfmultigpu.strategies.variable_sharding import is_sharded

__all__ = [
    "after_build",
    "apply_reduced_gradients",
    "build_optimizer",
    "finish_values",
    "prepare_update",
]


def apply_reduced_gradients(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
) -> None:
    """Updates variables from gradients that are already those of the global batch.

    ``optimizer.apply`` of Keras would add them over the replicas once more. Clipping set on the
    optimizer, weight decay, schedules, constraints and moving averages act as on one device.

    Args:
        optimizer: A built Keras optimizer; see ``build_optimizer``.
        gradients: One tensor per variable, the same on every replica and not scaled
            (``loss_scale_factor``, or a ``LossScaleOptimizer`` around the optimizer, is ignored);
            None leaves a variable as it is.
        variables: The variables, in the same order.

    Raises:
        RuntimeError: Called neither in a replica (``strategy.run``) nor on one device.
        TfMultiGpuError: A variable was created with ``sharded_variables``, or is one of a float8
            layer on several replicas.

    Example:
        >>> import keras, tensorflow as tf, tfmultigpu as tmg
        >>> weight = keras.Variable([1.0])
        >>> optimizer = keras.optimizers.SGD(0.5)
        >>> optimizer.build([weight])
        >>> tmg.apply_reduced_gradients(optimizer, [tf.constant([1.0])], [weight])
        >>> weight.numpy().tolist()
        [0.5]
    """
    alone = [variable.path for variable in variables if is_sharded(variable)]
    if alone:
        raise TfMultiGpuError(
            "A variable that lives on one device alone is updated once, not by every replica. "
            f"Received: {alone[:3]}, created with tmg.sharded_variables(). Train it with "
            "tmg.make_train_step or tmg.fit."
        )
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError(
            "apply_reduced_gradients must be called by every replica: call it in the function "
            "given to strategy.run."
        )
    new = [variable.path for variable in variables if is_overwritten(variable)]
    if new and context.num_replicas_in_sync > 1:
        raise TfMultiGpuError(
            "The gradient of a variable of a float8 layer is its new value, which replicas cannot "
            f"add. Received: {new[:3]}. Train on one replica, or leave out "
            'layer.quantize("float8").'
        )
    overwrites = any(_overwrite_frequency(part) for part in _parts(optimizer))
    apply_in_replica(optimizer, gradients, variables)
    applied = [v for g, v in zip(gradients, variables, strict=True) if g is not None]
    if overwrites:
        if _compat.uses_merge_call(context.strategy):
            context.merge_call(
                lambda strategy: overwrite_with_averages(optimizer, strategy, applied)
            )
        else:
            overwrite_with_averages(optimizer, context.strategy, applied)


def apply_in_replica(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Applies summed gradients in one replica, without overwriting variables by their averages."""
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if not pairs:
        return
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    for part in _parts(optimizer):
        known = {id(variable) for variable in _compat.optimizer_trains(part)}
        own = [(g, v) for g, v in pairs if part is optimizer or id(v) in known]
        if own:
            _apply(part, own, replicas)
    if hasattr(optimizer, "optimizers"):
        optimizer.iterations.assign_add(1)


def _apply(optimizer: Any, pairs: list[tuple[Any, Any]], replicas: int) -> None:
    summed, kept = zip(*pairs, strict=True)
    with _hiding(optimizer, dict.fromkeys(_OWN_IDEAS)):
        if replicas == 1 or _compat.can_skip_gradient_sum(optimizer):
            with _compat.gradients_already_summed(optimizer):
                optimizer.apply(list(summed), list(kept))
        else:
            with _hiding(optimizer, {name: _divided(optimizer, name, replicas) for name in _CLIPS}):
                optimizer.apply([gradient / replicas for gradient in summed], list(kept))


def overwrite_with_averages(
    optimizer: Any, strategy: tf.distribute.Strategy, applied: Sequence[Any]
) -> None:
    """Does what ``ema_overwrite_frequency`` asks, in a cross-replica context, after an update.

    All variables that the optimizer knows are overwritten, but only those in ``applied``, which the
    update changed, are constrained.
    """
    constraints = {id(v.value): v.constraint for v in applied}
    for part in _parts(optimizer):
        frequency = _overwrite_frequency(part)
        if frequency and any(id(v.value) in constraints for v in _compat.optimizer_trains(part)):
            done: Any = tf.convert_to_tensor(part.iterations)
            overwrite = functools.partial(_overwrite, part, strategy, constraints)
            tf.cond(done % frequency == 0, overwrite, lambda: None)


def finish_values(
    optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy
) -> None:
    """Overwrites variables with their moving averages, as Keras does at the end of training."""
    if not any(is_sharded(one) for one in variables):
        optimizer.finalize_variable_values(variables)
        return
    for part in _parts(optimizer):
        if part.use_ema:
            _overwrite(part, strategy, {})


def _overwrite(
    optimizer: Any, strategy: tf.distribute.Strategy, constraints: dict[int, Any]
) -> None:
    for variable, average in _compat.moving_averages(optimizer):
        # Keras constrains what it has overwritten: an average of what fits need not fit itself.
        constraint = constraints.get(id(variable)) or tf.convert_to_tensor
        if is_sharded(variable):
            with tf.device(variable.device):
                _assign(constraint, variable, average)
            continue
        assign = functools.partial(_assign, constraint)
        strategy.extended.update(variable, assign, args=(average,))


def _assign(constraint: Any, variable: Any, value: Any) -> None:
    variable.assign(constraint(value))


def _overwrite_frequency(optimizer: Any) -> int | None:
    """Returns the setting of the user, also while another replica hides it."""
    _, own = _hidden.get((id(optimizer), *_OWN_IDEAS), (None, {}))
    frequency = own.get("ema_overwrite_frequency", optimizer.ema_overwrite_frequency)
    return frequency if optimizer.use_ema else None


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers that do the work: those in a ``keras.optimizers.MultiOptimizer``, or one."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "optimizers", ())) or [inner]


# What an optimizer must not do by itself with gradients that are ready to be applied: the first is
# a tf.cond in a replica, an error on several; the second divides what is unscaled already.
_OWN_IDEAS = ("ema_overwrite_frequency", "loss_scale_factor")
_CLIPS = ("clipnorm", "global_clipnorm", "clipvalue")
_hidden: dict[Any, tuple[list[int], dict[str, Any]]] = {}


@contextmanager
def _hiding(optimizer: Any, settings: dict[str, Any]) -> Iterator[None]:
    """Gives an optimizer other settings for a while.

    Counted, because replicas are threads that take turns inside ``optimizer.apply``.
    """
    key = (id(optimizer), *settings)
    own = {name: getattr(optimizer, name, None) for name in settings}
    entered, kept = _hidden.setdefault(key, ([0], own))
    entered[0] += 1
    if entered[0] == 1:
        for name, value in settings.items():
            setattr(optimizer, name, value)
    try:
        yield
    finally:
        entered[0] -= 1
        if not entered[0]:
            del _hidden[key]
            for name, value in kept.items():
                setattr(optimizer, name, value)


def _divided(optimizer: Any, name: str, replicas: int) -> float | None:
    """A limit for gradients that are divided by the replicas before Keras clips and sums them."""
    limit = getattr(optimizer, name, None)
    return None if limit is None else limit / replicas


def prepare_update(
    optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy, shard: str | bool
) -> tuple[UpdatePlan, ShardedUpdate | None]:
    """Builds an optimizer, with its state on every replica or sharded over them.

    Args:
        optimizer: A Keras optimizer.
        variables: The variables it will train.
        strategy: The strategy whose scope they were created in.
        shard: ``"auto"``, True or False.

    Returns:
        What was decided and why, and what applies a sharded update, None where it is not sharded.

    Raises:
        ScopeError: As ``build_optimizer``.
        TfMultiGpuError: As ``build_optimizer``; or what was asked for cannot be had.
    """
    inner = unwrap_optimizer(optimizer)
    _check(optimizer, strategy)
    if not variables and not optimizer.built and inner is optimizer:
        return UpdatePlan(
            False, "everything is frozen; the optimizer is built when it is not"
        ), None
    plan = plan_update(shard, inner, variables, strategy)
    sharded = shard_update(inner, variables, strategy) if plan.sharded else None
    build_optimizer(optimizer, variables, strategy)
    return plan, sharded


def build_optimizer(
    optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy
) -> None:
    """Creates the optimizer's variables where they belong, before anything is traced.

    Slots made inside ``strategy.run`` crash every optimizer that has them, and slots made outside
    the scope let replicas drift apart.

    Args:
        optimizer: A Keras optimizer.
        variables: The variables it will train.
        strategy: The strategy whose scope they were created in.

    Raises:
        ScopeError: The optimizer was created or built outside the scope of the strategy.
        TfMultiGpuError: The optimizer accumulates gradients by itself.
    """
    _check(optimizer, strategy)
    if not optimizer.built:
        with strategy.scope():
            optimizer.build(list(variables))
        _check(optimizer, strategy)
    known = {id(variable) for variable in _compat.optimizer_trains(optimizer)}
    missing = [v.path for v in variables if known and id(v) not in known]
    if missing:
        raise ScopeError(
            f"The optimizer was built for other variables. It does not know: {missing[:3]}. "
            "Create a new optimizer for this model, inside strategy.scope(). To train several "
            "models with one, build it for all of them first: "
            "optimizer.build(a.trainable_variables + b.trainable_variables)."
        )
    after_build.pop(optimizer, lambda: None)()


# Called once an optimizer is built: where its restored slots live is unknown before a step is made.
after_build: weakref.WeakKeyDictionary[Any, Callable[[], None]] = weakref.WeakKeyDictionary()


def _check(optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    owned = owned_variables(unwrap_optimizer(optimizer))
    everywhere = [variable for variable in optimizer.variables if id(variable) not in owned]
    check_scope(everywhere, strategy, "optimizer")
    for part in _parts(optimizer):
        _refuse_accumulation(part)


def _refuse_accumulation(optimizer: Any) -> None:
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise TfMultiGpuError(
            "Accumulation inside a Keras optimizer crashes on several replicas and averages "
            "averages on one. Received: gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}. Leave it out and pass micro_batches="
            f"{optimizer.gradient_accumulation_steps} to make_train_step."
        )
