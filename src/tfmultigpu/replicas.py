"""The replica phase of a train step: forward and backward on each shard."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _bridge
from tfmultigpu import rows as rows_lib
from tfmultigpu.accumulation import sum_dtype
from tfmultigpu.backward_operations import any_may_fail, noting_operations
from tfmultigpu.batches import Shards, per_replica
from tfmultigpu.errors import LossError, TfMultiGpuError
from tfmultigpu.gradients import is_overwritten, spread_over_replicas
from tfmultigpu.metrics import build_metrics, holds_what_counts, update_metrics
from tfmultigpu.micro_batches import Addition, OtherStructureError, Part
from tfmultigpu.objectives import Layout, Objective, stack
from tfmultigpu.outputs import Output
from tfmultigpu.randomness import HeldRows, drawing_rows
from tfmultigpu.seeds import GlobalSeeds, global_seeds

__all__ = ["ReplicaPhase"]


class ReplicaPhase:
    """Computes gradients, sums and weights on every replica of this process.

    Attributes:
        layout: How the terms of the loss are put together; known once traced.
        present: For each backward pass, which variables have a gradient; known once traced.
        backward_may_fail: Whether the backward pass has operations of its own that can fail; known
            once traced.
        assigned: The variables that layers assigned to when they were called; known once traced.
        overwritten: The variables whose "gradient" is the value they are to have; likewise.
    """

    assigned: Sequence[Any] = ()
    backward_may_fail: bool = True
    layout: Layout
    overwritten: list[Any]
    present: list[list[bool]]

    def __init__(
        self,
        objective: Objective,
        strategy: tf.distribute.Strategy,
        *,
        micro_batches: Sequence[int],
        metrics: Any,
        weighted_metrics: Any,
        jit_compile: bool,
    ) -> None:
        """Takes what ``make_train_step`` was given, and the micro-batches of each replica."""
        self._objective = objective
        self._strategy = strategy
        self._counts = tuple(micro_batches)
        self._micro_batches = max(micro_batches)
        self._metrics = metrics
        self._weighted_metrics = weighted_metrics
        self._jit_compile = jit_compile

    @property
    def metrics(self) -> tuple[Any, ...]:
        """All metrics it updates."""
        metrics = tf.nest.flatten([self._metrics, self._weighted_metrics])
        return tuple(metric for metric in metrics if metric is not None)

    def build_metrics(self, batch_spec: Any) -> None:
        """Creates the variables of metrics that wait for the shapes of a batch."""
        for metrics in (self._metrics, self._weighted_metrics):
            build_metrics(metrics, self._objective.model, batch_spec, self._strategy)

    def __call__(self, shards: Shards, loss_scale: Any) -> list[list[tf.Tensor]]:
        """Runs the phase; call in a cross-replica context.

        Args:
            shards: The global batch.
            loss_scale: What losses are multiplied by, a float scalar, or None.

        Returns:
            For each local replica a list of tensors to be added over all replicas: the gradients
            that exist, backward pass by backward pass, then the new value of each variable that
            is overwritten, spread over the replicas, then one vector of sums and weights.
        """
        parts = self._parts(shards, loss_scale)
        numbers = rows_lib.local_replicas(self._strategy)
        replicas = self._strategy.num_replicas_in_sync
        return spread_over_replicas(parts, len(self.overwritten), numbers, replicas)

    def _parts(self, shards: Shards, loss_scale: Any) -> list[list[tf.Tensor]]:
        replicas = self._strategy.num_replicas_in_sync
        weight = rows_lib.row_weight(shards.global_rows, replicas) if replicas > 1 else None
        shard = per_replica(self._strategy, shards.local)
        fixed = (weight, tf.cast(shards.global_rows, tf.float64), loss_scale)
        with global_seeds(self._strategy) as seeds:
            replica = functools.partial(self._replica, shards, seeds)
            if self._micro_batches == 1:
                return self._local(self._strategy.run(replica, args=(shard, None, *fixed)))
            structure = [(value.shape, sum_dtype(value.dtype)) for value in self._values()]
            structure.append((tf.TensorShape([2]), tf.float32))
            alike = len(set(self._counts)) == 1
            loop = self._loop_around_replicas if alike else self._loop_in_replicas
            add = functools.partial(Addition, replica, self._objective.model, seeds, self._maxima)
            for _ in range(2):
                try:
                    return loop(add(structure), shards, shard, fixed)
                except OtherStructureError as other:
                    structure = other.args[0]
            return loop(add(structure), shards, shard, fixed)

    def _loop_around_replicas(
        self, addition: Addition, shards: Shards, shard: Any, fixed: tuple[Any, ...]
    ) -> list[list[tf.Tensor]]:
        """Adds over the micro-batches of each shard, one after the other on all replicas.

        The loop is around ``strategy.run``, not in it: a synchronized layer synchronises by
        ``merge_call``, which a loop inside a replica does not allow.
        """
        run = self._strategy.run
        local = len(rows_lib.local_replicas(self._strategy))
        size = len(addition.structure)
        begin = run(addition.begin) if addition.states else []
        with tf.device("CPU:0"):  # Decided there; nothing has to wait for a GPU.
            largest = tf.reduce_max(shards.offsets[1:] - shards.offsets[:-1])
            # In 32 bits, which GPUs keep where loops are decided.
            count = tf.minimum(self._micro_batches, tf.cast(largest, tf.int32))

        def body(micro: Any, *flat: Any) -> tuple[Any, ...]:
            sums = [list(flat[i * size : (i + 1) * size]) for i in range(local)]
            args = (per_replica(self._strategy, sums), begin, shard, _part(micro, count), *fixed)
            results = run(addition.add, args=args)
            return (micro + 1, *[tensor for result in self._local(results) for tensor in result])

        _, *flat = tf.while_loop(
            lambda micro, *_: micro < count,
            body,
            [tf.zeros([], tf.int32), *addition.zeros() * local],
            parallel_iterations=1,
        )
        return [flat[i * size : (i + 1) * size] for i in range(local)]

    def _loop_in_replicas(
        self, addition: Addition, shards: Shards, shard: Any, fixed: tuple[Any, ...]
    ) -> list[list[tf.Tensor]]:
        """Adds over the micro-batches of each replica, which has a number of its own of them.

        The loop is in the replica, so that none waits for the others between micro-batches. Also
        where there is one of them: were the structure not the one expected, what a body assigns is
        dropped with it, while assignments beside a loop would stay and be done twice.
        """

        def replica(shard: Any, *fixed: Any) -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            own = self._counts[tf.get_static_value(context.replica_id_in_sync_group)]
            begin = addition.begin()
            # Each row is in one part, whatever the number of rows: there is no empty one.
            with tf.device("CPU:0"):
                count = tf.minimum(own, tf.cast(rows_lib.count_rows(shard), tf.int32))

            def body(micro: Any, *sums: Any) -> tuple[Any, ...]:
                return (micro + 1, *addition.add(sums, begin, shard, _part(micro, count), *fixed))

            _, *sums = tf.while_loop(
                lambda micro, *_: micro < count,
                body,
                [tf.zeros([], tf.int32), *addition.zeros()],
                parallel_iterations=1,
            )
            return list(sums)

        try:
            return self._local(self._strategy.run(replica, args=(shard, *fixed)))
        except RuntimeError as error:
            if "merge_call" not in str(error):
                raise
            raise TfMultiGpuError(
                "A layer synchronises the replicas whenever it is called, such as "
                "BatchNormalization(synchronized=True), and replicas with different numbers of "
                f"micro-batches do not meet. Received: micro_batches={self._counts}. Give all the "
                f"same number, micro_batches={self._micro_batches}, or take a layer that needs no "
                "other replica, such as GroupNormalization."
            ) from error

    def _replica(
        self,
        shards: Shards,
        seeds: GlobalSeeds,
        shard: Any,
        part: Part | None,
        weight: Any,
        global_rows: Any,
        loss_scale: Any,
    ) -> list[tf.Tensor]:
        counts = holds_what_counts(weight)
        held = HeldRows.of(shards, shard, seeds, by_xla=self._jit_compile)
        if part is not None:
            rows = rows_lib.count_rows(shard)
            once = rows_lib.row_weight(rows, part.count)
            weight = once if weight is None else weight * once
            counts = counts & (tf.equal(once, 1.0) | tf.equal(part.number, 0))
            held = held.part(shard, part.count, part.number)
            shard = rows_lib.cut_part(shard, part.count, part.number)
        compute = self._compiled if self._jit_compile else self._forward_backward
        with drawing_rows(held):
            values, outputs = compute(shard, weight, global_rows, loss_scale)
        update_metrics(self._metrics, outputs, counts, weighted=False)
        update_metrics(self._weighted_metrics, outputs, counts, weighted=True)
        return list(values)

    def _compiled(self, *args: Any) -> tuple[list[tf.Tensor], list[Output]]:
        """Forward and backward by XLA; what metrics need of the outputs comes out as tensors."""
        outputs: list[Output] = []

        def compute(*args: Any) -> Any:
            values, found = self._forward_backward(*args)
            outputs[:] = found
            masks = [_bridge.keras_mask(o.y_pred) for o in found]
            return values, [(o.y_true, o.y_pred, o.sample_weight) for o in found], masks

        # A function of its own for each replica: it captures that replica's variables.
        function = tf.function(compute, jit_compile=True, autograph=False)
        try:
            values, tensors, masks = function(*args)
        except RuntimeError as error:
            if "merge_call" not in str(error):
                raise
            raise TfMultiGpuError(
                "XLA cannot compile a layer that synchronises replicas, such as "
                "BatchNormalization(synchronized=True). Received: jit_compile=True. Leave it out."
            ) from error
        for i, (y_true, y_pred, weight) in enumerate(tensors):
            _bridge.set_keras_mask(y_pred, masks[i])
            outputs[i] = dataclasses.replace(
                outputs[i], y_true=y_true, y_pred=y_pred, sample_weight=weight
            )
        return values, outputs

    def _forward_backward(
        self, shard: Any, weight: Any, global_rows: Any, loss_scale: Any
    ) -> tuple[list[tf.Tensor], list[Output]]:
        with tf.GradientTape(persistent=True) as tape:
            with _bridge.recording_assignments() as assigned:
                terms, outputs = self._objective(shard, training=True)
            self.assigned = assigned
            if not terms:
                raise LossError(
                    "There is nothing to minimise: no loss was given and no layer adds one. "
                    "Received: loss=None. Give make_train_step a loss, such as 'mse', or forward=."
                )
            layout = Layout.of(terms)
            factors = layout.scales(global_rows)
            variables = self._objective.model.trainable_variables
            replaced = [is_overwritten(variable) for variable in variables]
            # What is noted of the size of gradients on their way is that of whole rows.
            before, later = (None, weight) if any(replaced) else (weight, None)
            scaled = [
                term.sum * _product(term.sum.dtype, factor, before, loss_scale)
                for term, factor in zip(terms, factors, strict=True)
            ]
            measured = layout.measured
            if measured and any(replaced):
                raise LossError(_NOT_DIVIDED_YET)
            known = [scaled[i] for i in range(len(terms)) if i not in measured]
            targets = ([_total(known)] if known else []) + [scaled[i] for i in measured]
        values = [variable.value for variable in variables]
        with noting_operations() as backward:
            passes = [tape.gradient(target, values) for target in targets]
        del tape
        self.backward_may_fail = any_may_fail(backward)
        self.layout = layout
        found = [list(zip(one, variables, replaced, strict=True)) for one in passes]
        self.present = [[g is not None and not new for g, _, new in one] for one in found]
        self.overwritten = [v for one in found for g, v, new in one if g is not None and new]
        gradients = [
            _dense(gradient, variable.shape, None if new else later)
            for kind in (False, True)
            for one in found
            for gradient, variable, new in one
            if gradient is not None and new == kind
        ]
        return [*gradients, stack(terms, weight)], outputs

    def _maxima(self) -> int:
        return len(self.overwritten)

    def _values(self) -> list[Any]:
        return [variable.value for variable in self._objective.model.trainable_variables]

    def _local(self, results: list[Any]) -> list[list[tf.Tensor]]:
        local = [self._strategy.experimental_local_results(result) for result in results]
        return [list(one) for one in zip(*local, strict=True)]


def _part(number: Any, count: Any) -> Part:
    with tf.device("CPU:0"):
        return Part(tf.cast(number, tf.int64), tf.cast(count, tf.int64))


_NOT_DIVIDED_YET = (
    "A layer records how large the gradients are that pass through it, as float8 layers do, and "
    "what this loss is divided by is only known after they have passed: its rows are masked, "
    "weighted by mean_with_sample_weight, or summed by a function or a forward of your own. Its "
    "scales would not be those of one device. Take a loss of Keras that divides by the number of "
    'elements, such as "mse", or layers that are not quantized to float8.'
)


def _dense(gradient: Any, shape: Any, factor: Any = None) -> tf.Tensor:
    """A gradient ready to be added: rows of an embedding summed into place, at least float32."""
    gradient = tf.convert_to_tensor(gradient)
    gradient.set_shape(shape)  # A backward pass through a reshape forgets it.
    summed: tf.Tensor = tf.cast(gradient, sum_dtype(gradient.dtype))
    return summed if factor is None else summed * tf.cast(factor, summed.dtype)


def _product(dtype: tf.DType, *factors: Any) -> Any:
    result: Any = tf.ones([], dtype)
    for factor in factors:
        if factor is not None:
            result *= tf.cast(factor, dtype)
    return result


def _total(values: list[Any]) -> Any:
    dtype = tf.float64 if any(value.dtype == tf.float64 for value in values) else values[0].dtype
    return tf.add_n([tf.cast(value, dtype) for value in values]) if len(values) > 1 else values[0]
