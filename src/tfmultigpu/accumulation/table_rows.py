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
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.strategies.row_parts import whole_of
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
        if part is inner or id(whole_of(variable)) in trained:
            return leaves_other_rows(part)
    return False


def takes_lists(optimizer: KerasOptimizer, variable: KerasVariable) -> bool:
    """Returns whether an optimizer that updates all rows of a variable may be given a list.

    The optimizers of Keras make of it what they need, in less memory than the dense gradient and a
    copy take. A part of a table has ids of its own.
    """
    if whole_of(variable) is not variable:
        return False
    parts = parts_of(unwrap_optimizer(optimizer))
    return all(_compat.is_part_of_keras(type(each)) and not _own_methods(each) for each in parts)


# Which optimizers ---------------------------------------------------------------------------------

_known: dict[tuple[type, str, str], bool] = {}


def leaves_other_rows(optimizer: KerasOptimizer) -> bool:
    """Returns whether the update of a row needs no other, and leaves a row without gradient.

    A copy of the optimizer updates a small table from dense gradients, another copy its rows, and
    both must agree to the last bit. Only optimizers of Keras are asked: what a few steps show of
    code of a user may not be true of later ones. Call it outside of every strategy.
    """
    if _own_methods(optimizer) or not _compat.is_part_of_keras(type(optimizer)):
        return False
    # These change all rows in each step, whatever the gradient.
    if optimizer.weight_decay is not None or optimizer.use_ema:
        return False
    return _agrees(optimizer, optimizer.get_config(), _by_rows, np.array_equal)


def check_updates_parts(optimizer: KerasOptimizer, variables: Sequence[KerasVariable]) -> None:
    """Checks that an optimizer updates tables in parts as it would update the whole of them.

    A copy of the optimizer updates a small table, another copy two parts of it, and both must
    agree, but for the last bit, which depends on how many numbers are computed at once. Call it
    outside of every strategy.
    """
    parts = [variable for variable in variables if whole_of(variable) is not variable]
    for each in parts_of(optimizer):
        # Clipping is of the whole of it, and done before.
        config = {**each.get_config(), "clipnorm": None, "global_clipnorm": None, "clipvalue": None}
        if not _own_methods(each) and _agrees(each, config, _in_parts, _nearly):
            continue
        raise TfMultiGpuError(
            "The rows of a table are on several devices, and this optimizer needs the whole of it "
            "to update a row.",
            f"{type(each).__name__} for {parts[0].table.path!r}",
            "Write keras.optimizers.Adagrad(0.1) or keras.optimizers.Adam(), or create the model "
            "on devices that have room for the table.",
        )


def _nearly(one: _Value, other: _Value) -> bool:
    return bool(np.allclose(one, other, rtol=1e-6, atol=1e-7))


def _own_methods(optimizer: KerasOptimizer) -> set[str]:
    return {"update_step", "assign", "assign_add", "assign_sub"} & vars(optimizer).keys()


def _agrees(
    optimizer: KerasOptimizer,
    config: dict[str, _Value],
    train: Callable[[KerasOptimizer], list[_Value]],
    same: Callable[[_Value, _Value], bool],
) -> bool:
    """Returns whether copies of an optimizer agree that train a small table in two ways."""
    config = {**config, "learning_rate": 0.1, "name": "trial"}
    key = type(optimizer), repr(sorted(config.items())), train.__name__
    if key not in _known:
        with tf.init_scope():
            _known[key] = _trial(type(optimizer), config, train, same)
    return _known[key]


_START = np.linspace(-1.0, 1.0, 12, dtype="float32").reshape(4, 3)
_LISTS = ((0, 1), (1, 3), (0,), (3, 1))  # Row 2 never has a gradient, and others not always.


def _trial(
    kind: _Value,
    config: dict[str, _Value],
    train: Callable[[KerasOptimizer], list[_Value]],
    same: Callable[[_Value, _Value], bool],
) -> bool:
    """Returns whether two copies of an optimizer agree, one of which updates the whole."""
    whole = _train(kind.from_config(config), by_rows=False)
    for values in whole:
        if values.ndim and values.shape != _START.shape:  # What it keeps is not of rows.
            return False
    pairs = zip(whole, train(kind.from_config(config)), strict=False)
    return all(same(one, other) for one, other in pairs)


def _by_rows(optimizer: KerasOptimizer) -> list[_Value]:
    return _train(optimizer, by_rows=True)


def _in_parts(optimizer: KerasOptimizer) -> list[_Value]:
    """Returns what some steps make of the two halves of a small table, put together again.

    What the optimizer keeps is left out: if it were another, the table would be as well.
    """
    import keras

    halves = [keras.Variable(half, name="table") for half in np.split(_START, 2)]
    optimizer.build(halves)
    for number in range(len(_LISTS)):
        optimizer.apply(np.split(_gradient(number), 2), halves)
    return [np.concatenate([half.numpy() for half in halves])]


def _gradient(number: int) -> _Value:
    """Returns the dense gradient of a step of a trial."""
    gradient = np.zeros_like(_START)
    gradient[list(_LISTS[number])] = _values(number)
    return gradient


def _values(number: int) -> _Value:
    """Returns the rows of the gradient of a step of a trial."""
    ids = _LISTS[number]
    values = np.linspace(0.5, 1.5, 3 * len(ids), dtype="float32").reshape(-1, 3)
    return values * np.float32((-1.0) ** number)


def _train(optimizer: KerasOptimizer, *, by_rows: bool) -> list[_Value]:
    """Returns what some steps make of a small table, and of what the optimizer keeps."""
    import keras

    table = keras.Variable(_START, name="table")
    optimizer.build([table])
    for number, ids in enumerate(_LISTS):
        if by_rows:
            rows = {id(table.value): tf.constant(ids, tf.int64)}
            with updating_rows(optimizer, rows, lambda variable: [variable]):
                optimizer.apply([tf.constant(_values(number))], [table])
        else:
            optimizer.apply([tf.constant(_gradient(number))], [table])
    return [each.numpy() for each in (table, *optimizer.variables)]


# The update ---------------------------------------------------------------------------------------


@contextmanager
def updating_rows(
    optimizer: KerasOptimizer, ids: Mapping[int, tf.Tensor | None], copies: _Copies
) -> Iterator[None]:
    """Has ``optimizer.apply`` update the listed rows of some variables.

    The gradient of such a variable is given to ``apply`` as the values of its list: so Keras clips
    it, for rows that are not listed add nothing to a norm.

    Args:
        optimizer: A stock optimizer.
        ids: By the ``id`` of a copy of a variable, which rows its gradient lists, each once. None
            for a part of a table whose gradient has all rows of the part.
        copies: Returns the copies of a variable in this process.
    """
    if not ids:
        yield
        return
    update_step = optimizer.update_step
    trained = [tf_variable(each) for each in _compat.optimizer_trains(optimizer)]
    wholes = {id(copy): whole for whole in trained for copy in copies(whole)}

    def update(gradient: _Value, variable: _Value, learning_rate: _Value) -> None:
        if id(variable) not in ids:
            update_step(gradient, variable, learning_rate)
            return
        whole, rows = wholes[id(variable)], ids[id(variable)]
        with _finding_rows(optimizer, variable, whole, rows, copies):
            view = variable if rows is None else _RowsOf(variable, whole, rows)
            update_step(gradient, view, learning_rate)

    with setting(optimizer, update_step=update):
        yield


@contextmanager
def _finding_rows(
    optimizer: KerasOptimizer,
    variable: _Value,
    table: _Value,
    ids: tf.Tensor | None,
    copies: _Copies,
) -> Iterator[None]:
    """Has Keras find, in place of the slots of a table, their listed rows, or a part of them."""
    import keras

    slots = {id(each) for each in optimizer.variables if each.shape == table.shape}

    def value(original: Callable[[_Value], _Value], slot: KerasVariable) -> _Value:
        whole = original(slot)
        if id(slot) not in slots:
            return whole
        # The copy beside the variable, or the only one.
        found = copies(whole)
        beside = [copy for copy in found if copy.device == variable.device]
        copy = (beside or found)[0]
        return copy if ids is None else _RowsOf(copy, whole, ids)

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
