"""``measure_scaling``: speedup over the number of replicas, and the cause of the loss."""

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
from tfmultigpu.html_tables import html_table
from tfmultigpu.strategies.factory import create_strategy
from tfmultigpu.tuning.drawings import draw_curve
from tfmultigpu.tuning.step_profile import StepProfile, profile_step

__all__ = ["Scaling", "ScalingPoint", "measure_scaling"]

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
        lines = ["replicas  examples/step  ms/step  examples/s  speedup  efficiency  lost to"]
        for point in self.points:
            profile = point.profile
            lines.append(
                f"{point.replicas:>8}  {profile.rows:>13g}  {1e3 * profile.seconds:>7.2f}  "
                f"{point.throughput:>10.0f}  {point.speedup:>7.2f}  {point.efficiency:>10.0%}  "
                f"{point.cause or 'nothing significant'}"
            )
        return "\n".join([*lines, f"note: {self.note}"] if self.note else lines)

    def _repr_html_(self) -> str:
        """Returns the table, for a notebook."""
        header = (
            "replicas",
            "examples/step",
            "ms/step",
            "examples/s",
            "speedup",
            "efficiency",
            "lost to",
        )
        rows = [
            (
                one.replicas,
                f"{one.profile.rows:g}",
                f"{1e3 * one.profile.seconds:.2f}",
                f"{one.throughput:.0f}",
                f"{one.speedup:.2f}",
                f"{one.efficiency:.0%}",
                one.cause or "nothing significant",
            )
            for one in self.points
        ]
        notes = [f"note: {self.note}"] if self.note else []
        return html_table("Scaling", rows, header=header, notes=notes)

    def as_svg(self) -> str:
        """Returns a curve of speedup over replicas, as an SVG document."""
        first = self.points[0].replicas
        measured = [(float(one.replicas), one.speedup) for one in self.points]
        ideal = [(x, x / first) for x, _ in measured]
        return draw_curve("speedup over replicas (dashed: ideal)", measured, ideal)

    def save_svg(self, path: str | Path) -> None:
        """Writes the curve to a file."""
        Path(path).write_text(self.as_svg(), encoding="utf-8")


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
        The table; ``print`` it, or ``save_svg`` the curve.

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
