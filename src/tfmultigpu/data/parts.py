"""Batches of parts with rows of their own, and values that replicas get whole.

The rows of an ordinary batch agree, and one cut serves all its tensors. A batch of ``Parts`` is cut
part by part. What is marked ``Whole`` is not cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.errors import DataError

__all__ = [
    "ROWS",
    "Parts",
    "Whole",
    "has_noted",
    "has_parts",
    "is_marked",
    "map_items",
    "note_leaves",
    "noted_part",
    "part_names",
    "part_of_each_leaf",
]

# Name of the only part of an ordinary batch.
ROWS = ""


class Parts(dict[str, Any]):
    """Batch whose entries have numbers of rows of their own, each cut by its own.

    ``Parts(labeled=(x, y), unlabeled=u)`` is a dict: read an entry as ``batch["labeled"]``. An
    entry may be any nested structure, whose tensors agree in their rows. It is the outermost
    structure of a batch. ``tf.data``, ``tf.nest`` and ``tf.function`` keep it.

    With fewer rows than replicas in any part, every replica gets all parts whole, and each row
    counts ``1 / replicas``, as in an ordinary small batch.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> batch = tmg.Parts(labeled=tf.zeros([2, 3]), unlabeled=tf.zeros([6, 3]))
        >>> batch["unlabeled"].shape
        TensorShape([6, 3])
    """

    def __repr__(self) -> str:
        """Returns the call that makes it."""
        return f"Parts({', '.join(f'{name}={part!r}' for name, part in self.items())})"


class Whole(NamedTuple):
    """Value that every replica and every micro-batch gets whole: a temperature, a graph.

    It stands anywhere in a batch, beside tensors with rows or inside ``Parts``. Read it as
    ``batch["temperature"].value``. What a loss adds up over its entries, each replica adds: divide
    such a sum by the number of replicas, or compute the loss from tensors with rows.

    Attributes:
        value: A tensor of any shape, or a nested structure of tensors.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> batch = {"x": tf.zeros([4, 3]), "temperature": tmg.Whole(tf.constant(0.5))}
        >>> float(batch["temperature"].value)
        0.5
    """

    value: Any


def part_of_each_leaf(batch: Any) -> list[str | None]:
    """Returns the name of the part of each leaf of a batch, in the order of ``tf.nest``.

    ``ROWS`` stands for the only part of an ordinary batch, and None for what is not cut.

    Raises:
        DataError: Parts are inside another structure, or unnamed.
    """
    if not isinstance(batch, Parts):
        return _names_in(batch, ROWS)
    if not all(isinstance(name, str) and name for name in batch):
        raise DataError(
            f"Parts have names. Received: {list(batch)}. Write Parts(labeled=(x, y), unlabeled=u)."
        )
    return [one for name in sorted(batch) for one in _names_in(batch[name], name)]


def _names_in(structure: Any, name: str) -> list[str | None]:
    if isinstance(structure, Whole):
        return [None] * len(tf.nest.flatten(structure))
    items = _items(structure)
    if items is None:
        return [name] * len(tf.nest.flatten(structure))
    return [one for item in items for one in _names_in(item, name)]


def _items(structure: Any) -> list[Any] | None:
    """Returns what a dict, list or tuple holds, in the order of ``tf.nest``; None for a leaf.

    Raises:
        DataError: The structure is Parts, which hold all else.
    """
    if isinstance(structure, Parts):
        raise DataError(
            "Parts are the outermost structure of a batch. Received: Parts "
            f"{sorted(structure)} inside another structure. Write the whole batch as "
            "Parts(labeled=(x, y), unlabeled=u), with Whole(value) for what has no rows."
        )
    if isinstance(structure, Mapping):
        return [structure[key] for key in sorted(structure)]
    return list(structure) if isinstance(structure, (list, tuple)) else None


def part_names(batch: Any) -> tuple[str, ...]:
    """Returns the names of the parts that have rows, in the order of ``tf.nest``.

    That is ``(ROWS,)`` for an ordinary batch, and nothing if all of it is ``Whole``.
    """
    return tuple(
        dict.fromkeys(
            name
            for name, leaf in zip(part_of_each_leaf(batch), tf.nest.flatten(batch), strict=True)
            if name is not None and not _is_none(leaf)
        )
    )


def has_parts(batch: Any) -> bool:
    """Returns whether the outermost structure of a batch is ``Parts``."""
    return isinstance(batch, Parts)


def is_marked(batch: Any) -> bool:
    """Returns whether a batch has ``Parts``, or ``Whole`` values; looks into no leaf."""
    return has_parts(batch) or _has_whole(batch)


def _has_whole(structure: Any) -> bool:
    if isinstance(structure, Whole):
        return True
    found = [_has_whole(item) for item in _items(structure) or ()]  # All: nested Parts raise.
    return any(found)


def map_items(function: Callable[[Any], Any], structure: Any) -> Any:
    """Returns a dict, list or tuple with the results of a function; ``Parts`` stay ``Parts``."""
    if isinstance(structure, Mapping):
        named = {name: function(item) for name, item in structure.items()}
        return Parts(named) if isinstance(structure, Parts) else named
    items = [function(item) for item in structure]
    return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)


def _is_none(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, type(tf.type_spec_from_value(None)))


# The tensors of a part, by the graph they are in and their name. Random draws look them up.
_noted: weakref.WeakKeyDictionary[Any, dict[str, str | None]] = weakref.WeakKeyDictionary()


def note_leaves(batch: Any) -> None:
    """Notes, while a step is traced, to which part the tensors of a shard belong."""
    if not is_marked(batch):
        return
    for name, leaf in zip(part_of_each_leaf(batch), tf.nest.flatten(batch), strict=True):
        for tensor in tf.nest.flatten(leaf, expand_composites=True):
            if isinstance(tensor, tf.Tensor) and hasattr(tensor, "graph"):
                _noted.setdefault(tensor.graph, {})[tensor.name] = name


def has_noted(graph: Any) -> bool:
    """Returns whether tensors of a batch were noted in a graph."""
    return bool(_noted.get(graph))


def noted_part(tensor: Any) -> tuple[str | None] | None:
    """Returns the part that a tensor of a graph was noted for, in a tuple; None if it was not."""
    known = _noted.get(tensor.graph, {})
    return (known[tensor.name],) if tensor.name in known else None
