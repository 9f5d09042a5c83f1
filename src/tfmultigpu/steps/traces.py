"""One compiled function per kind of batch, whatever its number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import any_rows, take

__all__ = [
    "Traces",
]


class Traces:
    """Compiles a function of copies of one nested structure, and remembers what it compiled.

    The number of rows is left open from the start. An inner axis, such as the length of padded
    sequences, is left open from the second size on: two traces serve all lengths.

    Attributes:
        function: From a list of structures, and a list of further tensors, to a nested structure
            of tensors.
        keep_rows: Whether the first trace is for its number of rows alone, and only another number
            opens it. Shapes are then known while it is traced: on a GPU each that is not makes
            TensorFlow wait for what was computed before. It costs a second trace where numbers
            differ.
    """

    def __init__(
        self, function: Callable[[list[Any], list[Any]], Any], *, keep_rows: bool = False
    ) -> None:
        """Takes the function, and whether the first number of rows is kept."""
        self.function = function
        self.keep_rows = keep_rows
        self._compiled: dict[Any, Any] = {}
        self._by_structure: dict[Any, list[tuple[list[Any], Any]]] = {}

    def __call__(self, structure: Any, copies: list[list[Any]], further: list[Any]) -> Any:
        """Runs the function, compiling it for this kind of structure if need be.

        Flat lists come in, because packing and flattening costs as much as a small step.

        Args:
            structure: A nested structure; its leaves do not matter.
            copies: The leaves of each copy, tensors or None.
            further: More tensors.
        """
        leaves = [leaf for copy in copies for leaf in copy] + further
        kind = _kind_with_rows if self.keep_rows else _kind
        key = _structure_key(structure), tuple([kind(leaf) for leaf in leaves])
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._widest(key[0], structure, copies, further)
        return compiled(*tf.nest.flatten([one for one in leaves if one is not None], True))

    def _widest(self, key: Any, structure: Any, copies: list[list[Any]], further: list[Any]) -> Any:
        """A trace that takes these tensors: one there is, or one wider than those there are."""
        given = [one for copy in copies for one in copy]
        spec = _same_rows if self.keep_rows and _agree(given) else any_rows
        specs = [spec(leaf) for leaf in [*given, *further]]
        traces = self._by_structure.setdefault((key, len(copies)), [])
        for others, compiled in reversed(traces):
            wider = [_common(a, b) for a, b in zip(others, specs, strict=True)]
            if wider == others:
                return compiled
            if [spec is None for spec in wider] == [spec is None for spec in specs]:
                specs = wider
                break
        skeleton = tf.nest.map_structure(lambda leaf: None, structure)  # Keeps no tensor alive.
        compiled = self._compile(skeleton, specs, len(copies))
        traces.append((specs, compiled))
        return compiled

    def _compile(self, structure: Any, specs: list[Any], copies: int) -> Any:
        size = len(tf.nest.flatten(structure))

        def function(*tensors: Any) -> Any:
            given = iter(tensors)
            leaves = [None if spec is None else take(spec, given) for spec in specs]
            packed = [
                tf.nest.pack_sequence_as(structure, leaves[i * size : (i + 1) * size])
                for i in range(copies)
            ]
            return self.function(packed, leaves[copies * size :])

        signature = tf.nest.flatten([spec for spec in specs if spec is not None], True)
        compiled = tf.function(function, input_signature=signature, autograph=False)
        return compiled.get_concrete_function()


def _kind(leaf: Any) -> Any:
    """Returns what a trace depends on; for a dense tensor cheaper than a type spec."""
    if isinstance(leaf, tf.Tensor):
        return leaf.dtype, tuple(leaf.shape[1:]) if leaf.shape.rank else None
    return any_rows(leaf)


def _agree(leaves: list[Any]) -> bool:
    """Returns whether all dense tensors have the same number of rows; empty ones fail later."""
    rows = {leaf.shape[0] for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.shape.rank}
    return len(rows) == 1 and 0 not in rows


def _same_rows(leaf: Any) -> Any:
    """The type spec of a tensor, of one that is not dense with its number of rows left open."""
    return tf.TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, tf.Tensor) else any_rows(leaf)


def _kind_with_rows(leaf: Any) -> Any:
    return (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, tf.Tensor) else any_rows(leaf)


def _common(first: Any, second: Any) -> Any:
    """The spec of both, with axes that differ left open; None where there is none."""
    if first is None or second is None or first == second:
        return first
    return first.most_specific_common_supertype([second])


def _structure_key(structure: Any) -> Any:
    """The structure without its leaves, hashable."""
    if isinstance(structure, (tuple, list)):
        return type(structure), tuple([_structure_key(one) for one in structure])
    if isinstance(structure, Mapping):
        return type(structure), tuple([(k, _structure_key(v)) for k, v in structure.items()])
    return structure is None
