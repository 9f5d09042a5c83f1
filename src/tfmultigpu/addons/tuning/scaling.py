"""``measure_scaling``: speedup over the number of replicas, and the cause of the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.tuning.step_profile import StepProfile, profile_step
from tfmultigpu.arguments import check_count
from tfmultigpu.devices import list_logical_devices, logical_to_physical
from tfmultigpu.devices.names import listed
from tfmultigpu.errors import DeviceNotFoundError
from tfmultigpu.strategies.factory import create_strategy

__all__ = ["Scaling", "ScalingPoint", "measure_scaling"]

_HEADER = (
    "replicas",
    "examples/step",
    "ms/step",
    "examples/s",
    "speedup",
    "efficiency",
    "lost to",
)

_EFFICIENT = 0.9
_CAUSES = {
    "input": "the input pipeline, which is no faster for more devices",
    "forward and backward": "the replicas, which slow each other down",
    "all-reduce": "the all-reduce of the gradients",
    "update": "the update, which every replica computes",
    "call": "calling the step, which costs more with each replica",
}

_BUILD_STEP = "build_step must be a function: build_step(strategy) -> (step, data)."


@dataclass(frozen=True)
class ScalingPoint:
    """The speed of a number of replicas.

    Attributes:
        replicas: Number of replicas.
        profile: The profile of their step.
        throughput: Examples per second of whole steps.
        speedup: The throughput divided by that of the first point.
        efficiency: The speedup divided by the ideal speedup.
        cause: The part of a step that loses the most; empty if the loss is small.
    """

    replicas: int
    profile: StepProfile
    throughput: float
    speedup: float
    efficiency: float
    cause: str


@dataclass(frozen=True)
class Scaling:
    """The result of ``measure_scaling``; prints as a table.

    Attributes:
        points: One for each number of replicas.
        note: A limitation of these numbers; empty if there is none.
    """

    points: tuple[ScalingPoint, ...]
    note: str = ""

    def __str__(self) -> str:
        """Formats a table of throughput, speedup, efficiency, and the cause of the loss."""
        lines = [_line(_HEADER), *map(_format_point, self.points)]
        return "\n".join([*lines, f"note: {self.note}"] if self.note else lines)


def measure_scaling(
    build_step: Callable[[tf.distribute.Strategy], tuple[Any, Iterable[Any]]],
    replicas: Sequence[int] = (1, 2, 4),
    *,
    steps: int = 20,
) -> Scaling:
    """Measures throughput and efficiency for growing numbers of replicas.

    Creates a strategy for each number over the first devices (GPUs if there are any, otherwise
    logical CPUs), and profiles its step with ``profile_step``. For weak scaling let the global
    batch grow with ``strategy.num_replicas_in_sync``; for strong scaling keep it.

    Args:
        build_step: ``build_step(strategy) -> (step, data)``: makes model and optimizer in the
            scope, the train step and the distributed dataset.
        replicas: Growing numbers of replicas; the first is the baseline.
        steps: Timed steps for each number.

    Returns:
        The table; ``print`` it.

    Raises:
        DeviceNotFoundError: There are fewer devices than replicas.
        TypeError: ``build_step`` is not a function, or does not return a step and data.
        ValueError: ``replicas`` are not growing whole numbers from 1 on.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> def build_step(strategy):
        ...     with strategy.scope():
        ...         model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...         optimizer = keras.optimizers.SGD(0.1)
        ...     step = tmg.make_train_step(model, optimizer, "mse", strategy)
        ...     arrays = np.ones((16, 3)), np.ones((16, 1))
        ...     return step, tmg.distribute_dataset(arrays, strategy, batch_size=8)
        >>> scaling = tmg.tuning.measure_scaling(build_step, replicas=(1,), steps=2)
        >>> scaling.points[0].efficiency
        1.0
    """
    if not callable(build_step):
        raise TypeError(f"{_BUILD_STEP} Received: build_step={build_step!r}.")
    check_count("steps", steps)
    counts: list[Any] = list(replicas) if isinstance(replicas, Iterable) else []
    counts = [check_count("replicas", one) for one in counts]
    if not counts or not all(a < b for a, b in itertools.pairwise(counts)):
        given = tuple(counts) if counts else replicas
        raise ValueError(
            "replicas must be whole numbers that grow, from 1 on, such as (1, 2, 4). Received: "
            f"replicas={given!r}."
        )
    names = list_logical_devices("GPU") or list_logical_devices("CPU")
    if counts[-1] > len(names):
        usable = tuple(count for count in counts if count <= len(names))
        raise DeviceNotFoundError(
            f"Asked for {counts[-1]} replicas, but only {len(names)} device(s) exist: "
            f"{listed(names)}. Write replicas={usable!r}. Or split the CPU before TensorFlow "
            "starts, which shows no speedup: "
            f'tmg.split_device("CPU:0", parts={counts[-1]}).'
        )
    profiles = []
    for count in counts:
        built = build_step(create_strategy(devices=list(names[:count])))
        if not isinstance(built, tuple) or len(built) != 2:
            raise TypeError(f"{_BUILD_STEP} It returned {type(built).__name__}.")
        profiles.append(profile_step(*built, steps))
    owners = {logical_to_physical()[name] for name in names[: counts[-1]]}
    note = ""
    if len(owners) < counts[-1]:
        note = (
            f"{counts[-1]} replicas share {len(owners)} physical device(s), "
            f"{listed(sorted(owners))}: this shows the cost of a step's parts, not the speed of "
            "more devices."
        )
    return Scaling(compare(counts, profiles), note)


def _format_point(point: ScalingPoint) -> str:
    profile = point.profile
    return _line(
        (
            f"{point.replicas}",
            f"{profile.rows:g}",
            f"{1e3 * profile.seconds:.2f}",
            f"{point.throughput:.0f}",
            f"{point.speedup:.2f}",
            f"{point.efficiency:.0%}",
            point.cause or "nothing significant",
        )
    )


def _line(cells: Sequence[str]) -> str:
    *numbers, last = cells
    wide = zip(_HEADER, numbers, strict=False)
    return "  ".join([*(f"{one:>{max(7, len(name))}}" for name, one in wide), last])


def compare(replicas: Sequence[int], profiles: Sequence[StepProfile]) -> tuple[ScalingPoint, ...]:
    """Compares each profile with the first; pure."""
    points = []
    first = profiles[0]
    base = first.rows / first.seconds
    for count, profile in zip(replicas, profiles, strict=True):
        throughput = profile.rows / profile.seconds
        times = count / replicas[0]
        efficiency = throughput / base / times
        # Ideally n times the replicas take 1/n of the time for the same examples, in every part.
        work = profile.rows / first.rows / times
        lost = {name: part - first.parts[name] * work for name, part in profile.parts.items()}
        worst = max(lost, key=lost.__getitem__)
        cause = "" if efficiency >= _EFFICIENT or lost[worst] <= 0 else _CAUSES[worst]
        points.append(
            ScalingPoint(count, profile, throughput, throughput / base, efficiency, cause)
        )
    return tuple(points)
