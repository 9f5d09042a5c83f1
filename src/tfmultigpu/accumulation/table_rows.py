"""Updates of the rows of a table alone: the stock optimizer sees a variable of those rows.

::

    rows, slots = the listed rows of the variable, and of what the optimizer keeps for it
    optimizer.update_step(values of the list, rows, learning_rate)      unchanged, by Keras
    variable, slots = their listed rows written back

This is the update from a dense gradient if a row whose gradient is zero stays as it is, and so does
its part of each slot, and if a row depends on no other. Of which optimizers that is true is tried
out, with a copy of the optimizer: see ``leaves_other_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching, setting
from tfmultigpu.accumulation.loss_scale import parts_of, unwrap_optimizer
from tfmultigpu.strategies.topology import tf_variable
from tfmultigpu.types import KerasOptimizer, KerasVariable

# Numbers in a table from which lists of its rows are faster than the whole.
LARGE = 2**16

_Value: TypeAlias = Any  # A variable of TensorFlow, a tensor, or what stands for one.
_Copies = Callable[[_Value], Sequence[tf.Variable]]


def is_table(variable: KerasVariable) -> bool:
    """Returns whether a variable is so large that a list of its rows may be faster."""
    size = tf.TensorShape(variable.shape).num_elements()
    return len(variable.shape) > 0 and size is not None and size >= LARGE


def takes_rows(optimizer: KerasOptimizer, variable: KerasVariable) -> bool:
    """Returns whether an optimizer may update the listed rows of a variable alone."""
    if variable.constraint is not None or getattr(variable, "regularizer", None) is not None:
        return False
    inner = unwrap_optimizer(optimizer)
    for part in parts_of(inner):
        trained = {id(each) for each in _compat.optimizer_trains(part)}
        if part is inner or id(variable) in trained:
            return leaves_other_rows(part)
    return False


# Which optimizers ---------------------------------------------------------------------------------

_known: dict[tuple[type, str], bool] = {}


def leaves_other_rows(optimizer: KerasOptimizer) -> bool:
    """Returns whether the update of a row needs no other, and leaves a row without gradient.

    A copy of the optimizer updates a small table from dense gradients, another copy its rows, and
    both must agree to the last bit. Only optimizers of Keras are asked: what a few steps show of
    code of a user may not be true of later ones. Call it outside of every strategy.
    """
    own_methods = {"update_step", "assign", "assign_add", "assign_sub"} & vars(optimizer).keys()
    if own_methods or not _compat.is_part_of_keras(type(optimizer)):
        return False
    # These change all rows in each step, whatever the gradient.
    if optimizer.weight_decay is not None or optimizer.use_ema:
        return False
    config = {**optimizer.get_config(), "learning_rate": 0.1, "name": "trial"}
    key = type(optimizer), repr(sorted(config.items()))
    if key not in _known:
        with tf.init_scope():
            _known[key] = _trial(type(optimizer), config)
    return _known[key]


_START = np.linspace(-1.0, 1.0, 12, dtype="float32").reshape(4, 3)
_LISTS = ((0, 1), (1, 3), (0,), (3, 1))  # Row 2 never has a gradient, and others not always.


def _trial(kind: _Value, config: dict[str, _Value]) -> bool:
    """Returns whether two copies of an optimizer agree, one of which updates rows alone."""
    whole = _train(kind.from_config(config), by_rows=False)
    for values in whole:
        if values.ndim and values.shape != _START.shape:  # What it keeps is not of rows.
            return False
    by_rows = _train(kind.from_config(config), by_rows=True)
    pairs = zip(whole, by_rows, strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def _train(optimizer: KerasOptimizer, *, by_rows: bool) -> list[_Value]:
    """Returns what some steps make of a small table, and of what the optimizer keeps."""
    import keras

    table = keras.Variable(_START, name="table")
    optimizer.build([table])
    for number, ids in enumerate(_LISTS):
        values = np.linspace(0.5, 1.5, 3 * len(ids), dtype="float32").reshape(-1, 3)
        values *= (-1.0) ** number
        if by_rows:
            rows = {id(table.value): tf.constant(ids, tf.int64)}
            with updating_rows(optimizer, rows, lambda variable: [variable]):
                optimizer.apply([tf.constant(values)], [table])
        else:
            gradient = np.zeros_like(_START)
            gradient[list(ids)] = values
            optimizer.apply([tf.constant(gradient)], [table])
    return [each.numpy() for each in (table, *optimizer.variables)]


# The update ---------------------------------------------------------------------------------------


@contextmanager
def updating_rows(
    optimizer: KerasOptimizer, ids: Mapping[int, tf.Tensor], copies: _Copies
) -> Iterator[None]:
    """Has ``optimizer.apply`` update the listed rows of some variables.

    The gradient of such a variable is given to ``apply`` as the values of its list: so Keras clips
    it, for rows that are not listed add nothing to a norm.

    Args:
        optimizer: A stock optimizer.
        ids: By the ``id`` of a copy of a variable, which rows its gradient lists, each once.
        copies: Returns the copies of a variable in this process.
    """
    if not ids:
        yield
        return
    update_step = optimizer.update_step
    trained = [tf_variable(each) for each in _compat.optimizer_trains(optimizer)]
    wholes = {id(copy): whole for whole in trained for copy in copies(whole)}

    def update(gradient: _Value, variable: _Value, learning_rate: _Value) -> None:
        rows = ids.get(id(variable))
        if rows is None:
            update_step(gradient, variable, learning_rate)
            return
        with _finding_rows(optimizer, variable, rows, copies):
            view = _RowsOf(variable, wholes[id(variable)], rows)
            update_step(gradient, view, learning_rate)

    with setting(optimizer, update_step=update):
        yield


@contextmanager
def _finding_rows(
    optimizer: KerasOptimizer, variable: _Value, ids: tf.Tensor, copies: _Copies
) -> Iterator[None]:
    """Has Keras find, in place of the slots of a table, their listed rows."""
    import keras

    slots = {id(each) for each in optimizer.variables if each.shape == variable.shape}

    def value(original: Callable[[_Value], _Value], slot: KerasVariable) -> _Value:
        whole = original(slot)
        if id(slot) not in slots:
            return whole
        # The copy beside the variable, or the only one.
        found = copies(whole)
        beside = [copy for copy in found if copy.device == variable.device]
        return _RowsOf((beside or found)[0], whole, ids)

    with patching(keras.Variable, "value", value):
        yield


class _RowsOf:
    """Some rows of a variable, as a variable that has no others; Keras reads and assigns it.

    Attributes:
        shape: The shape of these rows.
    """

    def __init__(self, variable: _Value, whole: _Value, ids: tf.Tensor) -> None:
        self._variable, self._whole, self._ids = variable, whole, ids
        self.shape = tf.TensorShape([None, *variable.shape[1:]])

    def __getattr__(self, name: str) -> _Value:
        # Keras finds slots by the variable that has a copy on each replica.
        return getattr(self._whole, name)

    def __tf_tensor__(self, dtype: _Value = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._variable.sparse_read(self._ids), dtype, name=name)

    def assign(self, value: _Value) -> None:
        """Writes these rows."""
        self._variable.scatter_update(self._list(value))

    def assign_add(self, value: _Value) -> None:
        """Adds to these rows."""
        self._variable.scatter_add(self._list(value))

    def assign_sub(self, value: _Value) -> None:
        """Subtracts from these rows."""
        self._variable.scatter_sub(self._list(value))

    def _list(self, value: _Value) -> tf.IndexedSlices:
        return tf.IndexedSlices(tf.convert_to_tensor(value, self._variable.dtype), self._ids)
