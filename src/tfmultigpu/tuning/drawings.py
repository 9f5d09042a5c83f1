"""SVG drawings of a timeline and of a curve."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["draw_curve", "draw_timeline"]

_COLORS = {
    "input": "#d9822b",
    "forward and backward": "#2b6cb0",
    "all-reduce": "#6b46c1",
    "update": "#2f855a",
    "call": "#a0aec0",
}
_WIDTH, _LEFT, _RIGHT, _ROW = 720, 150, 20, 26


def draw_timeline(
    title: str, rows: Sequence[tuple[str, Sequence[tuple[float, float, str]]]]
) -> str:
    """Draws bars over time.

    Args:
        title: The title.
        rows: The name and the bars of each row; a bar is its begin, its end (seconds) and its part.

    Example:
        >>> draw_timeline("a step", [("input", [(0.0, 0.001, "input")])]).startswith("<svg")
        True
    """
    total = max((end for _, bars in rows for _, end, _ in bars), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / total
    height = 60 + _ROW * len(rows)
    lines = _begin(title, height)
    for i, (name, bars) in enumerate(rows):
        y = 34 + _ROW * i
        lines.append(_text(_LEFT - 8, y + 14, name, anchor="end"))
        for begin, end, part in bars:
            lines.append(
                f'<rect x="{_LEFT + begin * scale:.1f}" y="{y}" height="{_ROW - 6}" '
                f'width="{max(0.5, (end - begin) * scale):.1f}" fill="{_COLORS[part]}">'
                f"<title>{escape(part)}: {1e3 * (end - begin):.2f} ms</title></rect>"
            )
    for tick in range(5):
        at = total * tick / 4
        lines.append(_text(_LEFT + at * scale, height - 8, f"{1e3 * at:.1f} ms", anchor="middle"))
    return "\n".join([*lines, "</svg>"])


def draw_curve(
    title: str, points: Sequence[tuple[float, float]], ideal: Sequence[tuple[float, float]]
) -> str:
    """Draws measured points joined by a line, and a dashed line of ideal points.

    Example:
        >>> draw_curve("speed", [(1, 1), (2, 1.8)], [(1, 1), (2, 2)]).count("<circle")
        2
    """
    height = 320
    most_x = max((x for x, _ in [*points, *ideal]), default=1.0) or 1.0
    most_y = max((y for _, y in [*points, *ideal]), default=1.0) or 1.0
    across, up = (_WIDTH - 80 - _RIGHT) / most_x, (height - 90) / most_y

    def place(x: float, y: float) -> str:
        return f"{80 + x * across:.1f},{height - 40 - y * up:.1f}"

    lines = _begin(title, height)
    for values, style in ((ideal, 'stroke="#a0aec0" stroke-dasharray="5 4"'), (points, _SOLID)):
        path = " ".join(place(x, y) for x, y in values)
        lines.append(f'<polyline points="{path}" fill="none" {style}/>')
    for x, y in points:
        cx, cy = place(x, y).split(",")
        lines.append(f'<circle cx="{cx}" cy="{cy}" r="4" fill="#2b6cb0"/>')
        lines.append(_text(float(cx), float(cy) - 10, f"{y:.2f}", anchor="middle"))
        lines.append(_text(float(cx), height - 20, f"{x:g}", anchor="middle"))
    lines.append(_text(80 + most_x * across / 2, height - 4, "replicas", anchor="middle"))
    return "\n".join([*lines, "</svg>"])


_SOLID = 'stroke="#2b6cb0" stroke-width="2"'


def _begin(title: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(10, 20, title, anchor="start"),
    ]


def _text(x: float, y: float, text: str, *, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
