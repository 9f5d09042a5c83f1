"""A table whose rows are on several devices: one variable for Keras, and a part on each device.

Keras, checkpoints and users see one variable, ``RowParts``. A step sees the parts, each a variable
of one device as any other that is sharded: a replica asks the owners for its rows, and gradients,
slots and updates of a row are where the row is. Nothing makes the whole of it but who asks for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfmultigpu._compat import ComposedVariable
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.strategies.topology import is_sharded, tf_variable
from tfmultigpu.types import KerasVariable


class RowParts(ComposedVariable):
    """A table in parts: what Keras takes for the ``tf.Variable`` of one of its variables.

    Attributes:
        parts: The variables of TensorFlow, in the order of their rows; one on a device.
        counts: How many rows each part has.
        starts: The first row of each part.
        create_like: Creates, in place of a variable of this shape, such a table on the same devices
            for an optimizer; as ``tf.variable_creator_scope`` takes it.
    """

    def __init__(
        self,
        parts: Sequence[tf.Variable],
        name: str,
        identity: str,
        create_like: Callable[..., RowParts],
    ) -> None:
        """Keeps the parts.

        Args:
            parts: The variables, which all have this identity.
            name: The name of the table.
            identity: By what Keras finds what an optimizer keeps of a variable.
            create_like: As the attribute.
        """
        self.parts, self.create_like = tuple(parts), create_like
        self.counts = [int(part.shape[0] or 0) for part in parts]
        self.starts: list[int] = []
        rows = 0
        for count in self.counts:
            self.starts.append(rows)
            rows += count
        self._shape = tf.TensorShape([rows, *parts[0].shape[1:]])
        self._name = f"{name}:0"  # As TensorFlow names a variable.
        self._trainable = bool(parts[0].trainable)
        self.take_place(identity, parts[0].distribute_strategy, self._no_export)
        self._units: list[TablePart] = []

    # What TensorFlow and Keras ask of a variable ------------------------------------------------

    name = property(lambda self: self._name)
    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self.parts[0].dtype)
    device = property(lambda self: self.parts[0].device)
    trainable = property(lambda self: self._trainable)
    synchronization = property(lambda self: self.parts[0].synchronization)
    aggregation = property(lambda self: self.parts[0].aggregation)

    @property
    def handle(self) -> Any:
        """There is none: who asks for it would watch, or write, a part for the whole."""
        raise TfMultiGpuError(
            "The rows of this table are on several devices, so it is not one variable of "
            "TensorFlow, as a tape or a function by hand needs it.",
            f"{self.name!r} of shape {tuple(self.shape)} in {len(self.parts)} parts",
            "Write tmg.fit(model, data) or tmg.make_train_step(model, optimizer, loss, strategy).",
        )

    def __repr__(self) -> str:
        """Returns the name, the shape, and how many rows are where."""
        rows = [f"{part.shape[0]} on {parse_device_name(part.device)}" for part in self.parts]
        return f"<RowParts {self.name!r} of shape {tuple(self.shape)}: {', '.join(rows)}>"

    def value(self) -> tf.Tensor:
        """Returns the whole table, where this is called."""
        whole: tf.Tensor = tf.concat([part.read_value() for part in self.parts], 0)
        return whole

    read_value = value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Returns the whole table."""
        return tf.convert_to_tensor(self.value(), dtype, name=name)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns the whole table, in the memory of the host."""
        return np.concatenate([part.numpy() for part in self.parts])

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        """Returns the whole table, in the memory of the host."""
        return np.asarray(self.numpy(), dtype)

    def sparse_read(self, ids: Any, name: str | None = None) -> tf.Tensor:
        """Returns rows, each from the device that it is on; only these rows travel."""
        ids = tf.convert_to_tensor(ids)
        flat = tf.reshape(ids, [-1])
        owners = tf.zeros_like(flat, tf.int32)
        for start in self.starts[1:]:
            owners += tf.cast(flat >= start, tf.int32)

        # An id that is not a row goes to the first or to the last owner, who says so.
        count = len(self.parts)
        places = tf.dynamic_partition(tf.range(tf.size(flat)), owners, count)
        asked = tf.dynamic_partition(flat, owners, count)
        rows: list[tf.Tensor] = []
        for part, start, of_part in zip(self.parts, self.starts, asked, strict=True):
            with tf.device(part.device):
                rows.append(part.sparse_read(of_part - start))
        found = tf.dynamic_stitch(places, rows)
        shape = [*tf.unstack(tf.shape(ids)), *self.shape[1:]]
        found = tf.reshape(found, shape, name=name)
        found.set_shape([*ids.shape, *self.shape[1:]])
        return found

    def _no_export(self) -> NoReturn:
        raise TfMultiGpuError(
            "TensorFlow writes no SavedModel of a table whose rows are on several devices.",
            f"{self.name!r} of shape {tuple(self.shape)} in {len(self.parts)} parts",
            "Write model.save_weights(path), build the model without tmg.sharded_variables(), and "
            "there model.load_weights(path) and model.export(directory).",
        )

    # Writing ------------------------------------------------------------------------------------

    def assign(self, value: Any, *_: object, **__: object) -> RowParts:
        """Assigns the table, part by part: an array is never whole on a device."""
        for part, rows in self._cut(value):
            part.assign(rows)
        return self

    def assign_add(self, delta: Any, *_: object, **__: object) -> RowParts:
        """Adds to the table, part by part."""
        for part, rows in self._cut(delta):
            part.assign_add(rows)
        return self

    def assign_sub(self, delta: Any, *_: object, **__: object) -> RowParts:
        """Subtracts from the table, part by part."""
        for part, rows in self._cut(delta):
            part.assign_sub(rows)
        return self

    def _cut(self, value: Any) -> Iterator[tuple[tf.Variable, tf.Tensor]]:
        """Yields each part with its rows of a value, on its device."""
        value = tf_variable(value)
        same = isinstance(value, RowParts) and value.starts == self.starts
        if isinstance(value, RowParts) and not same:
            value = value.value()
        where = value.device if tf.is_tensor(value) else None
        for number, part in enumerate(self.parts):
            if same:
                rows = value.parts[number]
            else:
                start = self.starts[number]
                # Cut where the whole is: elsewhere it would be copied to be cut.
                with tf.device(where):
                    rows = value[start : start + self.counts[number]]
            with tf.device(part.device):
                yield part, tf.cast(rows, part.dtype)

    # What a step asks ---------------------------------------------------------------------------

    def units(self, table: KerasVariable) -> list[TablePart]:
        """Returns the parts as variables of Keras; the same ones each time."""
        if not self._units:
            self._units = [TablePart(table, number) for number in range(len(self.parts))]
        return self._units


class TablePart:
    """The rows of a table on one device, as a Keras variable that has no others.

    What is not of these rows alone, such as the regularizer, is the table's.

    Attributes:
        number: Which part it is.
        value: The variable of TensorFlow.
        shape: Its shape.
        path: The path of the table, with the rows.
    """

    def __init__(self, table: KerasVariable, number: int) -> None:
        self._table, self.number = weakref.ref(table), number
        whole: RowParts = table.value
        self.value = whole.parts[number]
        self.shape = self.value.shape
        first = whole.starts[number]
        self.path = f"{table.path}[{first}:{first + whole.counts[number]}]"

    @property
    def table(self) -> KerasVariable:
        """The Keras variable of the whole table."""
        return self._table()

    def __getattr__(self, name: str) -> Any:
        """Returns what is the table's."""
        return getattr(self.table, name)

    def __repr__(self) -> str:
        """Returns the path and the shape."""
        return f"<TablePart {self.path!r} of shape {tuple(self.shape)}>"

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Returns the rows."""
        return tf.convert_to_tensor(self.value, dtype, name=name)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns the rows."""
        return np.asarray(self.value.numpy())

    def assign(self, value: Any) -> None:
        """Assigns the rows."""
        self.value.assign(value)


def units_of(variables: Iterable[KerasVariable]) -> list[Any]:
    """Returns the variables as a step trains them: the parts of a table in its place."""
    units: list[Any] = []
    for variable in variables:
        value = tf_variable(variable)
        if isinstance(value, RowParts):
            units += value.units(variable)
        else:
            units.append(variable)
    return units


def sharded_of(variables: Iterable[KerasVariable]) -> list[Any]:
    """Returns the variables, or the parts of tables, that are on one device each."""
    return list(filter(is_sharded, units_of(variables)))


def whole_of(variable: KerasVariable) -> KerasVariable:
    """Returns the table that a variable is a part of, or else the variable."""
    return variable.table if isinstance(variable, TablePart) else variable


def copies_of(strategy: tf.distribute.Strategy, variable: KerasVariable) -> tuple[Any, ...]:
    """Returns the variables of TensorFlow that a variable has in this process: copies, or parts."""
    value = tf_variable(variable)
    if isinstance(value, RowParts):
        return value.parts
    return tuple(strategy.experimental_local_results(value))
