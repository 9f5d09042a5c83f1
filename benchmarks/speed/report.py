"""From measured milliseconds to medians, ratios, a table and a page."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from speed.measure import TOLERANCE, WARM_UP_STEPS
from speed.workloads import BATCH_SIZE, WORKLOADS

__all__ = ["Spread", "disagreements", "place", "ratios", "spreads", "table", "to_markdown"]

# Loops that exist in two forms: the faster one counts.
_FORMS = ("one_device", "hand", "hand_one_device_reduction")
_ROWS = {
    "one_device": "one device, no strategy",
    "hand": "by hand",
    "hand_one_device_reduction": "by hand, `ReductionToOneDevice`",
    "fit": "Keras `fit`",
    "ours": "`make_train_step`",
    "ours_mirrored": "`make_train_step`, plain `MirroredStrategy`",
    "one_device10": "one device, ten steps per call",
    "hand10": "by hand, ten steps per call",
    "hand_one_device_reduction10": "by hand, `ReductionToOneDevice`, ten steps per call",
    "ours10": "`step.run`, ten steps per call",
    "ours_mirrored10": "`step.run`, plain `MirroredStrategy`, ten steps per call",
}
_RATIOS = (
    ("ours", "hand"),
    ("ours_mirrored", "hand"),
    ("ours", "hand_one_device_reduction"),
    ("ours10", "hand10"),
    ("ours_mirrored10", "hand10"),
    ("ours10", "hand_one_device_reduction10"),
    ("ours", "one_device"),
    ("ours10", "one_device10"),
    ("ours", "fit"),
    ("fit", "hand"),
)
_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Returns the spread of two or more values."""
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)


def rounds_by_row(result: dict[str, Any], clock: str = "milliseconds") -> dict[str, list[float]]:
    """Returns the rounds of each row of the table; of two forms of a loop the faster one."""
    measured = dict(result[clock])
    for name in _FORMS:
        forms = [measured.pop(f"{name}:{form}") for form in ("batch", "iterator")]
        measured[name] = min(forms, key=statistics.median)
    return {name: measured[name] for name in _ROWS}


def spreads(result: dict[str, Any]) -> dict[str, Spread]:
    """Returns milliseconds per step for each row."""
    return {name: Spread.of(values) for name, values in rounds_by_row(result).items()}


def ratios(result: dict[str, Any]) -> dict[str, Spread]:
    """Returns how much of the other's time each one takes, compared round by round."""
    rounds = rounds_by_row(result)
    return {
        f"{ours} / {theirs}": Spread.of(
            [a / b for a, b in zip(rounds[ours], rounds[theirs], strict=True)]
        )
        for ours, theirs in _RATIOS
    }


def disagreements(result: dict[str, Any]) -> dict[str, float]:
    """Returns the contenders that trained another model than one device did, and how far off."""
    losses = result["losses"]
    reference = losses["one_device:batch"]
    if reference == result["loss_before"]:
        return {"one_device:batch (it did not train)": float("nan")}
    off = {name: abs(loss - reference) for name, loss in losses.items()}
    return {name: value for name, value in off.items() if not value <= TOLERANCE}


def largest_difference(result: dict[str, Any]) -> float:
    """Returns the largest difference of a loss from one device's."""
    losses = result["losses"]
    return max(abs(loss - losses["one_device:batch"]) for loss in losses.values())


def table(result: dict[str, Any]) -> str:
    """Returns what one child process measured, for a terminal."""
    workload = WORKLOADS[result["workload"]]
    lines = [
        f"{workload.title}, N = {result['replicas']}: ms per step, median [quartiles], processor"
    ]
    processor = rounds_by_row(result, "processor_milliseconds")
    for name, spread in spreads(result).items():
        quartiles = f"[{spread.low:.3f}, {spread.high:.3f}]"
        spent = statistics.median(processor[name])
        lines.append(f"  {name:<28}{spread.median:8.3f}  {quartiles:<18}{spent:8.3f}")
    for name, spread in ratios(result).items():
        lines.append(f"  {name:<42}{spread.median:6.2f} x  [{spread.low:.2f}, {spread.high:.2f}]")
    trained = result["losses"]["one_device:batch"]
    lines.append(
        f"  loss {result['loss_before']:.4f} -> {trained:.4f}; largest difference from one device: "
        f"loss {largest_difference(result):.1e}, weight {_largest_weight(result):.1e}"
    )
    return "\n".join(lines)


def to_markdown(record: dict[str, Any]) -> str:
    """Returns the measured part of the page: what ran where, times, ratios."""
    machine, versions = record["machine"], record["versions"]
    results: list[dict[str, Any]] = record["results"]
    lines = [
        f"Measured on {record['date']}: {machine['cpu']}, {machine['cores']} cores, "
        f"load {machine['load']:.1f} at the start; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". Global batch {BATCH_SIZE}, Adam, {record['rounds']} rounds of {record['steps']} "
        "steps.",
    ]
    for name, workload in WORKLOADS.items():
        cells = [result for result in results if result["workload"] == name]
        if not cells:
            continue
        head = [f"N = {cell['replicas']}" for cell in cells]
        times = [spreads(cell) for cell in cells]
        compared = [ratios(cell) for cell in cells]
        lines += ["", f"### {workload.title}", "", "Milliseconds per step, median (quartiles):", ""]
        lines += _grid(
            ["", *head], [[title, *(_time(t[row]) for t in times)] for row, title in _ROWS.items()]
        )
        lines += ["", "Share of the other's time, round by round, median (quartiles):", ""]
        lines += _grid(
            ["", *head],
            [[f"`{pair}`", *(_ratio(c[pair]) for c in compared)] for pair in compared[0]],
        )
        worst = max(largest_difference(cell) for cell in cells)
        weight = max(_largest_weight(cell) for cell in cells)
        lines += [
            "",
            f"All trained the same model: after {WARM_UP_STEPS} steps the losses differ from one "
            f"device's by at most {worst:.1e}, the weights by {weight:.1e}.",
        ]
    return "\n".join(lines) + "\n"


def place(page: Path, text: str) -> None:
    """Puts text between the marks in a page.

    Raises:
        ValueError: The page has no such marks.
    """
    before, begin, rest = page.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{page} must hold the lines {_BEGIN!r} and {_END!r}.")
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def _largest_weight(result: dict[str, Any]) -> float:
    return max(result["weights_off"].values())


def _grid(head: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in head[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def _time(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def _ratio(spread: Spread) -> str:
    return f"**{spread.median:.2f}** ({spread.low:.2f} to {spread.high:.2f})"
