"""What was done to the gradients of a window: marks on their tensors, which say the next call.

A tensor that other code computes from a gradient has no mark, and then nothing is claimed of it. A
``tf.function`` returns new tensors, too, but keeps the class of what ``reduce`` returns.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from tfmultigpu.data.graph_messages import GraphMessage
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.lists import present
from tfmultigpu.strategies.collectives import REDUCED
from tfmultigpu.types import KerasVariable, Scalar, Tensor

_ORDER = (
    "Write window.apply(optimizer, scale=scale, clip_norm=limit), which keeps the order; or in "
    "this order: gradients, finite = scale.unscale(window.reduce()[0]); gradients, norm = "
    "tmg.accumulation.clip_gradients(gradients, limit); "
    "tmg.accumulation.apply_reduced_gradients(optimizer, gradients, variables, where=finite); "
    "scale.update(finite)."
)
_EMPTY = GraphMessage(
    "Nothing was added to the window since it was emptied, and an update would move weights by "
    "momentum and weight decay alone.",
    "",
    "Update only if window.count is not 0, and call reduce once for each window.",
)
_OTHER_SCALE = GraphMessage(
    "The loss scale changed while a window was filled, so its gradients carry two.",
    "",
    "Update a scale that windows share when none of them is filled: give each window a "
    "tmg.LossScale() of its own, or apply them together.",
)
_NOT_SCALED = GraphMessage(
    "The losses were not multiplied by the loss scale, so the update would be as many times too "
    "small.",
    "gradients of pair.sum",
    "Differentiate the scaled loss: target = scale.scale_loss(pair); "
    "window.add(tape.gradient(target, variables), pair).",
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is known of a gradient of the global batch.

    Attributes:
        scaled: Whether a loss scale multiplied losses of its window, a bool or a scalar; None if
            not known.
        plain: Whether losses of its window were not multiplied by a loss scale, likewise.
        unscaled: Whether it was divided by the loss scale.
        clipped: Whether it was clipped.
        count: How many additions of all replicas its window held, a scalar; None if not known.
        scale: The loss scale that multiplied the losses of its window, a scalar, 0 if none is
            known; or None.
        window: The window, if that is known.
    """

    scaled: Scalar = None
    plain: Scalar = None
    unscaled: bool = False
    clipped: bool = False
    count: Scalar = None
    scale: Scalar = None
    window: weakref.ref[Any] | None = None

    def mark(self, gradient: Tensor) -> None:
        """Marks a gradient; ``tf.nest`` also makes lists of specs and numbers."""
        with suppress(AttributeError):
            setattr(gradient, REDUCED, self)


class Reduced(NamedTuple):
    """What ``GradientAccumulator.reduce`` returns.

    Attributes:
        gradients: The gradient of each variable: a tensor, or a list of unique rows.
        weight: The weight of the window, a scalar.
    """

    gradients: list[Tensor]
    weight: tf.Tensor


class OfUnknownLosses(Reduced):
    """Gradients of which it is not known whether a loss scale multiplied the losses."""

    scaled: ClassVar[bool | None] = None

    def __new__(cls, gradients: list[Tensor], weight: tf.Tensor) -> OfUnknownLosses:
        """Marks the gradients."""
        for gradient in gradients:
            Stage(cls.scaled, cls.scaled is False).mark(gradient)
        return super().__new__(cls, gradients, weight)


class OfScaledLosses(OfUnknownLosses):
    """Gradients of losses that a loss scale multiplied."""

    scaled = True


class OfPlainLosses(OfUnknownLosses):
    """Gradients of losses that no loss scale multiplied."""

    scaled = False


# Windows whose last ``reduce`` returned gradients with a loss scale that nothing has divided since.
CARRYING: weakref.WeakSet[Any] = weakref.WeakSet()

REDUCED_BY_SCALED: dict[bool | None, type[OfUnknownLosses]] = {
    None: OfUnknownLosses,
    True: OfScaledLosses,
    False: OfPlainLosses,
}


def stages_of(gradients: Sequence[Tensor]) -> list[Stage]:
    """Returns the stage of each gradient that is marked."""
    return present([getattr(gradient, REDUCED, None) for gradient in gradients])


def scale_of(gradient: Tensor, now: Scalar) -> Scalar:
    """Returns the loss scale in a gradient; the one now, if the scale of its losses is unknown."""
    stage = getattr(gradient, REDUCED, None)
    if stage is None or stage.scale is None:
        return now
    return tf.where(stage.scale > 0, tf.cast(stage.scale, now.dtype), now)


def check_one_scale(differs: Scalar) -> list[tf.Operation]:
    """Checks that one loss scale multiplied all losses of a window; returns assertions."""
    return _refuse([differs], _OTHER_SCALE)


def mark_as(before: Sequence[Tensor], after: Sequence[Tensor], **changes: bool) -> list[Tensor]:
    """Marks gradients that were computed from others, with what has changed; returns them."""
    for old, new in zip(before, after, strict=True):
        dataclasses.replace(getattr(old, REDUCED, None) or Stage(), **changes).mark(new)
    return list(after)


def check_scale_is_out(
    name: str, gradients: Sequence[Tensor], variables: Sequence[KerasVariable] = ()
) -> list[tf.Operation]:
    """Checks that no gradient carries a loss scale still; returns assertions as ``_refuse``.

    Args:
        name: The function that needs gradients without it.
        gradients: The gradients.
        variables: The variables that they are for.
    """
    message = GraphMessage(
        "The gradients still carry the loss scale.", f"{name} before scale.unscale", _ORDER
    )
    stages = stages_of(gradients)
    carrying = [stage.scaled for stage in stages if not stage.unscaled]
    if not stages:  # As those that a tf.function returned, without the class of reduce.
        known = set(map(id, variables))
        carrying = [True for window in CARRYING if known & set(map(id, window.variables))]
    return _refuse(carrying, message)


def check_to_unscale(gradients: Sequence[Tensor], *, has_scaled: bool) -> list[tf.Operation]:
    """Checks that gradients may carry a loss scale, and were not clipped with it.

    It returns assertions as ``_refuse``.

    Args:
        gradients: The gradients that are to be divided.
        has_scaled: Whether the scale may have multiplied the losses where no pair notes it.
    """
    stages = stages_of(gradients)
    windows = [stage.window for stage in stages]
    if not windows or None in windows:
        CARRYING.clear()
    CARRYING.difference_update(present([window() for window in present(windows)]))
    for stage in stages:
        if stage.unscaled:
            raise TfMultiGpuError(
                "The gradients were divided by the loss scale before.",
                "unscale for the second time",
                _ORDER,
            )
        if stage.clipped:
            raise TfMultiGpuError(
                "The gradients were clipped with the loss scale in them, to a norm that is as many "
                "times too small.",
                "unscale after clip_gradients",
                _ORDER,
            )
    if has_scaled:
        return []
    return _refuse([stage.plain for stage in stages], _NOT_SCALED)


def check_not_empty(count: Scalar) -> list[tf.Operation]:
    """Checks that a window was not empty; returns an assertion if a graph has to find out."""
    return [] if count is None else _refuse([tf.equal(count, 0)], _EMPTY)


def _refuse(faults: Sequence[Scalar], message: GraphMessage) -> list[tf.Operation]:
    """Raises an error if one of some bools is true; returns assertions if a graph has to find out.

    What follows must wait for them.
    """
    after = []
    # The gradients of a window have one tensor.
    for fault in {id(fault): fault for fault in present(faults)}.values():
        if tf.is_symbolic_tensor(fault):
            after.append(tf.debugging.Assert(~fault, [message.text]))
        elif bool(fault):
            raise message.as_error(TfMultiGpuError)
    return after
