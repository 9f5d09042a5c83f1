"""Memory: growth, limits, running out, the largest batch, micro-batches.

What is measured and what is judged are apart, so that the judgement can be held to numbers that no
machine at hand gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from gpu_checks.place import GIB, Place, used_memory

# A CUDA context with the kernels of TensorFlow, cuBLAS and cuDNN; no tensor of ours.
CONTEXT = 3 * GIB
WIDTH, LAYERS = 4096, 6


def growth(place: Place) -> dict[str, Any]:
    """TensorFlow takes little at the start, and what a tensor needs when it is made."""
    place.need_gpu("a CPU has no memory that TensorFlow takes at the start")
    with tf.device("GPU:0"):
        _wait(tf.zeros([]))
        started = used_memory()
        tensor = tf.ones([4, GIB // 4], tf.float32)  # 4 GiB
        _wait(tensor)
        filled = used_memory()
    facts = {"before": place.used_before, "started": started, "with_4_gib": filled}
    judge_growth(place.used_before, started, filled, 4 * GIB)
    return facts


def judge_growth(before: int, started: int, filled: int, tensor: int) -> None:
    """Raises AssertionError where memory was not taken as it was needed."""
    taken = started - before
    assert taken <= CONTEXT, f"{taken} bytes taken at the start, {CONTEXT} are allowed"
    grew = filled - started
    # The allocator takes regions that double in size, so at most twice what is asked for.
    assert 0.9 * tensor <= grew <= 2.2 * tensor, f"{grew} bytes more for a tensor of {tensor}"


def limit(place: Place) -> dict[str, Any]:
    """Half of the limit can be had, more than the limit cannot, and the driver sees no more."""
    place.need_gpu("TensorFlow cannot limit the memory of a CPU")
    (allowed,) = place.limits
    refused = False
    with tf.device("GPU:0"):
        half = tf.ones([allowed // 8], tf.float32)
        _wait(half)
        used = used_memory()
        try:
            _wait(tf.ones([3 * allowed // 8], tf.float32))  # half again as much as the limit
        except tf.errors.ResourceExhaustedError:
            refused = True
    after = used_memory()
    judge_limit(place.used_before, used, after, allowed, refused)
    return {"before": place.used_before, "with_half": used, "after_refusal": after}


def judge_limit(before: int, used: int, after: int, allowed: int, refused: bool) -> None:
    """Raises AssertionError where the limit did not hold."""
    assert refused, f"a tensor larger than the limit of {allowed} bytes was made"
    for taken in (used - before, after - before):
        assert taken <= allowed + CONTEXT, f"{taken} bytes taken, the limit is {allowed}"
    assert used - before >= 0.45 * allowed, f"{used - before} bytes taken for half of {allowed}"


def largest_batch(place: Place) -> dict[str, Any]:
    """``find_batch_size`` finds a batch that fits, a quarter more does not, training goes on.

    Sizes are counted in units of many rows, for few tries: TensorFlow may wait ten seconds before
    it gives up on an allocation.
    """
    unit = 4 if place.rehearsal else 2000
    strategy, step = _hungry_step(place, rows_that_fit=5 * unit)
    before = [variable.numpy() for variable in step.model.variables]

    def try_batch(units: int) -> None:
        float(step(_rows(units * unit, place))["loss"])

    found = tmg.find_batch_size(try_batch, start=2, limit=64)
    assert found < 64, "the memory did not run out, so this shows nothing: raise the rows"
    try_batch(found)
    more = found + max(1, found // 4)
    try:
        try_batch(more)
    except tmg.OutOfMemoryError as error:
        said = str(error)
    else:
        raise AssertionError(f"{found * unit} rows are the largest batch, but {more * unit} fit")
    assert "not enough memory for this step" in said, said
    changed = [
        bool(np.any(variable.numpy() != value))
        for variable, value in zip(step.model.variables, before, strict=True)
    ]
    assert any(changed), "no step trained"
    try_batch(found)  # after running out of memory
    return {"rows": found * unit, "replicas": strategy.num_replicas_in_sync}


def out_of_memory_report(place: Place) -> dict[str, Any]:
    """With equal shares the smallest part runs out and is named; nothing was trained."""
    parts = len(place.devices)
    smallest = int(np.argmin(place.limits))
    # Activations take LAYERS * WIDTH floats a row, and while gradients are computed a third more:
    # too many by half for the smallest part, and two thirds of a part three times as large.
    rows = int(1.5 * min(place.limits) / (4 * WIDTH * LAYERS)) * parts
    strategy, step = _hungry_step(place, rows_that_fit=6)
    float(step(_rows(2 * parts, place))["loss"])
    iterations = int(step.optimizer.iterations.numpy())
    before = [variable.numpy() for variable in step.model.variables]
    if place.rehearsal:
        equal = tuple(6 + 2 * (i == smallest) for i in range(parts))
        rows = sum(equal)
    else:
        equal = (1,) * parts
    data = tmg.distribute_dataset(
        tf.data.Dataset.from_tensors(_rows(rows, place)), strategy, shares=equal
    )
    try:
        step(next(iter(data)))
    except tmg.OutOfMemoryError as error:
        said = str(error)
    else:
        raise AssertionError(f"{rows} rows in equal shares fit into parts of {place.limits} bytes")
    name = place.devices[smallest]
    expected = f"Replica {smallest} ({name}) has not enough memory for this step."
    assert said.startswith(expected), f"expected {expected!r}, got {said!r}"
    for word in (f"a global batch of {rows} rows", "micro_batches=", "shares=", "find_batch_size"):
        assert word in said, f"{word!r} is missing in {said!r}"
    assert int(step.optimizer.iterations.numpy()) == iterations, "a failed step was counted"
    for variable, value in zip(step.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg="a failed step trained")
    return {"rows": rows, "message": said.splitlines()[0]}


def micro_batches(place: Place) -> dict[str, Any]:
    """Eight micro-batches take at most three tenths of the activations, and give the same step."""
    place.need_gpu("TensorFlow counts the memory of GPUs only")
    rows, peaks, losses = 16384, {}, {}
    for count in (1, 8):
        _, step = _hungry_step(place, micro_batches=count)
        for name, many in (("few", 64), ("many", rows)):
            batch = _rows(many, place)
            step(batch)
            tf.config.experimental.reset_memory_stats("GPU:0")
            losses[f"{count}, {name}"] = float(step(batch)["loss"])
            held = tf.config.experimental.get_memory_info("GPU:0")
            peaks[f"{count}, {name}"] = int(held["peak"])
        del step
    share = judge_micro_batches(peaks)
    gap = abs(losses["1, many"] - losses["8, many"])
    assert gap <= 1e-4 * abs(losses["1, many"]) + 1e-6, f"losses differ by {gap}"
    return {"peaks": peaks, "share_of_activations": share, "losses": losses}


def judge_micro_batches(peaks: dict[str, int], allowed: float = 0.3) -> float:
    """Returns the share of the activations that is left; AssertionError where it is too much."""
    whole = peaks["1, many"] - peaks["1, few"]
    left = peaks["8, many"] - peaks["8, few"]
    assert whole > 0, f"a large batch takes no more memory than a small one: {peaks}"
    share = left / whole
    assert share <= allowed, f"{share:.2f} of the activations with 8 micro-batches, not {allowed}"
    return share


def memory_of_sharded_variables(place: Place) -> dict[str, Any]:
    """Weights of 1 GiB in all take the memory of a GPU once, spread over its parts."""
    place.need_gpu("TensorFlow counts the memory of GPUs only")
    config: Any = tf.config.experimental
    before = [int(config.get_memory_info(one)["current"]) for one in place.devices]
    with (
        place.strategy().scope(),
        tmg.sharded_variables(memory=dict(zip(place.devices, place.limits, strict=True))),
    ):
        # A layer of 64 MiB.
        model = keras.Sequential([keras.Input((WIDTH,)), *map(keras.layers.Dense, [WIDTH] * 16)])
    after = [int(config.get_memory_info(one)["current"]) for one in place.devices]
    size = sum(4 * int(np.prod(one.shape)) for one in model.weights)
    taken = [b - a for a, b in zip(before, after, strict=True)]
    judge_sharded(taken, place.limits, size)
    return {"weights": size, "taken": taken}


def judge_sharded(taken: list[int], limits: Sequence[int], size: int) -> None:
    """Raises AssertionError if devices do not hold their part of the weights, once."""
    assert sum(taken) <= 1.1 * size, f"{sum(taken)} bytes for weights of {size}"
    for i, (used, of) in enumerate(zip(taken, limits, strict=True)):
        part = size * of / sum(limits)
        # One layer more or less, for there are 16.
        assert abs(used - part) <= size / 8, f"{used} bytes on part {i}, its part is {part:.0f}"


def _wait(tensor: Any) -> None:
    float(tf.reshape(tensor, [-1])[0])


class Ceiling(keras.layers.Layer):
    """Stands for the memory of a GPU in a rehearsal: asks for too much when rows are too many."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def call(self, inputs: Any) -> Any:
        many = tf.shape(inputs)[0] > self.rows
        size = tf.where(many, tf.constant(2**50, tf.int64), 1)
        # From a value, so that nothing is known before it is there.
        return inputs + tf.reduce_max(tf.fill([size], tf.reduce_max(inputs) * 0.0))


def _hungry_step(
    place: Place, rows_that_fit: int | None = None, **options: Any
) -> tuple[tf.distribute.Strategy, Any]:
    """A step whose activations are its memory: wide and small in weights."""
    strategy = place.strategy()
    width, layers = (8, 1) if place.rehearsal else (WIDTH, LAYERS)
    with strategy.scope():
        keras.utils.set_random_seed(2)
        stack: list[Any] = [keras.Input((4,))]
        if place.rehearsal:
            stack.append(Ceiling(int(rows_that_fit or 1)))
        for _ in range(layers):
            # A narrow layer between wide ones keeps the weights small beside the activations.
            stack += [keras.layers.Dense(4), keras.layers.Dense(width, "tanh")]
        stack.append(keras.layers.Dense(1))
        model = keras.Sequential(stack)
        optimizer = keras.optimizers.SGD(0.01)
    return strategy, tmg.make_train_step(model, optimizer, "mse", strategy, **options)


def _rows(rows: int, place: Place) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(4).normal(size=(rows, 4)).astype("float32")
    return x, x[:, :1]
