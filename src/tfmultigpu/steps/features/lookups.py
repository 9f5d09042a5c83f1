"""Lookups: a layer that looks up rows of a large table reads these rows alone.

Keras takes the value of the variable, and of that the rows. TensorFlow makes no copy of the value,
until an update writes to single rows: from then on each read of the value copies the whole table.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu._patch import patching
from tfmultigpu.accumulation.table_rows import is_table
from tfmultigpu.accumulation.targets import Target
from tfmultigpu.steps.assignments import deferred_here
from tfmultigpu.steps.features.feature import Feature
from tfmultigpu.steps.values import Rows
from tfmultigpu.strategies.row_parts import RowParts, whole_of
from tfmultigpu.strategies.topology import is_sharded, tf_variable
from tfmultigpu.types import KerasVariable

# The variables whose single rows steps write to, by their ``id``.
_written: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note_written(trained: Iterable[Target]) -> None:
    """Notes variables whose single rows a step writes to, before it is traced."""
    for target in trained:
        if target.takes == "rows":
            value = tf_variable(whole_of(target.variable))
            _written[id(value)] = value


def written_of(tables: Iterable[KerasVariable]) -> tuple[int, ...]:
    """Returns which of some tables are read by rows, on which a trace depends."""
    return tuple([id(table) for table in tables if _is_written(table)])


def _is_written(variable: KerasVariable) -> bool:
    value = tf_variable(variable)
    return _written.get(id(value)) is value


class Lookups(Feature):
    """Has ``tf.gather``, by which Keras looks up rows, read them from the variable.

    It is done for tables whose rows are updated alone, and for those on another device, of which
    only rows are then copied. Any other is read as Keras reads it.
    """

    def bind(self, step: Any) -> None:
        """Keeps the step, which knows its model and who updates it."""
        self._step = step

    def on_one_device(self) -> Feature:
        """Returns the same: what is read is the same."""
        return Lookups()

    @contextmanager
    def around_model(self, rows: Rows) -> Iterator[None]:
        """Has lookups on this replica read rows."""
        tables: dict[int, Any] = {}
        for variable in self._step.model.variables:
            if is_table(variable) and (_is_written(variable) or is_sharded(variable)):
                tables[id(variable)] = tf_variable(variable)  # Keras casts it in a layer.
        if not tables:
            yield
            return

        def look_up(original: Any, *args: Any, **options: Any) -> Any:
            read = None
            if len(args) == 2 and id(args[0]) in tables and options in ({}, {"axis": 0}):
                read = _reader(args[0], tables[id(args[0])])
            if read is None:
                return original(*args, **options)
            table, ids = args
            if isinstance(ids, tf.RaggedTensor):
                return ids.with_flat_values(tf.cast(read(ids.flat_values), table.dtype))
            return tf.cast(read(tf.convert_to_tensor(ids)), table.dtype)

        def shape(original: Any, table: Any, *args: Any, **options: Any) -> Any:
            if id(table) not in tables:
                return original(table, *args, **options)
            # TensorFlow would take the value first, and the shape of that.
            dtype = options.get("out_type", args[0] if args else tf.int32)
            return tf.constant(table.shape.as_list(), dtype)

        with (
            patching(tf, "gather", look_up),
            patching(tf.nn, "embedding_lookup", look_up),
            patching(tf, "shape", shape),
        ):
            yield


def _reader(table: KerasVariable, value: Any) -> Callable[[Any], tf.Tensor] | None:
    """Returns what reads rows of a table on this replica; None if it has another value here."""
    scope = deferred_here()
    if scope is None or scope.has_value(table):
        return None
    if isinstance(value, RowParts):
        return value.sparse_read
    strategy = getattr(value, "distribute_strategy", None) or tf.distribute.get_strategy()
    copies = strategy.experimental_local_results(value)
    if len(copies) == 1 or strategy is not tf.distribute.get_strategy():
        return copies[0].sparse_read  # type: ignore[no-any-return]  # As one device reads it.
    for copy in copies:
        if copy.handle is value.handle:  # The one of this replica.
            return copy.sparse_read  # type: ignore[no-any-return]
    return None
