"""Decisions about the global gradient, all of it together: its norm, its finiteness, clipping."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.stages import check_scale_is_out, mark_as
from tfmultigpu.arguments import check_positive
from tfmultigpu.data.batch_format import cast_all
from tfmultigpu.errors import LossError, ReplicaDependenceWarning, TfMultiGpuError
from tfmultigpu.lists import map_present, present
from tfmultigpu.strategies.collectives import REDUCED
from tfmultigpu.strategies.row_lists import values_of, with_values
from tfmultigpu.types import KerasVariable, Scalar, Tensor
from tfmultigpu.user_code import warn

BY_HAND = (
    "Write in strategy.scope(): window = tmg.GradientAccumulator(variables); in the function given "
    "to strategy.run: window.add(tape.gradient(pair.sum, variables), pair), with pair = "
    "tmg.loss_sum(loss, y, outputs); and after strategy.run: window.apply(optimizer), or "
    "gradients, weight = window.reduce(); tmg.accumulation.apply_reduced_gradients(optimizer, "
    "gradients, variables)."
)
# The scopes of tf.clip_by_norm, tf.clip_by_global_norm and tf.clip_by_value.
_CLIPPED = re.compile(r"(^|/)clip_by_(value|(global_|average_)?norm)")
_in_global_phase: ContextVar[bool] = ContextVar("in_global_phase", default=False)


def clip_gradients(gradients: Sequence[Tensor], limit: float) -> tuple[list[Tensor], Scalar]:
    """Scales gradients down so that their norm together is at most a limit, as on one device.

    This is clipping by the global norm (Pascanu et al. 2013, arXiv 1211.5063).

    Args:
        gradients: The gradients of the global batch, from ``GradientAccumulator.reduce``. None
            stays None.
        limit: The largest norm, positive and finite.

    Returns:
        The gradients, and their norm before clipping: a scalar of their dtype, or float64 if they
        have several.

    Raises:
        TfMultiGpuError: It is called by one of several replicas, inside ``strategy.run``; or the
            gradients carry a loss scale: call ``scale.unscale`` first.
        ValueError: ``limit`` is not a positive, finite number.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> gradients, norm = tmg.accumulation.clip_gradients([tf.constant([3.0, 4.0]), None], 1.0)
        >>> [round(x, 6) for x in gradients[0].numpy().tolist()], float(norm)
        ([0.6, 0.8], 5.0)
    """
    limit = check_positive("limit", limit, "To clip nothing, leave the call out.")
    check_reduced("clip_gradients", gradients)
    after = check_scale_is_out("clip_gradients", gradients)
    reduced: list[Tensor] = []
    for gradient in gradients:
        if gradient is None or getattr(gradient, REDUCED, False):
            reduced.append(gradient)  # A list has each row once.
        else:
            reduced.append(tf.convert_to_tensor(gradient))
    with tf.control_dependencies(after):
        norm = global_norm(present(reduced))
    return mark_as(gradients, clipped(reduced, limit, norm), clipped=True), norm


def clipped(gradients: Sequence[Tensor], limit: float, norm: Scalar) -> list[Tensor]:
    """Returns gradients of any float dtypes scaled down to a largest norm, given their norm."""
    scale = tf.clip_by_global_norm([tf.ones_like(norm)], limit, norm)[0][0]
    return map_present(functools.partial(scaled, factor=scale), gradients)


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Returns a gradient, a tensor or a list of rows, times a factor."""
    values = values_of(gradient)
    return with_values(gradient, values * tf.cast(factor, values.dtype))


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the norm of all gradients together, of their dtype, or float64 for several.

    The rows that a list leaves out are zero; it must have each row once.
    """
    numbers = list(map(values_of, gradients))
    if not numbers:
        return tf.zeros([])
    if any(tensor.dtype != numbers[0].dtype for tensor in numbers):
        numbers = cast_all(numbers, tf.float64)
    return tf.linalg.global_norm(numbers)


def all_finite(gradients: Sequence[Tensor]) -> Tensor:
    """Returns whether every number in every gradient is finite, a bool scalar."""
    finite = [tf.reduce_all(tf.math.is_finite(values_of(gradient))) for gradient in gradients]
    return tf.reduce_all(finite)


@contextmanager
def in_global_phase() -> Iterator[None]:
    """Marks what a replica computes of the gradient of the global batch, after the addition."""
    token = _in_global_phase.set(True)
    try:
        yield
    finally:
        _in_global_phase.reset(token)


def check_reduced(name: str, gradients: Sequence[Tensor] = ()) -> None:
    """Checks that a function of the global gradient gets that, once for all replicas."""
    context = tf.distribute.get_replica_context()
    parts = any(isinstance(gradient, tf.distribute.DistributedValues) for gradient in gradients)
    in_replica = context is not None and context.num_replicas_in_sync > 1
    if parts or (in_replica and not _in_global_phase.get()):
        raise TfMultiGpuError(
            "This call needs the gradient that was added over all replicas, and is made once.",
            f"{name} inside strategy.run, or with one value for each replica",
            BY_HAND,
        )


def check_gradients(variables: Sequence[KerasVariable], gradients: Sequence[Tensor]) -> None:
    """Checks that a gradient reaches any of the variables."""
    if variables and not present(gradients):
        raise LossError(
            "No gradient reaches any trainable variable, so no step would change anything.",
            f"variables {_paths(variables)[:5]}",
            "Compute the loss from the model's outputs by operations that have a gradient: not by "
            "tf.stop_gradient, tf.argmax, tf.round, a cast to integers or numpy. If you write the "
            "tf.GradientTape, call the model inside it.",
        )


def warn_of_variables(variables: Sequence[KerasVariable], without: Sequence[KerasVariable]) -> None:
    """Warns of variables without a gradient; Python shows a warning once for a line."""
    if without:
        warn(
            "No gradient reaches some trainable variables, so they stay as they are. Received: "
            f"variables {_paths(without)[:5]}. Look for an output without a loss or a "
            "tf.stop_gradient; if it is meant, write layer.trainable = False."
        )
    if not variables:
        warn("The model has no trainable variables: a step changes nothing. Received: trainable=[]")


def warn_of_clipped_part(gradient: Tensor) -> None:
    """Warns of a gradient that TensorFlow's functions clipped; only in a graph operations know."""
    values = values_of(gradient)
    if not tf.is_symbolic_tensor(values) or "gradient_tape/" in values.op.name:
        return
    if _CLIPPED.search(values.op.name):
        warn(
            "A replica has only a part of the gradient: clipped parts do not add up to the clipped "
            f"gradient. Received: the result of {values.op.name!r}. Write after strategy.run: "
            "window.apply(optimizer, clip_norm=limit); or set clipnorm, global_clipnorm or "
            "clipvalue on the optimizer.",
            ReplicaDependenceWarning,
        )


def _paths(variables: Sequence[KerasVariable]) -> list[str]:
    return [getattr(variable, "path", variable.name) for variable in variables]


def sum_dtype(dtype: Any) -> tf.DType:
    """Returns the dtype sums of gradients are kept in: at least float32."""
    known = tf.as_dtype(dtype)
    if known in (tf.float16, tf.bfloat16):
        return tf.float32
    return known


def refuse_float8(variables: Sequence[KerasVariable]) -> None:
    """Raises an error for trained float8 layers, whose scales replicas cannot add."""
    new = [v.path for v in variables if getattr(v, "overwrite_with_gradient", False)]
    if new:
        raise TfMultiGpuError(
            "A float8 layer computes its scales from a whole batch; scales of replicas cannot be "
            "added.",
            f"{new[:3]}",
            'Leave out layer.quantize("float8").',
        )
