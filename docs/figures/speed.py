"""The pictures of the page of speed, a question each, from what the benchmarks measured.

``python docs/figures/speed.py`` draws ``docs/speed-*.svg`` from ``docs/figures/speed.json``, and
with ``--measure`` it runs the benchmarks first and writes that file, with ``--measure bits`` that
part of it: half an hour on an idle machine. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("speed.json")
Lines = list[dict[str, Any]]

# For each picture what is run, in this order.
BENCHMARKS = {
    "steps": [("run.py", "--only", "CNN", "wide MLP")],
    "first": [
        ("first_step.py", "--network", "transformer", "--replicas", "1", "2", "4",
         "--only", "by hand", "Keras", "ours", "checked"),
    ],
    "tables": [
        ("embedding.py", "--only", "Adagrad", "--sizes", "2000", "20000", "200000"),
    ],
    "workers": [
        ("embedding_workers.py", "--only", "SGD", "--workers", workers, "--sizes", *sizes, *more)
        for workers, sizes, more in (
            ("2", ["2000", "20000"], ["--by-hand"]), ("4", ["2000", "20000"], ["--by-hand"]),
            ("2", ["2000", "20000", "200000"], []), ("4", ["2000", "20000", "200000"], []),
            ("4", ["2000", "20000", "200000"], ["--logical-replicas", "4"]),
        )
    ],
    "bits": [("same_bits.py", "--replicas", "2", "4")],
}  # fmt: skip
COLOURS = {
    "one device": "silver",
    "Keras": "firebrick",
    "by hand": "orange",
    "tmg": "dodgerblue",
    "tmg, checked": "navy",
}


def measured(commands: Sequence[Sequence[str]]) -> Lines:
    """Returns the lines of JSON that benchmarks print, or write if they print for people."""
    lines: Lines = []
    for program, *arguments in commands:
        command = [sys.executable, str(ROOT / "benchmarks" / program), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        printed = done.stdout
        if program == "run.py":
            printed = (ROOT / "build" / "speed.json").read_text()
        lines += [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return lines


def draw_steps(axes: Any, lines: Lines) -> None:
    """Draws the milliseconds of a step over N, of the CNN."""
    of_cnn = [line for line in lines if line["workload"] == "CNN"]
    names = {"Keras fit": "Keras", "step by hand": "by hand", "step": "tmg"}
    for key, name in names.items():
        over = [line["replicas"] for line in of_cnn]
        axes.plot(over, [line["milliseconds"][key] for line in of_cnn], "o-", **_style(name))
    axes.axhline(of_cnn[0]["milliseconds"]["step by hand"], **_style("one device"), linewidth=5)
    axes.set(title="A step of a CNN, 64 rows", ylabel="milliseconds")
    _replicas(axes, [line["replicas"] for line in of_cnn])


def draw_first(axes: Any, lines: Lines) -> None:
    """Draws the CPU seconds of the first step over N."""
    names = {"Keras": "Keras", "by hand": "by hand", "ours": "tmg", "checked": "tmg, checked"}
    for who, name in names.items():
        of_one = [line for line in lines if line["who"] == who]
        over = [line["replicas"] for line in of_one]
        axes.plot(over, [line["first_cpu_s"] for line in of_one], "o-", **_style(name))
    axes.set(title="The first step of a transformer of 12 layers", ylabel="CPU seconds")
    _replicas(axes, [1, 2, 4])


def draw_tables(axes: Any, lines: Lines) -> None:
    """Draws the milliseconds of a step over the rows of a table."""
    names = {
        "Keras": ("Keras", "o-", "Keras, one device"),
        "by hand, N = 2": ("by hand", "o-", "by hand, N = 2"),
        "tmg, N = 1": ("tmg", "o:", "tmg, one device"),
        "tmg, N = 2": ("tmg", "o-", "tmg, N = 2"),
    }
    for who, (colour, line, label) in names.items():
        of_one = [each for each in lines if each["who"] == who]
        rows, times = [each["rows"] for each in of_one], [each["ms"] for each in of_one]
        axes.loglog(rows, times, line, color=COLOURS[colour], label=label)
    axes.set(title="A step with a table of embeddings, Adagrad", ylabel="milliseconds")
    axes.set(xlabel="rows of the table, of 32 numbers; 256 ids a step")
    axes.legend(frameon=False)


def draw_workers(axes: Any, lines: Lines) -> None:
    """Draws the KiB of a step between workers over the rows of a table."""
    for who, colour in (("by hand", "by hand"), ("tmg", "tmg")):
        for workers, line in ((2, "o:"), (4, "o-")):
            of_one = _of_workers(lines, who, workers, logical=None)
            rows, sent = [each["rows"] for each in of_one], [each["kib"] for each in of_one]
            label = f"{who}, {workers} workers"
            axes.loglog(rows, sent, line, color=COLOURS[colour], label=label)
    of_bits = _of_workers(lines, "tmg", 4, logical=4)
    rows, sent = [each["rows"] for each in of_bits], [each["kib"] for each in of_bits]
    label = "tmg, 4 workers, logical_replicas=4"
    axes.loglog(rows, sent, "o--", color=COLOURS["tmg, checked"], label=label)
    axes.set(title="What all workers send in a step, SGD", ylabel="KiB")
    axes.set(xlabel="rows of the table, of 32 numbers; 256 ids a step")
    axes.legend(frameon=False)


def _of_workers(lines: Lines, who: str, workers: int, *, logical: int | None) -> Lines:
    wanted = who, workers, logical
    return [
        line for line in lines if (line["who"], line["workers"], line["logical_replicas"]) == wanted
    ]


def draw_bits(axes: Any, lines: Lines) -> None:
    """Draws what equal bits cost: medians, and quartiles as bars."""
    places = range(len(lines))
    keys = {
        "logical / plain": ("tmg", -0.15, "V = N, against a step without"),
        "logical parts / parts": ("tmg, checked", 0.15, "V = 4 N, against micro_batches=4"),
    }
    for key, (colour, aside, label) in keys.items():
        shares = [line[key] for line in lines]
        middle = [share[1] for share in shares]
        below = [share[1] - share[0] for share in shares]
        above = [share[2] - share[1] for share in shares]
        at = [place + aside for place in places]
        style = {"color": COLOURS[colour], "label": label}
        axes.errorbar(at, middle, yerr=[below, above], fmt="o", capsize=3, **style)
    axes.axhline(1.0, color="silver", linewidth=1)
    names = [f"{line['network']}\nN = {line['N']}" for line in lines]
    axes.set_xticks(list(places), names, fontsize=7)
    axes.set(title="A step with logical_replicas=V", ylabel="share of the time without")
    axes.set_ylim(bottom=0.5)
    axes.legend(frameon=False)


PICTURES: dict[str, Callable[[Any, Lines], None]] = {
    "steps": draw_steps,
    "first": draw_first,
    "tables": draw_tables,
    "workers": draw_workers,
    "bits": draw_bits,
}


def _style(name: str) -> dict[str, str]:
    return {"color": COLOURS[name], "label": name}


def _replicas(axes: Any, numbers: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, list(map(str, numbers)))
    axes.set_xlabel("replicas, virtual devices of one CPU of two cores")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def main() -> None:
    """Measures what is asked for, and draws all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs="*", choices=BENCHMARKS)
    asked = parser.parse_args()
    found = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if asked.measure is not None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        for name in asked.measure or BENCHMARKS:
            found[name] = measured(BENCHMARKS[name])
            found["machine"] = f"{os.cpu_count()} cores, {platform.machine()}"
            RECORD.write_text(json.dumps(found, indent=1) + "\n")

    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "same", "font.size": 9})
    for name in PICTURES.keys() & found.keys():
        figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
        PICTURES[name](axes, found[name])
        picture = ROOT / "docs" / f"speed-{name}.svg"
        figure.savefig(picture, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
