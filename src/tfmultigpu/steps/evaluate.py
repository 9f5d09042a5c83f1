"""Eval and predict steps: exact over every row, each row once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows, unpack_batch
from tfmultigpu.errors import DataError
from tfmultigpu.losses.build_model import prepare_model
from tfmultigpu.losses.metrics import (
    build_metrics,
    check_metrics,
    counting_once,
    holds_what_counts,
    update_metrics,
)
from tfmultigpu.losses.objective import Layout, Objective, stack
from tfmultigpu.steps.batch_function import BatchFunction, Shards
from tfmultigpu.steps.multi_step import TERMS, MultiStep
from tfmultigpu.steps.op_placement import computing_at_weights
from tfmultigpu.steps.random_draws import ReplicaRows, drawing_rows
from tfmultigpu.steps.row_gathering import gathering_from
from tfmultigpu.steps.seeds import GlobalSeeds, global_seeds
from tfmultigpu.steps.value_agreement import check_values_alike
from tfmultigpu.steps.verification import (
    Verification,
    Verifier,
    assigned_variables,
    check_verify,
)
from tfmultigpu.steps.weight_reads import bounding_reads
from tfmultigpu.strategies.collectives import sum_over_replicas
from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.not_copied import NotCopied
from tfmultigpu.strategies.scopes import check_backend, check_kinds
from tfmultigpu.strategies.topology import local_replicas, per_replica
from tfmultigpu.types import Models, Strategy, Verify

__all__ = ["EvalStep", "PredictStep", "Totals", "make_eval_step", "make_predict_step"]


def make_eval_step(
    model: Models,
    loss: Any,
    strategy: Strategy | None = None,
    *,
    metrics: Any = (),
    weighted_metrics: Any = (),
    loss_weights: Any = None,
    forward: Any = None,
    verify: Verify = "first",
) -> EvalStep:
    """Makes a step that computes loss and metrics without training.

    Args:
        model: A Keras model created in ``strategy.scope()``.
        loss: As for ``make_train_step``; None for metrics alone.
        strategy: The strategy; ``tf.distribute.get_strategy()`` where None.
        metrics: Keras metrics created in the scope, updated without sample weights.
        weighted_metrics: The same, updated with sample weights.
        loss_weights: A number, or a dict or list of numbers, one per output.
        forward: ``f(model, batch, training) -> LossSum``, with values for the logs if wanted; see
            ``make_train_step``.
        verify: When to hold a step to what one device computes: ``"first"``, True for every step,
            or False. See ``make_train_step``.

    Returns:
        The step: ``logs = step(batch)`` with ``"loss"`` and ``"weight"``, and
        ``logs = step.run(iterator, steps)``, whose loss is the mean over all rows seen.

    Raises:
        ScopeError: Model or a metric was created outside the scope.
        LossError: The loss is none, or not one value per example.
        LossError: A metric cannot be added over replicas.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> step = tmg.make_eval_step(model, "mse")
        >>> float(step((np.ones((5, 3)), np.ones((5, 1))))["weight"])
        5.0
    """
    check_backend()
    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    objective = Objective.of(model, loss, loss_weights, forward)
    check_kinds(objective.model, strategy)
    check_metrics(metrics, strategy)
    check_metrics(weighted_metrics, strategy)
    check_verify(verify)
    objective.check_metrics_allowed(metrics, weighted_metrics)
    verifier = Verifier(objective, strategy, verify, training=False)
    return EvalStep(objective, verifier, strategy, metrics, weighted_metrics)


def make_predict_step(
    model: Models, strategy: Strategy | None = None, *, verify: Verify = "first"
) -> PredictStep:
    """Makes a step that predicts each row of a batch once, in the order of the batch.

    Args:
        model: A Keras model created in ``strategy.scope()``.
        strategy: The strategy; ``tf.distribute.get_strategy()`` where None.
        verify: When to hold predictions, row by row, to those of one device: ``"first"``, True for
            every step, or False.

    Returns:
        The step: ``outputs = step(batch)``, tensors of shape ``[rows of the global batch, ...]`` in
        the structure of the model's outputs.

    Raises:
        ScopeError: The model was created outside the scope.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> tmg.make_predict_step(model)(np.ones((5, 3))).shape
        TensorShape([5, 2])
    """
    check_backend()
    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    check_kinds(model, strategy)
    check_verify(verify)
    return PredictStep(
        model, Verifier(_Prediction(model), strategy, verify, training=False), strategy
    )


class Totals(NamedTuple):
    """Sums of an evaluation, not yet divided, so that calls can be added.

    Attributes:
        steps: Batches.
        rows: Rows in them.
        sums: For each term of the loss, the sum over these rows.
        weights: What that is divided by.
    """

    steps: int
    rows: float
    sums: list[float]
    weights: list[float]

    def plus(self, other: Totals) -> Totals:
        """Returns what both add up to."""
        return Totals(
            self.steps + other.steps,
            self.rows + other.rows,
            [a + b for a, b in zip(self.sums, other.sums, strict=True)],
            [a + b for a, b in zip(self.weights, other.weights, strict=True)],
        )


class EvalStep(NotCopied):
    """Loss and metrics of one global batch; what ``make_eval_step`` returns.

    Attributes:
        strategy: The strategy it runs under.
    """

    _layout: Layout

    def __init__(
        self,
        objective: Objective,
        verifier: Verifier,
        strategy: tf.distribute.Strategy,
        metrics: Any,
        weighted_metrics: Any,
    ) -> None:
        """Use ``make_eval_step``, which checks what it is given."""
        self.strategy = strategy
        self._objective = objective
        self._verifier = verifier
        self._metrics = metrics
        self._weighted_metrics = weighted_metrics
        self._ready = False
        self._regularizes = False
        self._functions: dict[Any, tuple[BatchFunction, MultiStep, MultiStep]] = {}
        self._use(())

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, batch: Any) -> dict[str, Any]:
        """Evaluates one batch: an element of a distributed dataset, or a whole global batch."""
        if not self._is_current():
            self._prepare(self._function.spec_of(batch))
        logs: dict[str, Any] = self._verifier.call(self._function, batch)
        return logs

    def assigned(self, batch_spec: Any) -> list[Any]:
        """Returns the Keras variables that a forward pass assigns, such as those of metrics."""
        if not self._is_current():
            self._prepare(batch_spec)
        forward = functools.partial(self._objective, training=False)
        return assigned_variables(forward, self.strategy, batch_spec)

    @property
    def metrics(self) -> tuple[Any, ...]:
        """The Keras metrics that it updates."""
        found = tf.nest.flatten([self._metrics, self._weighted_metrics])
        return tuple(metric for metric in found if metric is not None)

    @property
    def verification(self) -> Verification | None:
        """The comparison of the last verified step with one device; None before the first."""
        return self._verifier.verification

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def run(self, iterator: Any, steps: int) -> dict[str, Any]:
        """Evaluates up to ``steps`` batches in one call; see ``TrainStep.run``."""
        if not self._is_current():
            self._prepare(self._multistep.batch_spec(iterator))
        logs = self._verifier.run(self._multistep, iterator, steps)
        return {name: logs[name] for name in logs if name not in ("gradient_norm", "loss_scale")}

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def totals(self, iterator: Any, steps: int) -> Totals:
        """Evaluates up to ``steps`` batches in one call, and returns sums and weights undivided."""
        if not self._is_current():
            self._prepare(self._adding.batch_spec(iterator))
        logs = self._verifier.run(self._adding, iterator, steps)
        terms = range(len(self._layout.terms))
        sums, weights = (
            [float(logs[f"{what} {i}"]) if f"{what} {i}" in logs else 0.0 for i in terms]
            for what in ("sum", "weight")
        )
        return Totals(int(logs["steps"]), float(logs["weight"]), sums, weights)

    def report(self, totals: Totals) -> dict[str, float]:
        """Returns the logs of all batches that were added up: each term divided once."""
        sums, weights = ([tf.constant(v, tf.float64) for v in one] for one in totals[2:])
        logs = self._layout.report(sums, weights, tf.constant(totals.rows, tf.float64))
        return {name: float(value) for name, value in self._regularized(logs).items()}

    def _is_current(self) -> bool:
        """Returns whether all is prepared and the same layers with penalties are frozen."""
        return self._ready and (not self._regularizes or self._penalized == self._find_penalized())

    def _find_penalized(self) -> tuple[int, ...]:
        """The variables whose penalty is part of the loss: Keras leaves out frozen ones."""
        variables = self._objective.model.trainable_variables
        return tuple([id(v) for v in variables if getattr(v, "regularizer", None) is not None])

    def _use(self, penalized: tuple[int, ...]) -> None:
        """Takes the functions compiled for a set of penalized variables."""
        if penalized not in self._functions:
            local = local_replicas(self.strategy)
            function = BatchFunction(self._step, self.strategy, local)
            adding = BatchFunction(self._addends, self.strategy, local)
            self._functions[penalized] = function, MultiStep(function), MultiStep(adding, wide=True)
        self._penalized = penalized
        self._function, self._multistep, self._adding = self._functions[penalized]

    def _prepare(self, spec: Any) -> None:
        model = self._objective.model
        if not self._ready:
            prepare_model(model, self.strategy, spec)
            for metrics in (self._metrics, self._weighted_metrics):
                build_metrics(metrics, model, spec, self.strategy)
            penalties = [getattr(variable, "regularizer", None) for variable in model.variables]
            self._regularizes = any(penalty is not None for penalty in penalties)
            check_values_alike(self.strategy, model)
            self._ready = True
        self._use(self._find_penalized())

    def _step(self, shards: Shards) -> dict[str, Any]:
        stats = self._terms(shards)
        rows = tf.cast(shards.global_rows, tf.float64)
        logs = self._layout.report(*self._layout.unstack(stats), rows)
        return {**self._regularized(logs), TERMS: stats}

    def _addends(self, shards: Shards) -> dict[str, Any]:
        """The terms as values that ``MultiStep`` adds up as they are."""
        stats = self._terms(shards)
        sums, weights = self._layout.unstack(stats)
        logs = {f"sum {i}": value for i, value in enumerate(sums)}
        logs |= {f"weight {i}": value for i, value in enumerate(weights)}
        rows = tf.cast(shards.global_rows, tf.float32)
        return {"loss": tf.zeros([]), "weight": rows, **logs, TERMS: stats}

    def _terms(self, shards: Shards) -> tf.Tensor:
        """Sums and weights of the terms of the loss over all replicas; updates the metrics."""
        replicas = self.strategy.num_replicas_in_sync
        weight = partition.row_weight(shards.global_rows, replicas) if replicas > 1 else None
        shard = per_replica(self.strategy, shards.local)
        with global_seeds(self.strategy) as seeds:
            replica = functools.partial(self._replica, shards, seeds)
            result = self.strategy.run(replica, args=(shard, weight))
        local = [[value] for value in self.strategy.experimental_local_results(result)]
        return sum_over_replicas(self.strategy, local)[0][0]

    def _regularized(self, logs: dict[str, Any]) -> dict[str, Any]:
        penalty, _ = self._objective.regularization(self._objective.model.trainable_variables)
        return {**logs, "loss": logs["loss"] + penalty}

    def _replica(self, shards: Shards, seeds: GlobalSeeds, shard: Any, weight: Any) -> tf.Tensor:
        counts = holds_what_counts(weight)
        held = ReplicaRows.of(shards, shard, seeds)
        reads = bounding_reads(self._objective.model.variables)
        places = computing_at_weights(self.strategy, self._objective.model)
        with places, reads, drawing_rows(held), gathering_from(held), counting_once(counts):
            terms, outputs = self._objective(shard, training=False)
        update_metrics(self._metrics, outputs, counts, weighted=False)
        update_metrics(self._weighted_metrics, outputs, counts, weighted=True)
        self._layout = Layout.of(terms)
        return stack(terms, weight)


@dataclasses.dataclass(frozen=True)
class _Prediction:
    """A model without losses, as what ``Verifier`` can try.

    Attributes:
        model: The model.
    """

    model: Any

    @property
    def trained(self) -> list[Any]:
        """The variables that training would change."""
        return list(self.model.trainable_variables)

    def __call__(self, batch: Any, training: bool) -> tuple[list[Any], Any]:
        """Returns no terms, and the predictions."""
        return [], self.model(unpack_batch(batch)[0], training=training)

    def regularization(self, variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns none: it is part of a loss."""
        return tf.zeros([]), [None] * len(variables)


class PredictStep(NotCopied):
    """Predictions for one global batch; what ``make_predict_step`` returns.

    Attributes:
        strategy: The strategy it runs under.
    """

    def __init__(self, model: Any, verifier: Verifier, strategy: tf.distribute.Strategy) -> None:
        """Use ``make_predict_step``, which checks what it is given."""
        self.strategy = strategy
        self._verifier = verifier
        self._model = model
        self._ready = False
        self._local = local_replicas(strategy)
        self._function = BatchFunction(self._step, strategy, self._local)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, batch: Any) -> Any:
        """Predicts one batch: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``; only x is used."""
        if not self._ready:
            prepare_model(self._model, self.strategy, self._function.spec_of(batch))
            check_values_alike(self.strategy, self._model)
            self._ready = True
        if not self._verifier.is_due:
            return self._function(batch)
        expected = self._verifier.expect(self._function.shards(batch))
        outputs = self._function(batch)
        if expected is not None:
            self._verifier.conclude(expected, [], outputs=outputs)
        return outputs

    @property
    def verification(self) -> Verification | None:
        """The comparison of the last verified step with one device; None before the first."""
        return self._verifier.verification

    def _step(self, shards: Shards) -> Any:
        replicas = self.strategy.num_replicas_in_sync
        weight = partition.row_weight(shards.global_rows, replicas)
        shard = per_replica(self.strategy, shards.local)

        def predict(shard: Any, weight: Any) -> Any:
            held = ReplicaRows.of(shards, shard, seeds)
            counting = counting_once(holds_what_counts(weight))
            reads = bounding_reads(self._model.variables)
            places = computing_at_weights(self.strategy, self._model)
            with places, reads, drawing_rows(held), gathering_from(held), counting:
                return self._model(unpack_batch(shard)[0], training=False)

        with global_seeds(self.strategy) as seeds:
            results = self.strategy.run(predict, args=(shard, weight))
        if replicas == 1:
            return results
        small = shards.global_rows < replicas

        def join(result: Any) -> Any:
            parts = list(self.strategy.experimental_local_results(result))
            if parts[0] is None:
                return None
            if isinstance(parts[0], tf.SparseTensor):
                raise DataError(
                    "Predictions of several replicas are put together row by row, and this output "
                    "is sparse. End the model with tf.sparse.to_dense."
                )
            if parts[0].shape.rank == 0:
                raise DataError(
                    "Predictions of several replicas are put together row by row, and this output "
                    "has no rows: it is one number for a batch. Return one value per row."
                )
            with tf.control_dependencies(self._check_lengths(parts, result)):
                if len(parts) < self.strategy.num_replicas_in_sync:
                    joined = gather_rows(self.strategy, result)
                else:
                    joined = tf.concat(parts, axis=0)
            # A small batch went to every replica whole: the first copy is the batch.
            once, joined_rows = count_rows(parts[0]), count_rows(joined)
            return joined[: tf.where(small, once, joined_rows)]

        return tf.nest.map_structure(join, results)

    def _check_lengths(self, parts: list[Any], result: Any) -> list[Any]:
        """Returns a check that the rows of one output have one shape on all replicas."""
        first = parts[0]
        if isinstance(first, tf.RaggedTensor) or first.shape[1:].is_fully_defined():
            return []
        if len(parts) < self.strategy.num_replicas_in_sync:
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
