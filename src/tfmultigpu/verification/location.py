"""Finding the first layer or loss whose result depends on how a batch was cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import rows as rows_lib
from tfmultigpu.batches import Shards, per_replica
from tfmultigpu.randomness import HeldRows, drawing_rows
from tfmultigpu.reductions import sum_over_replicas
from tfmultigpu.row_gathering import gathering_from
from tfmultigpu.seeds import global_seeds
from tfmultigpu.traces import Traces
from tfmultigpu.verification.advice import name_of
from tfmultigpu.verification.one_device import sharing_seeds
from tfmultigpu.verification.outcome import Difference
from tfmultigpu.verification.rounding import Rounding, largest_difference
from tfmultigpu.verification.trial import Forward, Trial, try_forward

__all__ = ["Located", "locate_in_parts", "locate_on_replicas"]

_HALVES = 2


@dataclasses.dataclass(frozen=True)
class Located:
    """What depends on the cut.

    Attributes:
        layer: The first layer, or operation of Keras, whose output does; None if all agree.
        stats: The sums of the terms, then their weights: of one device, and added over the parts.
        difference: The element of that output that differs most, or None.
        in_parts: Whether the batch was cut on one device and not over the replicas.
    """

    layer: Any
    stats: tuple[Any, Any]
    difference: Difference | None = None
    in_parts: bool = False


def locate_on_replicas(
    objective: Forward,
    strategy: tf.distribute.Strategy,
    shards: Shards,
    batch: Any,
    training: bool,
    rounding: Rounding,
) -> Located:
    """Runs the forward pass in one piece and on the replicas, and compares layer by layer.

    With the weights as they are now: what depends on the cut does so with any weights. Every worker
    must call it.

    Args:
        objective: The model and its losses.
        strategy: The strategy of the model.
        shards: A batch as the replicas of this process have it.
        batch: All rows of that batch.
        training: Whether layers behave as in training.
        rounding: The rounding of the model.
    """

    def parts(shards: Shards, trials: list[Trial]) -> tuple[Any, list[Any]]:
        def replica(shard: Any, weight: Any) -> Any:
            held = HeldRows.of(shards, shard, seeds)
            with drawing_rows(held), gathering_from(held):
                trial = try_forward(
                    objective, shard, training, row_weight=weight, record_calls=True
                )
            trials.append(trial)
            return trial.stats, _outputs(trial)

        weight = rows_lib.row_weight(shards.global_rows, strategy.num_replicas_in_sync)
        with global_seeds(strategy) as seeds:
            stats, outputs = strategy.run(replica, (per_replica(strategy, shards.local), weight))
        local = strategy.experimental_local_results
        added = sum_over_replicas(strategy, [[one] for one in local(stats)])[0][0]
        return added, [list(one) for one in zip(*map(local, outputs), strict=True)]

    first = np.asarray(shards.offsets)
    places = [(int(first[r]), int(first[r + 1])) for r in rows_lib.local_replicas(strategy)]
    return _locate(objective, strategy, shards, batch, training, rounding, parts, places)


def locate_in_parts(
    objective: Forward,
    strategy: tf.distribute.Strategy,
    batch: Any,
    training: bool,
    rounding: Rounding,
) -> Located:
    """Runs the forward pass in one piece and in two, on one device, and compares layer by layer.

    Args:
        objective: The model and its losses.
        strategy: The strategy of the model.
        batch: A batch of at least two rows.
        training: Whether layers behave as in training.
        rounding: The rounding of the model.
    """
    rows = int(rows_lib.count_rows(batch))

    def parts(shards: Shards, trials: list[Trial]) -> tuple[Any, list[Any]]:
        (shard,) = shards.local
        found = []
        with global_seeds(tf.distribute.get_strategy()) as seeds:
            held = HeldRows.of(shards, shard, seeds)
            for number in range(_HALVES):
                part = rows_lib.cut_part(shard, _HALVES, number)
                with drawing_rows(held.part(shard, _HALVES, number)):
                    trials.append(try_forward(objective, part, training, record_calls=True))
                found.append(_outputs(trials[-1]))
        return tf.add_n([trial.stats for trial in trials]), found

    shards = Shards([batch], tf.constant([0, rows], tf.int64))
    places = [(0, rows // _HALVES), (rows // _HALVES, rows)]
    found = _locate(objective, strategy, shards, batch, training, rounding, parts, places)
    return dataclasses.replace(found, in_parts=True)


def _locate(
    objective: Forward,
    strategy: tf.distribute.Strategy,
    shards: Shards,
    batch: Any,
    training: bool,
    rounding: Rounding,
    parts: Callable[[Shards, list[Trial]], tuple[Any, list[Any]]],
    places: list[tuple[int, int]],
) -> Located:
    whole: list[Trial] = []
    cut: list[Trial] = []

    def run(copies: list[Any], further: list[Any]) -> Any:
        given, *local = copies
        with sharing_seeds(strategy):
            whole.append(try_forward(objective, given, training, record_calls=True))
            found = parts(Shards(local, further[0]).with_open_rows(), cut)
        return (whole[0].stats, _outputs(whole[0])), found

    copies = [tf.nest.flatten(one) for one in (batch, *shards.local)]
    (stats, outputs), (added, pieces) = Traces(run)(batch, copies, [shards.offsets])
    rows = int(shards.global_rows)
    layers = [layer for layer, tensors in whole[0].calls for _ in tensors]
    alike = [layer for layer, tensors in cut[0].calls for _ in tensors]
    if layers != alike:
        return Located(None, (stats.numpy(), added.numpy()))
    for i, layer in enumerate(layers):
        for place, piece in zip(places, pieces, strict=True):
            apart = _furthest(outputs[i].numpy(), piece[i].numpy(), place, rows, rounding)
            if apart is not None:
                difference = Difference(f"an output of {name_of(layer)}", *apart)
                return Located(layer, (stats.numpy(), added.numpy()), difference)
    return Located(None, (stats.numpy(), added.numpy()))


def _outputs(trial: Trial) -> list[Any]:
    return [tf.cast(one, tf.float64) for _, tensors in trial.calls for one in tensors]


def _furthest(
    whole: Any, piece: Any, place: tuple[int, int], rows: int, rounding: Rounding
) -> tuple[float, float] | None:
    """The elements of a piece that are furthest from these rows in the whole; None if all agree."""
    begin, end = place
    candidates = [whole]
    if whole.ndim and whole.shape[0] and whole.shape[0] % rows == 0:
        # Several rows of a layer for one of the batch: side by side, or block after block.
        times = whole.shape[0] // rows
        blocks = whole.reshape(times, rows, *whole.shape[1:])[:, begin:end]
        candidates = [whole[begin * times : end * times], blocks.reshape(-1, *whole.shape[1:])]
        candidates += [whole] if whole.shape == piece.shape else []
    bound = 1000.0 * rounding.bound
    found = [
        largest_difference(one, piece, bound) for one in candidates if one.shape == piece.shape
    ]
    if not found:
        return float(whole.size), float(piece.size)
    return None if None in found else (found[0][0], found[0][1])  # type: ignore[index]
