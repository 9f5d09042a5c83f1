"""The graph of the step that one device computes for its rows: traced, and never run."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.targets import Target
from tfmultigpu.data.batch_format import any_rows
from tfmultigpu.steps import ChainedStep, TrainStep
from tfmultigpu.steps.batches import cut_batch, shards_of
from tfmultigpu.steps.features.draws import sharing_seeds
from tfmultigpu.steps.features.logical_replicas import LogicalReplicas
from tfmultigpu.steps.features.micro_batches import MicroBatches
from tfmultigpu.steps.other_states import Touched
from tfmultigpu.steps.values import Trace
from tfmultigpu.strategies.row_lists import is_list, values_of
from tfmultigpu.types import Nested, Shard, Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class TracedGradient:
    """A gradient in the trace.

    Attributes:
        target: The variable that it is for.
        size: Its bytes, as it is added; of a list of rows 0 if their number is open.
        is_rows: Whether it stays a list of rows until the update.
    """

    target: Target
    size: int
    is_rows: bool


@dataclasses.dataclass(frozen=True, eq=False)
class OneDeviceTrace:
    """What a device computes for its rows, without an update.

    Attributes:
        function: The concrete function, whose outputs are there at the end.
        gradients: The gradients, of the variables that have one.
        touched: What it reads, and what code of the user assigns in it.
    """

    function: Any
    gradients: tuple[TracedGradient, ...]
    touched: Touched

    def copies(self, strategy: tf.distribute.Strategy) -> list[tf.Variable]:
        """Returns all copies of the variables that it uses, known to Keras or not."""
        copies: list[tf.Variable] = []
        for variable in self.touched.variables:
            whole = _compat.variable_of_handle(variable.handle) or variable
            copies += strategy.experimental_local_results(whole)
        return copies


def trace_one_device(
    step: TrainStep | ChainedStep, batch: Shard, rows: int
) -> list[OneDeviceTrace]:
    """Traces what a device computes for rows at one time: a micro-batch, if there are some.

    Args:
        step: The step, whose models are built.
        batch: A batch of tensors like these rows.
        rows: How many there are.

    Returns:
        A trace of each train step.
    """
    spec = _spec_of_rows(batch, rows)
    return [_trace(part, spec) for part in step.train_steps]


def _trace(step: TrainStep, spec: Nested) -> OneDeviceTrace:
    twin = step.on_one_device()
    features = [
        feature
        for feature in twin.features
        if not isinstance(feature, (MicroBatches, LogicalReplicas))
    ]
    twin = twin.with_features(features)
    gradients: list[TracedGradient] = []
    touched = Touched()

    def look(batch: Shard) -> list[Tensor]:
        strategy = twin.strategy
        with sharing_seeds(step.strategy), touched.noting():
            shards = shards_of(strategy, *cut_batch(strategy, batch))
            tally, passes, gradient = twin.look(shards, Trace())
        kept = dict(zip(map(id, gradient.variables), gradient.tensors, strict=True))
        for number, target in enumerate(step.trained):
            parts = [of_target[number] for of_target in passes[0].gradients]
            parts = [part for part in parts if part is not None]
            last = kept.get(id(target.variable))
            if last is not None:
                size = sum(map(_bytes, parts)) or _bytes(last)
                gradients.append(TracedGradient(target, size, is_list(last)))
        return [tally.sums, *gradient.tensors]

    traced: Any = tf.function(look, autograph=False)
    return OneDeviceTrace(traced.get_concrete_function(spec), tuple(gradients), touched)


def _spec_of_rows(batch: Shard, rows: int) -> Nested:
    """Returns the type specs of a batch of so many rows; all open if some are ragged or sparse."""
    of_any_rows = tf.nest.map_structure(any_rows, batch)
    if not all(isinstance(each, tf.TensorSpec) for each in tf.nest.flatten(of_any_rows)):
        return of_any_rows

    def spec(leaf: Tensor) -> Any:
        of_any = any_rows(leaf)
        if isinstance(of_any, tf.TensorSpec):
            return tf.TensorSpec([rows, *of_any.shape[1:]], of_any.dtype)
        return of_any

    return tf.nest.map_structure(spec, batch)


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, or of a list of rows with their numbers; 0 if it is open."""
    values = values_of(tensor)
    size = (values.shape.num_elements() or 0) * values.dtype.size
    if is_list(tensor):
        size += (tensor.indices.shape.num_elements() or 0) * tensor.indices.dtype.size
    return int(size)
