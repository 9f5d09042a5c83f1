"""Tables of ``tf.lookup.experimental`` as arrays: their keys and values, read and written back.

Each is stored as TensorFlow serializes a tensor, for NumPy has no arrays of texts of any length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.checkpoints.files import Arrays
from tfmultigpu.errors import CheckpointError
from tfmultigpu.steps.other_states import OtherState, read_table, write_table
from tfmultigpu.strategies.worker_exchange import WorkerExchange, digest_of
from tfmultigpu.user_code import warn

Tables: TypeAlias = Mapping[str, Any]  # By the begin of the names of their arrays.
PREFIX = "tables/"  # Of the names of arrays.
_KINDS = tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable
_NAMES = {
    "table": "a table",
    "python": "Python code",
    "other": "a resource",
    "variable": "a variable",
}
_ADVICE = {
    "table": 'Keep it in an attribute of a layer, or write extra={"table": [table]}',
    "python": "If the Python code remembers nothing, write tf.numpy_function(function, inputs, "
    "dtype, stateful=False); what it remembers belongs into a tf.Variable of a layer",
    "other": "Keep it in a tf.Variable or a table of tf.lookup.experimental, in a layer",
    "variable": 'Create it by add_weight of a layer, or write extra={"mine": [variable]}',
}


def is_table(value: object) -> bool:
    """Returns whether a value is a table that a program can change."""
    return isinstance(value, _KINDS)


def named_tables(groups: Mapping[str, Sequence[object]]) -> Tables:
    """Returns the tables among values, once each, by group and number."""
    named: dict[str, Any] = {}
    known: set[int] = set()
    for group, values in groups.items():
        tables = [value for value in values if is_table(value) and id(value) not in known]
        known.update(map(id, tables))
        for number, table in enumerate(tables):
            named[f"{PREFIX}{group}{number:04d}"] = table
    return named


def read_tables(tables: Tables, exchange: WorkerExchange) -> Arrays:
    """Returns the keys and the values of tables; all workers must call it, with equal tables."""
    arrays = {}
    digests = {}
    for name, table in tables.items():
        content = read_table(table.resource_handle, table.key_dtype, table.value_dtype)
        for part, tensor in zip(("keys", "values"), content, strict=True):
            serialized = tf.io.serialize_tensor(tensor).numpy()
            arrays[f"{name}/{part}"] = np.frombuffer(serialized, "uint8")
            digests[f"{name}/{part}"] = digest_of(serialized)
    difference = exchange.find_difference("the tables to save", digests)
    if difference is not None:
        raise CheckpointError(
            "Workers hold different tables, and a checkpoint has one.",
            f"{difference[0]!r} differs on worker {difference[1]}",
            "Each worker writes the rows of its own shards. Count in a variable that adds the "
            "counts of all replicas: keras.Variable(0.0, trainable=False, aggregation='sum', "
            "synchronization='on_read').",
        )
    return arrays


def check_tables_fit(tables: Tables, arrays: Arrays, where: Path) -> None:
    """Checks that the checkpoint ``where`` has stored these tables, and no others."""
    stored = {name.rpartition("/")[0] for name in arrays if name.startswith(PREFIX)}
    if stored != set(tables):
        raise CheckpointError(
            "The checkpoint is of another model or has other extra objects.",
            f"{where} with {sorted(stored)}, and here {sorted(tables)}",
            "Build the same ones as when it was saved, or give another directory to start over.",
        )


def write_tables(tables: Tables, arrays: Arrays) -> None:
    """Puts stored contents into their tables."""
    for name, table in tables.items():
        content = []
        for part, dtype in (("keys", table.key_dtype), ("values", table.value_dtype)):
            content.append(tf.io.parse_tensor(arrays[f"{name}/{part}"].tobytes(), dtype))
        write_table(table.resource_handle, *content)


def check_holds_states(states: Sequence[OtherState], tables: Tables, variables: set[int]) -> None:
    """Checks that what a training changes is saved: tables, and ``variables`` by their handles."""
    saved = variables | {id(table.resource_handle) for table in tables.values()}
    for state in states:
        if state.kind == "draws":
            warn(
                f"The training draws by tf.random in {state.operation!r}, and no checkpoint can "
                "hold the place of such draws: a resumed run draws other numbers. Draw by "
                "keras.random with a keras.random.SeedGenerator, which checkpoints hold."
            )
        elif id(state.handle) not in saved:
            raise CheckpointError(
                "The training changes state that the checkpoint would not hold, so a resumed run "
                "would differ.",
                f"{_NAMES[state.kind]} in {state.operation!r}",
                f"{_ADVICE[state.kind]}.",
            )
