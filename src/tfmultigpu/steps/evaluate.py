"""Evaluation: a program without a backward pass, exact over every row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.assignments import assigned_variables, deferring
from tfmultigpu.steps.build_model import prepare_model
from tfmultigpu.steps.features import Feature, Pass, Rows, Shards
from tfmultigpu.steps.metrics import StepMetrics
from tfmultigpu.steps.objective import Forward, regularization, stack
from tfmultigpu.steps.program import Program
from tfmultigpu.steps.tally import Layout, Tally
from tfmultigpu.steps.trace import Trace
from tfmultigpu.strategies.collectives import sum_over_replicas


class EvalStep(Program):
    """Loss and metrics of one global batch; what ``make_eval_step`` returns.

    Attributes:
        forward: The forward pass: the model and its loss.
        trace: What the last trace found.
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
        self._metrics = StepMetrics(metrics, forward.objective.weighted_metrics, strategy)
        self.bind()

    @property
    def metrics(self) -> tuple[Any, ...]:
        """The Keras metrics that it updates."""
        return self._metrics.all

    def assigned(self, batch_spec: Any) -> list[Any]:
        """Returns the Keras variables that a forward pass assigns, such as those of metrics."""
        self.settle(lambda: batch_spec)
        forward = functools.partial(self.forward, training=False)
        return assigned_variables(forward, self.strategy, batch_spec)

    def key(self) -> Hashable:
        """Returns the variables whose penalty is part of the loss: Keras leaves out frozen ones."""
        trained = self.model.trainable_variables
        return tuple(id(v) for v in trained if getattr(v, "regularizer", None) is not None)

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Builds the model and its metrics."""
        batch_spec = spec()
        prepare_model(self.model, self.strategy, batch_spec)
        self._metrics.build(self.model, batch_spec)
        check_values_alike(self.strategy, self.model)

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
        with self.tracing_model(rows), deferring((), rows.counts()) as deferred:
            terms, outputs = self.forward(shard, training=False)
            self._metrics.update(outputs)
        self.trace.note(Layout.of(terms, trains=False), (), deferred.variables)
        state = tuple(tf.identity(deferred.current(variable)) for variable in self.trace.state)
        return Pass((), stack(terms, rows.weight), state)
