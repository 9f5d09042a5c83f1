"""The picture of the page on large models: bytes on the fullest of four devices, in three ways.

``python docs/figures/sharded_bytes.py`` plans, writes the record ``sharded_bytes.json`` and draws
``docs/sharded-bytes.svg``; with ``--draw`` it draws the record again, which needs no TensorFlow.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from same_curve import STYLE, _text

HERE = Path(__file__).parent
RECORD = HERE / "sharded_bytes.json"
DEVICES, LAYERS, UNITS = 4, 24, 1450
# The part of the bytes, colour in light, colour in dark.
PARTS = {
    "parameters": ("#1f6fd0", "#74b3ff"),
    "gradients": ("#d98200", "#f2b04c"),
    "optimizer state": ("#5f6368", "#b5b9be"),
    "copies": ("#c03a3a", "#f07f7f"),
}


def planned(strategy: Any) -> dict[str, dict[str, int]]:
    """Returns the bytes of each part on the fullest device, for each way to train with Adam."""
    import keras

    import tfmultigpu as tmg

    def build() -> Any:
        hidden = [keras.layers.Dense(UNITS, "relu") for _ in range(LAYERS)]
        return keras.Sequential([keras.Input((UNITS,)), *hidden, keras.layers.Dense(10)])

    def fullest(plan: Any) -> list[int]:
        return list(plan.parts_on(max(plan.devices, key=plan.bytes_on))[:4])

    adam = keras.optimizers.Adam()
    mirrored = tmg.plan_memory(build, adam, strategy, at_least=2**62)
    parameters, _, owned, copies = fullest(mirrored)
    gradients = sum(one.gradients for one in mirrored.variables)
    state = sum(one.optimizer_state for one in mirrored.variables)
    ways = {
        # Each replica computes the gradients of all variables.
        "replicas": [parameters, gradients, state, copies],
        "shard_update=True": [parameters, gradients, owned, copies],
        "sharded_variables()": fullest(tmg.plan_memory(build, adam, strategy)),
    }
    return {way: dict(zip(PARTS, sizes, strict=True)) for way, sizes in ways.items()}


def draw(record: dict[str, dict[str, int]], width: int) -> str:
    """Returns the picture for a width in pixels."""
    most = max(sum(parts.values()) for parts in record.values())
    left, right, each = 16, width - 84, 58
    drawn = [_text(left, 26, f"Bytes on the fullest of {DEVICES} devices, Adam", weight="bold")]
    for row, (way, parts) in enumerate(record.items()):
        top = 58 + row * each
        drawn.append(_text(left, top, way))
        x = float(left)
        for name, size in parts.items():
            length = (right - left) * size / most
            drawn.append(
                f'<rect x="{x:.1f}" y="{top + 8}" width="{length:.1f}" height="20" '
                f'class="{_class(name)}"><title>{name}: {_mib(size)}</title></rect>'
            )
            x += length
        drawn.append(_text(x + 8, top + 23, _mib(sum(parts.values()))))
    below = 58 + len(record) * each + 8
    columns = 4 if width > 600 else 2
    for i, name in enumerate(PARTS):
        x, y = left + i % columns * (width - left) / columns, below + i // columns * 24
        drawn.append(
            f'<rect x="{x:.1f}" y="{y - 12}" width="14" height="14" class="{_class(name)}"/>'
        )
        drawn.append(_text(x + 22, y, name))
    height = below + 24 * (len(PARTS) // columns)
    light = "".join(f".{_class(name)}{{fill:{one[0]}}}" for name, one in PARTS.items())
    dark = "".join(f".{_class(name)}{{fill:{one[1]}}}" for name, one in PARTS.items())
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="15">\n<style>\n{light}\n{STYLE}{dark}}}\n'
        f'</style>\n<rect width="100%" height="100%" class="page"/>\n{body}\n</svg>\n'
    )


def pictures(record: dict[str, dict[str, int]]) -> dict[str, str]:
    """Returns the pictures by the names of their files: for wide screens and for narrow ones."""
    return {"sharded-bytes.svg": draw(record, 740), "sharded-bytes-narrow.svg": draw(record, 370)}


def _class(name: str) -> str:
    return name.partition(" ")[0]


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def main(arguments: list[str]) -> None:
    """Plans unless the record is to be drawn again, and draws."""
    if arguments != ["--draw"]:
        import tfmultigpu as tmg

        tmg.split_device("CPU:0", parts=DEVICES)
        record = planned(tmg.create_strategy(devices=DEVICES))
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for name, svg in pictures(json.loads(RECORD.read_text())).items():
        (HERE.parent / name).write_text(svg)


if __name__ == "__main__":
    main(sys.argv[1:])
