"""The picture of README and start page: one training on 1, 2 and 4 replicas, here and in Keras.

``python docs/figures/same_curve.py`` trains, writes the record ``same_curve.json`` and draws
``docs/same-curve.svg``; with ``--draw`` it draws the record again, which needs no TensorFlow.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "same_curve.json"
REPLICAS = (1, 2, 4)
EPOCHS, BATCH_SIZE, EXAMPLES, LONGEST = 12, 32, 516, 48

# One run, colour in light, colour in dark, width of the line.
RUNS = {
    "Keras fit, one device": ("#9aa0a6", "#9aa0a6", 7.0),
    "Keras fit, 2 replicas": ("#d98200", "#f2b04c", 2.0),
    "Keras fit, 4 replicas": ("#c03a3a", "#f07f7f", 2.0),
    "tmg.fit, 2 replicas": ("#1f6fd0", "#74b3ff", 2.0),
    "tmg.fit, 4 replicas": ("#0b3d82", "#c3dcff", 2.0),
}
ONE = "Keras fit, one device"
STYLE = """\
.ink{fill:#222222}.quiet{fill:#5f6368}.page{fill:#ffffff}.grid{stroke:#dddddd}
@media (prefers-color-scheme: dark){
.ink{fill:#eeeeee}.quiet{fill:#b5b9be}.page{fill:#1e2129}.grid{stroke:#40444d}
"""
WIDTH, HEIGHT, LEFT, TOP = 370, 270, 52, 40


def train(library: str, replicas: int) -> None:
    """Trains on padded texts of unequal length and prints the loss of each epoch."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmultigpu as tmg

    devices = tmg.split_device("CPU:0", parts=4)
    random = np.random.default_rng(1)
    lengths = np.clip(np.exp(random.normal(1.8, 0.9, EXAMPLES)).astype(int), 2, LONGEST)
    x = random.normal(size=(EXAMPLES, LONGEST, 5)).astype("float32")
    # Each token has a tag: its largest number, moved on by one after each fourth token.
    y = (np.argmax(x, axis=-1) + np.arange(LONGEST) // 4) % 5
    x[np.arange(LONGEST) >= lengths[:, None]] = 0.0

    keras.utils.set_random_seed(1)
    if replicas == 1:
        strategy = tf.distribute.OneDeviceStrategy(devices[0])
    else:
        strategy = tf.distribute.MirroredStrategy(devices[:replicas])
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((LONGEST, 5)),
                keras.layers.Masking(),
                keras.layers.GRU(32, return_sequences=True),
                keras.layers.Dense(5),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    fit = tmg.fit if library == "tmg.fit" else keras.Model.fit
    history = fit(model, data, epochs=EPOCHS, verbose=0)
    print(json.dumps(history.history["loss"]))


def measure() -> dict[str, Any]:
    """Runs each training in a process of its own, and returns the record."""
    from importlib.metadata import version

    losses = {}
    for name in RUNS:
        library, _, devices = name.partition(", ")
        replicas = "1" if devices == "one device" else devices.split()[0]
        done = subprocess.run(
            [sys.executable, __file__, library, replicas],
            capture_output=True,
            text=True,
            check=True,
        )
        losses[name] = json.loads(done.stdout.splitlines()[-1])
    return {name: version(name) for name in ("tensorflow", "keras")} | {"losses": losses}


def draw(record: dict[str, Any], across: int) -> str:
    """Returns the picture: the curves, and their distance to that of one device."""
    losses = record["losses"]
    distances = {
        name: [abs(a - b) for a, b in zip(values, losses[ONE], strict=True)]
        for name, values in losses.items()
        if name != ONE
    }
    second = (WIDTH, 0) if across == 2 else (0, HEIGHT)
    parts = _panel("Loss that fit reports, by epoch", losses, 0, 0, logarithmic=False)
    title = "Distance to one device, logarithmic"
    parts += _panel(title, distances, *second, logarithmic=True)
    key_top = HEIGHT * (3 - across) + 6
    for i, name in enumerate(RUNS):
        # In one row of three and one of two, or one below the other.
        x = LEFT + (i % 3) * 225 if across == 2 else LEFT
        y = key_top + (i // 3 if across == 2 else i) * 24
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" class="{_class(name)}"/>')
        parts.append(_text(x + 34, y + 5, name))
    height = key_top + (2 if across == 2 else len(RUNS)) * 24
    light = "".join(f".{_class(name)}{{stroke:{run[0]}}}" for name, run in RUNS.items())
    dark = "".join(f".{_class(name)}{{stroke:{run[1]}}}" for name, run in RUNS.items())
    widths = "".join(
        f".{_class(name)}{{fill:none;stroke-width:{run[2]:g}}}" for name, run in RUNS.items()
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across * WIDTH} {height}" '
        f'font-family="sans-serif" font-size="15">\n<style>\n{widths}{light}\n{STYLE}{dark}}}\n'
        f'</style>\n<rect width="100%" height="100%" class="page"/>\n{body}\n</svg>\n'
    )


def pictures(record: dict[str, Any]) -> dict[str, str]:
    """Returns the pictures by the names of their files: for wide screens and for narrow ones."""
    return {"same-curve.svg": draw(record, 2), "same-curve-narrow.svg": draw(record, 1)}


def _class(name: str) -> str:
    return "".join(letter for letter in name if letter.isalnum())


def _panel(
    title: str, lines: dict[str, list[float]], left: int, top: int, logarithmic: bool
) -> list[str]:
    values = [value for line in lines.values() for value in line]
    if logarithmic:
        ticks = [10.0**power for power in range(-8, math.ceil(math.log10(max(values))) + 1, 2)]
        ticks += [ticks[-1] * 100] * (ticks[-1] < max(values))
    else:
        lowest, highest = math.floor(min(values) / 0.2), math.ceil(max(values) / 0.2)
        ticks = [0.2 * i for i in range(lowest, highest + 1)]
    right, bottom = left + WIDTH - 16, top + HEIGHT - 34

    def up(value: float) -> float:
        if logarithmic:
            # A distance of zero is drawn at the lower edge.
            share = math.log(max(value, ticks[0]) / ticks[0]) / math.log(ticks[-1] / ticks[0])
        else:
            share = (value - ticks[0]) / (ticks[-1] - ticks[0])
        return bottom - (bottom - top - TOP) * share

    def across(epoch: int) -> float:
        return left + LEFT + (right - left - LEFT) * epoch / (EPOCHS - 1)

    drawn = [_text(left + LEFT, top + 22, title, weight="bold")]
    for tick in ticks:
        drawn.append(f'<path d="M{left + LEFT} {up(tick):.1f}H{right}" class="grid"/>')
        label = f"{tick:.0e}".replace("e-0", "e-").replace("e+00", "") if logarithmic else tick
        label = label if isinstance(label, str) else f"{label:.1f}"
        drawn.append(_text(left + LEFT - 8, up(tick) + 5, label, "quiet", "end"))
    for epoch in (0, 3, 7, 11):
        drawn.append(_text(across(epoch), bottom + 20, str(epoch + 1), "quiet", "middle"))
    for name, line in lines.items():
        path = "L".join(f"{across(i):.1f} {up(value):.1f}" for i, value in enumerate(line))
        drawn.append(f'<path d="M{path}" class="{_class(name)}"><title>{name}</title></path>')
    return drawn


def _text(
    x: float, y: float, text: str, colour: str = "ink", anchor: str = "start", weight: str = ""
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{colour}"{bold}>{text}</text>'
    )


def main(arguments: list[str]) -> None:
    """Trains once if the arguments name a training, else measures and draws."""
    if len(arguments) == 2:
        train(arguments[0], int(arguments[1]))
        return
    if arguments != ["--draw"]:
        RECORD.write_text(json.dumps(measure(), indent=1) + "\n")
    for name, svg in pictures(json.loads(RECORD.read_text())).items():
        (HERE.parent / name).write_text(svg)


if __name__ == "__main__":
    main(sys.argv[1:])
