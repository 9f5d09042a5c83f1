"""The eval step: loss and metrics of one global batch, exact over every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import LossError
from tfmultigpu.lists import names_of
from tfmultigpu.steps import phases
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.assignments import DeferredAssignments
from tfmultigpu.steps.build_model import prepare_model
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.objective import Forward, penalty_of, stack
from tfmultigpu.steps.outputs import StepMetrics
from tfmultigpu.steps.replicas import for_all_replicas, tracing_model
from tfmultigpu.steps.runner import Runner
from tfmultigpu.steps.step import Looped, ModelStep
from tfmultigpu.steps.tally import Layout, Tallies, Tally, logs_of_step
from tfmultigpu.steps.values import Pass, Rows, Shards, Trace
from tfmultigpu.strategies.collectives import sum_over_replicas
from tfmultigpu.types import KerasVariable, Shard, Tensor


class EvalStep(ModelStep, Looped):
    """Loss and metrics of one global batch; what ``make_eval_step`` returns.

    Attributes:
        strategy: The strategy.
        features: Its optional parts.
        model: The model.
        metrics: The Keras metrics that it updates.
    """

    names: tuple[str, ...] = ("",)

    def __init__(
        self,
        forward: Forward,
        strategy: tf.distribute.Strategy,
        features: Sequence[Feature] = (),
        *,
        metrics: StepMetrics,
    ) -> None:
        """Use ``make_eval_step``, which checks what it is given."""
        self.strategy, self.features = strategy, tuple(features)
        self.model, self.forward = forward.model, forward
        self.step_metrics, self.metrics = metrics, metrics.all
        self.beside = {}
        self.runner = Runner(self)

    def __repr__(self) -> str:
        """Returns what it evaluates, where, and what the check of it found."""
        return self.shown(self.forward.loss_name, *names_of(self.metrics))

    def _penalized(self) -> list[KerasVariable]:
        """Returns the variables whose penalty is part of the loss: as in Keras no frozen one."""
        trained = self.model.trainable_variables
        return [v for v in trained if getattr(v, "regularizer", None) is not None]

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Builds the model and its metrics."""
        batch_spec = spec()
        prepare_model(self.model, self.strategy, batch_spec, self.parts)
        if self.take_in():
            check_values_alike(self.strategy, self.model)
            self.step_metrics.build(self.model, batch_spec)

    def _compute(self, shards: Shards, trace: Trace) -> tuple[dict[str, Tensor], Tallies]:
        """Evaluates one global batch; traced."""
        tally, passes = self._look(shards, trace)
        phases.commit(self.strategy, trace, passes, shards, [tally.sums])
        self.note_trace(trace)
        tallies = {"": tally}
        return logs_of_step(tallies), tallies

    def _look(self, shards: Shards, trace: Trace) -> tuple[Tally, list[Pass]]:
        """Evaluates one global batch and assigns nothing; traced."""
        passes = for_all_replicas(self, self._replica)(shards, trace)
        layout = trace.layout
        assert layout is not None
        addends = [[*result.shared, result.stats] for result in passes]
        sums = sum_over_replicas(self.strategy, addends)
        sums, passes = phases.settle_states(self, passes, sums, shards, trace)
        (stats,) = sums[0]
        sums_of_losses, weights = layout.unstack(stats)
        penalties: list[Tensor] = []
        for variable in self.model.trainable_variables:
            if not layout.is_whole and (of_variable := penalty_of(variable)) is not None:
                penalties.append(of_variable[0])
        penalty = phases.sum_in_order(penalties)
        return Tally.of_step(layout, sums_of_losses, weights, penalty, shards.total), passes

    def _replica(self, shard: Shard, rows: Rows, *_: object, trace: Trace) -> Pass:
        tracing = tracing_model(self, rows)
        with tracing, DeferredAssignments(trace.before(()), rows.counts()) as deferred:
            terms, outputs = self.forward(shard, training=False)
            self.step_metrics.update(outputs)
        something = terms or self.step_metrics.all or deferred.variables or self._penalized()
        if not something:
            raise LossError(
                "There is nothing to evaluate: no loss and no metric was given, and no layer adds "
                "one. Zeros would look like a result.",
                "loss=None, metrics=()",
                "Write model.compile(loss='mse') or another loss, for a step "
                "make_eval_step(model, 'mse', strategy); or for a loss of your own "
                "make_eval_step(model, None, strategy, forward=f).",
            )
        trace.note(Layout.of(terms, trains=False), (), deferred)
        return Pass((), stack(terms, rows.weight), deferred.values_of(trace.state))

    def run_model(self, shard: Shard) -> list[Tensor]:
        """Runs the forward pass on a shard, for code that watches its layers; traced.

        Returns:
            The sum of each term of the loss.
        """
        terms, _ = self.forward(shard, training=False)
        return [term.sum for term in terms]

    def on_one_device(self) -> EvalStep:
        """Returns the same for the default strategy."""
        features = self.features_on_one_device()
        strategy = tf.distribute.get_strategy()
        twin = EvalStep(self.forward, strategy, features, metrics=self.step_metrics)
        return twin.bind(known=self.features)
