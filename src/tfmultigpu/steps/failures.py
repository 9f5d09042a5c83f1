"""Errors of TensorFlow in a step, translated for the user."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.losses import as_rows_error
from tfmultigpu.data.batch_format import GATHERED, NOT_ALIKE, NOT_EVEN, NOT_ROWS, as_data_error
from tfmultigpu.errors import (
    DataError,
    LossError,
    OutOfMemoryError,
    ScopeError,
    StrategyUnavailableError,
    TfMultiGpuError,
)
from tfmultigpu.strategies.process_state import explaining_lost_workers
from tfmultigpu.strategies.topology import is_one_process, local_replicas
from tfmultigpu.types import Function, Scalar

# How allocators, XLA, cuDNN and a copy to a GPU, the last, say that memory ran out.
_NO_MEMORY = re.compile(
    r"OOM when|out of memory|OUT_OF_MEMORY|failed to allocate|RESOURCE_EXHAUSTED"
    r"|Dst tensor is not initialized",
    re.I,
)


@contextmanager
def explaining_failures(
    strategy: tf.distribute.Strategy, count_rows: Callable[[], Scalar] | None = None
) -> Iterator[None]:
    """Raises what an error of TensorFlow means for the user, where it does not speak for itself."""
    # Of the strategy of one worker alone no call waits for another.
    try:
        with nullcontext() if is_one_process(strategy) else explaining_lost_workers():
            yield
    except (
        tf.errors.ResourceExhaustedError, tf.errors.InvalidArgumentError, tf.errors.InternalError
    ) as error:  # fmt: skip
        if (explained := _explain(error, strategy, count_rows)) is error:
            raise
        raise explained from error
    except TfMultiGpuError as error:
        told = error.__context__  # Keras keeps the first field alone of what a layer raises.
        if isinstance(told, TfMultiGpuError) and told.write not in str(error):
            error.add_note(told.write)
        raise
    except AttributeError as error:
        if "has no attribute 'numpy'" in str(error):
            error.add_note(
                "A step is compiled, also with model.compile(run_eagerly=True), so its tensors "
                "have no values yet. Write tf.print(x), or tf.py_function(function, [x], dtype)."
            )
        raise
    except ValueError as error:
        if "singleton tf.Variables" in str(error):
            raise new_variable(str(error).partition(". ")[0]) from error
        if type(error) is ValueError and "shape" in str(error):  # Of Keras, for a layer's input.
            error.add_note("Of single examples make a batch: dataset.batch(global_batch_size).")
        raise


def line_on_memory(message: str) -> str | None:
    """Returns the line of an error's message that says that memory ran out; None without one."""
    # Not one that names the place in a program: it may be called so.
    for line in message.splitlines():
        if _NO_MEMORY.search(line) and not line.lstrip().startswith("File "):
            return line
    return None


def _explain(
    error: Any, strategy: tf.distribute.Strategy, count_rows: Function | None
) -> Exception:
    """Returns the error for the user; the same one if it speaks for itself."""
    line, exhausted = line_on_memory(error.message), tf.errors.ResourceExhaustedError
    if isinstance(error, exhausted) or (isinstance(error, tf.errors.InternalError) and line):
        return _out_of_memory(line or error.message, strategy, count_rows)
    if GATHERED in error.message and "same size and shape" in error.message:
        return LossError(
            "gather_rows adds the rows of all replicas, so they need one shape.",
            "rows of other shapes on other replicas: to_tensor() makes ragged rows as wide as the "
            "longest on each",
            "Write value.to_tensor(shape=[None, 100]), one width for all.",
        )
    if (of_loss := as_rows_error(error.message)) is not None:
        return of_loss
    if NOT_ALIKE.failed_in(error.message):
        return NOT_ALIKE.as_error(TfMultiGpuError)
    if NOT_EVEN.failed_in(error.message):
        return NOT_EVEN.as_error(DataError, error.message)
    if NOT_ROWS.failed_in(error.message):
        return NOT_ROWS.as_error(LossError, error.message)
    if "is joining a group" in error.message:
        return StrategyUnavailableError(
            "Two strategies over different devices have used TensorFlow's collectives. TensorFlow "
            "then aborts both, and all others that use them, until the process restarts.",
            "",
            "Restart, and make the strategies with tmg.create_strategy(devices=...), which avoids "
            "that.",
        )
    return as_data_error(error)


def _out_of_memory(line: str, strategy: tf.distribute.Strategy, count_rows: Scalar) -> Exception:
    # Of a copy, the device it went to.
    where = device = ["A device", *re.findall(r"device:(\w+:\d+)", line)][-1]
    if strategy.num_replicas_in_sync > 1:
        names = strategy.extended.worker_devices
        for replica, name in zip(local_replicas(strategy), names, strict=False):
            if name.upper().endswith(f":{device}"):
                where = f"Replica {replica} ({device})"
    batch = "" if count_rows is None else f"a global batch of {int(count_rows())} rows; "
    return OutOfMemoryError(
        f"{where} has not enough memory for this step.",
        f"{batch}{line.strip()}",
        "Compute it in parts, with the same result: make_train_step(..., micro_batches=2), or "
        "more; give a smaller device fewer rows: distribute_dataset(..., shares=...); or see what "
        "takes the memory: print(tmg.plan_memory(step, batch)); and find what fits: "
        "tmg.tuning.find_batch_size.",
    )


def new_variable(received: str) -> ScopeError:
    """Returns the error for code of the user that creates a variable in a step."""
    return ScopeError(
        "A variable is created in a step, where each replica and each trace would create another.",
        received,
        "Create it once, before the step: in __init__ of a loss, metric or model, or in build "
        "of a layer, which is made in the scope:\n"
        "    with strategy.scope():\n"
        "        scale = keras.Variable(1.0, trainable=False)",
    )
