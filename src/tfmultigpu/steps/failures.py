"""Errors of TensorFlow in a step, translated for the user."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.loss_sum import OTHER_ROWS
from tfmultigpu.data.batch_format import NOT_ROWS, as_data_error, with_values
from tfmultigpu.errors import DataError, LossError, OutOfMemoryError, StrategyUnavailableError
from tfmultigpu.strategies.process_state import explaining_lost_workers
from tfmultigpu.strategies.topology import local_replicas

OTHER_SHAPES = (
    "The predictions of the replicas have rows of different shapes, so they do not make one tensor."
    " One device would give all rows one length: pad the output to a fixed length, or return a "
    "tf.RaggedTensor."
)
# How allocators, XLA, cuDNN and a copy to a GPU, the last, say that memory ran out.
_NO_MEMORY = re.compile(
    r"OOM when|out of memory|OUT_OF_MEMORY|failed to allocate|RESOURCE_EXHAUSTED"
    r"|Dst tensor is not initialized",
    re.I,
)


@contextmanager
def explaining_failures(
    strategy: tf.distribute.Strategy, count_rows: Callable[[], Any] | None = None
) -> Iterator[None]:
    """Raises what an error of TensorFlow means for the user, where it does not speak for itself."""
    # Of the strategy of one worker alone no call waits for another.
    replicas = strategy.num_replicas_in_sync
    several = replicas > 1 and len(strategy.extended.worker_devices) < replicas
    try:
        with explaining_lost_workers() if several else nullcontext():
            yield
    except tf.errors.ResourceExhaustedError as error:
        raise _out_of_memory(error, strategy, count_rows) from error
    except (tf.errors.InvalidArgumentError, tf.errors.InternalError) as error:
        internal = isinstance(error, tf.errors.InternalError)
        if internal and line_on_memory(error.message) is not None:
            raise _out_of_memory(error, strategy, count_rows) from error
        if (explained := _explain(error)) is None:
            raise
        raise explained from error


def line_on_memory(message: str) -> str | None:
    """Returns the line of an error's message that says that memory ran out; None without one."""
    # Not one that names the place in a program: it may be called so.
    lines = [line for line in message.splitlines() if not line.lstrip().startswith("File ")]
    return next((line for line in lines if _NO_MEMORY.search(line)), None)


def _out_of_memory(error: Any, strategy: tf.distribute.Strategy, count_rows: Any) -> Exception:
    line = line_on_memory(error.message) or error.message
    # Of a copy, the device it went to.
    *_, device = ["A device", *re.findall(r"device:(\w+:\d+)", line)]
    where = device
    if strategy.num_replicas_in_sync > 1:
        names = strategy.extended.worker_devices
        for replica, name in zip(local_replicas(strategy), names, strict=False):
            if name.upper().endswith(f":{device}"):
                where = f"Replica {replica} ({device})"
    batch = "" if count_rows is None else f" a global batch of {int(count_rows())} rows;"
    return OutOfMemoryError(
        f"{where} has not enough memory for this step. Received:{batch} {line.strip()}. Compute it "
        "in parts, with the same result: make_train_step(..., micro_batches=2), or more, or as "
        "many for each replica as it needs: micro_batches=tmg.data.plan_micro_batches(shares, "
        "rows_in_memory); give a smaller device a smaller share: distribute_dataset(..., "
        "shares=...); or see what fits: tmg.find_batch_size."
    )


def _explain(error: Any) -> Exception | None:
    if OTHER_ROWS in error.message:
        return LossError(OTHER_ROWS)
    if OTHER_SHAPES in error.message:
        return DataError(OTHER_SHAPES)
    if NOT_ROWS in error.message:
        return LossError(with_values(NOT_ROWS, error.message))
    if "is joining a group" in error.message:
        return StrategyUnavailableError(
            "Two strategies over different devices have added by TensorFlow's collectives in this "
            "process, which TensorFlow does not allow: it aborts both, and whatever else adds so, "
            "until the process restarts (a default tf.distribute.MirroredStrategy does so on "
            "CPUs). Restart, and make the strategies with tmg.create_strategy(devices=...), which "
            "avoids that."
        )
    explained = as_data_error(error)
    return None if explained is error else explained


@contextmanager
def noting_operations() -> Iterator[list[Any]]:
    """Yields a list that has, at the end, the operations made in the context."""
    made: list[Any] = []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield made
    made += graph.get_operations()[before:]


def effects_of(operations: Sequence[Any]) -> list[Any]:
    """Returns the stateful ones, which TensorFlow runs in any case: they change something or fail.

    Reads of variables, which always succeed, are left out.
    """
    return [one for one in operations if one.op_def.is_stateful and one.type != "ReadVariableOp"]
