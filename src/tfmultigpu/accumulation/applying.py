"""The stock ``optimizer.apply``, given gradients as an update has them.

Keras would add gradients over the replicas, clip each as a tensor of all rows, and update the whole
of a variable. ``applying`` and ``updating_by`` replace what has to be another here; the table in
docs/architecture.md has each name with its reason.

A gradient that is a list of rows, without a ``dense_shape``, updates these alone: Keras sees a
variable that has no others::

    rows, slots = the listed rows of the variable, and of what the optimizer keeps for it
    optimizer.update_step(values of the list, rows, learning_rate)      unchanged, by Keras
    variable, slots = their listed rows written back

A step has the parts of a table whose rows are on several devices, and Keras the whole. Between the
two the gradients of the parts go through Keras as one object, which nothing but the update looks
into.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeGuard

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching, setting
from tfmultigpu.accumulation.loss_scale import parts_of
from tfmultigpu.strategies.row_lists import is_list, values_of, with_values
from tfmultigpu.strategies.row_parts import RowParts, copies_of, whole_of
from tfmultigpu.strategies.topology import tf_variable
from tfmultigpu.types import Function, KerasOptimizer, KerasVariable, Tensor


def applying(optimizer: KerasOptimizer, *, clipped: bool) -> AbstractContextManager[None]:
    """Has ``optimizer.apply`` take gradients as they are: added, unscaled, and ``clipped``."""
    return setting(optimizer, loss_scale_factor=None, **_compat.keeping_gradients(clipped))


@contextmanager
def updating_by(strategy: tf.distribute.Strategy, update: Function) -> Iterator[None]:
    """Has a function called in place of ``strategy.extended.update``.

    Args:
        strategy: The strategy.
        update: ``update(original, variable, function, args, kwargs)``.
    """

    def called(
        original: Function,
        variable: KerasVariable,
        function: Function,
        args: Any = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        original = functools.partial(original, group=group)
        return update(original, variable, function, args, kwargs or {})

    with patching(strategy.extended, "update", called):
        yield


def lists_rows(args: Sequence[Any]) -> TypeGuard[Sequence[tf.IndexedSlices]]:
    """Returns whether the first argument of an update is a list of the rows to update alone."""
    return len(args) > 0 and is_list(args[0]) and args[0].dense_shape is None


def of_rows(
    optimizer: KerasOptimizer,
    strategy: tf.distribute.Strategy,
    variable: KerasVariable,
    function: Function,
) -> Function:
    """Returns a function of Keras that updates of a copy of a variable the listed rows alone.

    Args:
        optimizer: A stock optimizer.
        strategy: The strategy of the variable.
        variable: The variable of TensorFlow, or the ``RowParts``, as Keras knows it.
        function: What Keras gives to ``strategy.extended.update``.
    """
    import keras

    def update(copy: tf.Variable, *args: Any, **kwargs: Any) -> Any:
        view: Any = copy
        ids = args[0].indices if lists_rows(args) else None
        if ids is not None:
            view, args = _RowsOf(copy, variable, ids), (args[0].values, *args[1:])
        elif not isinstance(variable, RowParts):
            return function(copy, *args, **kwargs)
        slots: set[int] = set()
        for part in parts_of(optimizer):
            slots.update(id(slot) for slot in part.variables if slot.shape == variable.shape)

        def value(original: Callable[[KerasVariable], Any], slot: KerasVariable) -> Any:
            whole = original(slot)
            if id(slot) not in slots:
                return whole
            # The copy beside the variable, or the only one.
            copies = copies_of(strategy, whole)
            beside = [each for each in copies if each.device == copy.device]
            of_slot = (beside or copies)[0]
            return of_slot if ids is None else _RowsOf(of_slot, whole, ids)

        with patching(keras.Variable, "value", value):
            return function(view, *args, **kwargs)

    return update


class _RowsOf:
    """Some rows of a variable, as a variable that has no others; Keras reads and assigns it.

    Attributes:
        shape: The shape of these rows.
    """

    def __init__(self, variable: tf.Variable, whole: KerasVariable, ids: Tensor) -> None:
        self._variable, self._whole, self._ids = variable, whole, ids
        self.shape = tf.TensorShape([None, *variable.shape[1:]])

    def __getattr__(self, name: str) -> Any:
        # Keras finds slots by the variable that has a copy on each replica.
        return getattr(self._whole, name)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._variable.sparse_read(self._ids), dtype, name=name)

    def assign(self, value: Any) -> None:
        """Writes these rows."""
        self._variable.scatter_update(self._list(value))

    def assign_add(self, value: Any) -> None:
        """Adds to these rows."""
        self._variable.scatter_add(self._list(value))

    def assign_sub(self, value: Any) -> None:
        """Subtracts from these rows."""
        self._variable.scatter_sub(self._list(value))

    def _list(self, value: Any) -> tf.IndexedSlices:
        return tf.IndexedSlices(tf.convert_to_tensor(value, self._variable.dtype), self._ids)


# Tables whose rows are on several devices ---------------------------------------------------------


@dataclasses.dataclass
class OfParts:
    """The gradient of a table in parts.

    Attributes:
        parts: In their order the gradient of each: a tensor, a list of rows, or None.
    """

    parts: list[Tensor]

    def present(self) -> list[tf.Tensor]:
        """Returns the numbers of those that are not None."""
        return [values_of(part) for part in self.parts if part is not None]

    def with_present(self, values: Iterator[tf.Tensor]) -> OfParts:
        """Returns the same with other numbers."""
        parts: list[Tensor] = []
        for part in self.parts:
            parts.append(part if part is None else with_values(part, next(values)))
        return OfParts(parts)


def whole_tables(
    gradients: Sequence[Tensor], variables: Sequence[KerasVariable]
) -> tuple[list[Tensor], list[KerasVariable]]:
    """Returns gradients with their variables, and a table in place of its parts, as in Keras."""
    wholes: dict[int, KerasVariable] = {}
    of_wholes: dict[int, Tensor] = {}
    for gradient, variable in zip(gradients, variables, strict=True):
        whole = whole_of(variable)
        wholes[id(whole)] = whole
        if whole is variable:
            of_wholes[id(whole)] = gradient
            continue
        of_table = of_wholes.setdefault(id(whole), OfParts([None] * len(whole.value.parts)))
        of_table.parts[variable.number] = gradient
    return list(of_wholes.values()), list(wholes.values())


def clip_as_set(optimizer: KerasOptimizer, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns gradients clipped as Keras would, which may be lists of rows, or of tables in parts.

    The rows that a list leaves out are zero, and add nothing to a norm.
    """
    flat: list[tf.Tensor] = []
    for gradient in gradients:
        flat += gradient.present() if isinstance(gradient, OfParts) else [values_of(gradient)]
    values = iter(_compat.clip_as_set(optimizer, flat))
    clipped: list[Tensor] = []
    for gradient in gradients:
        if not isinstance(gradient, OfParts):
            clipped.append(with_values(gradient, next(values)))
            continue
        clipped.append(gradient.with_present(values))
        if optimizer.clipnorm is not None:
            # Each variable has a norm of its own, and a table is one.
            parts, _ = tf.clip_by_global_norm(gradient.present(), optimizer.clipnorm)
            clipped[-1] = gradient.with_present(iter(parts))
    return clipped


def update_parts(
    table: RowParts, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Runs a function of Keras on each part of a table, on its device, with what it has there."""
    for number, part in enumerate(table.parts):
        of_part: list[Tensor] = []
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
