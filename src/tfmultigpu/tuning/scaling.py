"""``measure_scaling``: how much faster more replicas are, and what the rest is lost to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.devices.configure import list_logical_devices, logical_to_physical
from tfmultigpu.devices.names import listed
from tfmultigpu.errors import DeviceNotFoundError
from tfmultigpu.strategies.factory import create_strategy
from tfmultigpu.tuning.drawings import draw_curve
from tfmultigpu.tuning.step_profile import StepProfile, check_steps, profile_step

__all__ = ["Scaling", "ScalingPoint", "measure_scaling"]

_WELL = 0.9
_CAUSES = {
    "input": "the input pipeline, which does not make batches faster for more devices",
    "forward and backward": "the replicas, which hold each other up",
    "all-reduce": "adding the gradients over the replicas",
    "update": "the update, which every replica computes whole",
    "call": "calling the step, which costs more for each replica",
}


_BUILDS = "build_step is a function: build_step(strategy) -> (step, data)."


@dataclass(frozen=True)
class ScalingPoint:
    """What so many replicas do.

    Attributes:
        replicas: How many.
        profile: Where the time of a step goes.
        throughput: Rows per second of whole steps.
        speedup: That, divided by the first point's.
        efficiency: The speedup divided by how many times as many replicas there are.
        cause: What most of the loss goes to; empty where there is none to speak of.
    """

    replicas: int
    profile: StepProfile
    throughput: float
    speedup: float
    efficiency: float
    cause: str


@dataclass(frozen=True)
class Scaling:
    """What ``measure_scaling`` returns; ``print`` it.

    Attributes:
        points: One for each number of replicas.
        note: What to know about these numbers; empty if nothing.
    """

    points: tuple[ScalingPoint, ...]
    note: str = ""

    def __str__(self) -> str:
        """A table: throughput, speedup, efficiency, and where the rest goes."""
        lines = ["replicas  rows/step  ms/step      rows/s  speedup  efficiency  lost to"]
        for point in self.points:
            profile = point.profile
            lines.append(
                f"{point.replicas:>8}  {profile.rows:>9g}  {1e3 * profile.seconds:>7.2f}  "
                f"{point.throughput:>10.0f}  {point.speedup:>7.2f}  {point.efficiency:>10.0%}  "
                f"{point.cause or 'nothing to speak of'}"
            )
        return "\n".join([*lines, f"note: {self.note}"] if self.note else lines)

    def as_svg(self) -> str:
        """Returns speedup against replicas as a picture, an SVG document."""
        first = self.points[0].replicas
        measured = [(float(one.replicas), one.speedup) for one in self.points]
        ideal = [(x, x / first) for x, _ in measured]
        return draw_curve("speedup over replicas (dashed: ideal)", measured, ideal)

    def save_svg(self, path: str | Path) -> None:
        """Writes the picture to a file."""
        Path(path).write_text(self.as_svg(), encoding="utf-8")


def measure_scaling(
    build_step: Callable[[tf.distribute.Strategy], tuple[Any, Iterable[Any]]],
    replicas: Sequence[int] = (1, 2, 4),
    *,
    steps: int = 20,
) -> Scaling:
    """Measure throughput and efficiency for growing numbers of replicas, and what is lost to what.

    For each number a strategy is created over the first so many devices (GPUs where there are any,
    logical CPUs otherwise), and its step is profiled as by ``profile_step``. Let the batch grow
    with ``strategy.num_replicas_in_sync`` to see what more devices do for larger batches; keep it
    to see whether the same training ends sooner.

    Args:
        build_step: ``build_step(strategy) -> (step, data)``: makes model and optimizer in the
            scope, the train step and the distributed dataset.
        replicas: How many, in growing order; the first is what the others are compared to.
        steps: Timed steps for each.

    Returns:
        The table; ``print`` it, or ``save_svg`` the curve.

    Raises:
        DeviceNotFoundError: There are fewer devices than replicas asked for.
        TypeError: ``build_step`` is no function, or does not return a step and data.
        ValueError: ``replicas`` are not growing whole numbers from 1.

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
        raise TypeError(f"{_BUILDS} Received: build_step={build_step!r}.")
    check_steps(steps)
    counts: list[Any] = list(replicas) if isinstance(replicas, Iterable) else []
    counts = [check_count("replicas", one) for one in counts]
    if not counts or not all(a < b for a, b in itertools.pairwise(counts)):
        given = tuple(counts) if counts else replicas
        raise ValueError(
            "replicas are whole numbers that grow, from 1 on, such as (1, 2, 4). Received: "
            f"replicas={given!r}."
        )
    names = list_logical_devices("GPU") or list_logical_devices("CPU")
    if counts[-1] > len(names):
        usable = tuple(count for count in counts if count <= len(names))
        raise DeviceNotFoundError(
            f"Asked for {counts[-1]} replicas, and {len(names)} device(s) are here: "
            f"{listed(names)}. Write replicas={usable!r}; or, to try it without the speed, split "
            "the CPU before TensorFlow starts: "
            f'tmg.split_device("CPU:0", parts={counts[-1]}).'
        )
    profiles = []
    for count in counts:
        built = build_step(create_strategy(devices=list(names[:count])))
        if not isinstance(built, tuple) or len(built) != 2:
            raise TypeError(f"{_BUILDS} It returned {type(built).__name__}.")
        profiles.append(profile_step(*built, steps))
    owners = {logical_to_physical()[name] for name in names[: counts[-1]]}
    note = ""
    if len(owners) < counts[-1]:
        note = (
            f"{counts[-1]} replicas share {len(owners)} physical device(s), "
            f"{listed(sorted(owners))}: this shows what the parts of a step cost, not how fast "
            "more devices would be."
        )
    return Scaling(compare(counts, profiles), note)


def compare(replicas: Sequence[int], profiles: Sequence[StepProfile]) -> tuple[ScalingPoint, ...]:
    """Hold each profile to the first; pure."""
    points = []
    first = profiles[0]
    base = first.rows / first.seconds
    for count, profile in zip(replicas, profiles, strict=True):
        throughput = profile.rows / profile.seconds
        times = count / replicas[0]
        efficiency = throughput / base / times
        # With n times the replicas, every part of a step over the same rows ought to take 1/n.
        work = profile.rows / first.rows / times
        lost = {name: part - first.parts[name] * work for name, part in profile.parts.items()}
        worst = max(lost, key=lost.__getitem__)
        cause = "" if efficiency >= _WELL or lost[worst] <= 0 else _CAUSES[worst]
        points.append(
            ScalingPoint(count, profile, throughput, throughput / base, efficiency, cause)
        )
    return tuple(points)
