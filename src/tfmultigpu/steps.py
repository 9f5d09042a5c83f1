"""Train steps: the same result on any number of replicas.

A step has two phases inside one ``tf.function``::

    replica phase   for each micro-batch: forward, backward, add (gradients, sums, weights)
    global phase    add over the replicas, once; divide; norm; clip; one optimizer update
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import rows as rows_lib
from tfmultigpu.backward_operations import any_may_fail, noting_operations
from tfmultigpu.batches import BatchFunction, Shards, per_replica
from tfmultigpu.evaluation import make_eval_step, make_predict_step
from tfmultigpu.gradients import all_finite, clipped, global_norm, unscaled
from tfmultigpu.held_assignments import assign_held, holding
from tfmultigpu.local_cpus import all_on_local_cpus
from tfmultigpu.losses import LossSum
from tfmultigpu.metrics import check_metrics
from tfmultigpu.micro_batches import micro_batch_counts
from tfmultigpu.multistep import TERMS, MultiStep
from tfmultigpu.objectives import Objective, OutputLoss, regularization
from tfmultigpu.precision import LossScale, make_loss_scale, unwrap_optimizer
from tfmultigpu.reductions import sum_on_devices, sum_over_replicas
from tfmultigpu.replicas import ReplicaPhase
from tfmultigpu.scopes import all_layers, check_backend, check_kinds, prepare_model
from tfmultigpu.sharded_updates import ShardedUpdate, placed
from tfmultigpu.updates import apply_in_replica, overwrite_with_averages, prepare_update
from tfmultigpu.verification import Verification, Verifier, check_verify

__all__ = ["TrainStep", "make_eval_step", "make_predict_step", "make_train_step"]


def make_train_step(
    model: Any,
    optimizer: Any,
    loss: Any,
    strategy: tf.distribute.Strategy | None = None,
    *,
    metrics: Any = (),
    weighted_metrics: Any = (),
    loss_weights: Any = None,
    micro_batches: int | Sequence[int] = 1,
    forward: Callable[[Any, Any, bool], LossSum] | None = None,
    clip_norm: float | None = None,
    loss_scale: str | float | None = None,
    shard_update: str | bool = "auto",
    reduce_dtype: str | None = None,
    jit_compile: bool = False,
    verify: bool | str = "first",
) -> TrainStep:
    """Makes a train step that gives on N replicas what one device gives on the same global batches.

    Args:
        model: A Keras model created in ``strategy.scope()``.
        optimizer: A Keras optimizer created in the scope; its variables are made here. Clipping set
            on it acts on the gradient of the global batch. A
            ``keras.optimizers.LossScaleOptimizer`` means ``loss_scale="dynamic"``.
        loss: A Keras loss, its name, a function ``f(y_true, y_pred)`` of per-example values, or a
            dict or list of them for several outputs. None with ``forward``.
        strategy: The strategy; ``tf.distribute.get_strategy()`` where None.
        metrics: Keras metrics created in the scope, updated without sample weights; for several
            outputs a dict by output. Their states are added over replicas, so a metric of your own
            must keep sums and counts; anything else is refused at the first step.
        weighted_metrics: The same, updated with sample weights.
        loss_weights: A number, or a dict or list of numbers, one per output.
        micro_batches: Into how many parts each replica's shard is cut and computed one after the
            other, to save memory; or one such number for each replica, of all workers, as from
            ``plan_micro_batches``. The result is that of 1, except for layers that look at a whole
            batch (BatchNormalization) or count calls: they see each part.
        forward: ``f(model, batch, training) -> LossSum`` for what a loss cannot say. Weight
            regularisation and ``add_loss`` are added by the step.
        clip_norm: Largest global norm of the gradient; larger ones are scaled down to it.
        loss_scale: For float16: ``"dynamic"`` or a number. A step whose global gradient is not
            finite is skipped on every replica.
        shard_update: Whether each variable is updated by one replica, which keeps what the
            optimizer remembers of it, and then copied to the others: True, False, or ``"auto"``
            where it can be and is known to be faster. The result is the same.
        reduce_dtype: ``"bfloat16"`` sends float32 gradients in it, for slow connections. That is
            not exact: a sum over N replicas is off by up to N / 256 of the sum of absolute values.
        jit_compile: Compile forward and backward with XLA.
        verify: When to hold a step to what one device computes on the same global batch, and warn
            of what differs: ``"first"``, True for every step, False, or ``"gradients"``, which also
            compares the gradients of the first. See ``TrainStep.verification``.

    Returns:
        The step: ``logs = step(batch)``, ``logs = step.run(iterator, steps)``.

    Raises:
        ScopeError: Model, optimizer or a metric was created outside the scope.
        LossError: The loss is none, or not one value per example.
        MetricError: A metric cannot be added over replicas.
        KerasBackendError: Keras does not run on TensorFlow.
        TfMultiGpuError: ``shard_update=True`` cannot be had.

    Warns:
        ReplicaDependenceWarning: The first step computed something else than one device would.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> strategy = tmg.create_strategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     optimizer = keras.optimizers.SGD(0.1)
        >>> arrays = np.ones((5, 3)), np.ones((5, 1))
        >>> data = tmg.distribute_dataset(arrays, strategy, batch_size=2)
        >>> step = tmg.make_train_step(model, optimizer, "mse", strategy)
        >>> [float(step(batch)["weight"]) for batch in data]
        [2.0, 2.0, 1.0]
    """
    check_backend()
    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    check_kinds(model, strategy, optimizer)
    counts = micro_batch_counts(micro_batches, strategy.num_replicas_in_sync)
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm is positive. Received: clip_norm={clip_norm}.")
    if clip_norm == math.inf:
        clip_norm = None  # Nothing is larger; the norm is in the logs all the same.
    if not isinstance(shard_update, bool) and shard_update != "auto":
        raise ValueError(
            f"shard_update is True, False or 'auto'. Received: shard_update={shard_update!r}."
        )
    if reduce_dtype not in (None, "bfloat16"):
        raise ValueError(
            f"reduce_dtype is None or 'bfloat16'. Received: reduce_dtype={reduce_dtype!r}."
        )
    check_verify(verify)
    check_metrics(metrics, strategy)
    check_metrics(weighted_metrics, strategy)
    objective = Objective.of(model, loss, loss_weights, forward)
    objective.check_metrics_allowed(metrics, weighted_metrics)
    phase = ReplicaPhase(
        objective,
        strategy,
        micro_batches=counts,
        metrics=metrics,
        weighted_metrics=weighted_metrics,
        jit_compile=jit_compile,
    )
    verifier = Verifier(
        objective, strategy, verify, micro_batches=max(counts), jit_compile=jit_compile
    )
    return TrainStep(
        phase,
        verifier,
        model,
        optimizer,
        strategy,
        clip_norm,
        loss_scale,
        shard_update,
        reduce_dtype,
    )


_SUM = "sum of "  # Before the names of what ``totals`` returns.


class TrainStep:
    """One optimizer step on one global batch; what ``make_train_step`` returns.

    Attributes:
        model: The model it trains.
        optimizer: The optimizer; set its learning rate to another number and read its iterations
            as usual. A schedule, and clipping, must be set before the first step.
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
        phase: ReplicaPhase,
        verifier: Verifier,
        model: Any,
        optimizer: Any,
        strategy: tf.distribute.Strategy,
        clip_norm: float | None,
        loss_scale: str | float | None,
        shard_update: str | bool,
        reduce_dtype: str | None,
    ) -> None:
        """Use ``make_train_step``, which checks what it is given."""
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.metrics = phase.metrics
        self._phase = phase
        self._verifier = verifier
        local = rows_lib.local_replicas(strategy)
        verifier.compare_gradients(BatchFunction(self._gradients, strategy, local))
        self._clip_norm = clip_norm
        self._asked_loss_scale = loss_scale
        self._asked_shard_update = shard_update
        self._sharded: ShardedUpdate | None = None
        self._travel_as = None if reduce_dtype is None else tf.as_dtype(reduce_dtype)
        self._layers: list[Any] = []
        self._seen_a_batch = False
        self._functions: dict[Any, tuple[BatchFunction, MultiStep, MultiStep]] = {}
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
        if not self._is_current():
            self._prepare(self._function.spec_of(batch))
        logs: dict[str, Any] = self._verifier.call(self._function, batch, self.loss_scale)
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
        if not self._is_current():
            self._prepare(self._multistep.batch_spec(iterator))
        return self._verifier.run(self._multistep, iterator, steps, self.loss_scale)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def totals(self, iterator: Any, steps: int) -> dict[str, Any]:
        """Trains on up to ``steps`` batches in one call, and returns sums that can be added up.

        Returns:
            Scalars: ``"steps"``, how many ran; ``"rows"`` in their batches; ``"skipped"``; and for
            ``"loss"`` and the loss of each output the sum of its value times the rows of its batch.
        """
        if not self._is_current():
            self._prepare(self._adding.batch_spec(iterator))
        logs = self._verifier.run(self._adding, iterator, steps, self.loss_scale)
        sums = {name[len(_SUM) :]: logs[name] for name in logs if name.startswith(_SUM)}
        others = {"steps": logs["steps"], "rows": logs["weight"], "skipped": logs["skipped"]}
        return {**others, **sums}

    @property
    def verification(self) -> Verification | None:
        """How the last verified step compares with one device; None before the first."""
        return self._verifier.verification

    def _is_current(self) -> bool:
        """Whether everything was prepared, and no layer was frozen or thawed since."""
        return self._seen_a_batch and self._frozen == self._what_is_frozen()

    def _what_is_frozen(self) -> Any:
        trained = tuple([id(variable) for variable in self.model.trainable_variables])
        return trained, tuple([layer.trainable for layer in self._layers])

    def _use(self, frozen: Any) -> None:
        """Takes the functions compiled for a set of frozen layers; each set has its own."""
        if frozen not in self._functions:
            local = rows_lib.local_replicas(self.strategy)
            function = BatchFunction(self._step, self.strategy, local)
            adding = BatchFunction(self._addends, self.strategy, local)
            self._functions[frozen] = function, MultiStep(function), MultiStep(adding)
        self._frozen = frozen
        self._function, self._multistep, self._adding = self._functions[frozen]

    def _prepare(self, batch_spec: Any) -> None:
        first = not self._layers
        frozen = self._what_is_frozen()
        if self._seen_a_batch and frozen in self._functions:
            self._use(frozen)
            return
        prepare_model(self.model, self.strategy, batch_spec)
        plan, self._sharded = prepare_update(
            self.optimizer, self.model.trainable_variables, self.strategy, self._asked_shard_update
        )
        if batch_spec is not None:
            self._phase.build_metrics(batch_spec)
            self._seen_a_batch = True
        if first:
            self.shard_update, self.shard_update_reason = plan
            self.loss_scale = make_loss_scale(self._asked_loss_scale, self.optimizer, self.strategy)
            self._layers = all_layers(self.model)
        self._use(self._what_is_frozen())

    def _step(self, shards: Shards) -> dict[str, Any]:
        scale = self._scale()
        gradients, logs, states = self._reduced(shards, scale, self._clip_norm)
        finite = logs.pop("finite")
        rows = tf.cast(shards.global_rows, tf.float64)
        self._update(gradients, states, finite, [*shards.after, rows, logs["loss"]])
        skipped = tf.zeros([]) if scale is None else 1.0 - tf.cast(finite, tf.float32)
        return {**logs, "skipped": skipped, "loss_scale": tf.ones([]) if scale is None else scale}

    def _gradients(self, shards: Shards) -> dict[str, Any]:
        """The gradient of each trained variable before clipping, by its number; changes nothing."""
        gradients, _, _ = self._reduced(shards, self._scale(), None)
        local = self.strategy.experimental_local_results
        numbers = {id(one): i for i, one in enumerate(self.model.trainable_variables)}
        pairs = zip(self._trained, gradients, strict=True)
        return {str(numbers[id(variable)]): local(one)[0] for variable, one in pairs}

    def _scale(self) -> Any:
        return None if self.loss_scale is None else self.loss_scale.value()

    def _reduced(
        self, shards: Shards, scale: Any, clip_norm: float | None
    ) -> tuple[Any, dict[str, Any], Any]:
        """The gradient of the global batch, the logs, and the states to assign."""
        rows = tf.cast(shards.global_rows, tf.float64)
        parts, states = self._phase(shards, scale)
        if self._sharded is None:
            values = sum_over_replicas(self.strategy, parts, self._travel_as)
        else:
            places = self._sharded.places(self.model.trainable_variables, self._phase.present)
            values = [sum_on_devices(parts, places, self._travel_as)]
        if len(values) == 1:
            first = [self.strategy.experimental_local_results(value)[0] for value in states]
            finished = self._finish(values[0], first, rows, scale, clip_norm, shards.is_last)
            return *finished, states
        args = (per_replica(self.strategy, values), states, rows, scale, clip_norm)
        gradients, logs = self.strategy.run(self._finish, args=args)
        logs = {k: self.strategy.experimental_local_results(v)[0] for k, v in logs.items()}
        return gradients, logs, states

    def _addends(self, shards: Shards) -> dict[str, Any]:
        """The logs as values that ``MultiStep`` adds up as they are, losses by rows."""
        logs = self._step(shards)
        rows = tf.cast(shards.global_rows, tf.float32)
        losses = {n: logs[n] for n in logs if n == "loss" or isinstance(n, OutputLoss)}
        sums = {_SUM + name: value * rows for name, value in losses.items()}
        kept = {name: logs[name] for name in ("skipped", TERMS)}
        return {"loss": tf.zeros([]), "weight": rows, **kept, **sums}

    def _finish(
        self,
        values: Any,
        states: Any,
        global_rows: Any,
        scale: Any,
        clip_norm: float | None,
        reported: Any = True,
    ) -> tuple[list[tf.Tensor], dict[str, Any]]:
        """Turns what was added over the replicas into the gradient of the global batch."""
        layout = self._phase.layout
        *summed, stats = values
        sums, weights = layout.unstack(stats)
        variables = self.model.trainable_variables
        checks = layout.check(weights, global_rows)
        with tf.control_dependencies(checks):
            logs = layout.report(sums, weights, global_rows)
        held = zip(self._phase.held, states, strict=True)
        with noting_operations() as regularizing, holding(held):
            penalty, penalties = regularization(variables)
        self._may_fail = self._phase.backward_may_fail or any_may_fail(regularizing)
        corrections: list[Any] = layout.corrections(weights, global_rows)
        if len(self._phase.present) > len(corrections):
            corrections = [None, *corrections]
        total: list[Any] = [None] * len(variables)
        taken = iter(summed)
        for correction, present in zip(corrections, self._phase.present, strict=True):
            factor = unscaled(correction, scale)
            for i, here in enumerate(present):
                if here:
                    with placed(self._sharded, variables[i]), tf.control_dependencies(checks):
                        part = tf.identity(next(taken))
                        part = part if factor is None else part * tf.cast(factor, part.dtype)
                        total[i] = part if total[i] is None else total[i] + part
        for i, part in enumerate(penalties):
            if part is not None:
                with placed(self._sharded, variables[i]):
                    part = tf.cast(part, tf.float32) if part.dtype.size < 4 else part
                    total[i] = part if total[i] is None else total[i] + part
        self._trained = self._phase.trained(variables, total)
        gradients = [gradient for gradient in total if gradient is not None]
        norm = global_norm(gradients, reported if clip_norm is None else True)
        logs["finite"] = tf.constant(True) if scale is None else all_finite(gradients)
        if clip_norm is not None:
            gradients = clipped(gradients, clip_norm, norm)
        logs = {**logs, "loss": logs["loss"] + penalty, "gradient_norm": tf.cast(norm, tf.float32)}
        logs[TERMS] = stats
        return [tf.cast(g, v.dtype) for g, v in zip(gradients, self._trained, strict=True)], logs

    def _update(self, gradients: Any, states: Any, finite: Any, after: Sequence[Any]) -> None:
        optimizer = unwrap_optimizer(self.optimizer)
        # A step whose gradients fail is not counted and changes nothing. CPUs do not run out of
        # memory alone: where nothing else can fail, the loss and all checks are enough to wait for.
        early = all_on_local_cpus(self.strategy) and not self._may_fail

        def first(gradients: Any) -> list[Any]:
            return [*after, *([] if early else gradients)]

        def apply(gradients: list[tf.Tensor]) -> None:
            with tf.control_dependencies(first(gradients)):
                apply_in_replica(optimizer, gradients, self._trained)

        def update() -> tf.Tensor:
            if self._sharded is not None:
                self._sharded.apply(gradients, self._trained, first(gradients))
                return tf.constant(True)
            self.strategy.run(apply, args=(gradients,))
            overwrite_with_averages(optimizer, self.strategy)
            return tf.constant(True)

        if states:  # Also where the update is skipped, and before it: weights may be among them.
            held, run = self._phase.held, self.strategy.run
            run(lambda g, s: assign_held(held, s, first(g)), args=(gradients, states))
        if self.loss_scale is None:
            update()
            return
        tf.cond(finite, update, lambda: tf.constant(False))
        with tf.control_dependencies(after):
            self.loss_scale.update(tf.identity(finite))
