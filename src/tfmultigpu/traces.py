"""One compiled function per kind of batch, whatever its number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__ = ["Traces", "any_rows"]


class Traces:
    """Compiles a function of nested structures of tensors, and remembers what it compiled.

    The number of rows is left open from the start. An inner axis, such as the length of padded
    sequences, is left open from the second size on: two traces serve all lengths.

    Attributes:
        function: From a list of structures to a nested structure of tensors.
    """

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        """Takes the function."""
        self.function = function
        self._exact: dict[Any, list[tuple[Any, Any]]] = {}
        self._by_skeleton: list[tuple[Any, list[Any], Any]] = []

    def __call__(self, structures: list[Any]) -> Any:
        """Runs the function on structures of tensors, compiling it for this kind if need be."""
        leaves = tf.nest.flatten(structures)
        key = tuple([_kind(leaf) for leaf in leaves])
        skeleton = _skeleton(structures)
        flat = tf.nest.flatten(structures, expand_composites=True)
        alike = self._exact.setdefault(key, [])
        compiled = next((compiled for known, compiled in alike if known == skeleton), None)
        if compiled is None:
            compiled = self._widest(skeleton, structures)
            alike.append((skeleton, compiled))
        return compiled(*[tensor for tensor in flat if tensor is not None])

    def _widest(self, skeleton: Any, structures: list[Any]) -> Any:
        """A trace that takes these structures: one there is, or one wider than those there are."""
        specs = [any_rows(leaf) for leaf in tf.nest.flatten(structures)]
        for known, others, compiled in reversed(self._by_skeleton):
            if known != skeleton:
                continue
            wider = [_common(a, b) for a, b in zip(others, specs, strict=True)]
            if wider == others:
                return compiled
            if all(
                spec is not None or leaf is None for spec, leaf in zip(wider, specs, strict=True)
            ):
                specs = wider
                break
        compiled = self._compile(tf.nest.pack_sequence_as(structures, specs))
        self._by_skeleton.append((skeleton, specs, compiled))
        return compiled

    def _compile(self, specs: Any) -> Any:
        flat = tf.nest.flatten(specs, expand_composites=True)

        def function(*tensors: Any) -> Any:
            given = iter(tensors)
            leaves = [None if spec is None else next(given) for spec in flat]
            return self.function(tf.nest.pack_sequence_as(specs, leaves, expand_composites=True))

        signature = [spec for spec in flat if spec is not None]
        compiled = tf.function(function, input_signature=signature, autograph=False)
        return compiled.get_concrete_function()


def any_rows(leaf: Any) -> Any:
    """Returns the type spec of a tensor with its number of rows left open."""
    if leaf is None:
        return None
    if isinstance(leaf, tf.RaggedTensor):
        shape = [None, *leaf.shape[1:]]
        splits = leaf.row_splits.dtype
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, splits)
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    return tf.TensorSpec([None, *leaf.shape[1:]] if leaf.shape.rank else [], leaf.dtype)


def _kind(leaf: Any) -> Any:
    """What a trace depends on, cheaper than a type spec for the usual dense tensor."""
    if isinstance(leaf, tf.Tensor):
        return leaf.dtype, tuple(leaf.shape[1:]) if leaf.shape.rank else None
    return any_rows(leaf)


def _common(first: Any, second: Any) -> Any:
    """The spec of both, with axes that differ left open; None where there is none."""
    if first is None or second is None or first == second:
        return first
    return first.most_specific_common_supertype([second])


def _skeleton(structure: Any) -> Any:
    """The structure with the types of its leaves, comparable and without their values."""
    return tf.nest.map_structure(lambda leaf: type(leaf).__name__, structure)
