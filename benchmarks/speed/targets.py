"""What the library should cost, and whether it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speed.memory import ROWS, TINY
from speed.report import Spread, ratios

__all__ = ["compared", "of_activations", "per_round"]

# Workload, replicas, ratio, largest median.
_SPEED = (
    ("small_mlp", 1, "ours / one_device", 1.25),
    ("small_mlp", 1, "ours10 / one_device10", 1.25),
    ("cnn", 1, "ours / one_device", 1.05),
    ("cnn", 1, "ours10 / one_device10", 1.05),
    ("wide_mlp", 1, "ours / one_device", 1.05),
    ("wide_mlp", 1, "ours10 / one_device10", 1.05),
    ("small_mlp", 2, "ours / hand", 1.00),
    ("small_mlp", 4, "ours / hand", 1.00),
    ("cnn", 2, "ours / hand", 1.00),
    ("cnn", 4, "ours / hand", 1.00),
    ("wide_mlp", 2, "ours / hand", 1.00),
    ("wide_mlp", 4, "ours / hand", 1.00),
    ("small_mlp", 2, "ours10 / hand10", 0.80),
    ("small_mlp", 4, "ours10 / hand10", 0.80),
    ("cnn", 2, "ours10 / hand10", 1.00),
    ("cnn", 4, "ours10 / hand10", 1.00),
    ("wide_mlp", 2, "ours10 / hand10", 0.85),
    ("wide_mlp", 4, "ours10 / hand10", 0.65),
    ("small_mlp", 2, "our_fit / fit", 0.20),
    ("small_mlp", 4, "our_fit / fit", 0.20),
    ("cnn", 2, "our_fit / fit", 0.40),
    ("cnn", 4, "our_fit / fit", 0.40),
    ("wide_mlp", 2, "our_fit / fit", 0.55),
    ("wide_mlp", 4, "our_fit / fit", 0.30),
    ("cnn", 2, "ours10 / one_device10", 1.10),
)
_MICRO_TIME, _MICRO_MEMORY = 1.15, 0.30


def compared(record: dict[str, Any]) -> Iterator[tuple[str, str, float, Spread, float | None]]:
    """Returns what has a target and was measured.

    Where, which ratio, the target, the ratio, and where it is known the ratio of the time of
    processors.
    """
    parts = record["parts"]
    for workload, replicas, ratio, most in _SPEED:
        for result in parts.get(workload, {}).get("results", ()):
            found = ratios(result) if result["replicas"] == replicas else {}
            if ratio in found:
                spent = ratios(result, "processor_milliseconds")[ratio].median
                yield f"{workload}, N = {replicas}", ratio, most, found[ratio], spent
    if "costs" in parts:
        times = parts["costs"]["series"]["micro_batches"]["milliseconds"]["ours"]
        taken = per_round(times["8"], times["1"])
        yield "cnn, N = 2, 2,048 rows", "time, 8 micro_batches / 1", _MICRO_TIME, taken, None
    if "memory" in parts:
        peaks = parts["memory"]["peaks"]
        share = of_activations(peaks, 8) / of_activations(peaks, 1)
        where = f"cnn, N = 2, {ROWS:,} rows"
        name = "activation memory, 8 micro_batches / 1"
        yield where, name, _MICRO_MEMORY, Spread(share, share, share), None


def per_round(ours: list[float], theirs: list[float]) -> Spread:
    """Returns the ratio of two, compared round by round."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def of_activations(peaks: dict[str, Any], micro_batches: int) -> int:
    """Returns how much more memory a large batch takes than a tiny one, in bytes."""
    many, few = (
        peaks[f"micro_batches={micro_batches}, {rows} rows"]["peak"] for rows in (ROWS, TINY)
    )
    return many - few
