"""What an optimizer keeps of a variable, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import ignoring_warnings
from tfmultigpu.accumulation.loss_scale import parts_of, unwrap_optimizer
from tfmultigpu.lists import by_id
from tfmultigpu.types import KerasOptimizer, KerasVariable, Options


def bytes_of(variables: Iterable[KerasVariable]) -> int:
    """Returns the bytes of one copy of variables, of Keras or TensorFlow."""
    sizes = [math.prod(each.shape) * tf.as_dtype(each.dtype).size for each in variables]
    return int(sum(sizes))


def state_of(optimizer: KerasOptimizer, variables: Sequence[KerasVariable]) -> list[int]:
    """Returns the bytes that an optimizer keeps of each variable; nothing is allocated.

    A copy of the optimizer is built in a graph that never runs. A class of the user may not be
    made twice: of what it keeps each variable has a part by its size.
    """
    sizes: dict[int, int] = {}
    parts = parts_of(unwrap_optimizer(optimizer))
    for part in parts:
        trains = by_id(_compat.optimizer_trains(part))
        own = [each for each in variables if len(parts) == 1 or id(each) in trains]
        sizes.update(zip(map(id, own), _state_of_part(part, own), strict=True))
    return [sizes[id(variable)] for variable in variables]


def _state_of_part(optimizer: KerasOptimizer, variables: Sequence[KerasVariable]) -> list[int]:
    config = _settings_of(optimizer)
    if config is None:
        trained = bytes_of(_compat.optimizer_trains(optimizer)) or 1
        keeps = bytes_of(optimizer.variables)
        return [keeps * bytes_of([variable]) // trained for variable in variables]
    with tf.Graph().as_default():
        twin = type(optimizer).from_config(config)
        noting = _Noting(map(_like, variables), twin)
        twin.build(noting)
    return noting.sizes


def _settings_of(optimizer: KerasOptimizer) -> Options | None:
    """Returns the settings of an optimizer of Keras, with another learning rate; None of others.

    A learning rate may be code of the user, such as a schedule that has no config.
    """
    if not _compat.is_part_of_keras(type(optimizer)):
        return None
    try:
        with ignoring_warnings():
            return {**optimizer.get_config(), "learning_rate": 0.1}
    except (NotImplementedError, TypeError, ValueError):
        return None


class _Noting(list[KerasVariable]):
    """Variables for ``optimizer.build``: of which of them it creates state is seen by its loops.

    Attributes:
        sizes: The bytes of the state of each.
    """

    def __init__(self, variables: Iterable[KerasVariable], optimizer: KerasOptimizer) -> None:
        super().__init__(variables)
        self._optimizer, self.sizes = optimizer, [0] * len(self)

    def __iter__(self) -> Iterator[KerasVariable]:
        for number, variable in enumerate(super().__iter__()):
            before = len(self._optimizer.variables)
            yield variable
            self.sizes[number] += bytes_of(self._optimizer.variables[before:])


def _like(variable: KerasVariable) -> KerasVariable:
    """Returns a variable of the same path, by which some optimizers choose."""
    *scopes, name = variable.path.split("/")
    with ExitStack() as entered:
        for scope in scopes:
            entered.enter_context(keras.name_scope(scope))
        return keras.Variable("zeros", shape=variable.shape, dtype=variable.dtype, name=name)
