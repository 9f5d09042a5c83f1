"""The measured part of the page."""

from __future__ import annotations

from statistics import median
from typing import Any

from speed.measure import WARM_UP_STEPS
from speed.memory import ROWS as ROWS_IN_MEMORY, TINY
from speed.report import ROWS, Spread, largest_difference, largest_weight, ratios, spreads
from speed.targets import compared, of_activations, per_round
from speed.workloads import BATCH_SIZE, WORKLOADS

__all__ = ["to_markdown"]

_SUMMARY = {
    "ours / hand": "a step, beside a loop by hand",
    "ours10 / hand10": "ten steps per call, beside a loop by hand",
    "our_fit / fit": "`tmg.fit`, beside Keras `fit`",
}

_SERIES = {
    "replicas": ("replicas", "MLP of two layers of 256"),
    "parameters": ("width of the layers", "MLP of two layers, N = 2"),
    "batch": ("rows of the global batch", "CNN, N = 2"),
    "micro_batches": ("`micro_batches`", "CNN, N = 2, 2,048 rows"),
    "micro_batches_of_few_rows": ("`micro_batches`", f"CNN, N = 2, {BATCH_SIZE} rows"),
}


def to_markdown(record: dict[str, Any]) -> str:
    """Returns the measured part of the page: a summary, and folded below it all tables."""
    parts = record["parts"]
    lines = [*_summary(record), "", "## Time of a step"]
    for name in WORKLOADS:
        if name in parts:
            lines += _workload(name, parts[name]["results"])
    if "memory" in parts:
        lines += _memory(parts["memory"]["peaks"])
    if "costs" in parts:
        lines += _costs(parts["costs"])
    lines += _targets(record)
    return "\n".join(lines + _circumstances(parts)) + "\n"


def _folded(title: str, lines: list[str]) -> list[str]:
    """Returns lines that a reader opens; the tag is also one of Markdown on GitHub."""
    head = ["", '<details markdown="1">', f"<summary>{title}</summary>"]
    return [*head, *(["", *lines] if lines[0] else lines), "", "</details>"]


def _summary(record: dict[str, Any]) -> list[str]:
    """Returns what a step takes beside a loop by hand and beside Keras, for two replicas."""
    rows = []
    for name, workload in WORKLOADS.items():
        for result in record["parts"].get(name, {}).get("results", ()):
            if result["replicas"] == 2:
                found = ratios(result)
                cells = [found.get(pair) for pair in _SUMMARY]
                rows.append([workload.title, *("-" if c is None else _ratio(c) for c in cells)])
    held = [found.median <= most for _, _, most, found, _ in compared(record)]
    return [
        "Share of the other's time on two replicas, median (quartiles); below 1 is faster:",
        *("", *_grid(["", *_SUMMARY.values()], rows), ""),
        f"{sum(held)} of {len(held)} [targets](#targets) are reached. No GPU was measured here: "
        "virtual CPUs show what a strategy costs, not what more devices gain.",
    ]


def _circumstances(parts: dict[str, Any]) -> list[str]:
    first = next(iter(parts.values()))
    machine = first["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    loads = ", ".join(f"{name} {part['machine']['load']:.1f}" for name, part in parts.items())
    dates = sorted({part["date"] for part in parts.values()})
    return [
        *("", "## The machine", ""),
        f"Measured on {' and '.join(dates)}: {machine['cpu']}, {machine['cores']} cores; "
        f"{versions}. Global batch {BATCH_SIZE} and Adam unless said. Load of the machine when "
        f"each part began: {loads}.",
    ]


def _targets(record: dict[str, Any]) -> list[str]:
    rows = []
    for where, ratio, most, found, processor in compared(record):
        reached = "yes" if found.median <= most else "**no**"
        spent = "" if processor is None else f"{processor:.2f}"
        rows.append([where, f"`{ratio}`", f"{most:.2f}", _ratio(found), reached, spent])
    if not rows:
        return []
    head = [
        "",
        "share of the other's time",
        "at most",
        "median (quartiles)",
        "reached",
        "processor",
    ]
    return [
        *("", "## Targets", ""),
        "The last column compares processor time of all threads, which other programs disturb "
        "less; that of both `fit` includes what they set up.",
        *_folded(f"{len(rows)} targets", _grid(head, rows, numbers=2)),
    ]


def _workload(name: str, results: list[dict[str, Any]]) -> list[str]:
    head = [f"N = {result['replicas']}" for result in results]
    times, found = [spreads(one) for one in results], [ratios(one) for one in results]
    errors = [result["errors"] for result in results]
    first = results[0]
    lines = [
        f"Milliseconds per step, median (quartiles) of {first['rounds']} rounds of "
        f"{first['steps']} steps:",
        "",
    ]
    rows = []
    for row, title in ROWS.items():
        if any(row in one for one in times) or any(row in one for one in errors):
            cells = [_time(t[row]) if row in t else "error" for t in times]
            rows.append([title, *cells])
    lines += _grid(["", *head], rows)
    lines += ["", "Share of the other's time, round by round, median (quartiles):", ""]
    pairs = list(dict.fromkeys(pair for one in found for pair in one))
    lines += _grid(
        ["", *head],
        [[f"`{pair}`", *(_ratio(c[pair]) if pair in c else "-" for c in found)] for pair in pairs],
    )
    worst, weight = (max(map(f, results)) for f in (largest_difference, largest_weight))
    lines += [
        "",
        f"After {WARM_UP_STEPS} steps the losses differ from one device's by at most {worst:.1e}, "
        f"the weights by {weight:.1e}.",
    ]
    if name == "transformer":
        off = max(result["weights_off"].get("fit", 0.0) for result in results)
        lines[-1] += (
            f" Keras `fit` is left out of that: its weights are {off:.1e} off, because optimizers "
            "of Keras square the rows of a token that occurs twice in a batch one by one (see "
            "[gradients of embeddings](steps.md#gradients-of-embeddings))."
        )
    for result, one in zip(results, errors, strict=True):
        lines += [
            line
            for who, said in one.items()
            for line in ("", f"Error of {ROWS.get(who, who)}, N = {result['replicas']}: `{said}`")
        ]
    counts = ", ".join(head)
    return ["", f"### {WORKLOADS[name].title}", *_folded(f"All times, {counts}", lines)]


def _memory(peaks: dict[str, Any]) -> list[str]:
    def size(name: str, what: str = "peak") -> str:
        return f"{peaks[name][what] / 1e6:,.0f}"

    head = ["MB", f"peak, {ROWS_IN_MEMORY:,} rows", f"peak, {TINY} rows", "for activations"]
    rows = []
    for count in (1, 8):
        names = [f"micro_batches={count}, {rows} rows" for rows in (ROWS_IN_MEMORY, TINY)]
        activations = f"{of_activations(peaks, count) / 1e6:,.0f}"
        rows.append([f"`micro_batches={count}`", *map(size, names), activations])
    lines = [
        *("", "## Memory", ""),
        "The largest resident size of a process of its own, the median of three, in MB. All hold "
        f"the same data, so what a large batch takes more than one of {TINY} rows is for the step "
        "itself. CNN, N = 2:",
        *("", *_grid(head, rows), ""),
        "An MLP of 5.3 million numbers, N = 4, Adam:",
        "",
    ]
    rows = [
        [f"`{name}`", size(name, "optimizer"), size(name)]
        for name in ("shard_update=False", "shard_update=True")
    ]
    return lines + _grid(["MB", "state of the optimizer", "peak of the process"], rows)


def _costs(costs: dict[str, Any]) -> list[str]:
    lines = [
        f"Milliseconds of a step, medians of {costs['rounds']} rounds, ten steps per call; the "
        "loop by hand on `ReductionToOneDevice`. Steps in micro-batches take one step per call.",
    ]
    for name, (axis, title) in _SERIES.items():
        times = costs["series"][name]["milliseconds"]
        at = list(times["ours"])
        rows = [["this library", *(f"{median(times['ours'][x]):.2f}" for x in at)]]
        if "hand" in times:
            rows.append(["by hand", *(f"{median(times['hand'][x]):.2f}" for x in at)])
            pairs = [per_round(times["ours"][x], times["hand"][x]).median for x in at]
            rows.append(["share", *(f"**{x:.2f}**" for x in pairs)])
        else:
            pairs = [per_round(times["ours"][x], times["ours"][at[0]]).median for x in at]
            rows.append([f"beside {at[0]}", *(f"**{x:.2f}**" for x in pairs)])
        lines += ["", f"{title}, by {axis}:", "", *_grid(["", *(f"{int(x):,}" for x in at)], rows)]
    seconds = costs["tracing"]["seconds"]
    layers = sorted({int(key.split()[1]) for key in seconds["ours"]})
    rows = []
    for replicas in sorted({int(key.split()[0]) for key in seconds["ours"]}):
        for who, title in (("ours", "this library"), ("hand", "by hand")):
            cells = [f"{seconds[who][f'{replicas} {deep}']:.1f}" for deep in layers]
            rows.append([f"{title}, N = {replicas}", *cells])
    head = ["", *(f"{deep} layers" for deep in layers)]
    lines += ["", "Seconds of the first step, tracing included, MLP:", "", *_grid(head, rows)]
    return ["", "## How cost grows", *_folded("All numbers", lines)]


def _grid(head: list[str], rows: list[list[str]], numbers: int = 1) -> list[str]:
    rule = [*["---"] * numbers, *("---:" for _ in head[numbers:])]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def _time(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def _ratio(spread: Spread) -> str:
    if spread.low == spread.high:
        return f"**{spread.median:.2f}**"
    return f"**{spread.median:.2f}** ({spread.low:.2f} to {spread.high:.2f})"
