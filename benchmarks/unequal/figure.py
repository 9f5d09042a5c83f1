"""The timeline of a step on two devices, drawn from what was measured."""

from __future__ import annotations

from statistics import median
from typing import Any

__all__ = ["timeline"]

# Narrow, so that its letters are legible on a phone.
_LEFT, _WIDTH, _BAR = 10, 400, 26
_STYLE = """\
text{fill:#222222}.page{fill:#ffffff}.on{fill:#ffffff}.busy{fill:#3f6fb5}.idle{fill:#dddddd}
@media (prefers-color-scheme: dark){
text{fill:#eeeeee}.page{fill:#1e2129}.idle{fill:#4a4f59}
}
"""


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
    parts, top = [], 18
    for name, (cut, seconds) in steps.items():
        end = seconds * scale
        label = f"{name}: {seconds * 1e3:.0f} ms, {rows / seconds:.0f} rows a second"
        parts.append(_text(_LEFT, top, label, "bold"))
        top += 10
        for device, count, each in zip(("fast", "slow"), cut, per_row, strict=True):
            busy = min(count * each, seconds) * scale
            parts += [
                _rectangle(_LEFT, top, end, "idle"),
                _rectangle(_LEFT, top, busy, "busy"),
                _text(_LEFT + 6, top + 18, f"{device}: {count}", kind="on"),
            ]
            top += _BAR + 6
        top += 22
    top -= 14
    parts.append(_rectangle(_LEFT, top, 14, "busy", 14) + _text(_LEFT + 20, top + 12, "computes"))
    parts.append(_rectangle(130, top, 14, "idle", 14) + _text(150, top + 12, "waits"))
    body = "\n".join(parts)
    size = f'viewBox="0 0 {_LEFT + _WIDTH + 10} {top + 24}" width="{_LEFT + _WIDTH + 10}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">\n'
        f"<style>\n{_STYLE}</style>\n"
        f'<rect width="100%" height="100%" class="page"/>\n{body}\n</svg>\n'
    )


def _rectangle(left: float, top: float, width: float, kind: str, height: float = _BAR) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}" class="{kind}"/>'
    )


def _text(left: float, base: float, text: str, weight: str = "normal", kind: str = "") -> str:
    return (
        f'<text x="{left:.1f}" y="{base:.1f}" font-weight="{weight}" class="{kind}">{text}</text>'
    )
