"""The predict step: predictions for one global batch, each row once and in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import count_rows, unpack_batch
from tfmultigpu.data.partition import slice_rows
from tfmultigpu.errors import DataError
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.assignments import DeferredAssignments, assign
from tfmultigpu.steps.build_model import prepare_model
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.replicas import for_all_replicas, tracing_model
from tfmultigpu.steps.runner import Runner
from tfmultigpu.steps.step import ModelStep
from tfmultigpu.steps.tally import Tallies
from tfmultigpu.steps.values import Rows, Shards, Trace
from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.topology import per_replica
from tfmultigpu.types import KerasModel, Nested, Scalar, Shard, Tensor


class PredictStep(ModelStep):
    """Predictions for one global batch; what ``make_predict_step`` returns.

    Only x of a batch ``(x, y)`` or ``(x, y, sample_weight)`` is used.

    Attributes:
        strategy: The strategy.
        features: Its optional parts.
        model: The model.
    """

    names: tuple[str, ...] = ()
    metrics: tuple[Any, ...] = ()

    def __init__(
        self, model: KerasModel, strategy: tf.distribute.Strategy, features: Sequence[Feature] = ()
    ) -> None:
        """Use ``make_predict_step``, which checks what it is given."""
        self.strategy, self.features = strategy, tuple(features)
        self.model = model
        self.beside = {}
        self.runner = Runner(self)

    def __repr__(self) -> str:
        """Returns what predicts, where, and what the check of it found."""
        return self.shown()

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Builds the model."""
        prepare_model(self.model, self.strategy, spec(), self.parts)
        if self.take_in():
            check_values_alike(self.strategy, self.model)

    def _compute(self, shards: Shards, trace: Trace) -> tuple[Tensor, Tallies]:
        """Predicts one global batch, and returns no tallies; traced."""
        predictions = self._look(shards, trace)
        self.note_trace(trace)
        return predictions, {}

    def _look(self, shards: Shards, trace: Trace) -> Nested:
        """Predicts one global batch; traced."""
        parts: list[Tensor] = for_all_replicas(self, self._replica)(shards, trace)
        joined = join_rows(self.strategy, parts)
        replicas = self.strategy.num_replicas_in_sync
        if replicas == 1:
            return joined
        # A small batch went to every replica whole: the first copy is the batch.
        copies = tf.where(shards.rows[0].total < replicas, tf.constant(replicas, tf.int64), 1)

        def first_copy(rows: Scalar) -> Tensor:
            if rows is None:
                return None
            return slice_rows(rows, 0, count_rows(rows) // copies)

        return tf.nest.map_structure(first_copy, joined)

    def _replica(self, shard: Shard, rows: Rows, *_: object, trace: Trace) -> Nested:
        # A metric in a layer counts the rows of a small batch once, not once per copy.
        tracing = tracing_model(self, rows)
        with tracing, DeferredAssignments((), rows.counts()) as deferred:
            outputs = self.model(unpack_batch(shard)[0], training=False)
        variables = deferred.variables
        values = list(map(deferred.current, variables))
        assign(variables, values, rows.weight, replaced=deferred.replaced)
        return outputs

    def run_model(self, shard: Shard) -> list[Tensor]:
        """Runs the model on a shard, for code that watches its layers; traced. It has no loss."""
        self.model(unpack_batch(shard)[0], training=False)
        return []

    def on_one_device(self) -> PredictStep:
        """Returns the same for the default strategy."""
        features = self.features_on_one_device()
        twin = PredictStep(self.model, tf.distribute.get_strategy(), features)
        return twin.bind(known=self.features)


def join_rows(strategy: tf.distribute.Strategy, local: Sequence[Nested]) -> Tensor:
    """Returns the rows of all replicas in order, from the parts of this process."""
    replicas = strategy.num_replicas_in_sync

    def join(*parts: Scalar) -> Nested:
        if parts[0] is None or replicas == 1:
            return parts[0]
        if parts[0].shape.rank == 0:
            raise DataError(
                "The model returns one value for a batch, and each replica has a part of the "
                "batch.",
                f"an output of shape () on each of {replicas} replicas",
                "Return one value for each example: tf.reduce_mean(values, axis=-1).",
            )
        if len(parts) < replicas:
            return gather_rows(strategy, per_replica(strategy, list(parts)))
        if isinstance(parts[0], tf.SparseTensor):
            # Made of ragged rows they are as wide as the longest row of their replica.
            return tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True)
        return tf.concat(list(parts), 0)

    return tf.nest.map_structure(join, *local)
