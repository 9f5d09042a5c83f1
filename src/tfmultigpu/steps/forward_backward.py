"""The replica phase of a train step: forward and backward on each shard."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
from tfmultigpu.optimizers.gradients import is_overwritten, spread_over_replicas, sum_dtype
from tfmultigpu.steps.batch_function import Shards
from tfmultigpu.steps.layer_states import may_be_assigned
from tfmultigpu.steps.micro_batches import MicroBatchSum, OtherStructureError, Part
from tfmultigpu.steps.random_draws import ReplicaRows, drawing_rows
from tfmultigpu.steps.row_gathering import gathering_from
from tfmultigpu.steps.seeds import GlobalSeeds, global_seeds
from tfmultigpu.strategies.topology import local_replicas, per_replica

__all__ = ["ReplicaPhase"]


class ReplicaPhase:
    """Computes gradients, sums and weights on every replica of this process.

    Attributes:
        layout: How the terms of the loss are put together; known once traced.
        present: For each backward pass, which variables have a gradient; known once traced.
        held: The variables of the values that it returns to be assigned; known once traced.
        overwritten: The variables whose "gradient" is the value they are to have; likewise.
    """

    held: Sequence[Any] = ()
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
        in_one_piece = strategy.num_replicas_in_sync == max(micro_batches) == 1
        self._objective = dataclasses.replace(objective, added=None) if in_one_piece else objective
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

    def __call__(self, shards: Shards, loss_scale: Any) -> tuple[list[list[tf.Tensor]], Any]:
        """Runs the phase; call in a cross-replica context.

        It changes no Keras variable: what layers, draws and metrics assign is returned. The last of
        the tensors to be added is there only if every check that was made has passed.

        Args:
            shards: The global batch.
            loss_scale: What losses are multiplied by, a float scalar, or None.

        Returns:
            For each local replica a list of tensors to be added over all replicas: the gradients
            that exist, backward pass by backward pass, then the new value of each variable that
            is overwritten, spread over the replicas, then one vector of sums and weights; and the
            values for ``held``, a list of per-replica values.
        """
        parts, states = self._parts(shards, loss_scale)
        numbers = local_replicas(self._strategy)
        replicas = self._strategy.num_replicas_in_sync
        return spread_over_replicas(parts, len(self.overwritten), numbers, replicas), states

    def _parts(self, shards: Shards, loss_scale: Any) -> tuple[list[list[tf.Tensor]], Any]:
        replicas = self._strategy.num_replicas_in_sync
        weight = partition.row_weight(shards.global_rows, replicas) if replicas > 1 else None
        shard = per_replica(self._strategy, shards.local)
        fixed = (weight, tf.cast(shards.global_rows, tf.float64), loss_scale)
        with global_seeds(self._strategy) as seeds:
            replica = functools.partial(self._replica, shards, seeds)
            if self._micro_batches == 1:

                def once(*args: Any) -> Any:
                    values, held = replica([], *args)
                    self.held = held.variables
                    return values, [held.current(variable) for variable in held.variables]

                values, states = self._strategy.run(once, args=(shard, None, *fixed))
                return self._local(values), states
            structure = [(value.shape, sum_dtype(value.dtype)) for value in self._values()]
            structure.append((tf.TensorShape([2]), tf.float32))
            alike = len(set(self._counts)) == 1
            loop = self._loop_around_replicas if alike else self._loop_in_replicas
            model = self._objective.model
            states = may_be_assigned(model)
            states += [variable for metric in self.metrics for variable in metric.variables]
            for _ in range(3):
                try:
                    addition = MicroBatchSum(replica, model, seeds, self._maxima, structure, states)
                    return loop(addition, shards, shard, fixed)
                except OtherStructureError as other:
                    structure, states = other.structure, other.states
        raise TfMultiGpuError(
            "The model draws from another seed generator each time it is called, and micro-batches "
            f"must all draw from the same. Received: seed generators {seeds.used[-3:]}. Create "
            "each once, in the scope of the strategy, not in call or forward: "
            "seeds = keras.random.SeedGenerator(seed)."
        )

    def _loop_around_replicas(
        self, addition: MicroBatchSum, shards: Shards, shard: Any, fixed: tuple[Any, ...]
    ) -> tuple[list[list[tf.Tensor]], Any]:
        """Adds over the micro-batches of each shard, one after the other on all replicas.

        The loop is around ``strategy.run``, not in it: a synchronized layer synchronises by
        ``merge_call``, which a loop inside a replica does not allow.
        """
        run = self._strategy.run
        local = len(local_replicas(self._strategy))
        size = len(addition.structure) + len(addition.states)
        begin = run(addition.begin) if addition.states else []
        states = self._local(begin) or [[]] * local
        first = [tensor for one in states for tensor in [*addition.zeros(), *one]]
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
            [tf.zeros([], tf.int32), *first],
            parallel_iterations=1,
        )
        return self._split(addition, [flat[i * size : (i + 1) * size] for i in range(local)])

    def _split(self, addition: MicroBatchSum, flat: list[list[Any]]) -> tuple[list[list[Any]], Any]:
        """The sums of each local replica, and its values for the variables it assigned."""
        end = len(addition.structure)
        chosen = [i for i, assigned in enumerate(addition.assigned) if assigned]
        self.held = [addition.states[i] for i in chosen]
        states = [[one[end + i] for i in chosen] for one in flat]
        values = per_replica(self._strategy, states) if chosen else []
        return [one[:end] for one in flat], values

    def _loop_in_replicas(
        self, addition: MicroBatchSum, shards: Shards, shard: Any, fixed: tuple[Any, ...]
    ) -> tuple[list[list[tf.Tensor]], Any]:
        """Adds over the micro-batches of each replica, which has a number of its own of them.

        The loop is in the replica, so that none waits for the others between micro-batches. Also
        where there is one of them: were the structure not the one expected, what a body does is
        dropped with it, while checks beside a loop would stay and be done twice.
        """

        def replica(shard: Any, *fixed: Any) -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            own = self._counts[tf.get_static_value(context.replica_id_in_sync_group)]
            begin = addition.begin()
            # Each row is in one part, whatever the number of rows: there is no empty one.
            with tf.device("CPU:0"):
                count = tf.minimum(own, tf.cast(count_rows(shard), tf.int32))

            def body(micro: Any, *sums: Any) -> tuple[Any, ...]:
                return (micro + 1, *addition.add(sums, begin, shard, _part(micro, count), *fixed))

            _, *sums = tf.while_loop(
                lambda micro, *_: micro < count,
                body,
                [tf.zeros([], tf.int32), *addition.zeros(), *begin],
                parallel_iterations=1,
            )
            return list(sums)

        try:
            flat = self._local(self._strategy.run(replica, args=(shard, *fixed)))
            return self._split(addition, flat)
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
        given: list[Any],
        shard: Any,
        part: Part | None,
        weight: Any,
        global_rows: Any,
        loss_scale: Any,
    ) -> tuple[list[tf.Tensor], Held]:
        counts = holds_what_counts(weight)
        rows = ReplicaRows.of(shards, shard, seeds, by_xla=self._jit_compile)
        if part is not None:
            once = partition.row_weight(count_rows(shard), part.count)
            weight = once if weight is None else weight * once
            counts = counts & (tf.equal(once, 1.0) | tf.equal(part.number, 0))
            rows = rows.part(shard, part.count, part.number)
            shard = partition.cut_part(shard, part.count, part.number)
        compute = self._compiled if self._jit_compile else self._forward_backward
        gathering = gathering_from(rows, None if part is None else self._counts)
        with _noting_checks() as checks:
            with drawing_rows(rows), gathering, counting_once(counts):
                values, outputs, held = compute(given, shard, weight, global_rows, loss_scale)
            with holding(held=held):
                update_metrics(self._metrics, outputs, counts, weighted=False)
                update_metrics(self._weighted_metrics, outputs, counts, weighted=True)
        states = [held.current(variable) for variable in held.variables]
        with tf.control_dependencies([*checks, *states]):
            return [*values[:-1], tf.identity(values[-1])], held

    def _compiled(self, given: list[Any], *args: Any) -> tuple[list[tf.Tensor], list[Output], Held]:
        """Forward and backward by XLA; what metrics need of the outputs comes out as tensors."""
        outputs: list[Output] = []
        variables: list[Any] = []

        def compute(*args: Any) -> Any:
            values, found, held = self._forward_backward(given, *args)
            outputs[:], variables[:] = found, held.variables
            masks = [_compat.keras_mask(o.y_pred) for o in found]
            tensors = [(o.y_true, o.y_pred, o.sample_weight) for o in found]
            return values, tensors, masks, [held.current(variable) for variable in variables]

        # A function of its own for each replica: it captures that replica's variables.
        function = tf.function(compute, jit_compile=True, autograph=False)
        try:
            values, tensors, masks, states = function(*args)
        except RuntimeError as error:
            if "merge_call" not in str(error):
                raise
            raise TfMultiGpuError(
                "XLA cannot compile a layer that synchronises replicas, such as "
                "BatchNormalization(synchronized=True). Received: jit_compile=True. Leave it out."
            ) from error
        for i, (y_true, y_pred, weight) in enumerate(tensors):
            _compat.set_keras_mask(y_pred, masks[i])
            outputs[i] = dataclasses.replace(
                outputs[i], y_true=y_true, y_pred=y_pred, sample_weight=weight
            )
        with holding(given) as held:
            for variable, value in zip(variables, states, strict=True):
                held.add_update((variable, value))
        return list(values), outputs, held

    def _forward_backward(
        self, given: list[Any], shard: Any, weight: Any, global_rows: Any, loss_scale: Any
    ) -> tuple[list[tf.Tensor], list[Output], Held]:
        variables = self._objective.model.trainable_variables
        values = [variable.value for variable in variables]
        # Also while going backward, where a layer may be called once more to save memory.
        with holding(given) as held, tf.GradientTape(persistent=True) as tape:
            terms, outputs = self._objective(shard, training=True)
            if not terms:
                raise LossError(
                    "There is nothing to minimise: no loss was given and no layer adds one. "
                    "Received: loss=None. Give make_train_step a loss, such as 'mse', or forward=."
                )
            layout = Layout.of(terms)
            factors = layout.scales(global_rows)
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
        with holding(held=held):
            passes = [tape.gradient(target, values) for target in targets]
        del tape
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
        return [*gradients, stack(terms, weight)], outputs, held

    def _maxima(self) -> int:
        return len(self.overwritten)

    def _values(self) -> list[Any]:
        return [variable.value for variable in self._objective.model.trainable_variables]

    def _local(self, results: list[Any]) -> list[list[tf.Tensor]]:
        local = [self._strategy.experimental_local_results(result) for result in results]
        return [list(one) for one in zip(*local, strict=True)]


@contextmanager
def _noting_checks() -> Iterator[list[Any]]:
    """Yields a list that holds, at the end, the operations that may fail with their results unused.

    They are stateful: TensorFlow runs them in any case. A variable can always be read.
    """
    checks: list[Any] = []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield checks
    made = graph.get_operations()[before:]
    checks += [one for one in made if one.op_def.is_stateful and one.type != "ReadVariableOp"]


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
