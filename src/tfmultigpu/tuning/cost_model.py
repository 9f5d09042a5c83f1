"""Cost model of a train step: fitted to profiles, it predicts what more replicas would take.

The seconds of each part of a step follow from the number of replicas and of examples::

    forward and backward   crowd * (a + b * examples per replica)
    all-reduce             a + b * (n - 1) / n + c * (n - 1)          within a worker
                           2 (w - 1) * latency + 2 (w - 1) / w * bytes / bandwidth     between them
    update                 a + b * crowd
    input                  a + b * examples           every worker reads the whole batch
    call                   a + b * n
    start                  a + b * n

for ``n`` replicas in each of ``w`` workers. ``crowd`` is ``max(1, n / p)``, where the machine
computes at most ``p`` replicas at once. The all-reduce between workers is that of a ring (Patarasuk
and Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). The constants are at least 0 and have
the smallest sum of squared relative errors.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tfmultigpu.tuning.step_profile import StepProfile

__all__ = ["CostModel", "Network", "Prediction", "fit_costs", "fit_network"]

_START = "start"
# Replicas that a machine may compute at once: 1 to 64.
_AT_ONCE = tuple(2.0 ** (i / 4) for i in range(25))


@dataclasses.dataclass(frozen=True)
class Network:
    """Connection of the workers.

    Attributes:
        latency: Seconds of a hop from one worker to the next.
        bandwidth: Bytes per second of each worker.
    """

    latency: float = 50e-6
    bandwidth: float = 1.25e9

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: One is not finite, the latency is negative, or the bandwidth not positive.
        """
        if not (0 <= self.latency < math.inf and 0 < self.bandwidth < math.inf):
            raise ValueError(
                "A network has a latency in seconds, at least 0, and a bandwidth in bytes per "
                f"second, above 0. Received: latency={self.latency}, bandwidth={self.bandwidth}. "
                "Write tmg.tuning.Network(latency=50e-6, bandwidth=1.25e9)."
            )

    def __str__(self) -> str:
        """Formats the numbers with units."""
        return f"{self.bandwidth / 1e9:.3g} GB/s and {1e6 * self.latency:.3g} us a hop"

    def seconds(self, workers: int, num_bytes: float) -> float:
        """Returns the seconds of an all-reduce over a ring of workers."""
        hops = 2 * (workers - 1)
        return hops * self.latency + hops / workers * num_bytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Times that a step would take with a number of replicas.

    Attributes:
        replicas: Number of replicas of all workers.
        workers: Number of workers.
        rows: Examples of a global batch.
        seconds: A whole step with its input.
        parts: Seconds of each part by name, as if none overlapped.
        start: Seconds of the first step.
    """

    replicas: int
    workers: int
    rows: float
    seconds: float
    parts: Mapping[str, float]
    start: float


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Cost model of one train step.

    Attributes:
        terms: The constants of each part, in the order of the formulas.
        at_once: How many replicas a machine computes at once.
        overlap: The seconds of a whole step of one worker, divided by the sum of its parts.
        gradient_bytes: Bytes that each worker adds to those of the others.
        network: What connects the workers.
    """

    terms: Mapping[str, tuple[float, ...]]
    at_once: float
    overlap: float
    gradient_bytes: int
    network: Network

    def predict(self, replicas: int, rows: float, workers: int = 1) -> Prediction:
        """Predicts a step.

        Args:
            replicas: Number of replicas of all workers; each worker has equally many.
            rows: Examples of a global batch.
            workers: Number of workers, each on a machine like the measured one.
        """
        here = replicas // workers
        parts = {
            name: float(np.dot(constants, _FEATURES[name](here, replicas, rows, self.at_once)))
            for name, constants in self.terms.items()
        }
        start = parts.pop(_START)
        between = self.network.seconds(workers, self.gradient_bytes)
        seconds = self.overlap * sum(parts.values()) + between
        parts["all-reduce"] += between
        return Prediction(replicas, workers, rows, seconds, parts, start)


def fit_costs(
    profiles: Sequence[StepProfile], *, own_devices: bool, network: Network | None = None
) -> CostModel:
    """Fits the cost model to profiles of one step with different numbers of replicas.

    Args:
        profiles: The profiles, each of one process; at least one.
        own_devices: Whether each replica has a device that no other shares.
        network: What connects workers; None: ``Network()``.

    Returns:
        The model that fits best.

    Raises:
        ValueError: A profile has no times.
    """
    times = [value for one in profiles for value in (*one.parts.values(), one.seconds)]
    if not all(math.isfinite(value) for value in times) or not all(
        sum(one.parts.values()) > 0 and one.seconds > 0 for one in profiles
    ):
        raise ValueError(
            f"A profile has no times to fit. Received: {len(profiles)} profile(s) with {times} "
            "seconds. Measure them with tmg.tuning.profile_step."
        )
    options = [math.inf] if own_devices else _AT_ONCE
    fits = [(_fit_parts(profiles, at_once), at_once) for at_once in options]
    (_, terms), at_once = min(fits, key=lambda one: one[0][0])
    overlap = statistics.median(one.seconds / sum(one.parts.values()) for one in profiles)
    return CostModel(terms, at_once, overlap, profiles[0].gradient_bytes, network or Network())


def fit_network(profiles: Sequence[StepProfile], workers: Sequence[int]) -> Network:
    """Fits latency and bandwidth to profiles of several workers, of one replica each.

    Args:
        profiles: The profiles; with gradients of different sizes both can be told apart.
        workers: The workers of each profile, from 2 on.

    Raises:
        ValueError: A profile is of one worker.
    """
    if not workers or min(workers) < 2:
        raise ValueError(
            "The network shows in profiles of two or more workers. Received: "
            f"workers={list(workers)}. Leave the others out."
        )
    hops = np.array([2.0 * (one - 1) for one in workers])
    sent = [2 * (n - 1) / n * one.gradient_bytes for one, n in zip(profiles, workers, strict=True)]
    features = np.stack([hops, np.array(sent)], axis=1)
    (latency, per_byte), _ = _nonnegative(features, np.array([one.reduce for one in profiles]))
    return Network(float(latency), 1 / max(float(per_byte), 1e-15))


def _fit_parts(
    profiles: Sequence[StepProfile], at_once: float
) -> tuple[float, dict[str, tuple[float, ...]]]:
    """Returns the error of the parts in seconds, and the constants of each."""
    terms, error = {}, 0.0
    for name, features_of in _FEATURES.items():
        rows = [
            features_of(len(one.replicas), one.replicas_in_all, one.rows, at_once)
            for one in profiles
        ]
        seconds = np.array([{**one.parts, _START: one.start}[name] for one in profiles])
        constants, wrong = _nonnegative(np.array(rows), seconds)
        terms[name] = tuple(float(one) for one in constants)
        error += wrong if name != _START else 0.0
    return error, terms


def _nonnegative(features: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the constants of least squared relative error, and the sum of absolute errors.

    There are at most three constants, so all sets of those that are not 0 are tried.
    """
    scale = 1 / np.maximum(wanted, wanted.max() / 100 or 1.0)
    best = np.zeros(features.shape[1])
    least = float(np.sum((wanted * scale) ** 2))
    for count in range(1, features.shape[1] + 1):
        for chosen in itertools.combinations(range(features.shape[1]), count):
            part = features[:, chosen] * scale[:, None]
            found = np.linalg.lstsq(part, wanted * scale, rcond=None)[0]
            error = float(np.sum((part @ found - wanted * scale) ** 2))
            # More constants must pay: with as many as profiles anything fits.
            if np.all(found >= 0) and error < 0.9 * least:
                best, least = np.zeros(features.shape[1]), error
                best[list(chosen)] = found
    return best, float(np.sum(np.abs(features @ best - wanted)))


def _crowd(here: int, at_once: float) -> float:
    return max(1.0, here / at_once)


# For replicas of a worker, replicas of all, examples and replicas computed at once.
_FEATURES: dict[str, Callable[[int, int, float, float], list[float]]] = {
    "input": lambda here, total, rows, at_once: [1.0, rows],
    "forward and backward": lambda here, total, rows, at_once: [
        _crowd(here, at_once),
        # Of fewer rows than replicas each gets all.
        _crowd(here, at_once) * (rows / total if rows >= total else rows),
    ],
    "all-reduce": lambda here, total, rows, at_once: [1.0, (here - 1) / here, here - 1.0],
    "update": lambda here, total, rows, at_once: [1.0, _crowd(here, at_once)],
    "call": lambda here, total, rows, at_once: [1.0, float(here)],
    _START: lambda here, total, rows, at_once: [1.0, float(here)],
}
