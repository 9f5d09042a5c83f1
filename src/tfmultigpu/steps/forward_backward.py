"""The replica phase of a train step: forward and backward on each shard.

Tracing returns what it finds, as ``Findings`` beside tensors. It sets no attribute on the way.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.errors import LossError, TfMultiGpuError
from tfmultigpu.losses.held_assignments import Held, holding
from tfmultigpu.losses.metrics import (
    build_metrics,
    counting_once,
    holds_what_counts,
    update_metrics,
)
from tfmultigpu.losses.objective import Layout, Objective, stack
from tfmultigpu.losses.outputs import Output
from tfmultigpu.optimizers.gradients import is_overwritten, sum_dtype
from tfmultigpu.steps.batch_function import Shards
from tfmultigpu.steps.graph_effects import effects_of, noting_operations
from tfmultigpu.steps.micro_batches import MicroBatchSum, Part
from tfmultigpu.steps.op_placement import devices_of
from tfmultigpu.steps.options import StepOptions
from tfmultigpu.steps.owned_gradients import OwnedGradients
from tfmultigpu.steps.pipeline import pipelined
from tfmultigpu.steps.random_draws import ReplicaRows, drawing_rows
from tfmultigpu.steps.replica_sums import short_sums
from tfmultigpu.steps.row_gathering import gathering_from
from tfmultigpu.steps.seeds import GlobalSeeds, global_seeds
from tfmultigpu.steps.weight_reads import BackwardReads, bounding_reads
from tfmultigpu.strategies.collectives import refusing_to_meet
from tfmultigpu.strategies.topology import local_replicas, per_replica

__all__ = ["Findings", "PhaseResult", "ReplicaPhase"]


class Findings(NamedTuple):
    """Facts that the trace of a forward and backward pass tells, the same on every replica.

    Attributes:
        layout: How the terms of the loss are put together.
        present: For each backward pass, which variables have a gradient.
    """

    layout: Layout
    present: list[list[bool]]


@dataclasses.dataclass(frozen=True)
class PhaseResult:
    """Tensors of all replicas of this process, and facts about them.

    Attributes:
        parts: For each local replica a list of tensors to be added over all replicas: the gradients
            that exist, backward pass by backward pass, then one vector of sums and weights. Of a
            gradient that is added already the first list has the sum, and the others None.
        held: The Keras variables that layers, draws and metrics assigned.
        states: Their values, a list of per-replica values.
        findings: The findings of the trace.
    """

    parts: list[list[Any]]
    held: Sequence[Any]
    states: Any
    findings: Findings


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One forward and backward pass on one replica.

    Attributes:
        values: The tensors to be added.
        outputs: The outputs, for metrics.
        held: The variables that were assigned.
        findings: The findings of its trace.
        reads: The reads of sharded variables in the backward pass.
    """

    values: list[tf.Tensor]
    outputs: list[Output]
    held: Held
    findings: Findings
    reads: BackwardReads


class ReplicaPhase:
    """Computes gradients, sums and weights on every replica of this process."""

    def __init__(
        self, objective: Objective, strategy: tf.distribute.Strategy, options: StepOptions
    ) -> None:
        """Takes the model with its loss, the strategy and the options of the step."""
        counts = options.micro_batches
        in_one_piece = strategy.num_replicas_in_sync == max(counts) == 1
        self._objective = dataclasses.replace(objective, added=None) if in_one_piece else objective
        self._strategy = strategy
        self._options = options
        self._micro_batches = max(counts)

    @property
    def metrics(self) -> tuple[Any, ...]:
        """All metrics it updates."""
        metrics = tf.nest.flatten([self._options.metrics, self._options.weighted_metrics])
        return tuple(metric for metric in metrics if metric is not None)

    def build_metrics(self, batch_spec: Any) -> None:
        """Creates the variables of metrics that wait for the shapes of a batch."""
        for metrics in (self._options.metrics, self._options.weighted_metrics):
            build_metrics(metrics, self._objective.model, batch_spec, self._strategy)

    def __call__(self, shards: Shards, loss_scale: Any) -> PhaseResult:
        """Runs the phase; call in a cross-replica context.

        It changes no Keras variable: what layers, draws and metrics assign is returned. The last of
        the tensors to be added is there only if every check that was made has passed.

        Args:
            shards: The global batch.
            loss_scale: What losses are multiplied by, a float scalar, or None.
        """
        replicas = self._strategy.num_replicas_in_sync
        weight = partition.row_weight(shards.global_rows, replicas) if replicas > 1 else None
        shard = per_replica(self._strategy, shards.local)
        fixed = (weight, tf.cast(shards.global_rows, tf.float64), loss_scale)
        passes: list[_Pass] = []  # Of each replica; ``strategy.run`` returns tensors only.
        with global_seeds(self._strategy) as seeds:
            replica = functools.partial(self._replica, shards, seeds)

            def once(*args: Any) -> Any:
                passes.append(one := replica([], *args))
                return one.values, [one.held.current(variable) for variable in one.held.variables]

            if self._micro_batches == 1:
                values, states = self._strategy.run(once, args=(shard, None, *fixed))
                one, parts = passes[-1], self._local(values)
                owned = OwnedGradients.of(self._objective.trained, one.findings.present)
                sums = owned.add(parts, [one.reads for one in passes], self._options.reduce_dtype)
                parts = owned.put_back([owned.without(each) for each in parts], sums)
                return PhaseResult(parts, one.held.variables, states, one.findings)
            # A loop must know what it carries before it is traced. So one micro-batch is traced
            # first, in a graph that is thrown away.
            with _compat.scratch_graph():
                self._strategy.run(once, args=(shard, _unknown_part(), *fixed))
            look = passes[-1]

            def further(*args: Any) -> tuple[list[tf.Tensor], Held]:
                passes.append(one := replica(*args))
                return one.values, one.held

            addition = MicroBatchSum.like(
                look.values,
                look.held,
                further,
                self._objective.model,
                seeds,
            )
            alike = len(set(self._options.micro_batches)) == 1
            loop: Callable[..., Any] = functools.partial(self._loop_around_replicas, passes)
            if not alike:
                loop = self._loop_in_replicas
            elif self._options.pipeline:
                loop = self._side_by_side
            flat = loop(addition, shards, shard, fixed)
        end = len(addition.structure)
        states = [[one[end + i] for one in flat] for i in range(len(addition.states))]
        return PhaseResult(
            [one[:end] for one in flat],
            addition.states,
            [per_replica(self._strategy, one) for one in states],
            look.findings,
        )

    def _loop_around_replicas(
        self,
        passes: Sequence[_Pass],
        addition: MicroBatchSum,
        shards: Shards,
        shard: Any,
        fixed: tuple[Any, ...],
    ) -> list[list[Any]]:
        """Adds over the micro-batches of each shard, one after the other on all replicas.

        The loop is around ``strategy.run``, not in it: a synchronized layer synchronises by
        ``merge_call``, which a loop inside a replica does not allow. Gradients of sharded variables
        are added on their devices, over the replicas and to those of the micro-batches before.
        """
        run = self._strategy.run
        local = len(local_replicas(self._strategy))
        owned = OwnedGradients.of(self._objective.trained, passes[-1].findings.present)
        addition = dataclasses.replace(addition, elsewhere=owned.places.keys())
        # On the replicas: TensorFlow carries a tensor through a loop on the device it comes from.
        first = run(lambda: [*addition.zeros(), *addition.begin()])
        size = len(first)
        begin = first[size - len(addition.states) :]
        with tf.device("CPU:0"):  # Decided there; nothing has to wait for a GPU.
            largest = shards.largest
            # In 32 bits, which GPUs keep where loops are decided.
            count = tf.minimum(self._micro_batches, tf.cast(largest, tf.int32))

        def body(micro: Any, *flat: Any) -> tuple[Any, ...]:
            sums = [list(flat[i * size : (i + 1) * size]) for i in range(local)]
            args = (per_replica(self._strategy, sums), begin, shard, _part(micro, count), *fixed)
            results = self._local(run(addition.add, args=args))
            reads = [one.reads for one in passes[-local:]]
            dtype, before = self._options.reduce_dtype, flat[local * size :]
            added = owned.add(results, reads, dtype, before)
            return (micro + 1, *[one for each in results for one in owned.without(each)], *added)

        _, *flat = tf.while_loop(
            lambda micro, *_: micro < count,
            body,
            [tf.zeros([], tf.int32), *itertools.chain(*self._local(first)), *owned.zeros()],
            parallel_iterations=1,
        )
        others = [flat[i * size : (i + 1) * size] for i in range(local)]
        return owned.put_back(others, flat[local * size :])

    def _side_by_side(
        self, addition: MicroBatchSum, shards: Shards, shard: Any, fixed: tuple[Any, ...]
    ) -> list[list[tf.Tensor]]:
        """Adds over the micro-batches of the only replica, on all devices of the model."""
        # With one more than devices, none of these waits for the gradients of another.
        at_once = len(devices_of(self._objective.model)) + 1
        sums = pipelined(self._strategy, addition, self._micro_batches, at_once, shard, fixed)
        return [sums]

    def _loop_in_replicas(
        self, addition: MicroBatchSum, shards: Shards, shard: Any, fixed: tuple[Any, ...]
    ) -> list[list[tf.Tensor]]:
        """Adds over the micro-batches of each replica, which has a number of its own of them.

        The loop is in the replica, so that none waits for the others between micro-batches.
        """
        synchronised = TfMultiGpuError(
            "A layer synchronises the replicas whenever it is called, such as "
            "BatchNormalization(synchronized=True), and replicas with different numbers of "
            f"micro-batches do not meet. Received: micro_batches={self._options.micro_batches}. "
            f"Give all the same number, micro_batches={self._micro_batches}, or take a layer that "
            "needs no other replica, such as GroupNormalization."
        )

        def replica(shard: Any, *fixed: Any) -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            own = self._options.micro_batches[tf.get_static_value(context.replica_id_in_sync_group)]
            begin = addition.begin()
            # Each row is in one part, whatever the number of rows: there is no empty one.
            with tf.device("CPU:0"):
                count = tf.minimum(own, tf.cast(count_rows(shard), tf.int32))

            def body(micro: Any, *sums: Any) -> tuple[Any, ...]:
                with refusing_to_meet(synchronised):
                    added = addition.add(sums, begin, shard, _part(micro, count), *fixed)
                return (micro + 1, *added)

            _, *sums = tf.while_loop(
                lambda micro, *_: micro < count,
                body,
                [tf.zeros([], tf.int32), *addition.zeros(), *begin],
                parallel_iterations=1,
            )
            return list(sums)

        return self._local(self._strategy.run(replica, args=(shard, *fixed)))

    def _replica(
        self,
        shards: Shards,
        seeds: GlobalSeeds,
        given: list[Any],
        shard: Any,
        part: Part | None,
        weight: Any,
        global_rows: Any,
        loss_scale: Any,
    ) -> _Pass:
        counts = holds_what_counts(weight)
        rows = ReplicaRows.of(shards, shard, seeds, by_xla=self._options.jit_compile)
        if part is not None:
            once = partition.row_weight(count_rows(shard), part.count)
            weight = once if weight is None else weight * once
            counts = counts & (tf.equal(once, 1.0) | tf.equal(part.number, 0))
            rows = rows.part(shard, part.count, part.number)
            shard = partition.cut_part(shard, part.count, part.number)
        compute = self._compiled if self._options.jit_compile else self._forward_backward
        gathering = gathering_from(rows, None if part is None else self._options.micro_batches)
        with short_sums(), noting_operations() as made:
            with drawing_rows(rows), gathering, counting_once(counts):
                one = compute(given, shard, weight, global_rows, loss_scale)
            with holding(held=one.held):
                update_metrics(self._options.metrics, one.outputs, counts, weighted=False)
                update_metrics(self._options.weighted_metrics, one.outputs, counts, weighted=True)
        states = [one.held.current(variable) for variable in one.held.variables]
        with tf.control_dependencies([*effects_of(made), *states]):
            values = [*one.values[:-1], tf.identity(one.values[-1])]
            return dataclasses.replace(one, values=values)

    def _compiled(self, given: list[Any], *args: Any) -> _Pass:
        """Forward and backward by XLA; what metrics need of the outputs comes out as tensors."""
        inside: list[_Pass] = []

        def compute(*args: Any) -> Any:
            inside.append(one := self._forward_backward(given, *args))
            masks = [_compat.keras_mask(o.y_pred) for o in one.outputs]
            tensors = [(o.y_true, o.y_pred, o.sample_weight) for o in one.outputs]
            return one.values, tensors, masks, [one.held.current(v) for v in one.held.variables]

        synchronised = TfMultiGpuError(
            "XLA cannot compile a layer that synchronises replicas, such as "
            "BatchNormalization(synchronized=True). Received: jit_compile=True. Leave it out."
        )
        # A function of its own for each replica: it captures that replica's variables.
        function = tf.function(compute, jit_compile=True, autograph=False)
        with refusing_to_meet(synchronised):
            values, tensors, masks, states = function(*args)
        one, outputs = inside[-1], []
        for output, (y_true, y_pred, weight), mask in zip(one.outputs, tensors, masks, strict=True):
            _compat.set_keras_mask(y_pred, mask)
            outputs.append(
                dataclasses.replace(output, y_true=y_true, y_pred=y_pred, sample_weight=weight)
            )
        with holding(given) as held:
            for variable, value in zip(one.held.variables, states, strict=True):
                held.add_update((variable, value))
        return _Pass(list(values), outputs, held, one.findings, one.reads)

    def _forward_backward(
        self, given: list[Any], shard: Any, weight: Any, global_rows: Any, loss_scale: Any
    ) -> _Pass:
        with bounding_reads(self._objective.model.variables) as reads:
            return self._traced(reads, given, shard, weight, global_rows, loss_scale)

    def _traced(
        self,
        reads: BackwardReads,
        given: list[Any],
        shard: Any,
        weight: Any,
        global_rows: Any,
        loss_scale: Any,
    ) -> _Pass:
        variables = self._objective.trained
        values = [variable.value for variable in variables]
        # Also while going backward, where a layer may be called once more to save memory.
        # Under a persistent tape each loop of a layer would keep all that it computes.
        eager = tf.executing_eagerly()
        with holding(given) as held, tf.GradientTape(persistent=eager) as tape:
            terms, outputs = self._objective(shard, training=True)
            if not terms:
                raise LossError(
                    "There is nothing to minimise: no loss was given and no layer adds one. "
                    "Received: loss=None. Give make_train_step a loss, such as 'mse', or forward=."
                )
            layout = Layout.of(terms)
            factors = layout.scales(global_rows)
            scaled = [
                term.sum * _product(term.sum.dtype, factor, weight, loss_scale)
                for term, factor in zip(terms, factors, strict=True)
            ]
            measured = layout.measured
            if measured and any(map(is_overwritten, variables)):
                raise LossError(_NOT_DIVIDED_YET)
            known = [
                scaled[i] for i, one in enumerate(terms) if i not in measured and not one.logged
            ]
            targets = ([_total(known)] if known else []) + [scaled[i] for i in measured]
        passes: list[list[Any]] = []
        for target in targets:
            reads.backward_begins()
            with holding(held=held):
                again = passes and not eager
                passes.append((tf.gradients if again else tape.gradient)(target, values))
        reads.backward_ends()
        del tape
        findings = Findings(layout, [[one is not None for one in found] for found in passes])
        gradients = [
            _dense(gradient, variable.shape)
            for found in passes
            for gradient, variable in zip(found, variables, strict=True)
            if gradient is not None
        ]
        return _Pass([*gradients, stack(terms, weight)], outputs, held, findings, reads)

    def _local(self, results: list[Any]) -> list[list[tf.Tensor]]:
        local = [self._strategy.experimental_local_results(result) for result in results]
        return [list(one) for one in zip(*local, strict=True)]


def _unknown_part() -> Part:
    """A micro-batch whose number nothing can know while it is traced, as in a loop."""
    hide = tf.compat.v1.placeholder_with_default
    return _part(hide(0, []), hide(1, []))


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


def _dense(gradient: Any, shape: Any) -> tf.Tensor:
    """A gradient ready to be added: rows of an embedding summed into place, at least float32."""
    gradient = tf.convert_to_tensor(gradient)
    gradient.set_shape(shape)  # A backward pass through a reshape forgets it.
    summed: tf.Tensor = tf.cast(gradient, sum_dtype(gradient.dtype))
    return summed


def _product(dtype: tf.DType, *factors: Any) -> Any:
    result: Any = tf.ones([], dtype)
    for factor in factors:
        if factor is not None:
            result *= tf.cast(factor, dtype)
    return result


def _total(values: list[Any]) -> Any:
    dtype = tf.float64 if any(value.dtype == tf.float64 for value in values) else values[0].dtype
    return tf.add_n([tf.cast(value, dtype) for value in values]) if len(values) > 1 else values[0]
