"""Finding the first layer or loss whose result depends on how a batch was cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.verification.compare import Quantity, Rounding, furthest, of_terms
from tfmultigpu.addons.verification.one_device import DryRun, OneDevice, cutter, dense
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.steps.assignments import deferring
from tfmultigpu.steps.features import Rows, Shards
from tfmultigpu.steps.micro_batches import MicroBatches
from tfmultigpu.steps.objective import stack
from tfmultigpu.steps.recording import recording_calls
from tfmultigpu.steps.seeds import sharing_seeds
from tfmultigpu.strategies.collectives import sum_over_replicas
from tfmultigpu.strategies.topology import local_replicas

_HALVES = 2
_ROWS = 4  # Of each replica.


class Located(NamedTuple):
    """The first layer, or operation of Keras, that depends on the cut; None if all agree."""

    layer: Any
    terms: Sequence[Quantity]  # The sums and weights of the loss for the rows that were looked at.
    in_parts: bool = False  # Whether the shards were cut into micro-batches.


def locate(
    step: Any, device: OneDevice, join: Any, local: list[Any], offsets: Any, rounding: Rounding
) -> Located:
    """Runs a forward pass in one piece and cut, and compares layer by layer; all workers call it.

    With the weights as they are now: what depends on the cut does so with any weights.
    """
    counts = np.minimum(np.diff(offsets), _ROWS)
    numbers = local_replicas(step.strategy)
    local = [
        partition.slice_rows(shard, 0, int(counts[number]))
        for number, shard in zip(numbers, local, strict=True)
    ]
    places = np.insert(np.cumsum(counts), 0, 0)
    one = _Pieces(step, device.twin)
    expected, (outputs,) = one(*cutter(device.twin.strategy).cut(join(local)))
    trace = getattr(device.twin, "trace", None)
    in_parts = any(isinstance(feature, MicroBatches) for feature in step.features)
    located = Located(None, ())
    for parts in [1] * (step.strategy.num_replicas_in_sync > 1) + [_HALVES] * in_parts:
        pieces = _Pieces(step, step, parts)
        added, cut = pieces(local, tf.constant(places, tf.int64))
        compared = of_terms(trace.layout, device.dtype, expected, added, rounding) if trace else ()
        located = Located(None, tuple(compared), parts > 1)
        bounds = [place for number in numbers for place in _bounds(places, number, parts)]
        for number, layer in enumerate(one.layers if one.layers == pieces.layers else ()):
            for place, piece in zip(bounds, cut, strict=True):
                bound = math.sqrt(rounding.compute)
                if not _agrees(outputs[number], piece[number], place, int(places[-1]), bound):
                    return located._replace(layer=layer)
    return located


class _Pieces:
    """The terms of a loss over all rows, and the outputs of layers for each part of each shard."""

    def __init__(self, step: Any, runs: Any, parts: int = 1) -> None:
        self.layers: list[Any] = []
        self._step, self._runs, self._parts = step, runs, parts

    def __call__(self, local: list[Any], offsets: Any) -> tuple[Any, list[list[Any]]]:
        return DryRun(self._trace)(local, offsets)  # type: ignore[no-any-return]

    def _trace(self, local: list[Any], offsets: Any) -> Any:
        runs = self._runs
        shards = cutter(runs.strategy).shards(local, offsets)
        phase: Any = functools.partial(runs.on_replicas, self._replica)
        for feature in runs.features:
            if not isinstance(feature, MicroBatches):
                phase = feature.around_phase(phase)
        with sharing_seeds(self._step.strategy):
            each = [phase(part) for part in self._cut(shards)]
        by_replica = list(zip(*each, strict=True))
        stats = [[tf.add_n([stats for stats, _ in parts])] for parts in by_replica]
        outputs = [outputs for parts in by_replica for _, outputs in parts]
        return sum_over_replicas(runs.strategy, stats)[0][0], outputs

    def _cut(self, shards: Shards) -> list[Shards]:
        if self._parts == 1:
            return [shards]
        numbers = [tf.constant(number, tf.int64) for number in range(self._parts + 1)]
        return [shards.cut(number, numbers[-1]) for number in numbers[:-1]]

    def _replica(self, shard: Any, rows: Rows, *_: Any) -> Any:
        graph, step, own = tf.compat.v1.get_default_graph(), self._step, []
        tracing = self._runs.tracing_model(rows)
        with tracing, deferring((), rows.counts()), recording_calls() as calls:
            if hasattr(step, "forward"):
                own, _outputs = step.forward(shard, training=hasattr(step, "optimizer"))
            else:
                step.model(unpack_batch(shard)[0], training=False)
        kept = [(layer, t) for layer, result in calls for t in dense(result) if t.graph is graph]
        self.layers = [layer for layer, _ in kept]
        return stack(own, rows.weight), [tf.cast(tensor, tf.float64) for _, tensor in kept]


def _bounds(places: Any, replica: int, parts: int) -> list[tuple[int, int]]:
    """The first row and the end of each part of a shard."""
    first, rows = int(places[replica]), tf.constant(places[replica + 1] - places[replica])
    each = [partition.part_bounds(rows, parts, number) for number in range(parts)]
    return [(first + int(begin), first + int(end)) for begin, end in each]


def _agrees(whole: Any, piece: Any, place: tuple[int, int], rows: int, bound: float) -> bool:
    """Returns whether a piece has the values of these rows in the whole."""
    begin, end = place
    candidates = [whole]
    if whole.ndim and whole.shape[0] and whole.shape[0] % rows == 0:
        # Several rows of a layer for one of the batch: side by side, or block after block.
        times = whole.shape[0] // rows
        blocks = whole.reshape(times, rows, *whole.shape[1:])[:, begin:end]
        candidates = [whole[begin * times : end * times], blocks.reshape(-1, *whole.shape[1:])]
        candidates += [whole] if whole.shape == piece.shape else []
    return any(furthest(one, piece, bound) is None for one in candidates)
