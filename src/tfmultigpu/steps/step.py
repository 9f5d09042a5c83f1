"""One optimizer step on one global batch, as a compiled function.

A step has two phases inside one ``tf.function``::

    replica phase   on each replica: forward, backward; gradients, sums, weights, new states
    global phase    add over the replicas, once; divide, once; features; one optimizer update
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, compress
from typing import Any, Self

import tensorflow as tf

from tfmultigpu.accumulation.gradients import combined, global_norm, refuse_float8, sum_dtype
from tfmultigpu.accumulation.replicated import Replicated
from tfmultigpu.accumulation.settings import Settings
from tfmultigpu.accumulation.update import choose_update
from tfmultigpu.errors import LossError
from tfmultigpu.steps.agreement import check_programs_alike, check_values_alike
from tfmultigpu.steps.assignments import DeferredAssignments
from tfmultigpu.steps.build_model import is_built, prepare_model
from tfmultigpu.steps.features import Feature, Gradient, Pass, Rows, Shards
from tfmultigpu.steps.objective import Forward, check_weights, regularization, stack
from tfmultigpu.steps.outputs import StepMetrics
from tfmultigpu.steps.program import Program
from tfmultigpu.steps.tally import Layout, Tally
from tfmultigpu.steps.trace import Trace, check_gradients, noting_effects
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.types import ShardUpdate


class TrainStep(Program):
    """One optimizer step on one global batch; what ``make_train_step`` returns.

    Attributes:
        model: The model it trains.
        optimizer: The optimizer; its settings may change between steps.
        forward: The forward pass: the model and its loss.
        metrics: The Keras metrics that it updates.
        update: Who adds gradients and who updates variables: ``update.reason`` says why.
        trace: What the last trace found.
    """

    forward: Forward
    update: Replicated

    def __init__(
        self,
        forward: Forward,
        optimizer: Any,
        strategy: tf.distribute.Strategy,
        features: Sequence[Feature] = (),
        *,
        metrics: Any = (),
        shard_update: ShardUpdate = "auto",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Use ``make_train_step``, which checks what it is given."""
        super().__init__(strategy, features)
        self.model, self.forward, self.optimizer = forward.model, forward, optimizer
        self.trace = Trace()
        self._metrics = StepMetrics(metrics, forward, strategy)
        self.metrics = self._metrics.all
        self._shard_update, self._settings = shard_update, Settings()
        self._unchecked = settings  # What the workers have not compared yet.
        self._layers: list[Any] = []
        self._version, self._batch_spec = 0, None
        self.bind()
        if is_built(self.model):
            self._build(None)

    @property
    def variables(self) -> list[Any]:
        """The variables that it trains; frozen ones are left out."""
        return self.forward.trained

    @property
    def train_steps(self) -> tuple[TrainStep, ...]:
        """The steps of a chain, each once; here the step itself."""
        return (self,)

    def changed_variables(self) -> list[Any]:
        """Returns what a step changes: of model, optimizer, features, and closures of forward."""
        states = [variable for feature in self.features for variable in feature.variables]
        metrics = [*self.metrics, *getattr(self.model, "metrics", ())]
        known = {id(v) for owner in (self.model, *metrics) for v in owner.variables}
        beside = () if self.forward.forward is None else self.trace.state
        closures = [variable for variable in beside if id(variable) not in known]
        return [*self.model.variables, *self.optimizer.variables, *states, *closures]

    # What a trace takes in ----------------------------------------------------------------------

    def key(self) -> Hashable:
        """Returns what is frozen, and a number that counts changes of optimizer settings."""
        if self._batch_spec is None or self._settings.changed(self.optimizer):
            return None
        trained = tuple([id(variable) for variable in self.variables])
        layers = [(one.trainable, getattr(one, "synchronized", None)) for one in self._layers]
        return self._version, trained, tuple(layers)

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Builds the model, its metrics and the optimizer, and takes in changed settings."""
        first = self._batch_spec is None
        batch_spec = spec() if first else self._batch_spec
        self._build(batch_spec)
        if first:
            check_values_alike(self.strategy, self.model, self.optimizer)
            self._metrics.build(self.model, batch_spec)
            self._batch_spec = batch_spec
        if self._settings.changed(self.optimizer):
            self._version += 1
            self.functions, self._loops = {}, []
        self._settings.note(self.optimizer)

    def _build(self, batch_spec: Any) -> None:
        prepare_model(self.model, self.strategy, batch_spec)
        refuse_float8(self.model.trainable_variables)
        # What the optimizer remembers is made by all workers together, and so is a step.
        due = batch_spec is not None or not self.optimizer.built
        if self._unchecked is not None and due and not tf.inside_function():
            check_programs_alike(self.strategy, self.model, self.optimizer, self._unchecked)
            self._unchecked = None
        self.update = choose_update(
            self.optimizer, self.variables, self.strategy, self._shard_update
        )
        self._layers = all_layers(self.model)

    # The step -----------------------------------------------------------------------------------

    def compute(self, shards: Shards) -> dict[str, Tally]:
        """Trains on one global batch; traced."""
        tally, passes, gradient = self.look(shards)
        after = [tally.sums, *self.strategy.experimental_local_results(gradient.norm)]
        # Also if the update is skipped, and before it: weights may be among them.
        self.commit(self.trace.state, passes, after)
        self.apply(gradient, after)
        with tf.control_dependencies(after):  # A step that raises advances nothing.
            for feature in self.features:
                feature.after_update(gradient)
        self._settings.note(self.optimizer, traced=True)
        return {"": tally}

    def look(self, shards: Shards) -> tuple[Tally, list[Pass], Gradient]:
        """Computes the gradient of one global batch and assigns nothing; traced."""
        self.trace = Trace()
        factors = [feature.loss_factor() for feature in self.features]
        shards = shards._replace(factor=next((f for f in factors if f is not None), None))
        passes = self.phase(self._replica)(shards)
        gradient, tally = self.reduced(passes, shards)
        return tally, passes, gradient

    def on_one_device(self) -> Self:
        """Returns the same for the default strategy, for ``look``: it updates nothing."""
        twin = super().on_one_device()
        twin.update = Replicated(self.optimizer, twin.strategy, "one device")
        return twin

    def reduced(self, passes: list[Pass], shards: Shards) -> tuple[Gradient, Tally]:
        """Adds over the replicas, once, and divides, once."""
        trained, present = self.variables, self.trace.present
        kept = [here for each in present for here in each]
        # An add-on that has added up a gradient leaves None for it on the other replicas.
        addends = [[*compress(chain(*one.gradients), kept), one.stats] for one in passes]
        sums = self.update.add(addends, [*compress(trained * len(present), kept)])
        # Weights that layers assign, as SpectralNormalization does, alike on all replicas.
        new = {id(v): value for v, value in zip(self.trace.state, passes[0].state, strict=True)}
        assigned = [new.get(id(variable)) for variable in trained]
        gradient, (numbers, last) = self.update.where(
            self._finish, sums, shards.total, shards.factor, assigned
        )
        gradient = gradient._replace(variables=self.trace.updated)
        return gradient, Tally(self.trace.layout, numbers, last)

    def _replica(self, shard: Any, rows: Rows, state: Any, factor: Any, total: Any) -> Pass:
        """Goes forward and backward over the rows of one replica; changes no variable."""
        values = [variable.value for variable in self.variables]
        before = zip(self.trace.state, state, strict=False)
        with self.tracing_model(rows), noting_effects() as effects:
            with DeferredAssignments(before, rows.counts()) as deferred, tf.GradientTape() as tape:
                terms, outputs = self.forward(shard, training=True)
                if not terms:
                    raise LossError(
                        "There is nothing to minimise: no loss was given and no layer adds one. "
                        "Received: loss=None. For fit write model.compile(loss='mse') or another "
                        "loss, for a step make_train_step(model, optimizer, 'mse'), or forward=f."
                    )
                layout = Layout.of(terms)
                targets = layout.targets(terms, total, rows.weight, factor)
            check_weights(layout, terms, values)
            # Also while going backward, where a layer may be called once more to save memory.
            with deferred:
                gradients = tuple(
                    self._backward(tape, number, target, values)
                    for number, target in enumerate(targets)
                )
                self._metrics.update(outputs)
        self.trace.note(layout, gradients, deferred.variables)
        after = tuple(tf.identity(deferred.current(variable)) for variable in self.trace.state)
        with tf.control_dependencies([*effects, *after]):  # All checks have passed.
            stats = tf.identity(stack(terms, rows.weight))
        return Pass(gradients, stats, after)

    def _backward(self, tape: Any, number: int, target: Any, values: Any) -> tuple[Any, ...]:
        """Returns the gradients of a target, ready to be added: dense, at least float32, or None.

        Under a persistent tape each loop of a layer would keep all that it computes.
        """
        with ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.around_backward())
            by_graph = number or any(feature.colocates_gradients for feature in self.features)
            gradients = (tf.gradients if by_graph else tape.gradient)(target, values)
            pairs = zip(gradients, values, strict=True)
            return tuple(None if g is None else _dense(g, value.shape) for g, value in pairs)

    def _finish(self, sums: list[Any], total: Any, factor: Any, assigned: Sequence[Any]) -> Any:
        """Turns sums over the global batch into its gradient and its tally; where the sums are."""
        layout, trained, present = self.trace.layout, self.variables, self.trace.present
        assert layout is not None
        *summed, stats = sums
        own, weights = layout.unstack(stats)
        with tf.control_dependencies(layout.check(weights, total)):
            total = tf.identity(total)
        # The penalties of variables that are not trained here are part of the loss as well.
        known = {id(variable) for variable in trained}
        others = [v for v in self.model.trainable_variables if id(v) not in known]
        new = [*(assigned or [None] * len(trained)), *[None] * len(others)]
        penalty, penalties = regularization([*trained, *others], self.update.at, new)
        penalties = penalties[: len(trained)]
        factors = layout.corrections(len(present), weights, total)
        if factor is not None:  # The inverse of the loss scale as well.
            factors = [(1.0 if f is None else tf.cast(f, tf.float32)) / factor for f in factors]
        places = [functools.partial(self.update.at, variable) for variable in trained]
        found = combined(summed, present, factors, penalties, places)
        check_gradients(trained, found)
        kept = [(g, variable) for g, variable in zip(found, trained, strict=True) if g is not None]
        norm = global_norm([g for g, _ in kept])
        self.trace.updated = tuple(v for _, v in kept)
        gradient = Gradient(tuple(g for g, _ in kept), norm, None, self.trace.updated)
        for feature in self.features:
            gradient = feature.on_gradient(gradient)
        tensors = tuple(
            tf.cast(g, v.dtype) for g, (_, v) in zip(gradient.tensors, kept, strict=True)
        )
        skipped = 0.0 if gradient.valid is None else ~gradient.valid
        last = (norm, tf.ones([]) if factor is None else factor)
        tally = Tally.of_step(layout, own, weights, penalty, total, skipped=skipped, last=last)
        # ``strategy.run`` returns tensors only.
        return gradient._replace(tensors=tensors, variables=()), (tally.sums, tally.last)

    def apply(self, gradient: Gradient, after: Sequence[Any] = ()) -> None:
        """Updates the variables, if the gradient is valid; traced."""
        variables = list(gradient.variables)

        def update() -> Any:
            self.update.apply(gradient.tensors, variables, after)
            return tf.no_op()

        if gradient.valid is None:
            update()
        else:
            tf.cond(gradient.valid, update, tf.no_op)


def _dense(gradient: Any, shape: Any) -> tf.Tensor:
    gradient = tf.convert_to_tensor(gradient)  # Rows of an embedding are summed into place.
    gradient.set_shape(shape)  # A backward pass through a reshape forgets it.
    wide: tf.Tensor = tf.cast(gradient, sum_dtype(gradient.dtype))
    return wide
