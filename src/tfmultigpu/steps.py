"""Train steps: the same result on any number of replicas.

A step has two phases inside one ``tf.function``::

    replica phase   for each micro-batch: forward, backward, add (gradients, sums, weights)
    global phase    add over the replicas, once; divide; norm; clip; one optimizer update
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import rows as rows_lib
from tfmultigpu.backward_operations import any_may_fail, noting_operations
from tfmultigpu.batches import BatchFunction, Shards, per_replica
from tfmultigpu.evaluation import make_eval_step, make_predict_step
from tfmultigpu.gradients import all_finite, clipped, combined, global_norm, unscaled
from tfmultigpu.layer_states import warn_about_copies
from tfmultigpu.local_cpus import all_on_local_cpus
from tfmultigpu.losses import LossSum
from tfmultigpu.metrics import check_metrics
from tfmultigpu.micro_batches import micro_batch_counts
from tfmultigpu.multistep import MultiStep
from tfmultigpu.objectives import Objective, OutputLoss, regularization
from tfmultigpu.optimizer_settings import Settings, explaining_settings
from tfmultigpu.precision import LossScale, make_loss_scale, unwrap_optimizer
from tfmultigpu.reductions import sum_on_devices, sum_over_replicas
from tfmultigpu.replicas import ReplicaPhase
from tfmultigpu.scopes import all_layers, check_backend, check_kinds, prepare_model
from tfmultigpu.sharded_updates import ShardedUpdate, placed
from tfmultigpu.updates import apply_in_replica, overwrite_with_averages, prepare_update

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

    Returns:
        The step: ``logs = step(batch)``, ``logs = step.run(iterator, steps)``.

    Raises:
        ScopeError: Model, optimizer or a metric was created outside the scope.
        LossError: The loss is none, or not one value per example.
        MetricError: A metric cannot be added over replicas.
        KerasBackendError: Keras does not run on TensorFlow.
        TfMultiGpuError: ``shard_update=True`` cannot be had.

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
    return TrainStep(
        phase, model, optimizer, strategy, clip_norm, loss_scale, shard_update, reduce_dtype
    )


_SUM = "sum of "  # Before the names of what ``totals`` returns.


class TrainStep:
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
        phase: ReplicaPhase,
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
        self._clip_norm = clip_norm
        self._asked_loss_scale = loss_scale
        self._asked_shard_update = shard_update
        self._sharded: ShardedUpdate | None = None
        self._travel_as = None if reduce_dtype is None else tf.as_dtype(reduce_dtype)
        self._layers: list[Any] = []
        self._seen_a_batch = False
        self._checks = 3
        self._settings = Settings()
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
        logs = dict(self._function(batch))
        self._check_copies()
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
        logs = self._multistep(iterator, steps)
        self._check_copies()
        return logs

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def totals(self, iterator: Any, steps: int) -> dict[str, Any]:
        """Trains on up to ``steps`` batches in one call, and returns sums that can be added up.

        Returns:
            Scalars: ``"steps"``, how many ran; ``"rows"`` in their batches; ``"skipped"``; and for
            ``"loss"`` and the loss of each output the sum of its value times the rows of its batch.
        """
        if not self._is_current():
            self._prepare(self._adding.batch_spec(iterator))
        logs = self._adding(iterator, steps)
        self._check_copies()
        sums = {name[len(_SUM) :]: logs[name] for name in logs if name.startswith(_SUM)}
        others = {"steps": logs["steps"], "rows": logs["weight"], "skipped": logs["skipped"]}
        return {**others, **sums}

    def _check_copies(self) -> None:
        """Looks at what layers assigned in the first calls: a batch may be too small to tell."""
        if self._checks and self._phase.assigned and not tf.inside_function():
            self._checks -= 1
            if warn_about_copies(self.strategy, self.model, self._phase.assigned):
                self._checks = 0

    def _is_current(self) -> bool:
        """Whether all was prepared, and no layer frozen or thawed, no setting changed since."""
        if self._settings.changed(self.optimizer):
            return False
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
            several = [MultiStep(one, self._keeps_state) for one in (function, adding)]
            self._functions[frozen] = function, several[0], several[1]
        self._frozen = frozen
        self._function, self._multistep, self._adding = self._functions[frozen]

    def _keeps_state(self) -> bool:
        return bool(self.model.non_trainable_variables or self.metrics or self.loss_scale)

    def _prepare(self, batch_spec: Any) -> None:
        first = not self._layers
        frozen = self._what_is_frozen()
        if self._settings.changed(self.optimizer):
            self._functions.clear()
        if self._seen_a_batch and frozen in self._functions:
            self._use(frozen)
            return
        prepare_model(self.model, self.strategy, batch_spec, training=first)
        plan, self._sharded = prepare_update(
            self.optimizer, self.model.trainable_variables, self.strategy, self._asked_shard_update
        )
        if batch_spec is not None:
            self._phase.build_metrics(batch_spec)
            self._seen_a_batch = True
        if first:
            self._layers = all_layers(self.model)
        self.shard_update, self.shard_update_reason = plan
        self.loss_scale = make_loss_scale(self._asked_loss_scale, self.optimizer, self.strategy)
        self._settings.note(self.optimizer)
        self._use(self._what_is_frozen())

    def _step(self, shards: Shards) -> dict[str, Any]:
        scale = None if self.loss_scale is None else self.loss_scale.value()
        rows = tf.cast(shards.global_rows, tf.float64)
        parts = self._phase(shards, scale)
        if self._sharded is None:
            values = sum_over_replicas(self.strategy, parts, self._travel_as)
        else:
            values = [sum_on_devices(parts, self._places(self._sharded), self._travel_as)]
        if len(values) == 1:
            gradients, logs = self._finish(values[0], rows, scale, shards.is_last)
        else:
            args = (per_replica(self.strategy, values), rows, scale)
            gradients, logs = self.strategy.run(self._finish, args=args)
            logs = {k: self.strategy.experimental_local_results(v)[0] for k, v in logs.items()}
        finite = logs.pop("finite")
        self._update(gradients, finite, logs["loss"], shards.after)
        self._settings.note(self.optimizer, traced=True)
        skipped = tf.zeros([]) if scale is None else 1.0 - tf.cast(finite, tf.float32)
        return {**logs, "skipped": skipped, "loss_scale": tf.ones([]) if scale is None else scale}

    def _addends(self, shards: Shards) -> dict[str, Any]:
        """The logs as values that ``MultiStep`` adds up as they are, losses by rows."""
        logs = self._step(shards)
        rows = tf.cast(shards.global_rows, tf.float32)
        losses = {n: logs[n] for n in logs if n == "loss" or isinstance(n, OutputLoss)}
        sums = {_SUM + name: value * rows for name, value in losses.items()}
        return {"loss": tf.zeros([]), "weight": rows, "skipped": logs["skipped"], **sums}

    def _places(self, sharded: ShardedUpdate) -> list[str]:
        """Where what the replicas return is added: gradients with their owners."""
        owners = [sharded.owners[id(v)] for v in self.model.trainable_variables]
        used = [
            o for one in self._phase.present for o, here in zip(owners, one, strict=True) if here
        ]
        return [sharded.devices[owner] for owner in [*used, 0]]

    def _finish(
        self, values: list[tf.Tensor], global_rows: Any, scale: Any, reported: Any = True
    ) -> tuple[list[tf.Tensor], dict[str, Any]]:
        """Turns what was added over the replicas into the gradient of the global batch."""
        layout = self._phase.layout
        *summed, stats = values
        sums, weights = layout.unstack(stats)
        variables = self.model.trainable_variables
        checks = layout.check(weights, global_rows)
        with tf.control_dependencies(checks):
            logs = layout.report(sums, weights, global_rows)
        with noting_operations() as regularizing:
            penalty, penalties = regularization(variables)
        self._may_fail = self._phase.backward_may_fail or any_may_fail(regularizing)
        corrections: list[Any] = layout.corrections(weights, global_rows)
        if len(self._phase.present) > len(corrections):
            corrections = [None, *corrections]
        factors = [unscaled(correction, scale) for correction in corrections]
        places = [functools.partial(placed, self._sharded, variable) for variable in variables]
        with tf.control_dependencies(checks):
            total, new = combined(summed, self._phase.present, factors, penalties, places)
        self._trained = [
            v for v, gradient in zip(variables, total, strict=True) if gradient is not None
        ]
        gradients = [gradient for gradient in total if gradient is not None]
        norm = global_norm(gradients, reported if self._clip_norm is None else True)
        logs["finite"] = tf.constant(True) if scale is None else all_finite([*gradients, *new])
        if self._clip_norm is not None:
            gradients = clipped(gradients, self._clip_norm, norm)
        gradients, self._trained = gradients + new, self._trained + self._phase.overwritten
        logs = {**logs, "loss": logs["loss"] + penalty, "gradient_norm": tf.cast(norm, tf.float32)}
        return [tf.cast(g, v.dtype) for g, v in zip(gradients, self._trained, strict=True)], logs

    def _update(self, gradients: Any, finite: Any, loss: Any, after: Sequence[Any]) -> None:
        optimizer = unwrap_optimizer(self.optimizer)
        # A step whose gradients fail is not counted and updates nothing. CPUs do not run out of
        # memory alone: where nothing else can fail, the loss and its checks are enough to wait for.
        early = all_on_local_cpus(self.strategy) and not self._may_fail

        def first(gradients: Any) -> list[Any]:
            return [*after, loss, *([] if early else gradients)]

        def apply(gradients: list[tf.Tensor]) -> None:
            with tf.control_dependencies(first(gradients)):
                apply_in_replica(optimizer, gradients, self._trained)

        @explaining_settings(optimizer)
        def update() -> tf.Tensor:
            if self._sharded is not None:
                self._sharded.apply(gradients, self._trained, first(gradients))
                return tf.constant(True)
            self.strategy.run(apply, args=(gradients,))
            overwrite_with_averages(optimizer, self.strategy, self._trained)
            return tf.constant(True)

        if self.loss_scale is None:
            update()
            return
        tf.cond(finite, update, lambda: tf.constant(False))
        self.loss_scale.update(finite)
