"""The update of the old train step; it goes with that."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.update import Replicated, apply_reduced_gradients, choose_update
from tfmultigpu.strategies.variable_sharding import is_sharded

__all__ = ["apply_in_replica", "apply_reduced_gradients", "overwrite_with_averages"]


class UpdatePlan(NamedTuple):
    """The decision how variables are updated, and its reason."""

    sharded: bool
    reason: str


class ShardedUpdate:
    """An update by owners, as the old train step asks for it."""

    def __init__(self, update: Replicated) -> None:
        """Takes the update."""
        self.at, self.apply = update.at, update.apply
        self._update: Any = update

    def places(self, variables: Sequence[Any], present: Sequence[Sequence[bool]]) -> list[str]:
        """Returns where what replicas return is added: gradients with the owners, then the rest."""
        used = [v for one in present for v, here in zip(variables, one, strict=True) if here]
        return [*map(self._update._device, used), self._update.devices[0]]


def prepare_update(
    optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy, shard: str | bool
) -> tuple[UpdatePlan, ShardedUpdate | None]:
    """Chooses the update and builds the optimizer."""
    update = choose_update(optimizer, variables, strategy, shard)
    return UpdatePlan(update.owned, update.reason), ShardedUpdate(update) if update.owned else None


def placed(update: ShardedUpdate | None, variable: Any) -> AbstractContextManager[Any]:
    """Places what is computed of a variable where it is updated; anywhere, where that is all."""
    return nullcontext() if update is None else update.at(variable)


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
