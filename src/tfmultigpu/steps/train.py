"""The train step: one optimizer step on one global batch, as a compiled function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tfmultigpu._patch import lock_of
from tfmultigpu.accumulation.gradients import refuse_float8
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.accumulation.replicated import Replicated
from tfmultigpu.accumulation.settings import Settings
from tfmultigpu.accumulation.targets import Target
from tfmultigpu.accumulation.update import choose_update
from tfmultigpu.steps import phases
from tfmultigpu.steps.agreement import (
    check_programs_alike,
    check_values_alike,
    warn_of_other_kernels,
)
from tfmultigpu.steps.build_model import prepare_model
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.features.lookups import note_written
from tfmultigpu.steps.objective import Forward
from tfmultigpu.steps.other_states import OtherState
from tfmultigpu.steps.outputs import StepMetrics
from tfmultigpu.steps.program import Key
from tfmultigpu.steps.replicas import for_all_replicas
from tfmultigpu.steps.retraces import SETTING, Facts
from tfmultigpu.steps.runner import Runner
from tfmultigpu.steps.step import Looped, ModelStep
from tfmultigpu.steps.tally import Tallies, Tally, logs_of_step
from tfmultigpu.steps.values import Gradient, Pass, Shards, Trace
from tfmultigpu.strategies.row_parts import units_of
from tfmultigpu.types import KerasOptimizer, KerasVariable, Shard, ShardUpdate, Tensor


class TrainStep(ModelStep, Looped):
    """One optimizer step on one global batch; what ``make_train_step`` returns.

    Attributes:
        strategy: The strategy.
        features: Its optional parts, in their order.
        model: The model it trains.
        optimizer: The optimizer; its settings may change between steps.
        forward: The forward pass: the model and its loss.
        metrics: The Keras metrics that it updates.
        update: Who adds gradients and who updates variables: ``update.reason`` says why.
        trained: The variables that it trains; frozen ones are left out.
    """

    names: tuple[str, ...] = ("",)
    update: Replicated
    trained: list[Target]

    def __init__(
        self,
        forward: Forward,
        optimizer: KerasOptimizer,
        strategy: tf.distribute.Strategy,
        features: Sequence[Feature] = (),
        *,
        metrics: StepMetrics,
        shard_update: ShardUpdate = "auto",
        settings: Mapping[str, Any] | None = None,
        options: Mapping[str, object] = MappingProxyType({}),
        update: Replicated | None = None,
    ) -> None:
        """Use ``make_train_step``, which checks what it is given.

        Args:
            forward: The forward pass.
            optimizer: The optimizer.
            strategy: The strategy.
            features: The features, in their order; the maker of the step binds them.
            metrics: The metrics.
            shard_update: As for ``make_train_step``.
            settings: What the workers compare before the first step.
            options: What it is shown with.
            update: Who adds and updates; None to choose it when the model is built.
        """
        self.strategy, self.features = strategy, tuple(features)
        self.model, self.forward, self.optimizer = forward.model, forward, optimizer
        self.step_metrics, self.metrics = metrics, metrics.all
        self.runner = Runner(self, [lock_of(unwrap_optimizer(optimizer))])
        self._shard_update, self._settings = shard_update, Settings()
        self._unchecked = settings  # What the workers have not compared yet.
        self._options = options
        self._batch_spec = None
        self.beside = {}
        if update is not None:
            self._note_update(update)

    def __repr__(self) -> str:
        """Returns what it trains, by what, where, and what the check of it found."""
        optimizer = type(unwrap_optimizer(self.optimizer)).__name__
        options = [f"{name}={value!r}" for name, value in self._options.items()]
        return self.shown(self.forward.loss_name, optimizer, *options)

    @property
    def variables(self) -> list[KerasVariable]:
        """The variables that it trains; a table on several devices is its parts."""
        return units_of(self.forward.trained)

    @property
    def train_steps(self) -> tuple[TrainStep, ...]:
        """The steps of a chain, each once; here the step itself."""
        return (self,)

    def changed_variables(self) -> list[KerasVariable]:
        """Returns what a step changes: of model, optimizer, features, and closures of forward."""
        states = [variable for feature in self.features for variable in feature.variables]
        metrics = [*self.metrics, *getattr(self.model, "metrics", ())]
        known = {id(v) for owner in (self.model, *metrics) for v in owner.variables}
        closures: list[KerasVariable] = []
        if self.forward.forward is not None:
            assigned = (self.assigned or {}).values()
            closures = [variable for variable in assigned if id(variable) not in known]
        return [*self.model.variables, *self.optimizer.variables, *states, *closures]

    def other_states(self) -> list[OtherState]:
        """Returns the state that the traces so far change, known to Keras or not."""
        return self.runner.touched.states

    # What a trace takes in ----------------------------------------------------------------------

    def key(self) -> Key | None:
        """Returns what a trace takes in of the model; None if the optimizer has other settings."""
        if self._batch_spec is None or self._settings.changed(self.optimizer):
            return None
        return super().key()

    def facts(self) -> Facts:
        """Returns the settings of the optimizer, and what is trained and synchronized."""
        facts = {SETTING + name: value for name, value in self._settings.values().items()}
        trained = [variable.path for variable in self.variables]
        return {**facts, **super().facts(), "the trained variables": trained}

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Builds the model, its metrics and the optimizer, and takes in changed settings."""
        first = self._batch_spec is None
        batch_spec = spec() if first else self._batch_spec
        self.build(batch_spec)
        if first:
            check_values_alike(self.strategy, self.model, self.optimizer)
            self.step_metrics.build(self.model, batch_spec)
            self._batch_spec = batch_spec
        self.take_in(changed=self._settings.changed(self.optimizer))
        self._settings.note(self.optimizer)

    def build(self, batch_spec: Any = None) -> None:
        """Builds model and optimizer, if they are not, and chooses who updates.

        Args:
            batch_spec: The type specs of a batch; None for a model that is built.
        """
        prepare_model(self.model, self.strategy, batch_spec, self.parts)
        refuse_float8(self.model.trainable_variables)
        # What the optimizer remembers is made by all workers together, and so is a step.
        due = batch_spec is not None or not self.optimizer.built
        if self._unchecked is not None and due and not tf.inside_function():
            check_programs_alike(self.strategy, self.model, self.optimizer, self._unchecked)
            if self.logical_replicas is not None:
                warn_of_other_kernels(self.strategy)
            self._unchecked = None
        self._note_update(
            choose_update(self.optimizer, self.forward.trained, self.strategy, self._shard_update)
        )
        note_written(self.trained)

    def _note_update(self, update: Replicated) -> None:
        self.update, self.trained = update, update.targets_of(self.forward.trained)

    # The step -----------------------------------------------------------------------------------

    def _compute(self, shards: Shards, trace: Trace) -> tuple[dict[str, Any], Tallies]:
        """Trains on one global batch; traced."""
        tally, passes, gradient = self._look(shards, trace)
        # The norm needs the whole backward pass. If nobody reads it, TensorFlow leaves it out.
        last: Sequence[Tensor] = gradient.tensors
        if trace.logs_last:
            last = [gradient.norm]
        else:
            tally = tally._replace(last=tf.zeros_like(tally.last))
        after = [tally.sums]
        for value in last:
            copies = self.strategy.experimental_local_results(value)
            after += tf.nest.flatten(copies, expand_composites=True)
        # Also if the update is skipped, and before it: weights may be among them.
        phases.commit(self.strategy, trace, passes, shards, after)
        phases.update(self.update, gradient, after)
        phases.advance(self.features, gradient, after)

        self._settings.note(self.optimizer, traced=True)
        self.note_trace(trace)
        tallies = {"": tally}
        return logs_of_step(tallies), tallies

    def _look(self, shards: Shards, trace: Trace) -> tuple[Tally, list[Pass], Gradient]:
        """Computes the gradient of one global batch and assigns nothing; traced."""
        shards = shards._replace(factor=phases.loss_factor(self.features))
        replica = functools.partial(phases.train_replica, self)
        passes = for_all_replicas(self, replica)(shards, trace)
        sums, passes = phases.add_over_replicas(self, passes, shards, trace)
        gradient, tally = phases.divide(self, sums, shards, passes[0].state, trace)
        return tally, passes, gradient

    def run_model(self, shard: Shard) -> list[Tensor]:
        """Runs the forward pass on a shard, for code that watches its layers; traced.

        Returns:
            The sum of each term of the loss.
        """
        terms, _ = self.forward(shard, training=True)
        return [term.sum for term in terms]

    def with_features(self, features: Sequence[Feature]) -> TrainStep:
        """Returns the same step with other features; it trains the same variables."""
        other = TrainStep(
            self.forward,
            self.optimizer,
            self.strategy,
            features,
            metrics=self.step_metrics,
            update=self.update,
        )
        return other.bind(known=self.features)

    def on_one_device(self) -> TrainStep:
        """Returns the same for the default strategy, for ``look``: it updates nothing."""
        strategy = tf.distribute.get_strategy()
        twin = TrainStep(
            self.forward,
            self.optimizer,
            strategy,
            self.features_on_one_device(),
            metrics=self.step_metrics,
            update=Replicated(self.optimizer, strategy, "one device"),
        )
        return twin.bind(known=self.features)
