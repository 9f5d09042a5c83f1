"""Parts of a batch whose rows a random draw is for, as the graph tells them while it is traced.

In a batch of ``Parts`` the number of rows does not tell whose rows they are. The graph does: the
length of a draw is that of some tensor, which was computed from tensors of the batch. Two questions
are asked of every tensor on the way. Of which parts does it depend at all? If of one part alone, a
draw is for rows of that part. Which rows follow each other along its first axis? ``tf.concat`` of
labeled and unlabeled rows is a segment of each. What neither answers is an error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.data.parts import has_noted, noted_part
from tfmultigpu.errors import LossError
from tfmultigpu.steps.draw_shapes import axis_of, is_along_rows, rows_from

__all__ = ["Segment", "segments_of"]


class Segment(NamedTuple):
    """Rows along the first axis of a tensor that are all of one part.

    Attributes:
        part: The name of the part; None if the rows are not cut, but the same on every replica.
        tensor: A tensor of as many rows, or of a fraction that is the same for all segments.
        among: If it is one of several in a larger tensor that others follow: its number, these,
            and the larger tensor, which tells how many rows each row of these has there.
    """

    part: str | None
    tensor: Any
    among: tuple[int, tuple[Segment, ...], Any] | None = None

    def length(self, checks: list[Any]) -> Any:
        """Returns how many rows it has, or a fraction as above: an int32 scalar.

        Args:
            checks: Takes conditions that must hold, bool scalars.
        """
        if self.among is None:
            return tf.shape(self.tensor)[0]
        number, segments, larger = self.among
        lengths = [one.length(checks) for one in segments]
        size = tf.shape(larger)[0]
        scale = size // tf.maximum(tf.add_n(lengths), 1)
        checks.append(tf.equal(scale * tf.add_n(lengths), size))
        return scale * lengths[number]

    def is_in(self, graph: Any) -> bool:
        """Returns whether its length can be known in a graph."""
        outside = self.tensor.graph is not graph
        if outside or self.among is None:
            return not outside
        _, segments, larger = self.among
        return larger.graph is graph and all(one.is_in(graph) for one in segments)


def _in_row(tensor: Any, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Returns the segments of a tensor that others follow, or precede, in a larger one."""
    if len(segments) == 1:
        return (Segment(segments[0].part, tensor),)
    return tuple([one._replace(among=(i, segments, tensor)) for i, one in enumerate(segments)])


class _Origin(NamedTuple):
    """Facts about a tensor.

    Attributes:
        parts: What it depends on: names of parts, None for ``Whole`` values, ``_UNKNOWN``.
        segments: The segments of its first axis; None if unknown.
    """

    parts: frozenset[str | None]
    segments: tuple[Segment, ...] | None


_UNKNOWN = "\0unknown"  # No name of a part.
# The number of the input that is the shape of the result.
_SHAPED = {"Reshape": 1, "BroadcastTo": 1, "Fill": 0}
# Of these the first axis is none of those of their inputs.
_OTHER_ROWS = ("Where", "Unique", "UniqueV2", "Range", "Fill", "RandomShuffle", "TopKV2", "Pack")

_ORIGINS = "_tfmultigpu_origins"


def _origins(graph: Any) -> dict[str, _Origin]:
    """The facts about the tensors of a graph by name, which end with it: they hold its tensors."""
    if not hasattr(graph, _ORIGINS):
        setattr(graph, _ORIGINS, {})
    found: dict[str, _Origin] = getattr(graph, _ORIGINS)
    return found


def segments_of(shape: Any, names: tuple[str, ...], *, by_xla: bool = False) -> tuple[Segment, ...]:
    """Returns the segments of the first axis of a draw.

    Args:
        shape: The shape of the draw, an int32 vector of a graph.
        names: The parts of the batch, for the error.
        by_xla: Whether XLA compiles the draw, likewise.

    Raises:
        LossError: The graph does not tell whose rows they are.
    """
    tensor, _ = axis_of(shape)
    if tensor is None:  # Lengths that were computed: what they were computed from.
        first = shape.op.inputs[0] if shape.op.type == "Pack" else shape
        segments = _by_parts(_origin(first).parts, first)
    else:
        segments = _origin(tensor).segments
    here = tf.compat.v1.get_default_graph()
    several = segments is not None and len({one.part for one in segments}) > 1
    if segments is None or (several and not all(one.is_in(here) for one in segments)):
        where = " Or leave out jit_compile=True, which hides it." if by_xla else ""
        raise LossError(
            "It is unknown which part of the batch a random draw is for, as in dropout or noise "
            "behind a tf.split of several parts, in a tf.function of your own, or in a layer that "
            "mixes parts. The replicas would draw other numbers than one device. Received: parts "
            f"{[name for name in names if name]} and a draw of a tensor that depends on several, "
            "or cannot be followed. Call the model for each part by itself, or once for "
            f"tf.concat([a, b], axis=0), and draw before you split the result.{where}"
        )
    return segments


def _origin(tensor: Any) -> _Origin:
    """Returns the facts about a tensor, computed from those of all it was computed from."""
    pending = [tensor]
    while pending:
        one = pending[-1]
        known = _origins(one.graph)
        if one.name in known:
            pending.pop()
            continue
        sources = _sources(one)
        missing = [s for s in sources if s.name not in _origins(s.graph)]
        if missing:
            pending.extend(missing)
            continue
        found = {source.name: _origins(source.graph)[source.name] for source in sources}
        known[one.name] = _of_op(one, sources, found)
        pending.pop()
    return _origins(tensor.graph)[tensor.name]


def _sources(tensor: Any) -> list[Any]:
    """The tensors of graphs that one was computed from; none for a tensor of the batch."""
    if noted_part(tensor) is not None:
        return []
    if tensor.op.type == "Placeholder":
        outer = _captured(tensor)
        return [outer] if outer is not None and hasattr(outer, "graph") else []
    return [one for one in tensor.op.inputs if one.dtype != tf.resource]


def _captured(tensor: Any) -> Any:
    """The tensor that a placeholder of a function stands for; None if it is an argument."""
    pairs = getattr(tensor.graph, "captures", ())
    return next((outer for outer, inner in pairs if inner is tensor), None)


def _of_op(tensor: Any, sources: list[Any], found: dict[str, _Origin]) -> _Origin:
    noted = noted_part(tensor)
    if noted is not None:
        # A scalar has no rows that a tensor computed from it could have.
        parts = frozenset[str | None]() if tensor.shape.rank == 0 else frozenset(noted)
        return _Origin(parts, (Segment(noted[0], tensor),))
    if tensor.op.type == "Placeholder":
        if sources:
            return found[sources[0].name]
        # Where tensors of the batch are arguments of a graph, the others are not of the batch.
        constant = _captured(tensor) is not None or has_noted(tensor.graph)
        parts = frozenset[str | None]() if constant else frozenset({_UNKNOWN})
        return _Origin(parts, _by_parts(parts, tensor))
    parts = frozenset[str | None]().union(*[found[one.name].parts for one in sources])
    segments = _segments(tensor, found)
    return _Origin(parts, _by_parts(parts, tensor) if segments is None else segments)


def _by_parts(parts: frozenset[str | None], tensor: Any) -> tuple[Segment, ...] | None:
    """The segments of a tensor of which only is known what it depends on."""
    if not parts or parts == {None}:
        return (Segment(None, tensor),)
    (part, *others) = parts
    return None if others or part == _UNKNOWN else (Segment(part, tensor),)


def _segments(tensor: Any, found: dict[str, _Origin]) -> tuple[Segment, ...] | None:
    """The segments that follow from those of the inputs; None if they do not."""
    op = tensor.op
    if op.type in _OTHER_ROWS or "Segment" in op.type or not tensor.shape.rank:
        return None
    if tensor.shape[0] is not None:
        return None
    if op.type in _SHAPED or op.type.startswith("StatelessRandom"):
        # Made as long as another tensor is: noise, a mask, what is flattened by example.
        like, axis = axis_of(op.inputs[_SHAPED.get(op.type, 0)])
        if like is not None and axis == 0:
            return _origins(like.graph)[like.name].segments
    if op.type == "ConcatV2" and is_along_rows(op.inputs[-1], tensor):
        one_by_one = [(one, _of_input(one, found)) for one in list(op.inputs)[:-1]]
        if any(segments is None for _, segments in one_by_one):
            return None
        return tuple(
            [one for given, segments in one_by_one for one in _in_row(given, segments or ())]
        )
    if op.type in ("GatherV2", "ResourceGather"):
        # Rows picked out of a table by a vector of numbers: as many as there are numbers.
        axis = tf.get_static_value(op.inputs[2]) if op.type == "GatherV2" else 0
        if axis == 0 and not op.get_attr("batch_dims"):
            return _of_input(op.inputs[1], found) if op.inputs[1].shape.rank else None
    times, adds, sources = rows_from(tensor)
    if adds or not sources:
        return None
    alike = [found[source.name].segments for source in sources]
    if any(one is None for one in alike):
        return None
    kinds = {tuple([segment.part for segment in one or ()]) for one in alike}
    return (alike[0] or ()) * times if len(kinds) == 1 else None


def _of_input(tensor: Any, found: dict[str, _Origin]) -> tuple[Segment, ...] | None:
    if tensor.shape.rank and tensor.shape[0] is not None:
        return (Segment(None, tensor),)
    return found[tensor.name].segments
