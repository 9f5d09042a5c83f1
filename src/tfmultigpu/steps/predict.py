"""Prediction: each row of a batch once, in the order of the batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.data.batch_format import count_rows, unpack_batch
from tfmultigpu.errors import DataError
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.assignments import assign, deferring
from tfmultigpu.steps.build_model import prepare_model
from tfmultigpu.steps.features import Rows, Shards
from tfmultigpu.steps.program import Program
from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.topology import local_replicas, per_replica

__all__ = ["PredictStep"]


class PredictStep(Program):
    """Predictions for one global batch; what ``make_predict_step`` returns.

    Attributes:
        model: The model.
    """

    def __init__(self, model: Any, strategy: tf.distribute.Strategy, features: Any = ()) -> None:
        """Use ``make_predict_step``, which checks what it is given."""
        super().__init__(strategy, features)
        self.model, self._ready = model, False
        self.bind()

    def __call__(self, batch: Any) -> Any:
        """Predicts one batch: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``; only x is used."""
        return super().__call__(batch)

    def key(self) -> Hashable:
        """Returns nothing that could change once the model is built."""
        return () if self._ready else None

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Builds the model."""
        prepare_model(self.model, self.strategy, spec())
        check_values_alike(self.strategy, self.model)
        self._ready = True

    def look(self, shards: Shards) -> Any:
        """Predicts one global batch; traced."""
        return self.traced(shards)[0]

    def traced(self, shards: Shards) -> Any:
        """Returns the predictions, and no tallies."""

        def predict(shard: Any, rows: Rows, *_: Any) -> Any:
            # A metric in a layer counts the rows of a small batch once, not once per copy.
            with self.tracing_model(rows), deferring((), rows.counts()) as deferred:
                outputs = self.model(unpack_batch(shard)[0], training=False)
            found = deferred.variables
            assign(found, [deferred.current(variable) for variable in found], [])
            return outputs

        def run(replica: Any, shards: Shards) -> Any:
            parts = (shards.local, shards.rows)
            return self.strategy.run(replica, args=[per_replica(self.strategy, p) for p in parts])

        results: Any = self.phase(predict, run)(shards)
        if self.strategy.num_replicas_in_sync == 1:
            return results, ()
        total = shards.rows[0].total
        return tf.nest.map_structure(lambda result: self._join(result, total), results), ()

    def _join(self, result: Any, total: Any) -> Any:
        """Puts the rows of all replicas together."""
        parts = list(self.strategy.experimental_local_results(result))
        if parts[0] is None:
            return None
        sparse = isinstance(parts[0], tf.SparseTensor)
        if sparse or parts[0].shape.rank == 0:
            raise DataError(
                "Predictions of several replicas are put together row by row, and this output "
                + ("is sparse. End the model with tf.sparse.to_dense." if sparse else
                   "has no rows: it is one number for a batch. Return one value per row.")
            )  # fmt: skip
        with tf.control_dependencies(self._check_lengths(parts, result)):
            if len(parts) < self.strategy.num_replicas_in_sync:
                joined = gather_rows(self.strategy, result)
            else:
                joined = tf.concat(parts, axis=0)
        # A small batch went to every replica whole: the first copy is the batch.
        small = total < self.strategy.num_replicas_in_sync
        return joined[: tf.where(small, count_rows(parts[0]), count_rows(joined))]

    def _check_lengths(self, parts: list[Any], result: Any) -> list[Any]:
        """Returns a check that the rows of one output have one shape on all replicas."""
        first = parts[0]
        if isinstance(first, tf.RaggedTensor) or first.shape[1:].is_fully_defined():
            return []
        if len(local_replicas(self.strategy)) < self.strategy.num_replicas_in_sync:
            shapes = self.strategy.run(lambda one: tf.shape(one)[1:][None], args=(result,))
            shapes = self.strategy.gather(shapes, axis=0)
        else:
            shapes = tf.stack([tf.shape(part)[1:] for part in parts])
        static = tuple(first.shape)

        def check(shapes: Any) -> Any:
            if (shapes != shapes[0]).any():
                raise DataError(
                    "The predictions of the replicas have rows of different shapes, so they do not "
                    f"make one tensor. Received: an output of shape {static} with rows of "
                    f"{[tuple(one) for one in shapes.tolist()]}, by replica. One device would give "
                    "all rows one length: pad the output to a fixed length, or return a "
                    "tf.RaggedTensor."
                )
            return np.int32(0)

        with tf.device("CPU:0"):
            return [tf.numpy_function(check, [shapes], tf.int32, stateful=True)]
