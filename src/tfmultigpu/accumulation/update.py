"""The choice of who updates the variables of an optimizer, and updates by hand."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import lock_of, setting
from tfmultigpu.accumulation.gradients import check_reduced, refuse_float8
from tfmultigpu.accumulation.loss_scale import parts_of, unwrap_optimizer
from tfmultigpu.accumulation.replicated import Owned, Replicated
from tfmultigpu.accumulation.stages import (
    check_not_empty,
    check_scale_is_out,
    stages_of,
)
from tfmultigpu.errors import ScopeError, TfMultiGpuError
from tfmultigpu.lists import by_id
from tfmultigpu.strategies.called_by_all import PAYS_FROM_VARIABLES
from tfmultigpu.strategies.collectives import replicas_share_memory
from tfmultigpu.strategies.row_lists import is_list, row_list, unique
from tfmultigpu.strategies.scopes import check_optimizer, check_scope
from tfmultigpu.strategies.topology import is_mirrored, is_sharded, tf_variable
from tfmultigpu.types import KerasOptimizer, KerasVariable, Scalar, Tensor

# Methods that the train_step of Keras calls, and what to write in place of one's own.
_PASSED_OVER = {
    "apply_gradients": "Write it as def apply(self, grads, trainable_variables=None), which Keras "
    "calls too, with gradients of the global batch; and in it super().apply(...).",
    "scale_loss": "Weigh the loss where it is made, model.compile(..., loss_weights=[3.0]); "
    "against underflow in float16 use keras.optimizers.LossScaleOptimizer.",
}
# Trained numbers from which steps of owners are faster on virtual CPUs.
PAYS_FROM = 50_000

_chosen: weakref.WeakKeyDictionary[KerasOptimizer, Replicated] = weakref.WeakKeyDictionary()


def update_of(optimizer: KerasOptimizer) -> Replicated | None:
    """Returns what ``choose_update`` has chosen for an optimizer; None if it has not yet."""
    return _chosen.get(unwrap_optimizer(optimizer))


def choose_update(
    optimizer: KerasOptimizer,
    variables: Sequence[KerasVariable],
    strategy: tf.distribute.Strategy,
    shard_update: str | bool = "auto",
) -> Replicated:
    """Chooses who updates variables, and builds the optimizer; later returns the same object."""
    with lock_of(unwrap_optimizer(optimizer)):  # Two threads would build it twice.
        return _choose(optimizer, variables, strategy, shard_update)


def _choose(
    optimizer: KerasOptimizer,
    variables: Sequence[KerasVariable],
    strategy: tf.distribute.Strategy,
    shard_update: str | bool,
) -> Replicated:
    inner = unwrap_optimizer(optimizer)
    update = _chosen.get(inner)
    if update is None:
        check_scope(optimizer.variables, strategy, "optimizer")
    else:
        others = [v for v in optimizer.variables if id(v) not in update.state]
        check_scope(others, strategy, "optimizer")
    refuse_float8(variables)
    if update is None:
        if not variables and not inner.built and inner is optimizer:  # All is frozen, for now.
            return Replicated(optimizer, strategy, "nothing is trained")
        owned, reason = _decide(inner, variables, strategy, shard_update)
        kind = Owned if owned else Replicated
        update = kind(optimizer, strategy, reason)
        with tf.init_scope():
            update.build(variables)
            update.part_copies(variables)
        _chosen[inner] = update
    for part in parts_of(inner):  # A MultiOptimizer has them when it is built.
        for name, instead in _PASSED_OVER.items():
            if not _compat.is_part_of_keras(getattr(part, name)):
                raise TfMultiGpuError(
                    f"The optimizer replaces {name} of Keras, which replicas do not call.",
                    f"{type(part).__name__}.{name}",
                    instead,
                )
        if steps := getattr(part, "gradient_accumulation_steps", None):
            raise TfMultiGpuError(
                f"Replicas cannot train with gradient_accumulation_steps={steps}.",
                "",
                f"Leave it out, and make batches of {steps} times as many rows, each computed in "
                f"{steps} parts: tmg.fit(model, x, y, batch_size={steps} * batch_size, "
                f"micro_batches={steps}), or make_train_step(..., micro_batches={steps}).",
            )
    if strategy.num_replicas_in_sync > 1 and shard_update not in ("auto", update.owned):
        raise TfMultiGpuError(
            f"shard_update={shard_update} came too late or is not possible: {update.reason}.",
            "",
            "Leave shard_update out, which gives the same numbers, or create a new optimizer.",
        )
    if not optimizer.built:  # The inner one is.
        with tf.init_scope(), strategy.scope(), setting(inner, build=lambda variables: None):
            optimizer.build(list(variables))
    known = by_id(_compat.optimizer_trains(inner))
    if known and (missing := [v.path for v in variables if id(v) not in known]):
        raise ScopeError(
            "The optimizer was built for other variables.",
            f"{missing[:3]}",
            "Create a new one in strategy.scope(), after a layer is added or unfrozen by "
            "model.compile(keras.optimizers.Adam(), loss); or for several models build it for all "
            "of them first: optimizer.build(a.trainable_variables + b.trainable_variables).",
        )
    return update


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def apply_reduced_gradients(
    optimizer: KerasOptimizer,
    gradients: Sequence[Tensor],
    variables: Sequence[KerasVariable],
    *,
    where: Scalar = None,
) -> None:
    """Updates variables from gradients of the global batch; called once, outside of replicas.

    Keras' ``optimizer.apply`` would add the gradients over the replicas once more. Clipping set on
    the optimizer, weight decay, schedules, constraints and moving averages act as on one device.

    Args:
        optimizer: A Keras optimizer. If it is not built, it is built for these variables.
        gradients: One for each variable, from ``GradientAccumulator.reduce``. They carry no loss
            scale: give them to ``LossScale.unscale`` first. None leaves a variable as it is.
        variables: The variables, in the same order.
        where: Whether to update, a bool scalar; None means yes. Without an update no slot and no
            counter changes.

    Raises:
        TfMultiGpuError: It is called by one of several replicas, inside ``strategy.run``; all
            gradients are None, or of a window to which nothing was added; they carry a loss scale;
            or the optimizer has one, and they were not unscaled by a ``LossScale``.
        ScopeError: The optimizer was created outside the scope of the strategy.

    Of gradients that a ``tf.function`` has returned it is not known whether their window was empty:
    then test ``window.count`` before you reduce.

    Example:
        >>> import keras, tensorflow as tf, tfmultigpu as tmg
        >>> weight = keras.Variable([1.0])
        >>> optimizer = keras.optimizers.SGD(0.5)
        >>> for where in (False, True):
        ...     apply_reduced_gradients(optimizer, [tf.ones([1])], [weight], where=where)
        >>> weight.numpy().tolist(), int(optimizer.iterations.numpy())
        ([0.5], 1)
    """
    check_optimizer(optimizer)
    check_reduced("apply_reduced_gradients", gradients)
    if len(gradients) != len(variables):
        raise TfMultiGpuError(
            "apply_reduced_gradients takes one gradient for each variable, in the same order.",
            f"{len(gradients)} gradients for {len(variables)} variables",
            "Give the variables of the window; None stands for a variable without gradient.",
        )
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if not pairs:
        raise TfMultiGpuError(
            "There is nothing to update.",
            f"no gradient for {len(variables)} variables",
            "Give gradients of a loss that depends on model.trainable_variables.",
        )
    after = _check_stages(optimizer, *zip(*pairs, strict=True))
    update = update_of(optimizer)
    if update is None:
        strategy = getattr(tf_variable(variables[0]), "distribute_strategy", None)
        # A variable of a OneDeviceStrategy does not tell its strategy, but the optimizer does.
        strategy = strategy or _compat.strategy_of_optimizer(optimizer)
        update = choose_update(optimizer, variables, strategy)

    taken: list[Tensor] = []
    for gradient, variable in pairs:
        if is_list(gradient):
            rows = unique(row_list(gradient, variable.shape, gradient.dtype))
            gradient = update.target_of(variable).taken(rows)
        taken.append(gradient)

    def apply() -> tf.Tensor:
        update.apply(taken, [variable for _, variable in pairs], after if where is None else ())
        return tf.constant(True)

    with lock_of(unwrap_optimizer(optimizer)):
        if where is None:
            apply()
        else:
            with tf.control_dependencies(after):
                tf.cond(tf.convert_to_tensor(where), apply, lambda: tf.constant(False))


def _check_stages(
    optimizer: KerasOptimizer, gradients: Sequence[Tensor], variables: Sequence[KerasVariable]
) -> list[tf.Operation]:
    """Checks that gradients carry no loss scale; returns what the update is to wait for."""
    after = check_scale_is_out("apply_reduced_gradients", gradients, variables)
    stages = stages_of(gradients)
    unscaled = len(stages) == len(gradients) and all(stage.unscaled for stage in stages)
    wraps = unwrap_optimizer(optimizer) is not optimizer
    if not unscaled and (wraps or optimizer.loss_scale_factor is not None):
        raise TfMultiGpuError(
            "Of gradients by hand an optimizer that scales the loss cannot know whether they carry "
            "its scale.",
            f"{type(optimizer).__name__} with a loss scale, and gradients that no tmg.LossScale "
            "has unscaled",
            "Write in strategy.scope(): scale = tmg.LossScale(); in the replica, in place of "
            "optimizer.scale_loss: target = scale.scale_loss(pair); and outside: "
            "window.apply(optimizer, scale=scale).",
        )
    for stage in stages:
        return after + check_not_empty(stage.count)
    return after


def _decide(
    optimizer: KerasOptimizer,
    variables: Sequence[KerasVariable],
    strategy: tf.distribute.Strategy,
    asked: str | bool,
) -> tuple[bool, str]:
    """Returns whether each variable gets an owner, and why."""
    trained = _compat.optimizer_trains(optimizer) or variables
    sharded = list(filter(is_sharded, trained))
    if strategy.num_replicas_in_sync == 1:
        return False, "there is one replica"
    if sharded:
        return True, f"the model has {len(sharded)} sharded variables"
    if not is_mirrored(strategy):
        return False, f"{type(strategy).__name__} has no two devices that one process writes to"
    if optimizer.built:
        return False, "the optimizer was built before, with its state on every replica"
    for variable in optimizer.variables:
        if variable.name not in ("iteration", "learning_rate"):
            return False, f"update_step may change {variable.name!r}, which every replica has"
    if asked != "auto":
        return bool(asked), f"shard_update={asked}"
    if not replicas_share_memory(strategy):
        return False, "only on CPUs was it measured to be faster"
    count = sum(math.prod(variable.shape) for variable in variables)
    return count >= PAYS_FROM or len(variables) >= PAYS_FROM_VARIABLES, (
        f"{count:,} trained numbers in {len(variables)} variables: it is faster from {PAYS_FROM:,} "
        f"numbers, or {PAYS_FROM_VARIABLES} variables, on"
    )
