"""The largest batch that fits into memory, found by trying."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.errors import OutOfMemoryError, TfMultiGpuError
from tfmultigpu.steps.failures import line_on_memory
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["find_batch_size"]

_LARGEST = 2**24


def find_batch_size(
    try_batch: Callable[[int], Any],
    *,
    start: int = 32,
    limit: int | None = None,
    out_of_memory: Callable[[BaseException], bool] | None = None,
) -> int:
    """Finds the largest batch size that fits: doubles until out of memory, then bisects.

    What a failed try held is freed before the next one. Search before joining several workers:
    where one worker runs out of memory, the others wait for it for ever. A GPU whose memory
    TensorFlow may not take whole (``limit_memory``, ``split_device``) is searched within its limit.

    Args:
        try_batch: Runs at least one real step on a batch of that many rows, and waits for it (reads
            the loss, say). Its largest moment counts, so the step should be the one that trains:
            forward, backward and update.
        start: The first size to try, at least 1.
        limit: The largest size to try. None: 2 to the 24; on a CPU, whose memory TensorFlow does
            not limit, give one.
        out_of_memory: Whether an exception means that memory ran out. None:
            ``tf.errors.ResourceExhaustedError``, ``MemoryError``, and errors of TensorFlow that
            say so in their message.

    Returns:
        The largest size that ran.

    Raises:
        OutOfMemoryError: Not even one row fits.
        TfMultiGpuError: Called under several workers.
        TypeError: ``try_batch`` is no function, or ``start`` or ``limit`` is not a whole number.
        ValueError: ``start`` or ``limit`` is less than 1.

    Example:
        >>> import tfmultigpu as tmg
        >>> def try_batch(size):
        ...     if size > 100:
        ...         raise MemoryError
        >>> tmg.find_batch_size(try_batch)
        100
    """
    if not callable(try_batch):
        raise TypeError(
            "What is tried is a function of the batch size, which runs one step. Received: "
            f"try_batch={try_batch!r}."
        )
    start = check_count("start", start)
    largest = _LARGEST if limit is None else check_count("limit", limit, other="None")
    strategy = tf.distribute.get_strategy()
    if WorkerExchange(strategy).workers > 1:
        raise TfMultiGpuError(
            "Where one worker runs out of memory the others wait for it for ever, so the size must "
            "be known before. Received: "
            f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas. Call "
            "find_batch_size in a process of its own, on one machine, before create_strategy."
        )
    fits, too_large = 0, largest + 1
    size = min(start, largest)
    while too_large - fits > 1:
        if _fits(try_batch, size, out_of_memory or runs_out_of_memory):
            fits = size
            grown = 2 * size if too_large > largest else (fits + too_large) // 2
            size = min(grown, largest)
        else:
            too_large = size
            size = (fits + too_large) // 2
    if fits == 0:
        raise OutOfMemoryError(
            "Not even a batch of one row fits into memory. Make the model smaller, train it in "
            "float16 or bfloat16 (keras.mixed_precision), or put it on several devices."
        )
    return fits


def runs_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception means that a device or the machine has no memory left.

    XLA and cuDNN report it as an internal error with a text, not as ``ResourceExhaustedError``.

    Args:
        error: Any exception.
    """
    if isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError)):
        return True
    kinds = (tf.errors.InternalError, tf.errors.UnknownError, tf.errors.AbortedError)
    return isinstance(error, kinds) and line_on_memory(error.message) is not None


def _fits(
    try_batch: Callable[[int], Any], size: int, out_of_memory: Callable[[BaseException], bool]
) -> bool:
    try:
        try_batch(size)
    except Exception as error:
        if not out_of_memory(error):
            raise
        # The frames of the error hold the tensors that were too many.
        held: BaseException | None = error
        while held is not None:
            traceback.clear_frames(held.__traceback__)
            held = held.__cause__ or held.__context__
    else:
        return True
    gc.collect()
    return False
