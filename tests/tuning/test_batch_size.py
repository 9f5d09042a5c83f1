"""The largest batch that fits: found exactly, in few tries, and without keeping what failed."""

from __future__ import annotations

import resource
import weakref
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from law.processes import pool

import tfmultigpu as tmg
from tfmultigpu.addons.tuning.batch_size import _ran_out_of_memory


def test_without_a_limit_it_ends_somewhere() -> None:
    assert tmg.find_batch_size(lambda size: None) == 2**24


@pytest.mark.parametrize("fits", [1, 37, 512, 767, 768, 769, 1000])
def test_a_plan_begins_near_the_answer_and_is_never_passed(fits: int) -> None:
    tried: list[int] = []

    def try_batch(size: int) -> None:
        tried.append(size)
        if size > fits:
            raise MemoryError

    plan = tmg.tuning.Plan("a step", 8, 8, (), (), most_rows=1024)
    assert tmg.find_batch_size(try_batch, limit=plan) == fits
    assert tried[0] == 768
    assert max(tried) <= 1024
    assert len(tried) <= 12
    unknown = tmg.tuning.Plan("a step", 8, 8, (), ())
    tried.clear()
    assert tmg.find_batch_size(try_batch, limit=unknown) == fits
    assert tried[0] == 32


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (np.exceptions.AxisError("axis"), False),
        (tf.errors.ResourceExhaustedError(None, None, "OOM when allocating"), True),
        (tmg.OutOfMemoryError("no memory"), True),
        (tf.errors.InternalError(None, None, "CUDA_ERROR_OUT_OF_MEMORY: out of memory"), True),
        (tf.errors.InternalError(None, None, "Failed to allocate 3 bytes"), True),
        (tf.errors.InternalError(None, None, "Dst tensor is not initialized."), True),
        (tf.errors.InternalError(None, None, "something else"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_means_that_memory_ran_out(error: BaseException, expected: bool) -> None:
    assert _ran_out_of_memory(error) is expected


@pytest.mark.parametrize("option", ["start", "limit"])
def test_sizes_that_make_no_sense(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be a whole number, at least 1"):
        tmg.find_batch_size(lambda size: None, **{option: 0})


def test_what_a_failed_try_held_is_freed() -> None:
    held: list[weakref.ref] = []

    def try_batch(size: int) -> None:
        assert not any(ref() is not None for ref in held), "the try before is still held"
        tensor = tf.zeros([size])
        array = np.zeros(size)
        held.append(weakref.ref(array))
        assert tensor.shape[0] == size
        if size > 5:
            raise MemoryError(array, tensor)

    assert tmg.find_batch_size(try_batch) == 5
    assert len(held) > 3


def allocate() -> None:
    """Finds batches in a process whose memory is bounded."""
    mib = 1024**2

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32)])
    def step(rows: tf.Tensor) -> tf.Tensor:
        return tf.reduce_max(tf.fill([rows, mib // 4], tf.random.uniform([], 1, 2)) + 1.0)

    float(step(1))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 240 * mib, resource.RLIM_INFINITY))
    sizes: list[int] = []

    def try_batch(rows: int) -> None:
        sizes.append(rows)
        batch = np.ones((rows, mib), np.uint8)  # One row is one MiB.
        assert int(batch[-1].sum()) == mib

    largest = tmg.find_batch_size(try_batch, start=16)
    # Threads of TensorFlow take some of the room meanwhile.
    assert 64 <= largest <= 240
    assert max(sizes) > 240 or largest + 1 in sizes
    tried: list[int] = []

    # What TensorFlow itself asks for in vain, and frees: the next try has all the room again.
    def try_step(rows: int) -> None:
        tried.append(rows)
        assert float(step(rows)) > 0

    largest = tmg.find_batch_size(try_step, start=16)
    assert 32 <= largest <= 240
    assert largest + 1 in tried


@pytest.mark.slow
def test_a_real_allocation() -> None:
    worker = pool().start()
    worker.call(allocate)
    worker.end()
