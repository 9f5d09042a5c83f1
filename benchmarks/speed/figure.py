"""The figures of the page: small line charts, written as SVG by hand.

Each has two files: two panels in a row, and one below the other for narrow screens. Both follow
the reader's choice of light or dark.
"""

from __future__ import annotations

import math
import re
from html import escape
from typing import Any

from speed.report import Spread, spreads
from speed.workloads import WORKLOADS

__all__ = ["figures"]

# Name of the line, colour in light, colour in dark.
_LINES = {
    "one_device10": ("one device, 10 steps per call", "#8a8a8a", "#9aa0a6"),
    "hand": ("by hand", "#e0a030", "#f0c070"),
    "hand10": ("by hand, 10 steps per call", "#b06a00", "#d98a20"),
    "fit": ("Keras fit", "#c03a3a", "#f07f7f"),
    "ours": ("make_train_step", "#6fa8e8", "#a9d0ff"),
    "ours10": ("step.run, 10 steps per call", "#1f4f99", "#5a9cf0"),
    "our_fit": ("tmg.fit", "#2f8555", "#6cc794"),
}
_COSTS = {
    "ours": ("this library", "#1f4f99", "#5a9cf0"),
    "hand": ("by hand", "#b06a00", "#d98a20"),
}
_Names = dict[str, tuple[str, str, str]]
_STYLE = """\
text{fill:#222222}.page{fill:#ffffff}.grid{stroke:#dddddd}
"""
_DARK = """\
@media (prefers-color-scheme: dark){
text{fill:#eeeeee}.page{fill:#1e2129}.grid{stroke:#40444d}
"""
_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 230, 48, 34
_Points = list[tuple[float, Spread]]


def figures(record: dict[str, Any]) -> dict[str, str]:
    """Returns the figures by the names of their files, as far as they were measured."""
    parts = record["parts"]
    drawn = {}
    panels = []
    for name, workload in WORKLOADS.items():
        lines: dict[str, _Points] = {}
        for result in parts.get(name, {}).get("results", ()):
            for row, spread in spreads(result).items():
                if row in _LINES:
                    lines.setdefault(row, []).append((result["replicas"], spread))
        if lines:
            title = re.split(":|,| with ", workload.title)[0]
            panels.append((f"{title}: ms by replicas", lines))
    if panels:
        drawn |= _pictures("benchmarks", panels, _LINES)
    if "costs" in parts:
        drawn |= _pictures("benchmarks-costs", _cost_panels(parts["costs"]), _COSTS)
    return drawn


def _pictures(
    name: str, panels: list[tuple[str, dict[str, _Points]]], names: _Names
) -> dict[str, str]:
    return {
        f"{name}.svg": _picture(panels, names, 2),
        f"{name}-narrow.svg": _picture(panels, names, 1),
    }


def _cost_panels(costs: dict[str, Any]) -> list[tuple[str, dict[str, _Points]]]:
    titles = {
        "replicas": "MLP of 256: ms by replicas",
        "parameters": "MLP, N = 2: ms by width",
        "batch": "CNN, N = 2: ms by rows",
        "micro_batches": "CNN, 2,048 rows: ms by micro_batches",
    }
    panels = []
    for name, title in titles.items():
        times = costs["series"][name]["milliseconds"]
        lines = {
            who: [(float(x), Spread.of(values)) for x, values in times[who].items()]
            for who in times
        }
        panels.append((title, lines))
    seconds = costs["tracing"]["seconds"]
    deepest = max(int(key.split()[1]) for key in seconds["ours"])
    first = {
        who: [
            (float(key.split()[0]), Spread(value, value, value))
            for key, value in seconds[who].items()
            if int(key.split()[1]) == deepest
        ]
        for who in seconds
    }
    return [*panels, (f"{deepest} layers: first step, s by replicas", first)]


def _picture(panels: list[tuple[str, dict[str, _Points]]], names: _Names, across: int) -> str:
    down = math.ceil((len(panels) + 1) / across)  # One more for what the colours mean.
    parts = []
    for i, (title, lines) in enumerate(panels):
        parts += _panel(title, lines, names, (i % across) * _WIDTH, (i // across) * _HEIGHT)
    left, top = len(panels) % across * _WIDTH + 40, len(panels) // across * _HEIGHT + _TOP
    shown = [name for name in names if any(name in lines for _, lines in panels)]
    for i, name in enumerate(shown):
        title = names[name][0]
        y = top + 20 * i
        parts.append(
            f'<line x1="{left}" y1="{y}" x2="{left + 24}" y2="{y}" class="{name}" '
            'stroke-width="2"/>'
        )
        parts.append(_text(left + 32, y + 4, title))
    parts.append(_text(left, top + 20 * len(shown) + 4, "both axes logarithmic; bars: quartiles"))
    size = f'viewBox="0 0 {across * _WIDTH} {down * _HEIGHT}"'
    light, dark = ("".join(f".{name}{{stroke:{names[name][i]}}}" for name in shown) for i in (1, 2))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
        f"<style>\n{_STYLE}{light}\n{_DARK}{dark}}}\n</style>\n"
        f'<rect width="100%" height="100%" class="page"/>\n{body}\n</svg>\n'
    )


def _panel(
    title: str,
    lines: dict[str, _Points],
    names: _Names,
    left: int,
    top: int,
) -> list[str]:
    points = [point for values in lines.values() for point in values]
    values = [end for _, spread in points for end in (spread.low, spread.high)]
    low, high = 2 ** math.floor(math.log2(min(values))), 2 ** math.ceil(math.log2(max(values)))
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    width = math.log(last / first) or 1.0
    right, bottom = left + _WIDTH - 24, top + _HEIGHT - 34

    def across(x: float) -> float:
        return left + _LEFT + (right - left - _LEFT) * math.log(x / first) / width

    def up(value: float) -> float:
        return bottom - (bottom - top - _TOP) * math.log(value / low) / math.log(high / low)

    drawn = [_text(left + _LEFT, top + 20, title, weight="bold")]
    for power in range(round(math.log2(low)), round(math.log2(high)) + 1):
        y = up(2.0**power)
        drawn.append(f'<path d="M{left + _LEFT} {y:.1f}H{right}" class="grid"/>')
        drawn.append(_text(left + _LEFT - 6, y + 4, f"{2.0**power:g}", anchor="end"))
    for x in sorted({x for x, _ in points}):
        drawn.append(_text(across(x), bottom + 16, f"{x:,.0f}", anchor="middle"))
    for name, line in lines.items():
        path = "L".join(f"{across(x):.1f} {up(spread.median):.1f}" for x, spread in line)
        drawn.append(f'<path d="M{path}" class="{name}" fill="none" stroke-width="2"/>')
        for x, spread in line:
            at = across(x)
            drawn.append(
                f'<path d="M{at:.1f} {up(spread.low):.1f}V{up(spread.high):.1f}" '
                f'class="{name}"/>'
                f'<circle cx="{at:.1f}" cy="{up(spread.median):.1f}" r="2" class="{name}" '
                'fill="none" stroke-width="2">'
                f"<title>{escape(names[name][0])}: {spread.median:.3g}</title></circle>"
            )
    return drawn


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )
