"""Steps that are trained to measure something, and undone afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.addons.tuning.one_device_trace import OneDeviceTrace
from tfmultigpu.errors import DataError
from tfmultigpu.lists import by_id
from tfmultigpu.steps import ChainedStep, TrainStep
from tfmultigpu.strategies.row_parts import copies_of
from tfmultigpu.types import KerasVariable, Shard


def rows_of_whole(name: str, batch: Shard) -> int:
    """Returns the rows of a whole global batch of tensors or arrays.

    Args:
        name: The function that asks.
        batch: What it is given.

    Raises:
        DataError: It is another batch.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if not leaves or not all(len(getattr(leaf, "shape", ())) for leaf in leaves):
        raise DataError(
            "batch must be a whole global batch of arrays or tensors, not yet divided.",
            ", ".join(sorted({type(leaf).__name__ for leaf in leaves})),
            f"Write {name}(step, (x[:256], y[:256])).",
        )
    return int(leaves[0].shape[0])


@contextmanager
def undoing(step: TrainStep | ChainedStep, traces: Sequence[OneDeviceTrace]) -> Iterator[None]:
    """Puts back, at the end, what a step changes, each copy by itself; Python's state excepted.

    Args:
        step: The step.
        traces: Of each of its train steps what one device computes.
    """
    # Replicas may have statistics of their own.
    copies: list[tf.Variable] = []
    with ExitStack() as entered:
        for part, trace in zip(step.train_steps, traces, strict=True):
            for variable in _changed_by(part):
                copies += copies_of(step.strategy, variable)
            copies += trace.copies(step.strategy)
            entered.enter_context(trace.touched.putting_back_tables())
            if any(state.kind == "draws" for state in trace.touched.states):
                # The numbers of tf.random are in the compiled functions, each with its own.
                entered.enter_context(step.runner.programs.apart())
        copies = list(by_id(copies).values())
        before = [copy.numpy() for copy in copies]
        try:
            yield
        finally:
            for copy, value in zip(copies, before, strict=True):
                copy.assign(value)


def _changed_by(step: TrainStep) -> list[KerasVariable]:
    """Returns the variables of Keras that a step may change."""
    changed: list[KerasVariable] = [*step.changed_variables()]
    for metric in step.metrics:
        changed += metric.variables
    seeds = _compat.global_seeds()
    if seeds is not None:
        changed.append(seeds.state)
    return changed
