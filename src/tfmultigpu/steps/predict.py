"""Prediction: each row of a batch once, in the order of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import count_rows, unpack_batch
from tfmultigpu.errors import DataError
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.assignments import assign, deferring
from tfmultigpu.steps.build_model import prepare_model
from tfmultigpu.steps.failures import OTHER_SHAPES
from tfmultigpu.steps.features import Rows, Shards
from tfmultigpu.steps.program import Program
from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.topology import per_replica


class PredictStep(Program):
    """Predictions for one global batch; what ``make_predict_step`` returns.

    A batch is ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, of which only x is used.

    Attributes:
        model: The model.
    """

    def __init__(self, model: Any, strategy: tf.distribute.Strategy, features: Any = ()) -> None:
        """Use ``make_predict_step``, which checks what it is given."""
        super().__init__(strategy, features)
        self.model = model
        self.bind()

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Builds the model."""
        prepare_model(self.model, self.strategy, spec())
        check_values_alike(self.strategy, self.model)

    def look(self, shards: Shards) -> Any:
        """Predicts one global batch; traced."""
        return self.traced(shards)[0]

    def traced(self, shards: Shards) -> Any:
        """Returns the predictions, and no tallies."""

        def predict(shard: Any, rows: Rows, *_: Any) -> Any:
            # A metric in a layer counts the rows of a small batch once, not once per copy.
            with self.tracing_model(rows), deferring((), rows.counts()) as deferred:
                outputs = self.model(unpack_batch(shard)[0], training=False)
            variables = deferred.variables
            assign(variables, [deferred.current(variable) for variable in variables], [])
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
        replicas = self.strategy.num_replicas_in_sync
        with tf.control_dependencies(self._check_shapes(parts, result)):
            whole = len(parts) == replicas
            joined = tf.concat(parts, axis=0) if whole else gather_rows(self.strategy, result)
        # A small batch went to every replica whole: the first copy is the batch.
        return joined[: tf.where(total < replicas, count_rows(parts[0]), count_rows(joined))]

    def _check_shapes(self, parts: list[Any], result: Any) -> list[Any]:
        """Returns a check that the rows of one output have one shape on all replicas."""
        if isinstance(parts[0], tf.RaggedTensor) or parts[0].shape[1:].is_fully_defined():
            return []
        if len(parts) < self.strategy.num_replicas_in_sync:
            shapes = self.strategy.run(lambda part: tf.shape(part)[1:][None], args=(result,))
            shapes = self.strategy.gather(shapes, axis=0)
        else:
            shapes = tf.stack([tf.shape(part)[1:] for part in parts])
        with tf.device("CPU:0"):
            alike = tf.reduce_all(shapes == shapes[0])
            return [tf.raw_ops.Assert(condition=alike, data=[OTHER_SHAPES, shapes])]
