"""Micro-batches without a loop around them, so that the devices of a model compute at one time."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import count_rows, with_dependencies
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps.micro_batches import MicroBatchSum, Part
from tfmultigpu.steps.op_placement import devices_of

__all__ = ["check_pipeline", "pipelined"]


def pipelined(
    strategy: tf.distribute.Strategy,
    addition: MicroBatchSum,
    micro_batches: int,
    at_once: int,
    shard: Any,
    fixed: tuple[Any, ...],
) -> list[Any]:
    """Adds over the micro-batches of the one replica; TensorFlow computes them side by side.

    A micro-batch begins when the gradients of an earlier one have been added, so that not all
    activations are kept.

    Args:
        strategy: The strategy of the step, of one replica.
        addition: Adds a micro-batch.
        micro_batches: How many there are; with fewer rows the last ones are not counted.
        at_once: How many are computed side by side.
        shard: The batch.
        fixed: Further arguments of a micro-batch.
    """
    run = strategy.run
    begin = run(addition.begin) if addition.states else []
    with tf.device("CPU:0"):
        count = tf.minimum(tf.cast(micro_batches, tf.int64), count_rows(shard))
    sums: list[Any] = [*[0] * len(addition.structure), *begin]
    done: list[Any] = []
    for micro in range(micro_batches):
        with tf.device("CPU:0"):
            part = Part(tf.minimum(tf.constant(micro, tf.int64), count - 1), count)
        given = with_dependencies(done[-at_once] if micro >= at_once else [], shard)
        added = run(addition.add, args=(sums, begin, given, part, *fixed))
        # The first one has rows. One without rows has computed the last rows again.
        if micro:
            pairs = zip(added, sums, strict=True)
            added = [tf.where(micro < count, new, before) for new, before in pairs]
        sums = added
        done.append(sums)
    return sums


def check_pipeline(strategy: tf.distribute.Strategy, options: Any, model: Any) -> None:
    """Checks that there is something that ``pipeline=True`` can overlap.

    Args:
        strategy: The strategy of the step.
        options: The options of the step.
        model: The Keras model.

    Raises:
        TfMultiGpuError: There are several replicas, one micro-batch, or XLA; or all weights are on
            one device.
    """
    if not options.pipeline:
        return
    replicas, counts = strategy.num_replicas_in_sync, options.micro_batches
    if replicas > 1:
        raise TfMultiGpuError(
            "Replicas compute side by side already, each the whole model. Received: pipeline=True "
            f"and {replicas} replicas. Leave pipeline out, or place the layers by hand with one "
            "replica: make_train_step(..., tf.distribute.get_strategy())."
        )
    if counts[0] == 1 or options.jit_compile:
        raise TfMultiGpuError(
            "A pipeline computes several micro-batches side by side, on several devices. Received: "
            f"pipeline=True, micro_batches={counts[0]}, jit_compile={options.jit_compile}. Write "
            "micro_batches=8, and leave jit_compile out."
        )
    devices = devices_of(model)
    if model.built and len(devices) == 1:
        raise TfMultiGpuError(
            "A pipeline needs layers on several devices. Received: pipeline=True, and all weights "
            f"of model {model.name!r} on {devices[0]}. Build each block under its device, outside "
            'of scopes, which place weights themselves: with tf.device("GPU:1"): x = layer(x). '
            "Make the step with tf.distribute.get_strategy()."
        )
