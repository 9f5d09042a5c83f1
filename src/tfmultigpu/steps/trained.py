"""A trained variable, on the way from the sums of its gradients to the gradient of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfmultigpu.accumulation.gradients import scaled, sum_dtype
from tfmultigpu.steps.features import Feature
from tfmultigpu.strategies.row_lists import Shape, as_tensor, is_list, joined, unique
from tfmultigpu.types import KerasVariable, Scalar, Tensor


@dataclasses.dataclass
class Trained:
    """A trained variable and its gradient; lists of rows, of a large table, are settled first.

    Attributes:
        variable: The Keras variable.
        sums: The number of each target that has a gradient for it, with the sum of that.
        assigned: The value that a layer assigns to it in this step, as SpectralNormalization does.
        penalty: The gradient of its regularizer, or None.
        gradient: The gradient of the global batch, at least float32, or None.
    """

    variable: KerasVariable
    sums: list[tuple[int, Tensor]] = dataclasses.field(default_factory=list)
    assigned: Tensor = None
    penalty: Tensor = None
    gradient: Tensor = None

    @property
    def has_lists(self) -> bool:
        """Whether one of the sums is a list of rows."""
        return any(is_list(gradient_sum) for _, gradient_sum in self.sums)

    @property
    def needs_all_rows(self) -> bool:
        """Whether something is added to the gradient that has all rows."""
        is_dense = not all(is_list(gradient_sum) for _, gradient_sum in self.sums)
        has_penalty = getattr(self.variable, "regularizer", None) is not None
        return is_dense or has_penalty or self.assigned is not None

    def make_dense(self) -> None:
        """Puts tensors of all rows in the place of lists."""
        for place, (target, gradient_sum) in enumerate(self.sums):
            self.sums[place] = target, as_tensor(gradient_sum, self.variable.shape)

    def penalize(self, gradient: Tensor) -> None:
        """Keeps the gradient of the regularizer; None if the penalty has none."""
        if gradient is not None:
            self.penalty = dense(gradient, self.variable.shape)

    def finish(self, corrections: Sequence[Scalar]) -> None:
        """Makes the gradient: the penalty, and the sum of each target, corrected."""
        total = self.penalty
        for target, gradient_sum in self.sums:
            part = tf.identity(gradient_sum)
            if (correction := corrections[target]) is not None:
                part = scaled(part, correction)
            if total is None:
                total = part
            elif is_list(part):
                total = joined([total, part])
            else:
                total += part
        if is_list(total):
            total = unique(total)
        self.gradient = total


def dense(gradient: Tensor, shape: Shape) -> Tensor:
    """Returns a gradient as a tensor, of the dtype of its sum: at least float32."""
    tensor = as_tensor(gradient, shape)  # Rows of an embedding are summed into place.
    return tf.cast(tensor, sum_dtype(tensor.dtype))


def keeps_lists(features: Sequence[Feature]) -> bool:
    """Returns whether no feature asks for a gradient as a tensor of the shape of its variable."""
    for feature in features:
        kind = type(feature)
        sees = kind.on_gradient is not Feature.on_gradient
        sees = sees or kind.after_update is not Feature.after_update
        if sees and not feature.takes_lists:
            return False
    return True
