"""The optimizers that may update some rows of a table alone, or a table in parts.

An update of the listed rows is that from a dense gradient if a row whose gradient is zero stays as
it is, and so does its part of each slot, and if a row depends on no other. Of which optimizers that
is true is tried out, with a copy of the optimizer: see ``leaves_other_rows``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.applying import applying, of_rows, updating_by
from tfmultigpu.accumulation.loss_scale import parts_of, unwrap_optimizer
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.lists import by_id
from tfmultigpu.strategies.row_parts import whole_of
from tfmultigpu.types import Array, Function, KerasOptimizer, KerasVariable, Tensor

# Numbers in a table from which lists of its rows are faster than the whole.
LARGE = 2**16


def is_table(variable: KerasVariable) -> bool:
    """Returns whether a variable is so large that a list of its rows may be faster."""
    size = tf.TensorShape(variable.shape).num_elements()
    return len(variable.shape) > 0 and size is not None and size >= LARGE


def how_taken(optimizer: KerasOptimizer, variable: KerasVariable) -> str:
    """Returns how an optimizer takes a list of the rows of a variable, each once.

    Returns:
        "rows" if it may update these alone. "list" if it updates all rows, and may be given the
        list: the optimizers of Keras make of it what they need, in less memory than the dense
        gradient and a copy take. Else "tensor"; a part of a table has ids of its own.
    """
    inner = unwrap_optimizer(optimizer)
    whole, parts = whole_of(variable), parts_of(inner)
    if variable.constraint is None and getattr(variable, "regularizer", None) is None:
        for part in parts:
            if part is inner or id(whole) in by_id(_compat.optimizer_trains(part)):
                if leaves_other_rows(part):
                    return "rows"
                break
    if whole is not variable or not all(map(_is_of_keras, parts)):
        return "tensor"
    return "list"


# Which optimizers ---------------------------------------------------------------------------------

_CLIPS = "clipnorm", "global_clipnorm", "clipvalue"
_known: dict[tuple[type, str, str], bool] = {}


def leaves_other_rows(optimizer: KerasOptimizer) -> bool:
    """Returns whether the update of a row needs no other, and leaves a row without gradient.

    A copy of the optimizer updates a small table from dense gradients, another copy its rows, and
    both must agree to the last bit. Only optimizers of Keras are asked: what a few steps show of
    code of a user may not be true of later ones. Call it outside of every strategy.
    """
    if not _is_of_keras(optimizer):
        return False
    # These change all rows in each step, whatever the gradient.
    if optimizer.weight_decay is not None or optimizer.use_ema:
        return False
    return _agrees(optimizer, "rows")


def check_updates_parts(optimizer: KerasOptimizer, variables: Sequence[KerasVariable]) -> None:
    """Checks that an optimizer updates tables in parts as it would update the whole of them.

    A copy of the optimizer updates a small table, another copy two parts of it, and both must
    agree, but for the last bit, which depends on how many numbers are computed at once. Call it
    outside of every strategy.
    """
    parts = [variable for variable in variables if whole_of(variable) is not variable]
    for each in parts_of(optimizer):
        if not _own_methods(each) and _agrees(each, "parts"):
            continue
        raise TfMultiGpuError(
            "The rows of a table are on several devices, and this optimizer needs the whole of it "
            "to update a row.",
            f"{type(each).__name__} for {parts[0].table.path!r}",
            "Write keras.optimizers.Adagrad(0.1) or keras.optimizers.Adam(), or create the model "
            "on devices that have room for the table.",
        )


def _own_methods(optimizer: KerasOptimizer) -> set[str]:
    return {"update_step", "assign", "assign_add", "assign_sub"} & vars(optimizer).keys()


def _is_of_keras(optimizer: KerasOptimizer) -> bool:
    return _compat.is_part_of_keras(type(optimizer)) and not _own_methods(optimizer)


def _agrees(optimizer: KerasOptimizer, way: str) -> bool:
    """Returns whether copies of an optimizer agree that train a small table in two ways."""
    # Gradients are clipped before, all of them together; and none is accumulated by Keras.
    settled = dict.fromkeys([*_CLIPS, "gradient_accumulation_steps"])
    config = {**optimizer.get_config(), **settled, "learning_rate": 0.1, "name": "trial"}
    key = type(optimizer), repr(sorted(config.items())), way
    if key not in _known:
        with tf.init_scope():
            _known[key] = _trial(functools.partial(type(optimizer).from_config, config), way)
    return _known[key]


_START = np.linspace(-1.0, 1.0, 12, dtype="float32").reshape(4, 3)
_LISTS = ((0, 1), (1, 3), (0,), (3, 1))  # Row 2 never has a gradient, and others not always.


def _trial(make: Callable[[], KerasOptimizer], way: str) -> bool:
    """Returns whether two optimizers agree, one of which updates the whole."""
    whole = _train(make(), "whole")
    for values in whole:
        if values.ndim and values.shape != _START.shape:  # What it keeps is not of rows.
            return False
    limit = 0.0 if way == "rows" else 1e-6
    pairs = zip(whole, _train(make(), way), strict=False)
    return all(np.allclose(one, other, rtol=limit, atol=limit / 10) for one, other in pairs)


def _train(optimizer: KerasOptimizer, way: str) -> list[Array]:
    """Returns what some steps make of a small table, and of what the optimizer keeps.

    Args:
        optimizer: An optimizer that is not built.
        way: "whole", from dense gradients; "rows", from lists; or "parts", of two halves. There
            what it keeps is left out: if it were another, the table would be as well.
    """
    import keras

    strategy = tf.distribute.get_strategy()

    def update(
        original: Function, variable: Any, function: Function, args: Any, kwargs: Any
    ) -> None:
        original(variable, of_rows(optimizer, strategy, variable, function), args, kwargs=kwargs)

    count = 2 if way == "parts" else 1
    tables = [keras.Variable(part, name="table") for part in np.split(_START, count)]
    optimizer.build(tables)
    for number, ids in enumerate(_LISTS):
        values = np.linspace(0.5, 1.5, 3 * len(ids), dtype="float32").reshape(-1, 3)
        values *= np.float32((-1.0) ** number)
        gradients: list[Tensor] = []
        if way == "rows":
            rows = tf.IndexedSlices(tf.constant(values), tf.constant(ids, tf.int64))
            gradients.append(rows)
        else:
            dense = np.zeros_like(_START)
            dense[list(ids)] = values
            gradients += map(tf.constant, np.split(dense, count))
        with applying(optimizer, clipped=True), updating_by(strategy, update):
            optimizer.apply(gradients, tables)
    table = np.concatenate([part.numpy() for part in tables])
    if count > 1:
        return [table]
    return [table, *(slot.numpy() for slot in optimizer.variables)]
