"""What a trace takes in of a model: its layers and variables, and which of them are frozen."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable

import keras

from tfmultigpu import _compat
from tfmultigpu.accumulation.table_rows import is_table
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.types import KerasModel, KerasVariable


@dataclasses.dataclass(frozen=True)
class TakenIn:
    """A model as it is at one time.

    Attributes:
        objects: Its layers and their variables, in order.
        flags: What may change of them and change back: which are frozen, which layers are
            synchronized, their dtypes.
        tables: The large variables among them.
    """

    objects: tuple[object, ...]
    flags: tuple[Hashable, ...]
    tables: tuple[KerasVariable, ...] = ()

    @classmethod
    def of(cls, model: KerasModel) -> TakenIn:
        """Returns what there is in a model now; asked at each step."""
        objects: list[object] = []
        flags: list[Hashable] = []
        for layer in all_layers(model):
            policy = getattr(layer, "dtype_policy", None)
            flags += layer.trainable, getattr(layer, "synchronized", None), str(policy)
            variables = _compat.own_variables(layer)
            objects += layer, *variables
            flags += [variable.trainable for variable in variables]
        return cls(tuple(objects), tuple(flags))

    def has_objects_of(self, other: TakenIn) -> bool:
        """Returns whether the layers and the variables are the same ones."""
        if len(self.objects) != len(other.objects):
            return False
        return all(map(operator.is_, self.objects, other.objects))

    def with_tables(self) -> TakenIn:
        """Returns the same with its tables, which takes longer."""
        variables = [each for each in self.objects if isinstance(each, keras.Variable)]
        return dataclasses.replace(self, tables=tuple(filter(is_table, variables)))
