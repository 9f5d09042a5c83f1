"""A trained variable: where it is, who updates it, and its gradient in a step.

An update makes a record of each variable, and nobody asks the variable again. A table whose rows
are on several devices has a record for the rows on each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.gradients import scaled, sum_dtype
from tfmultigpu.strategies.row_lists import (
    as_tensor,
    is_list,
    joined,
    row_list,
    unique,
    with_values,
)
from tfmultigpu.types import KerasVariable, Scalar, Tensor


@dataclasses.dataclass(eq=False)
class Target:
    """A trained variable, or the rows of a table on one device, and its gradient in a step.

    Attributes:
        variable: The Keras variable, or the ``TablePart``, with its path and its rows.
        copies: The variables of TensorFlow in this process, in the order of the replicas.
        is_sharded: Whether there is one, on one of several devices.
        is_table: Whether it is so large that a list of its rows may be faster.
        takes: How the optimizer takes a list of rows, each once: "rows" updates these alone,
            "list" all rows of it, "tensor" has a gradient of all rows.
        device: The device of its owner, who alone updates it; None if each replica does.
        sums: In a step the number of each target of the backward pass that has a gradient for it,
            with the sum of that; lists of rows are settled first.
        assigned: The value that a layer assigns to it, as SpectralNormalization does.
        penalty: The gradient of its regularizer, or None.
        gradient: The gradient of the global batch, at least float32, or None.
    """

    variable: KerasVariable
    copies: tuple[tf.Variable, ...]
    is_sharded: bool
    is_table: bool
    takes: str
    device: str | None
    sums: list[tuple[int, Tensor]] = dataclasses.field(default_factory=list)
    assigned: Tensor = None
    penalty: Tensor = None
    gradient: Tensor = None

    def placed(self) -> AbstractContextManager[Any]:
        """Places what is computed of the variable where its gradients are added."""
        return nullcontext() if self.device is None else tf.device(self.device)

    # From the backward pass to the gradient of the global batch ---------------------------------

    def addend(self, gradient: Tensor) -> Tensor:
        """Returns what a backward pass gives, ready to be added: at least float32, or None.

        It is dense, but for a list of the rows of a table.
        """
        if gradient is None:
            return None
        dtype = sum_dtype(gradient.dtype)
        if is_list(gradient) and self.is_table:
            return row_list(gradient, self.variable.shape, dtype)
        # Rows of an embedding are summed into place.
        return tf.cast(self.as_tensor(gradient), dtype)

    def settle(self, keeps_lists: bool) -> None:
        """Puts tensors of all rows in the place of lists, if something needs all rows."""
        lists = [is_list(gradient_sum) for _, gradient_sum in self.sums]
        has_penalty = getattr(self.variable, "regularizer", None) is not None
        if keeps_lists and all(lists) and not has_penalty and self.assigned is None:
            return
        if any(lists):
            with self.placed():
                self.sums = [(number, self.as_tensor(each)) for number, each in self.sums]

    def penalize(self, gradient: Tensor) -> None:
        """Keeps the gradient of the regularizer; None if the penalty has none."""
        if gradient is not None:
            self.penalty = tf.cast(self.as_tensor(gradient), sum_dtype(gradient.dtype))

    def finish(self, corrections: Sequence[Scalar]) -> None:
        """Makes the gradient: the penalty, and each sum, corrected."""
        total = self.penalty
        for number, gradient_sum in self.sums:
            part = tf.identity(gradient_sum)
            if (correction := corrections[number]) is not None:
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

    def taken(self, gradient: Tensor) -> Tensor:
        """Returns a gradient, which may be a list with each row once, as the optimizer takes it."""
        if not is_list(gradient) or self.takes == "rows":
            return gradient
        with self.placed():
            if self.takes == "list":
                return with_values(gradient, gradient.values, self.variable.shape)
            return self.as_tensor(gradient)

    def as_tensor(self, gradient: Tensor) -> Tensor:
        """Returns a gradient, which may be a list, as a tensor of all rows."""
        return as_tensor(gradient, self.variable.shape)
