"""What a trace takes in of a model: its layers and variables, and which of them are frozen."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import keras

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.accumulation.table_rows import is_table
from tfmultigpu.lists import by_id
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.types import Function, KerasLayer, KerasModel, KerasVariable, Nested


@dataclasses.dataclass(frozen=True)
class TakenIn:
    """A model as it is at one time.

    Attributes:
        objects: Its layers, their dtypes and their variables, in order, then all of what is called
            beside it, and whether that is frozen or synchronized.
        flags: What may change of them and change back: which are frozen, and which layers are
            synchronized.
        beside: Layers that are not in the model, and that a trace has called, as a loss calls
            another model.
        tables: The large variables of the model.
    """

    objects: tuple[object, ...]
    flags: tuple[Hashable, ...]
    beside: tuple[KerasLayer, ...] = ()
    tables: tuple[KerasVariable, ...] = ()

    @classmethod
    def of(cls, model: KerasModel, beside: tuple[KerasLayer, ...] = ()) -> TakenIn:
        """Returns what there is in a model now, and in layers beside it; asked at each step."""
        objects: list[object] = []
        flags: list[Hashable] = []
        for layer in all_layers(model):
            flags += layer.trainable, getattr(layer, "synchronized", None)
            objects += layer, getattr(layer, "dtype_policy", None)
            for variable in _compat.own_variables(layer):
                objects.append(variable)
                flags.append(variable.trainable)
        # Flags tell what is trained, unless the user says it: to ask Keras takes much longer.
        if model.__class__.trainable_variables is not keras.Model.trainable_variables:
            flags += map(id, model.trainable_variables)
        for layer in beside:
            # Not as flags: which layers are called is known after the trace, and its key is not.
            objects += layer.trainable, getattr(layer, "synchronized", None)
            objects += layer, getattr(layer, "dtype_policy", None), *_compat.own_variables(layer)
        return cls(tuple(objects), tuple(flags), beside)

    def has_objects_of(self, other: TakenIn) -> bool:
        """Returns whether the layers and the variables are the same ones."""
        if len(self.objects) != len(other.objects):
            return False
        return all(map(operator.is_, self.objects, other.objects))

    def with_tables(self) -> TakenIn:
        """Returns the same with its tables, which takes longer."""
        variables = [each for each in self.objects if isinstance(each, keras.Variable)]
        return dataclasses.replace(self, tables=tuple(filter(is_table, variables)))


@contextmanager
def noting_calls(model: KerasModel, called: dict[int, KerasLayer]) -> Iterator[None]:
    """Adds the layers that are called in the context and are not in the model, by their ``id``."""
    inside = by_id(_compat.layers_inside(model))

    def call(original: Function, layer: KerasLayer, *args: object, **kwargs: object) -> Nested:
        # The model may be a weak reference to this layer.
        if isinstance(layer, keras.Layer) and id(layer) not in inside and layer != model:
            called[id(layer)] = layer
        return original(layer, *args, **kwargs)

    with patching(keras.Operation, "__call__", call):
        yield
