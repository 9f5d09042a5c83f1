"""Gradients and updates of tables whose rows are on several devices.

A step has the parts of such a table, and Keras the whole. Between the two the gradients of the
parts go through Keras as one object, which nothing but the update looks into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.strategies.row_lists import Gradient, values_of, with_values
from tfmultigpu.strategies.row_parts import RowParts, whole_of
from tfmultigpu.strategies.topology import tf_variable
from tfmultigpu.types import KerasOptimizer, KerasVariable


@dataclasses.dataclass
class OfParts:
    """The gradient of a table in parts.

    Attributes:
        parts: In their order the gradient of each: a tensor, a list of rows, or None.
    """

    parts: list[Gradient]

    def present(self) -> list[tf.Tensor]:
        """Returns the numbers of those that are not None."""
        return [values_of(part) for part in self.parts if part is not None]

    def with_present(self, values: Iterator[tf.Tensor]) -> OfParts:
        """Returns the same with other numbers."""
        parts: list[Gradient] = []
        for part in self.parts:
            parts.append(part if part is None else with_values(part, next(values)))
        return OfParts(parts)


def whole_tables(
    gradients: Sequence[Gradient], variables: Sequence[KerasVariable]
) -> tuple[list[Gradient], list[KerasVariable]]:
    """Returns gradients with their variables, and a table in place of its parts, as in Keras."""
    wholes: dict[int, KerasVariable] = {}
    found: dict[int, Gradient] = {}
    for gradient, variable in zip(gradients, variables, strict=True):
        whole = whole_of(variable)
        wholes[id(whole)] = whole
        if whole is variable:
            found[id(whole)] = gradient
            continue
        of_table = found.setdefault(id(whole), OfParts([None] * len(whole.value.parts)))
        of_table.parts[variable.number] = gradient
    return list(found.values()), list(wholes.values())


def clip_parts(optimizer: KerasOptimizer, gradients: list[Gradient]) -> list[Gradient]:
    """Returns gradients clipped as Keras would, where some are of tables in parts."""
    if not any(isinstance(gradient, OfParts) for gradient in gradients):
        return gradients  # Keras does it.
    if optimizer.clipnorm is not None:
        # Each variable has a norm of its own, and a table is one.
        return [_clipped_alone(gradient, optimizer.clipnorm) for gradient in gradients]
    flat: list[Gradient] = []
    for gradient in gradients:
        is_table = isinstance(gradient, OfParts)
        flat += gradient.present() if is_table else [values_of(gradient)]
    values = iter(_compat.clip_as_set(optimizer, flat))
    clipped: list[Gradient] = []
    for gradient in gradients:
        if isinstance(gradient, OfParts):
            clipped.append(gradient.with_present(values))
        else:
            clipped.append(with_values(gradient, next(values)))
    return clipped


def _clipped_alone(gradient: Gradient, limit: float) -> Gradient:
    """Returns the gradient of one variable, which may be of parts, of at most a norm."""
    if not isinstance(gradient, OfParts):
        return with_values(gradient, tf.clip_by_norm(values_of(gradient), limit))
    values, _ = tf.clip_by_global_norm(gradient.present(), limit)
    return gradient.with_present(iter(values))


def update_parts(
    table: RowParts, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Runs a function of Keras on each part of a table, on its device, with what it has there."""
    for number, part in enumerate(table.parts):
        of_part: list[Gradient] = []
        for value in args:
            inner = tf_variable(value)
            if isinstance(value, OfParts):
                of_part.append(value.parts[number])
            else:
                of_part.append(inner.parts[number] if isinstance(inner, RowParts) else value)
        if args and of_part[0] is None:
            continue
        with tf.device(part.device):
            function(part, *of_part, **kwargs)
