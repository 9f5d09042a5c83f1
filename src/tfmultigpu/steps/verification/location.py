"""Finding the first layer or loss whose result depends on how a batch was cut."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.steps.batch_function import Shards
from tfmultigpu.steps.random_draws import ReplicaRows, drawing_rows
from tfmultigpu.steps.rows import standing_at, standing_at_all
from tfmultigpu.steps.seeds import global_seeds, sharing_seeds
from tfmultigpu.steps.traces import Traces
from tfmultigpu.steps.verification.advice import name_of
from tfmultigpu.steps.verification.outcome import Difference
from tfmultigpu.steps.verification.rounding import Rounding, largest_difference
from tfmultigpu.steps.verification.trial import Forward, Trial, try_forward
from tfmultigpu.strategies.collectives import sum_over_replicas
from tfmultigpu.strategies.topology import local_replicas, per_replica

__all__ = ["Located", "Locator"]

_HALVES = 2


@dataclasses.dataclass(frozen=True)
class Located:
    """The first layer or loss that depends on the cut.

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


@dataclasses.dataclass(frozen=True)
class Locator:
    """Runs a forward pass in one piece and in parts, and compares layer by layer.

    With the weights as they are now: what depends on the cut does so with any weights.

    Attributes:
        objective: The model and its losses.
        strategy: The strategy of the model.
        training: Whether layers behave as in training.
        rounding: The rounding of the model.
    """

    objective: Forward
    strategy: tf.distribute.Strategy
    training: bool
    rounding: Rounding

    def on_replicas(self, shards: Shards, batch: Any) -> Located:
        """Compares with the replicas; every worker must call it.

        Args:
            shards: A batch as the replicas of this process have it.
            batch: All rows of that batch.
        """
        strategy = self.strategy

        def parts(shards: Shards, trials: list[Trial]) -> tuple[Any, list[Any]]:
            def replica(shard: Any, weight: Any) -> Any:
                held = ReplicaRows.of(shards, shard, seeds)
                with drawing_rows(held), standing_at(held.place()):
                    trials.append(self._try(shard, weight))
                return trials[-1].stats, _outputs(trials[-1])

            weight = partition.row_weight(shards.global_rows, strategy.num_replicas_in_sync)
            with global_seeds(strategy) as seeds:
                args = (per_replica(strategy, shards.local), weight)
                stats, outputs = strategy.run(replica, args)
            local = strategy.experimental_local_results
            added = sum_over_replicas(strategy, [[one] for one in local(stats)])[0][0]
            return added, [list(one) for one in zip(*map(local, outputs), strict=True)]

        first = np.asarray(shards.offsets)
        places = [(int(first[r]), int(first[r + 1])) for r in local_replicas(strategy)]
        return self._compare(shards, batch, parts, places)

    def in_parts(self, batch: Any) -> Located:
        """Compares with two halves of a batch on one device, one after the other."""
        rows = int(count_rows(batch))

        def parts(shards: Shards, trials: list[Trial]) -> tuple[Any, list[Any]]:
            (shard,) = shards.local
            with global_seeds(tf.distribute.get_strategy()) as seeds:
                held = ReplicaRows.of(shards, shard, seeds)
                for number in range(_HALVES):
                    with drawing_rows(held.part(shard, _HALVES, number)):
                        trials.append(self._try(partition.cut_part(shard, _HALVES, number)))
            return tf.add_n([one.stats for one in trials]), [_outputs(one) for one in trials]

        shards = Shards([batch], partition.batch_offsets(batch, (1,)))
        places = [(0, rows // _HALVES), (rows // _HALVES, rows)]
        found = self._compare(shards, batch, parts, places)
        return dataclasses.replace(found, in_parts=True)

    def _try(self, batch: Any, row_weight: Any = None) -> Trial:
        return try_forward(
            self.objective, batch, self.training, row_weight=row_weight, record_calls=True
        )

    def _compare(
        self,
        shards: Shards,
        batch: Any,
        parts: Callable[[Shards, list[Trial]], tuple[Any, list[Any]]],
        places: list[tuple[int, int]],
    ) -> Located:
        whole: list[Trial] = []
        cut: list[Trial] = []

        def run(copies: list[Any], further: list[Any]) -> Any:
            given, *local = copies
            with sharing_seeds(self.strategy):
                with standing_at_all(given):
                    whole.append(self._try(given))
                found = parts(Shards(local, further[0]).with_open_rows(), cut)
            return (whole[0].stats, _outputs(whole[0])), found

        copies = [tf.nest.flatten(one) for one in (batch, *shards.local)]
        (stats, outputs), (added, pieces) = Traces(run)(batch, copies, [shards.offsets])
        located = Located(None, (stats.numpy(), added.numpy()))
        layers = [layer for layer, tensors in whole[0].calls for _ in tensors]
        if layers != [layer for layer, tensors in cut[0].calls for _ in tensors]:
            return located
        rows, bound = int(shards.global_rows), math.sqrt(self.rounding.compute)
        for i, layer in enumerate(layers):
            for place, piece in zip(places, pieces, strict=True):
                apart = _furthest(outputs[i].numpy(), piece[i].numpy(), place, rows, bound)
                if apart is not None:
                    difference = Difference(f"an output of {name_of(layer)}", *apart)
                    return dataclasses.replace(located, layer=layer, difference=difference)
        return located


def _outputs(trial: Trial) -> list[Any]:
    return [tf.cast(one, tf.float64) for _, tensors in trial.calls for one in tensors]


def _furthest(
    whole: Any, piece: Any, place: tuple[int, int], rows: int, bound: float
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
    found = [
        largest_difference(one, piece, bound) for one in candidates if one.shape == piece.shape
    ]
    if not found:
        return float(whole.size), float(piece.size)
    return None if None in found else (found[0][0], found[0][1])  # type: ignore[index]
