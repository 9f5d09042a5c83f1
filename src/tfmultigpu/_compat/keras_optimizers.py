"""Strategy and variables of a Keras optimizer, and steps of its ``apply`` one by one."""

from __future__ import annotations

import tensorflow as tf

from tfmultigpu.types import KerasOptimizer, KerasVariable, Options, Tensor


def keeping_gradients(clipped: bool) -> Options:
    """Returns attributes with which ``optimizer.apply`` does not add or clip gradients once more.

    Private: ``optimizer._all_reduce_sum_gradients``, and ``optimizer._clip_gradients`` if they are
    ``clipped``, of which these make the identity. Keras offers no public way to apply gradients
    that are already summed, and clipping, skipping and loss scaling need the sum first. Without the
    first gradients would be divided by the number of replicas, for Keras to sum again: exact, but
    with twice the traffic. Without the second three settings would be hidden.
    """
    options: Options = {"_all_reduce_sum_gradients": _same}
    return {**options, "_clip_gradients": _same} if clipped else options


def _same(gradients: list[Tensor]) -> list[Tensor]:
    return gradients


def clip_as_set(optimizer: KerasOptimizer, gradients: list[Tensor]) -> list[Tensor]:
    """Clips gradients by what is set on an optimizer, its ``clipnorm`` for example.

    Private: ``optimizer._clip_gradients``. Keras calls it in ``apply`` with what it is given, and
    it fails for values that replicas hold each of. No public function reads all three settings.
    Without it a step whose optimizer clips is not traced.
    """
    return list(optimizer._clip_gradients(gradients))


def strategy_of_optimizer(optimizer: KerasOptimizer) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope a Keras optimizer was created.

    Private: ``optimizer._distribution_strategy``. A variable of a ``OneDeviceStrategy`` does not
    tell its strategy. Without it the strategy in effect is taken.
    """
    own = getattr(optimizer, "_distribution_strategy", None)
    return tf.distribute.get_strategy() if own is None else own


def optimizer_trains(optimizer: KerasOptimizer) -> list[KerasVariable]:
    """Returns the variables an optimizer was built for; [] if unknown.

    Private: ``optimizer._trainable_variables``. Without it each part of a ``MultiOptimizer`` would
    get the gradients of all, and Keras would tell of unknown variables inside a trace.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "_trainable_variables", []))
