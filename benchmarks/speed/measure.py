"""One workload on so many replicas: all contenders in one process, taking turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from speed.contenders import STEPS_PER_CALL, Contender
from speed.workloads import WORKLOADS, Workload

__all__ = ["TOLERANCE", "WARM_UP_STEPS", "measure", "take_turns", "virtual_cpus"]

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
        the warm-up; ``"seconds_to_warm_up"``: tracing included; ``"errors"``: what contenders
        said that could not train; they are in none of the others.
    """
    workload = WORKLOADS[workload_name]
    virtual_cpus(replicas)
    losses, weights, warm_up, errors = {}, {}, {}, {}
    contenders = []
    for contender in _contenders(workload, replicas):
        began = time.perf_counter()
        try:
            contender.train(WARM_UP_STEPS)
        except Exception as error:  # Whatever it is, it is what the record says of it.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            errors[contender.name] = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
            continue
        warm_up[contender.name] = round(time.perf_counter() - began, 2)
        losses[contender.name] = _loss(contender.model, workload)
        weights[contender.name] = _weights(contender.model)
        contenders.append(contender)
    milliseconds, processor = take_turns(contenders, rounds, steps)
    reference = weights[contenders[0].name]
    return {
        "workload": workload_name,
        "replicas": replicas,
        "rounds": rounds,
        "steps": steps,
        "milliseconds": milliseconds,
        "processor_milliseconds": processor,
        "losses": losses,
        "loss_before": _loss(workload.model(), workload),
        "weights_off": {
            name: float(np.abs(theirs - reference).max()) for name, theirs in weights.items()
        },
        "seconds_to_warm_up": warm_up,
        "errors": errors,
    }


def virtual_cpus(count: int) -> list[str]:
    """Makes the CPU of this process several logical devices, and returns their names."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )
    return [f"CPU:{i}" for i in range(count)]


def take_turns(
    contenders: list[Contender], rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns for each contender the milliseconds of a step, wall and processor, of each round."""
    _UNTIL_THE_PROCESS_ENDS.append(contenders)
    milliseconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    processor: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        # Nobody always runs after the same neighbour.
        first = turn * len(contenders) // rounds
        for contender in contenders[first:] + contenders[:first]:
            many = steps * contender.longer
            gc.collect()
            gc.disable()
            began = time.process_time()
            milliseconds[contender.name].append(round(contender.train(many) * 1e3, 4))
            spent = (time.process_time() - began) / many
            processor[contender.name].append(round(spent * 1e3, 4))
            gc.enable()
    return milliseconds, processor


def _contenders(workload: Workload, replicas: int) -> Iterator[Contender]:
    import tensorflow as tf

    from speed import by_hand, ours

    devices = [f"CPU:{i}" for i in range(replicas)]
    mirrored = tf.distribute.MirroredStrategy(devices)
    default = ours.default_strategy(devices)
    yield from by_hand.on_one_device(workload)
    yield from by_hand.under_strategy("hand", workload, mirrored)
    if workload.thorough:
        reducing = tf.distribute.MirroredStrategy(
            devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
        yield from by_hand.under_strategy("hand_one_device_reduction", workload, reducing)
    yield from ours.with_library("ours", workload, default)
    yield ours.fit(workload, default)
    # Last: after an error in it the collectives of the process may not work any more.
    yield by_hand.fit(workload, mirrored)
    if workload.thorough:
        yield by_hand.fit(workload, mirrored, endless=True)


def _weights(model: Any) -> np.ndarray:
    return np.concatenate([weight.numpy().ravel() for weight in model.trainable_variables])


def _loss(model: Any, workload: Workload) -> float:
    import tensorflow as tf

    examples, labels = workload.arrays()
    logits = model(examples[:256], training=False)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels[:256], logits)
    return float(tf.reduce_mean(losses))
