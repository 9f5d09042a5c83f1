"""Steps without a backward pass: evaluation, exact over every row, and prediction, in order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tfmultigpu.data.batch_format import count_rows, unpack_batch
from tfmultigpu.steps.assignments import DeferredAssignments, assign
from tfmultigpu.steps.features import Feature, Pass, Rows, Shards
from tfmultigpu.steps.objective import Forward, regularization, stack
from tfmultigpu.steps.outputs import StepMetrics
from tfmultigpu.steps.program import Program
from tfmultigpu.steps.tally import Layout, Tally
from tfmultigpu.steps.trace import Trace
from tfmultigpu.strategies.collectives import sum_over_replicas
from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.topology import per_replica


class EvalStep(Program):
    """Loss and metrics of one global batch; what ``make_eval_step`` returns.

    Attributes:
        model: The model.
        metrics: The Keras metrics that it updates.
    """

    def __init__(
        self,
        forward: Forward,
        strategy: tf.distribute.Strategy,
        features: Sequence[Feature] = (),
        *,
        metrics: Any = (),
    ) -> None:
        """Use ``make_eval_step``, which checks what it is given."""
        super().__init__(strategy, features)
        self.model, self.forward, self.trace = forward.model, forward, Trace()
        self._metrics = StepMetrics(metrics, forward, strategy)
        self.metrics = self._metrics.all
        self.bind()

    def key(self) -> Hashable:
        """Returns the variables whose penalty is part of the loss: Keras leaves out frozen ones."""
        trained = self.model.trainable_variables
        return tuple(id(v) for v in trained if getattr(v, "regularizer", None) is not None)

    @override
    def prepare(self, spec: Callable[[], Any]) -> None:
        """Builds the model and its metrics."""
        batch_spec = spec()
        super().prepare(lambda: batch_spec)
        self._metrics.build(self.model, batch_spec)

    def compute(self, shards: Shards) -> dict[str, Tally]:
        """Evaluates one global batch; traced."""
        tally, passes = self.look(shards)
        self.commit(self.trace.state, passes, [tally.sums])
        return {"": tally}

    def look(self, shards: Shards) -> tuple[Tally, list[Pass]]:
        """Evaluates one global batch and assigns nothing; traced."""
        self.trace = Trace()
        passes = self.phase(self._replica)(shards)
        layout = self.trace.layout
        assert layout is not None
        (stats,) = sum_over_replicas(self.strategy, [[one.stats] for one in passes])[0]
        penalty, _ = regularization(self.model.trainable_variables, lambda _: nullcontext())
        return Tally.of_step(layout, *layout.unstack(stats), penalty, shards.total), passes

    def _replica(self, shard: Any, rows: Rows, *_: Any) -> Pass:
        with self.tracing_model(rows), DeferredAssignments((), rows.counts()) as deferred:
            terms, outputs = self.forward(shard, training=False)
            self._metrics.update(outputs)
        self.trace.note(Layout.of(terms, trains=False), (), deferred.variables)
        state = tuple(tf.identity(deferred.current(variable)) for variable in self.trace.state)
        return Pass((), stack(terms, rows.weight), state)


class PredictStep(Program):
    """Predictions for one global batch; what ``make_predict_step`` returns.

    Only x of a batch ``(x, y)`` or ``(x, y, sample_weight)`` is used.
    """

    def __init__(self, model: Any, strategy: tf.distribute.Strategy, features: Any = ()) -> None:
        """Use ``make_predict_step``, which checks what it is given."""
        super().__init__(strategy, features)
        self.model = model
        self.bind()

    def traced(self, shards: Shards) -> Any:
        """Returns the predictions, and no tallies."""
        return self.look(shards), ()

    def look(self, shards: Shards) -> Any:
        """Predicts one global batch; traced."""

        def predict(shard: Any, rows: Rows, *_: Any) -> Any:
            # A metric in a layer counts the rows of a small batch once, not once per copy.
            with self.tracing_model(rows), DeferredAssignments((), rows.counts()) as deferred:
                outputs = self.model(unpack_batch(shard)[0], training=False)
            variables = deferred.variables
            assign(variables, [deferred.current(variable) for variable in variables], [])
            return outputs

        joined = join_rows(self.strategy, self.phase(predict)(shards))
        replicas = self.strategy.num_replicas_in_sync
        if replicas == 1:
            return joined
        # A small batch went to every replica whole: the first copy is the batch.
        copies = tf.where(shards.rows[0].total < replicas, tf.constant(replicas, tf.int64), 1)
        return tf.nest.map_structure(
            lambda rows: None if rows is None else rows[: count_rows(rows) // copies], joined
        )


def join_rows(strategy: tf.distribute.Strategy, local: Sequence[Any]) -> Any:
    """Returns the rows of all replicas in order, from those of each of this process."""
    replicas = strategy.num_replicas_in_sync

    def join(*parts: Any) -> Any:
        if parts[0] is None or replicas == 1:
            return parts[0]
        if len(parts) < replicas:
            return gather_rows(strategy, per_replica(strategy, list(parts)))
        sparse = isinstance(parts[0], tf.SparseTensor)
        return tf.sparse.concat(0, list(parts)) if sparse else tf.concat(list(parts), 0)

    return tf.nest.map_structure(join, *local)
