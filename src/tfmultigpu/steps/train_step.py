"""One optimizer step on one global batch, as a compiled function.

A step has two phases inside one ``tf.function``::

    replica phase   for each micro-batch: forward, backward, add (gradients, sums, weights)
    global phase    add over the replicas, once; divide; norm; clip; one optimizer update
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.accumulation.settings import Settings, explaining_settings
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.losses.build_model import prepare_model
from tfmultigpu.losses.held_assignments import assign_held, holding
from tfmultigpu.losses.objective import MeanKey, Objective, is_loss
from tfmultigpu.optimizers.gradients import (
    all_finite,
    clipped,
    combined,
    global_norm,
    is_overwritten,
    unscaled,
)
from tfmultigpu.optimizers.loss_scaling import LossScale, make_loss_scale, unwrap_optimizer
from tfmultigpu.optimizers.update import (
    ShardedUpdate,
    apply_in_replica,
    overwrite_with_averages,
    placed,
    prepare_update,
)
from tfmultigpu.steps.batch_function import BatchFunction, Shards
from tfmultigpu.steps.forward_backward import Findings, ReplicaPhase
from tfmultigpu.steps.missing_gradients import MissingGradients
from tfmultigpu.steps.multi_step import TERMS, MultiStep
from tfmultigpu.steps.op_placement import computing_at_weights, devices_of
from tfmultigpu.steps.options import StepOptions, check_float8
from tfmultigpu.steps.pipeline import check_pipeline
from tfmultigpu.steps.program_agreement import ProgramAgreement
from tfmultigpu.steps.value_agreement import check_values_alike
from tfmultigpu.steps.verification import Verification, Verifier, assigned_variables
from tfmultigpu.strategies.collectives import sum_on_devices, sum_over_replicas, sum_over_workers
from tfmultigpu.strategies.not_copied import NotCopied
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.topology import local_replicas, per_replica
from tfmultigpu.strategies.variable_sharding import is_sharded

__all__ = ["Reduced", "TrainStep", "Trained", "addends", "as_totals"]

_SUM = "sum of "  # Before the names of what ``totals`` returns.


@dataclasses.dataclass(frozen=True)
class Reduced:
    """The gradient of the global batch, and everything else that an update needs.

    Attributes:
        gradients: One tensor, or per-replica value, for each of ``variables``.
        variables: The variables to update.
        logs: The logs.
        finite: Whether every number in every gradient is finite, a bool scalar.
        held: The Keras variables that layers, draws and metrics assigned.
        states: Their values, a list of per-replica values.
    """

    gradients: Any
    variables: list[Any]
    logs: dict[str, Any]
    finite: Any
    held: Sequence[Any]
    states: Any


class Trained(NamedTuple):
    """A model, its optimizer, and the variables that it updates."""

    model: Any
    optimizer: Any
    variables: list[Any]


class TrainStep(NotCopied):
    """One optimizer step on one global batch; what ``make_train_step`` returns.

    Attributes:
        model: The model it trains.
        optimizer: The optimizer; set its learning rate to another number and read its iterations
            as usual. Another setting, a schedule or clipping, has the next call trace anew.
        strategy: The strategy it runs under.
        metrics: The Keras metrics it updates.
        loss_scale: The loss scale in use, or None; known after the first step.
        shard_update: Whether each variable is updated by one replica; likewise.
        shard_update_reason: Why, for a person; likewise.
    """

    loss_scale: LossScale | None = None
    shard_update: bool = False
    shard_update_reason: str = "the model is not built yet"

    def __init__(
        self,
        objective: Objective,
        optimizer: Any,
        strategy: tf.distribute.Strategy,
        options: StepOptions,
        agreement: ProgramAgreement,
    ) -> None:
        """Use ``make_train_step``, which checks what it is given."""
        self.model = model = objective.model
        self._objective = objective
        self.optimizer = optimizer
        self.strategy = strategy
        self._options = options
        self._phase = ReplicaPhase(objective, strategy, options)
        self.metrics = self._phase.metrics
        self._verifier = Verifier(
            objective,
            strategy,
            options.verify,
            micro_batches=max(options.micro_batches),
            jit_compile=options.jit_compile,
        )
        if not model.built:
            check_pipeline(strategy, options, model)
        self._agreement = agreement
        local = local_replicas(strategy)
        self._verifier.compare_gradients(BatchFunction(self._gradients, strategy, local))
        self._sharded: ShardedUpdate | None = None
        self._layers: list[Any] = []
        self._seen_a_batch = False
        self._batch_spec: Any = None
        self._assigned: tuple[Any, list[Any]] | None = None  # Traced again only if it may differ.
        self._settings = Settings()
        self._missing = MissingGradients()
        self._functions: dict[Any, tuple[BatchFunction, MultiStep, MultiStep]] = {}
        self._frozen: Any = None
        self._use(None)
        if model.built:
            self._prepare(None)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, batch: Any) -> dict[str, Any]:
        """Trains on one batch.

        Args:
            batch: An element of a distributed dataset, or a whole global batch: ``x``, ``(x, y)``
                or ``(x, y, sample_weight)`` of tensors or arrays.

        Returns:
            Scalars: ``"loss"``, what one device would report, regularisation included;
            ``"weight"``, what its sum was divided by (with several outputs: the number of rows);
            ``"gradient_norm"``, before clipping; ``"skipped"``, 1 where loss scaling skipped the
            update; ``"loss_scale"``, the one used; and for each of several outputs ``"NAME_loss"``
            and ``"NAME_weight"``, what its sum was divided by.
        """
        self.prepare(lambda: self.function.spec_of(batch))
        logs: dict[str, Any] = self._verifier.call(self.function, batch, self.loss_scale)
        return logs

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def run(self, iterator: Any, steps: int) -> dict[str, Any]:
        """Trains on up to ``steps`` batches in one call, which saves the cost of calls.

        Args:
            iterator: ``iter()`` of a distributed dataset, or of a plain dataset of global batches.
            steps: How many, at least 1.

        Returns:
            ``"steps"``, how many ran: fewer where the data ended. Losses are means over these
            steps, each output's by its own weight; weights and ``"skipped"`` are sums, the rest is
            that of the last step.
        """
        self.prepare(lambda: self.multistep.batch_spec(iterator))
        return self._verifier.run(self.multistep, iterator, steps, self.loss_scale)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def totals(self, iterator: Any, steps: int) -> dict[str, Any]:
        """Trains on up to ``steps`` batches in one call, and returns sums that can be added up.

        Returns:
            Scalars: ``"steps"``, how many ran; ``"rows"`` in their batches; ``"skipped"``; for
            ``"loss"`` and the loss of each output the sum of its value times the rows of its batch;
            and for each value that ``forward`` returned ``"NAME"``, its sum, and ``"NAME_weight"``.
        """
        self.prepare(lambda: self._adding.batch_spec(iterator))
        logs = self._verifier.run(self._adding, iterator, steps, self.loss_scale)
        return as_totals(logs)

    @property
    def variables(self) -> list[Any]:
        """The variables that it trains; frozen ones are left out."""
        return self._objective.trained

    @property
    def asked_shard_update(self) -> str | bool:
        """The argument ``shard_update``."""
        return self._options.shard_update

    @property
    def trained(self) -> tuple[Trained, ...]:
        """The trained model with its optimizer and variables, as for a chain of one step."""
        return (Trained(self.model, self.optimizer, self.variables),)

    def assigned(self, batch_spec: Any = None) -> list[Any]:
        """Returns the Keras variables that a forward pass assigns: states of layers, metrics.

        Args:
            batch_spec: The type specs of a global batch; None means those of the first batch.
                Without a batch before nothing is known.
        """
        if batch_spec is None:
            batch_spec = self._batch_spec
        if batch_spec is None:
            return []
        self.prepare(lambda: batch_spec)
        key = self.function, batch_spec
        if self._assigned is None or self._assigned[0] != key:
            forward = functools.partial(self._objective, training=True)
            self._assigned = key, assigned_variables(forward, self.strategy, batch_spec)
        return self._assigned[1]

    def changed_variables(self) -> list[Any]:
        """Returns the variables that a step changes: of model, optimizer and closures."""
        return [*self.model.variables, *self.optimizer.variables, *self.states_beside_model()]

    def states_beside_model(self) -> list[Any]:
        """Returns what ``forward`` assigns that no model and no metric of the step has.

        That is the state of a seed generator or a metric in a closure, for example.
        """
        if self._objective.forward is None:
            return []
        owners = [self.model, *self.metrics, *getattr(self.model, "metrics", ())]
        known = {id(variable) for one in owners for variable in one.variables}
        found = {id(variable): variable for variable in self.assigned()}
        return [variable for key, variable in found.items() if key not in known]

    @property
    def is_to_be_verified(self) -> bool:
        """True if the next step is to be held to one device."""
        return self._verifier.is_due

    def prepare(self, batch_spec: Callable[[], Any]) -> None:
        """Builds model and optimizer, and takes in changed settings; called before a step.

        Args:
            batch_spec: Returns the type specs of a global batch.
        """
        if not self._is_current():
            self._prepare(batch_spec())

    @property
    def verification(self) -> Verification | None:
        """The comparison of the last verified step with one device; None before the first."""
        return self._verifier.verification

    def _is_current(self) -> bool:
        """Returns whether all is prepared and no layer or setting has changed since."""
        if self._settings.changed(self.optimizer):
            return False
        return self._seen_a_batch and self._frozen == self._what_is_frozen()

    def _what_is_frozen(self) -> Any:
        trained = tuple([id(variable) for variable in self.variables])
        layers = [(one.trainable, getattr(one, "synchronized", None)) for one in self._layers]
        return trained, tuple(layers)

    def _use(self, frozen: Any) -> None:
        """Takes the functions compiled for a set of frozen layers; each set has its own."""
        if frozen not in self._functions:
            local = local_replicas(self.strategy)
            function = BatchFunction(self.compute, self.strategy, local)
            adding = BatchFunction(self._addends, self.strategy, local)
            self._functions[frozen] = function, MultiStep(function), MultiStep(adding, wide=True)
            if frozen != self._frozen:
                self._verifier.renew()
        self._frozen = frozen
        self.function, self.multistep, self._adding = self._functions[frozen]

    def _prepare(self, batch_spec: Any) -> None:
        first = not self._layers
        frozen = self._what_is_frozen()
        if self._settings.changed(self.optimizer):
            self._functions.clear()
        if self._seen_a_batch and frozen in self._functions:
            self._use(frozen)
            return
        prepare_model(self.model, self.strategy, batch_spec)
        check_pipeline(self.strategy, self._options, self.model)
        if self._options.jit_compile:
            self._refuse_sharded()
        # What the optimizer remembers is made by all workers together, and so is a step.
        if batch_spec is not None or not unwrap_optimizer(self.optimizer).built:
            self._agreement.check(self.model, self.optimizer)
        plan, self._sharded = prepare_update(
            self.optimizer,
            self.variables,
            self.strategy,
            self._options.shard_update,
        )
        if batch_spec is not None:
            if not self._seen_a_batch:
                check_values_alike(self.strategy, self.model, self.optimizer)
            self._batch_spec = batch_spec
            self._phase.build_metrics(batch_spec)
            self._seen_a_batch = True
        if first:
            self._layers = all_layers(self.model)
        if first or plan.sharded != self.shard_update:
            self.shard_update, self.shard_update_reason = plan
        self.loss_scale = make_loss_scale(self._options.loss_scale, self.optimizer, self.strategy)
        check_float8(self.variables, self.strategy, self._options, self.loss_scale)
        self._settings.note(self.optimizer)
        self._use(self._what_is_frozen())

    def _refuse_sharded(self) -> None:
        alone = [variable.path for variable in self.model.variables if is_sharded(variable)]
        if self.strategy.num_replicas_in_sync == 1 and len(devices_of(self.model)) > 1:
            raise TfMultiGpuError(
                "XLA cannot read a variable that lives on another device. Received: "
                f"jit_compile=True, and weights on {', '.join(devices_of(self.model))}. Leave "
                "jit_compile out, or build all layers on one device."
            )
        if alone:
            raise TfMultiGpuError(
                "XLA cannot read a variable that lives on another device. Received: "
                f"jit_compile=True, and {len(alone)} sharded variables, such as {alone[0]!r}. "
                "Leave jit_compile out, or create the model without tmg.sharded_variables()."
            )

    def compute(self, shards: Shards) -> dict[str, Any]:
        """Trains on one batch inside a ``tf.function``; call ``prepare`` before that."""
        with computing_at_weights(self.strategy, self.model):
            return self._compute(shards)

    def _compute(self, shards: Shards) -> dict[str, Any]:
        scale = self._scale()
        reduced = self._reduced(shards, scale, self._options.clip_norm)
        rows = tf.cast(shards.global_rows, tf.float64)
        self._update(reduced, [rows, reduced.logs["loss"]])
        self._settings.note(self.optimizer, traced=True)
        skipped = tf.zeros([]) if scale is None else 1.0 - tf.cast(reduced.finite, tf.float32)
        scale = tf.ones([]) if scale is None else scale
        return {**reduced.logs, "skipped": skipped, "loss_scale": scale}

    def _gradients(self, shards: Shards) -> dict[str, Any]:
        """The gradient of each trained variable before clipping, by its number; changes nothing."""
        reduced = self._reduced(shards, self._scale(), None)
        local = self.strategy.experimental_local_results
        numbers = {id(one): i for i, one in enumerate(self.variables)}
        pairs = zip(reduced.variables, reduced.gradients, strict=True)
        return {str(numbers[id(variable)]): local(one)[0] for variable, one in pairs}

    def _scale(self) -> Any:
        return None if self.loss_scale is None else self.loss_scale.value()

    def _reduced(self, shards: Shards, scale: Any, clip_norm: float | None) -> Reduced:
        rows = tf.cast(shards.global_rows, tf.float64)
        result = self._phase(shards, scale)
        dtype, local = self._options.reduce_dtype, self.strategy.experimental_local_results
        if self._sharded is None:
            values = sum_over_replicas(self.strategy, result.parts, dtype)
        else:
            present = result.findings.present
            places = self._sharded.places(self.variables, present)
            added = sum_on_devices(result.parts, places, dtype)
            values = [sum_over_workers(self.strategy, added, places, dtype)]
        updated: list[list[Any]] = []  # ``strategy.run`` returns tensors only.

        def finish(values: Any, states: Any, *others: Any) -> Any:
            held = list(zip(result.held, states, strict=True))
            gradients, variables, logs = self._finish(result.findings, values, held, *others)
            updated.append(variables)
            return gradients, logs

        others = (rows, scale, clip_norm)
        if len(values) == 1:
            gradients, logs = finish(values[0], [local(one)[0] for one in result.states], *others)
        else:
            args = (per_replica(self.strategy, values), result.states, *others)
            gradients, logs = self.strategy.run(finish, args=args)
            logs = {name: local(value)[0] for name, value in logs.items()}
        finite = logs.pop("finite")
        return Reduced(gradients, updated[-1], logs, finite, result.held, result.states)

    def _addends(self, shards: Shards) -> dict[str, Any]:
        """The logs as values that ``MultiStep`` adds up as they are, losses by rows."""
        logs = self.compute(shards)
        rows = tf.cast(shards.global_rows, tf.float32)
        others = {"loss": tf.zeros([]), "weight": rows, TERMS: logs[TERMS]}
        return {**others, **addends(logs, rows)}

    def _finish(
        self,
        findings: Findings,
        values: Any,
        held: Sequence[tuple[Any, Any]],
        global_rows: Any,
        scale: Any,
        clip_norm: float | None,
    ) -> tuple[list[tf.Tensor], list[Any], dict[str, Any]]:
        """Turns what was added over the replicas into the gradient of the global batch.

        Returns:
            The gradients, the variables that they are for, and the logs, with ``"finite"``.
        """
        layout, present = findings
        *summed, stats = values
        sums, weights = layout.unstack(stats)
        variables = self.variables
        checks = layout.check(weights, global_rows)
        with tf.control_dependencies(checks):
            logs = layout.report(sums, weights, global_rows)
        with holding(held):
            penalty, penalties = self._objective.regularization(variables)
        corrections: list[Any] = layout.corrections(weights, global_rows)
        if len(present) > len(corrections):
            corrections = [None, *corrections]
        factors = [unscaled(correction, scale) for correction in corrections]
        places = [functools.partial(placed, self._sharded, variable) for variable in variables]
        with tf.control_dependencies(checks):
            total = combined(summed, present, factors, penalties, places)
        trained = self._missing.trained(variables, total)
        gradients = [gradient for gradient in total if gradient is not None]
        pairs = zip(gradients, trained, strict=True)
        counted = [gradient for gradient, one in pairs if not is_overwritten(one)]
        norm = global_norm(counted)
        # Clipping by a norm that overflows would make every gradient NaN.
        checked = gradients if clip_norm is None else [*gradients, norm]
        logs["finite"] = tf.constant(True) if scale is None else all_finite(checked)
        if clip_norm is not None:
            gradients = clipped(gradients, clip_norm, norm)
        logs = {**logs, "loss": logs["loss"] + penalty, "gradient_norm": tf.cast(norm, tf.float32)}
        logs[TERMS] = stats
        cast = [tf.cast(g, v.dtype) for g, v in zip(gradients, trained, strict=True)]
        return cast, trained, logs

    def _update(self, reduced: Reduced, after: Sequence[Any]) -> None:
        gradients, variables, states = reduced.gradients, reduced.variables, reduced.states
        optimizer = unwrap_optimizer(self.optimizer)

        # A step whose gradients fail is not counted and changes nothing.
        def apply(gradients: list[tf.Tensor]) -> None:
            with tf.control_dependencies([*after, *gradients]):
                apply_in_replica(optimizer, gradients, variables)

        @explaining_settings(optimizer)
        def update() -> tf.Tensor:
            if self._sharded is not None:
                self._sharded.apply(gradients, variables, [*after, *gradients])
                return tf.constant(True)
            self.strategy.run(apply, args=(gradients,))
            overwrite_with_averages(optimizer, self.strategy, variables)
            return tf.constant(True)

        if states:  # Also where the update is skipped, and before it: weights may be among them.
            run = self.strategy.run
            run(lambda g, s: assign_held(reduced.held, s, [*after, *g]), args=(gradients, states))
        if self.loss_scale is None:
            update()
            return
        tf.cond(reduced.finite, update, lambda: tf.constant(False))
        with tf.control_dependencies(after):
            self.loss_scale.update(tf.identity(reduced.finite))


def addends(logs: Mapping[str, Any], rows: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the logs of a step as values that can be added up over batches.

    Args:
        logs: The logs.
        rows: Rows of the batch, a scalar: the loss, and that of each output, are multiplied by it.
        prefix: What the names in the result begin with.
    """
    sums = {"skipped": logs["skipped"]}
    for name, value in logs.items():
        if is_loss(name):
            sums[name] = value * tf.cast(rows, value.dtype)
        elif isinstance(name, MeanKey):
            total = logs[name.sum] if name.sum else value * logs[name.weight]
            sums |= {name: total, name.weight: logs[name.weight]}
    return {f"{_SUM}{prefix}{name}": value for name, value in sums.items()}


def as_totals(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sums of ``addends`` as ``TrainStep.totals`` does."""
    sums = {name[len(_SUM) :]: logs[name] for name in logs if name.startswith(_SUM)}
    return {"steps": logs["steps"], "rows": logs["weight"], **sums}
