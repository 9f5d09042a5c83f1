"""From measured milliseconds to medians, ratios and a table for a terminal."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from speed.measure import TOLERANCE
from speed.workloads import WORKLOADS

__all__ = [
    "ROWS",
    "Spread",
    "disagreements",
    "largest_difference",
    "largest_weight",
    "place",
    "ratios",
    "spreads",
    "table",
]

# Loops that exist in two forms: the faster one counts.
_FORMS = ("one_device", "hand", "hand_one_device_reduction")
ROWS = {
    "one_device": "one device, no strategy",
    "hand": "by hand",
    "hand_one_device_reduction": "by hand, `ReductionToOneDevice`",
    "ours": "`make_train_step`",
    "one_device10": "one device, ten steps per call",
    "hand10": "by hand, ten steps per call",
    "hand_one_device_reduction10": "by hand, `ReductionToOneDevice`, ten steps per call",
    "ours10": "`step.run`, ten steps per call",
    "fit": "Keras `fit`",
    "fit_endless": "Keras `fit`, data without end",
    "our_fit": "`tmg.fit`",
}
_RATIOS = (
    ("ours", "hand"),
    ("ours", "hand_one_device_reduction"),
    ("ours10", "hand10"),
    ("ours10", "hand_one_device_reduction10"),
    ("ours", "one_device"),
    ("ours10", "one_device10"),
    ("our_fit", "fit"),
    ("our_fit", "fit_endless"),
    ("our_fit", "one_device10"),
    ("fit", "hand"),
)
# Optimizers of Keras square the rows of a token that occurs twice in a batch one by one, so that
# what it trains is another model; the loops by hand and ours add them up first.
_MAY_DIFFER = {"transformer": {"fit"}}
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
        forms = [form for form in (f"{name}:batch", f"{name}:iterator") if form in measured]
        if forms:
            measured[name] = min((measured.pop(form) for form in forms), key=statistics.median)
    return {name: measured[name] for name in ROWS if name in measured}


def spreads(result: dict[str, Any]) -> dict[str, Spread]:
    """Returns milliseconds per step for each row."""
    return {name: Spread.of(values) for name, values in rounds_by_row(result).items()}


def ratios(result: dict[str, Any], clock: str = "milliseconds") -> dict[str, Spread]:
    """Returns how much of the other's time each one takes, compared round by round."""
    rounds = rounds_by_row(result, clock)
    return {
        f"{ours} / {theirs}": Spread.of(
            [a / b for a, b in zip(rounds[ours], rounds[theirs], strict=True)]
        )
        for ours, theirs in _RATIOS
        if ours in rounds and theirs in rounds
    }


def disagreements(result: dict[str, Any]) -> dict[str, float]:
    """Returns the contenders that trained another model than one device did, and how far off."""
    losses = result["losses"]
    reference = losses["one_device:iterator"]
    if reference == result["loss_before"]:
        return {"one_device:iterator (it did not train)": float("nan")}
    off = {name: abs(loss - reference) for name, loss in losses.items()}
    may = _MAY_DIFFER.get(result["workload"], set())
    return {
        name: value for name, value in off.items() if name not in may and not value <= TOLERANCE
    }


def largest_difference(result: dict[str, Any]) -> float:
    """Returns the largest difference of a loss from one device's."""
    may = _MAY_DIFFER.get(result["workload"], set())
    losses = result["losses"]
    reference = losses["one_device:iterator"]
    return max(abs(loss - reference) for name, loss in losses.items() if name not in may)


def largest_weight(result: dict[str, Any]) -> float:
    """Returns the largest difference of a weight from one device's."""
    may = _MAY_DIFFER.get(result["workload"], set())
    return max(value for name, value in result["weights_off"].items() if name not in may)


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
    for name, said in result["errors"].items():
        lines.append(f"  {name:<28}  error: {said}")
    trained = result["losses"]["one_device:iterator"]
    lines.append(
        f"  loss {result['loss_before']:.4f} -> {trained:.4f}; largest difference from one device: "
        f"loss {largest_difference(result):.1e}, weight {largest_weight(result):.1e}"
    )
    return "\n".join(lines)


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
