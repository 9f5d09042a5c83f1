"""One workload on so many replicas: all contenders in one process, taking turns."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from speed.contenders import STEPS_PER_CALL, Contender
from speed.workloads import WORKLOADS, Workload

__all__ = ["TOLERANCE", "WARM_UP_STEPS", "measure"]

_UNTIL_THE_PROCESS_ENDS: list[Any] = []  # TensorFlow's iterators are slow to let go of

WARM_UP_STEPS = 2 * STEPS_PER_CALL
TOLERANCE = 1e-4


def measure(workload_name: str, replicas: int, rounds: int, steps: int) -> dict[str, Any]:
    """Times every contender and checks that all of them trained the same model.

    Call it in a new process: the number of virtual devices of a process cannot change.

    Args:
        workload_name: A key of ``WORKLOADS``.
        replicas: Virtual CPUs to make, and replicas of each strategy.
        rounds: How often each contender has its turn.
        steps: Steps of a turn, a multiple of ``STEPS_PER_CALL``.

    Returns:
        ``"milliseconds"``: per contender the time of a step in each round;
        ``"processor_milliseconds"``: the same in processor time of all threads, which other
        programs on the machine disturb less (for ``fit`` with its set-up); ``"losses"``: per
        contender the loss after the warm-up; ``"loss_before"``: the loss of an untrained model;
        ``"weights_off"``: per contender the largest difference of a weight from one device's after
        the warm-up; ``"seconds_to_warm_up"``: tracing included.
    """
    workload = WORKLOADS[workload_name]
    contenders = _contenders(workload, replicas)
    _UNTIL_THE_PROCESS_ENDS.append(contenders)
    losses, weights, warm_up = {}, {}, {}
    for contender in contenders:
        began = time.perf_counter()
        contender.train(WARM_UP_STEPS)
        warm_up[contender.name] = time.perf_counter() - began
        losses[contender.name] = _loss(contender.model, workload)
        weights[contender.name] = _weights(contender.model)
    milliseconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    processor: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        # Nobody always runs after the same neighbour.
        first = turn * len(contenders) // rounds
        for contender in contenders[first:] + contenders[:first]:
            gc.collect()
            gc.disable()
            began = time.process_time()
            milliseconds[contender.name].append(round(contender.train(steps) * 1e3, 4))
            spent = (time.process_time() - began) / steps
            processor[contender.name].append(round(spent * 1e3, 4))
            gc.enable()
    return {
        "workload": workload_name,
        "replicas": replicas,
        "steps": steps,
        "milliseconds": milliseconds,
        "processor_milliseconds": processor,
        "losses": losses,
        "loss_before": _loss(workload.model(), workload),
        "weights_off": {
            name: float(np.abs(theirs - weights[contenders[0].name]).max())
            for name, theirs in weights.items()
        },
        "seconds_to_warm_up": warm_up,
    }


def _contenders(workload: Workload, replicas: int) -> list[Contender]:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
    )
    from speed import by_hand, ours

    devices = [f"CPU:{i}" for i in range(replicas)]
    mirrored = tf.distribute.MirroredStrategy(devices)
    reducing = tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    return [
        *by_hand.on_one_device(workload),
        *by_hand.under_strategy("hand", workload, mirrored),
        *by_hand.under_strategy("hand_one_device_reduction", workload, reducing),
        by_hand.fit(workload, mirrored),
        *ours.with_library("ours", workload, ours.default_strategy(devices)),
        *ours.with_library("ours_mirrored", workload, mirrored),
    ]


def _weights(model: Any) -> np.ndarray:
    return np.concatenate([weight.numpy().ravel() for weight in model.trainable_variables])


def _loss(model: Any, workload: Workload) -> float:
    import tensorflow as tf

    examples, labels = workload.arrays()
    logits = model(examples[:256], training=False)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels[:256], logits)
    return float(tf.reduce_mean(losses))
