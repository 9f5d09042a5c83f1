"""The timeline of a step on two devices, drawn from what was measured."""

from __future__ import annotations

from statistics import median
from typing import Any

__all__ = ["timeline"]

_LEFT, _WIDTH, _BAR = 150, 560, 26
_BUSY, _IDLE = "#3f6fb5", "#dddddd"


def timeline(pair: dict[str, Any]) -> str:
    """Returns an SVG: what each device does during a step, with equal and with planned shares.

    Args:
        pair: What ``measure_pair`` returned.
    """
    rows, shares = pair["rows"], pair["shares"]
    # One row is computed by the other device meanwhile, which takes no time to speak of.
    per_row = [median(pair["seconds"][name]) / (rows - 1) for name in ("fast_alone", "slow_alone")]
    steps = {
        "equal shares": ((rows // 2, rows - rows // 2), median(pair["seconds"]["equal"])),
        "planned shares": (shares, median(pair["seconds"]["planned"])),
    }
    scale = _WIDTH / max(seconds for _, seconds in steps.values())
    parts, top = [], 16
    for name, (cut, seconds) in steps.items():
        end = _LEFT + seconds * scale
        label = f"{name}: {seconds * 1e3:.0f} ms, {rows / seconds:.0f} rows a second"
        parts.append(_text(_LEFT, top + 4, label, "bold"))
        top += 14
        for device, count, each in zip(("fast", "slow"), cut, per_row, strict=True):
            busy = min(count * each, seconds) * scale
            parts += [
                _text(10, top + 17, f"{device} device"),
                _rectangle(_LEFT, top, end - _LEFT, _IDLE),
                _rectangle(_LEFT, top, busy, _BUSY),
                _text(_LEFT + 6, top + 17, f"{count} rows", colour="white"),
            ]
            top += _BAR + 6
        top += 22
    parts.append(
        _rectangle(_LEFT, top - 14, 14, _BUSY, 14) + _text(_LEFT + 20, top - 2, "computes")
    )
    parts.append(
        _rectangle(_LEFT + 110, top - 14, 14, _IDLE, 14) + _text(_LEFT + 130, top - 2, "waits")
    )
    body = "\n".join(parts)
    size = f'viewBox="0 0 {_LEFT + _WIDTH + 20} {top + 12}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _rectangle(left: float, top: float, width: float, colour: str, height: float = _BAR) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}" '
        f'fill="{colour}"/>'
    )


def _text(
    left: float, base: float, text: str, weight: str = "normal", colour: str = "black"
) -> str:
    return (
        f'<text x="{left:.1f}" y="{base:.1f}" font-weight="{weight}" fill="{colour}">{text}</text>'
    )
