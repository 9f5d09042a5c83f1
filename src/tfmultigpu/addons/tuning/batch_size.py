"""Search for the largest batch that fits into memory."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable

import tensorflow as tf

from tfmultigpu.addons.tuning.memory_plan import Plan
from tfmultigpu.arguments import check_callable, check_count
from tfmultigpu.errors import OutOfMemoryError, TfMultiGpuError
from tfmultigpu.steps.failures import line_on_memory
from tfmultigpu.strategies.worker_exchange import WorkerExchange

_LARGEST = 2**24


def find_batch_size(
    try_batch: Callable[[int], object], *, start: int = 32, limit: int | Plan | None = None
) -> int:
    """Finds the largest batch size that fits: doubles until out of memory, then bisects.

    Frees the memory of a failed try before the next one. Respects ``limit_memory`` and
    ``split_device``. Call it before joining several workers: if one runs out of memory, the others
    wait for it for ever.

    Args:
        try_batch: Runs at least one train step on a batch of that many examples, and waits for its
            result, such as the loss. The step must be the real one: forward, backward and update.
            ``MemoryError`` and TensorFlow's out-of-memory errors say that the batch is too large;
            other errors are raised.
        start: The first size to try, at least 1.
        limit: The largest size to try; None: 2**24. Give one on a CPU, which has no limit. Of
            ``plan_memory(step, batch)`` no size is tried that does not fit for sure, and the first
            one is near the answer, if the memory of a device is known.

    Returns:
        The largest size that ran.

    Raises:
        OutOfMemoryError: A batch of one example does not fit.
        TfMultiGpuError: Called under several workers.
        TypeError: ``start`` or ``limit`` is not a whole number.
        ValueError: ``start`` or ``limit`` is less than 1.

    Example:
        >>> import tfmultigpu as tmg
        >>> def try_batch(size):
        ...     if size > 100:
        ...         raise MemoryError
        >>> tmg.tuning.find_batch_size(try_batch)
        100
    """
    write = "def try_batch(size), which trains a step on a batch of that many examples."
    check_callable("try_batch", try_batch, "size", write=write)
    start = check_count("start", start)
    problem = ""
    if isinstance(limit, Plan):
        problem, peak, limit = limit.problem, limit.peak, limit.most_rows
        if limit is not None:  # The bound was from a half to all of what a step needs.
            start = max(3 * limit // 4, 1)
        if peak is not None and peak.fits is not None:
            start = max(peak.fits[0], 1)
    elif limit is not None:
        limit = check_count("limit", limit, other="None")
    largest = _LARGEST if limit is None else limit
    strategy = tf.distribute.get_strategy()
    if WorkerExchange(strategy).workers > 1:
        raise TfMultiGpuError(
            "If one of several workers runs out of memory, the others wait for it for ever.",
            f"{strategy.num_replicas_in_sync} replicas of several workers",
            "Call find_batch_size in a separate process, on one machine, before create_strategy.",
        )
    fits, too_large = 0, largest + 1
    size = min(start, largest)
    while too_large - fits > 1:
        if _fits(try_batch, size):
            fits = size
            grown = 2 * size if too_large > largest else (fits + too_large) // 2
            size = min(grown, largest)
        else:
            too_large = size
            size = (fits + too_large) // 2
    if fits == 0:
        raise OutOfMemoryError(
            "A batch of one example does not fit into memory.",
            problem.rstrip(".") or f"limit={limit}",
            "Make the model smaller, train it in float16 or bfloat16 (keras.mixed_precision), or "
            "put it on several devices.",
        )
    return fits


def _ran_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception says so; XLA and cuDNN say it in the message."""
    if isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError)):
        return True
    kinds = (tf.errors.InternalError, tf.errors.UnknownError, tf.errors.AbortedError)
    return isinstance(error, kinds) and line_on_memory(error.message) is not None


def _fits(try_batch: Callable[[int], object], size: int) -> bool:
    try:
        try_batch(size)
    except Exception as error:
        if not _ran_out_of_memory(error):
            raise
        # The frames of the error keep tensors alive.
        link: BaseException | None = error
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
    else:
        return True
    gc.collect()
    return False
