"""Finding the first layer or loss whose result depends on how a batch was cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.verification.dry_run import DryRun
from tfmultigpu.addons.verification.global_batch import join
from tfmultigpu.addons.verification.one_device import OneDevice, dense
from tfmultigpu.addons.verification.quantities import terms
from tfmultigpu.addons.verification.rounding import Quantity, Rounding, furthest
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.steps.assignments import deferring
from tfmultigpu.steps.batches import BatchFunction
from tfmultigpu.steps.features import Rows
from tfmultigpu.steps.micro_batches import MicroBatches
from tfmultigpu.steps.objective import stack
from tfmultigpu.steps.recording import recording_calls
from tfmultigpu.steps.seeds import sharing_seeds
from tfmultigpu.strategies.collectives import sum_over_replicas
from tfmultigpu.strategies.topology import local_replicas

__all__ = ["Located", "locate", "name_of"]

_HALVES = 2


class Located(NamedTuple):
    """The first layer that depends on the cut.

    Attributes:
        layer: The layer, or operation of Keras; None if the outputs of all agree.
        terms: The sums and weights of the loss for these rows.
        in_parts: Whether the shards were cut into micro-batches.
    """

    layer: Any
    terms: Sequence[Quantity]
    in_parts: bool = False


def locate(
    step: Any, device: OneDevice, local: list[Any], offsets: Any, rounding: Rounding
) -> Located:
    """Runs a forward pass in one piece and cut, and compares layer by layer.

    With the weights as they are now: what depends on the cut does so with any weights.

    Args:
        step: The step; every worker must call it.
        device: The same on one device.
        local: Rows of each replica of this process.
        offsets: Their offsets.
        rounding: The rounding of the model.
    """
    in_parts = any(isinstance(feature, MicroBatches) for feature in step.features)
    whole = join(step.strategy, local)
    one = _Pieces(step, device.twin)
    expected, (outputs,) = one(*BatchFunction(None, device.twin.strategy).cut(whole))
    layout = device.twin.trace.layout if hasattr(device.twin, "trace") else None
    located = Located(None, (), in_parts)
    for parts in (1, _HALVES) if in_parts else (1,):
        if parts == 1 and step.strategy.num_replicas_in_sync == 1:
            continue
        pieces = _Pieces(step, step, parts)
        added, cut = pieces(local, offsets)
        compared = terms(layout, expected.dtype, expected, added, rounding) if layout else ()
        located = Located(None, tuple(compared), parts > 1)
        if one.layers != pieces.layers:
            continue
        places = _places(step.strategy, np.asarray(offsets), parts)
        for number, layer in enumerate(one.layers):
            for place, piece in zip(places, cut, strict=True):
                rows, bound = int(offsets[-1]), math.sqrt(rounding.compute)
                if not _agrees(outputs[number], piece[number], place, rows, bound):
                    return located._replace(layer=layer)
    return located


class _Pieces:
    """The outputs of layers for each part of each shard, and the terms of all together."""

    def __init__(self, step: Any, runs: Any, parts: int = 1) -> None:
        self.layers: list[Any] = []
        self._step, self._runs, self._parts = step, runs, parts

    def __call__(self, local: list[Any], offsets: Any) -> tuple[Any, list[list[Any]]]:
        added, pieces = DryRun(self._trace)(local, offsets)
        return added.numpy(), [[output.numpy() for output in piece] for piece in pieces]

    def _trace(self, local: list[Any], offsets: Any) -> Any:
        runs = self._runs
        shards = BatchFunction(None, runs.strategy).shards(local, offsets)
        phase: Any = functools.partial(runs.on_replicas, self._replica)
        for feature in runs.features:
            if not isinstance(feature, MicroBatches):
                phase = feature.around_phase(phase)
        with sharing_seeds(self._step.strategy):
            if self._parts == 1:
                each = [phase(shards)]
            else:
                count = tf.constant(self._parts, tf.int64)
                each = [
                    phase(shards.cut(tf.constant(i, tf.int64), count)) for i in range(self._parts)
                ]
        replicas = [list(one) for one in zip(*each, strict=True)]
        stats = [[tf.add_n([s for s, _ in one])] for one in replicas]
        added = sum_over_replicas(runs.strategy, stats)[0][0]
        return added, [outputs for one in replicas for _, outputs in one]

    def _replica(self, shard: Any, rows: Rows, *_: Any) -> Any:
        graph, step = tf.compat.v1.get_default_graph(), self._step
        training = hasattr(step, "optimizer")
        with (
            self._runs.tracing_model(rows),
            deferring((), rows.counts()),
            recording_calls() as calls,
        ):
            own: list[Any] = []
            if hasattr(step, "forward"):
                own = step.forward(shard, training=training)[0]
            else:
                step.model(unpack_batch(shard)[0], training=False)
        kept = [(layer, t) for layer, result in calls for t in dense(result) if t.graph is graph]
        self.layers = [layer for layer, _ in kept]
        return stack(own, rows.weight), [tf.cast(tensor, tf.float64) for _, tensor in kept]


def _places(strategy: Any, offsets: Any, parts: int) -> list[tuple[int, int]]:
    places = []
    for replica in local_replicas(strategy):
        first, count = offsets[replica], offsets[replica + 1] - offsets[replica]
        for number in range(parts):
            start, stop = partition.part_bounds(tf.constant(count), parts, number)
            places.append((int(first + start), int(first + stop)))
    return places


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


def name_of(layer: Any) -> str:
    """Returns a layer as its class and its path."""
    path = getattr(layer, "path", None) or getattr(layer, "name", "")
    return f"{type(layer).__name__} {path!r}"
