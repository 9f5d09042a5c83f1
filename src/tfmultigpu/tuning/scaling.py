"""``measure_scaling``: speedup over the number of replicas, and the cause of the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from tfmultigpu.tuning.cost_model import CostModel, Network, Prediction, fit_costs
from tfmultigpu.tuning.drawings import draw_curve
from tfmultigpu.tuning.step_profile import StepProfile, profile_step

__all__ = ["Scaling", "ScalingPoint", "ScalingPrediction", "measure_scaling"]

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
class ScalingPrediction:
    """The predicted speed of a number of replicas.

    Attributes:
        replicas: Number of replicas of all workers.
        step: The predicted step.
        throughput: Examples per second.
        speedup: The throughput divided by that of the first point, as the model has it.
        efficiency: The speedup divided by the ideal speedup.
        cause: The part of a step that loses the most; empty if the loss is small.
    """

    replicas: int
    step: Prediction
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
        model: The cost model fitted to the points; None if nothing was to be predicted.
        predicted: Its predictions.
    """

    points: tuple[ScalingPoint, ...]
    note: str = ""
    model: CostModel | None = None
    predicted: tuple[ScalingPrediction, ...] = ()

    def __str__(self) -> str:
        """Formats a table of throughput, speedup, efficiency, and the cause of the loss."""
        lines = [_line(_HEADER)]
        lines += [_line(_cells(p, p.profile.rows, p.profile.seconds)) for p in self.points]
        lines += self._of_model()
        lines += [_line(_cells(p, p.step.rows, p.step.seconds)) for p in self.predicted]
        return "\n".join([*lines, f"note: {self.note}"] if self.note else lines)

    @property
    def model_error(self) -> float:
        """The largest relative difference of the cost model to a measured point; 0 without one."""
        if self.model is None:
            return 0.0
        pairs = [(one.profile, one.replicas) for one in self.points]
        return max(
            abs(self.model.predict(count, one.rows).seconds / one.seconds - 1)
            for one, count in pairs
        )

    def _repr_html_(self) -> str:
        """Returns the table, for a notebook."""
        rows = [_cells(one, one.profile.rows, one.profile.seconds) for one in self.points]
        rows += [
            (f"{one.replicas} (predicted)", *_cells(one, one.step.rows, one.step.seconds)[1:])
            for one in self.predicted
        ]
        notes = [*self._of_model(), *([f"note: {self.note}"] if self.note else [])]
        return html_table("Scaling", rows, header=_HEADER, notes=notes)

    def _of_model(self) -> list[str]:
        if self.model is None:
            return []
        return [
            f"predicted: {self.points[-1].replicas} replica(s) a worker, {self.model.network} "
            f"between workers; the model is within {self.model_error:.0%} of what was measured"
        ]

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
    predict: Sequence[int] = (),
    network: Network | None = None,
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
        predict: Numbers of replicas to predict with a cost model fitted to the measured ones, such
            as ``(64, 1024)``: workers like this machine, each with as many replicas as the largest
            measured number. If the measured global batches grow with the replicas, so do these.
        network: What connects the workers; None: ``Network()``, 1.25 GB/s and 50 us a hop.

    Returns:
        The table; ``print`` it, or ``save_svg`` the curve. A prediction is as good as its
        assumptions, which the table prints.

    Raises:
        DeviceNotFoundError: There are fewer devices than replicas.
        TypeError: ``build_step`` is not a function, or does not return a step and data.
        ValueError: ``replicas`` are not growing whole numbers from 1 on, ``predict`` are not
            multiples of the largest, or only one is measured.

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
    further = _check_predict(predict, counts)
    if network is not None and not isinstance(network, Network):
        raise TypeError(
            f"network must be a Network. Received: network={network!r}. Write "
            "tmg.tuning.Network(latency=50e-6, bandwidth=1.25e9)."
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
    points = compare(counts, profiles)
    if not further:
        return Scaling(points, note)
    model = fit_costs(profiles, own_devices=len(owners) == counts[-1], network=network)
    return Scaling(points, note, model, predict_scaling(model, points, further))


def predict_scaling(
    model: CostModel, points: Sequence[ScalingPoint], replicas: Sequence[int]
) -> tuple[ScalingPrediction, ...]:
    """Predicts further points of a scaling; pure.

    Args:
        model: The cost model fitted to the points.
        points: The measured points.
        replicas: Numbers of replicas, multiples of that of the last point.
    """
    first, last = points[0], points[-1]
    growth = (last.profile.rows / first.profile.rows - 1) / (last.replicas / first.replicas - 1)
    grows = growth > 0.5
    before = model.predict(first.replicas, first.profile.rows)
    found = []
    for count in replicas:
        times = count / first.replicas
        rows = last.profile.rows * (count / last.replicas if grows else 1)
        step = model.predict(count, rows, workers=count // last.replicas)
        throughput = rows / step.seconds
        speedup = throughput / (before.rows / before.seconds)
        lost = _lost(step.parts, before.parts, rows / before.rows / times)
        cause = "" if speedup / times >= _EFFICIENT else _CAUSES[max(lost, key=lost.__getitem__)]
        found.append(ScalingPrediction(count, step, throughput, speedup, speedup / times, cause))
    return tuple(found)


def _check_predict(predict: Any, measured: Sequence[int]) -> list[int]:
    counts = list(predict) if isinstance(predict, Iterable) else [predict]
    counts = [check_count("predict", one) for one in counts]
    here = measured[-1]
    if counts and len(measured) < 2:
        raise ValueError(
            "One number of replicas does not show what more of them cost. Received: "
            f"predict={tuple(counts)} with replicas={tuple(measured)}. Measure two or more: "
            "replicas=(1, 2)."
        )
    if any(one % here for one in counts):
        raise ValueError(
            "predict takes numbers of replicas of equal workers, each with as many as were "
            f"measured last. Received: predict={tuple(counts)} with {here} measured. Write "
            f"predict={tuple(max(1, round(one / here)) * here for one in counts)}."
        )
    return counts


def _cells(point: ScalingPoint | ScalingPrediction, rows: float, seconds: float) -> tuple[str, ...]:
    return (
        f"{point.replicas}",
        f"{rows:g}",
        f"{1e3 * seconds:.2f}",
        f"{point.throughput:.0f}",
        f"{point.speedup:.2f}",
        f"{point.efficiency:.0%}",
        point.cause or "nothing significant",
    )


def _line(cells: Sequence[str]) -> str:
    *numbers, last = cells
    wide = zip(_HEADER, numbers, strict=False)
    return "  ".join([*(f"{one:>{max(7, len(name))}}" for name, one in wide), last])


def _lost(parts: Mapping[str, float], before: Mapping[str, float], work: float) -> dict[str, float]:
    """Returns the seconds that each part takes beyond the ideal.

    Ideally n times the replicas take 1/n of the time for the same examples, in every part.
    """
    return {name: part - before[name] * work for name, part in parts.items()}


def compare(replicas: Sequence[int], profiles: Sequence[StepProfile]) -> tuple[ScalingPoint, ...]:
    """Compares each profile with the first; pure."""
    points = []
    first = profiles[0]
    base = first.rows / first.seconds
    for count, profile in zip(replicas, profiles, strict=True):
        throughput = profile.rows / profile.seconds
        times = count / replicas[0]
        efficiency = throughput / base / times
        lost = _lost(profile.parts, first.parts, profile.rows / first.rows / times)
        worst = max(lost, key=lost.__getitem__)
        cause = "" if efficiency >= _EFFICIENT or lost[worst] <= 0 else _CAUSES[worst]
        points.append(
            ScalingPoint(count, profile, throughput, throughput / base, efficiency, cause)
        )
    return tuple(points)
