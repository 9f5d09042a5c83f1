"""Measures what planned shares gain on unequal devices, and what cutting a batch costs.

``python benchmarks/run_unequal.py`` takes about two minutes on two idle cores, which it needs: each
is a device. It writes ``benchmarks/unequal.json``, and of it the numbers of
``docs/unequal-gpus.md``. With ``--quick`` it prints and writes nothing; ``--page-only`` writes them
again from the record.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from run import _circumstances
from speed import report
from unequal.pair import measure_pair
from unequal.splitting import measure_splitting

HERE = Path(__file__).parent
RECORD = HERE / "unequal.json"
PAGE = HERE.parent / "docs" / "unequal-gpus.md"
SLOWER = (2, 4)


def main() -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; nothing is written")
    parser.add_argument("--page-only", action="store_true", help="write the page from the record")
    asked, _ = parser.parse_known_args()  # Beside options of run.py.
    if asked.page_only:
        _write(json.loads(RECORD.read_text()))
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    rounds = 3 if asked.quick else 9
    record = {
        **_circumstances(),
        "rounds": rounds,
        "pairs": [_in_child(measure_pair, slower, rounds) for slower in SLOWER],
        "splitting": _in_child(measure_splitting, rounds, 10),
    }
    print(_to_markdown(record))
    if not asked.quick:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        _write(record)
        print(f"wrote {RECORD} and {PAGE}")
    return 0


def _write(record: dict[str, Any]) -> None:
    report.place(PAGE, _to_markdown(record))


def _in_child(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The number of devices and threads of a process cannot change, so each gets its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def _to_markdown(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    splitting = record["splitting"]
    about = ", ".join(f"{name} {number}" for name, number in versions.items())
    shape = " x ".join(str(length) for length in splitting["shape"])
    lines = [
        f"Measured on {record['date']}: {machine['cpu']}, {machine['cores']} cores, load "
        f"{machine['load']:.1f} at the start; {about}; medians of {record['rounds']} rounds "
        "(quartiles).",
        "",
        "Two virtual CPUs of one thread each; on the second the work of a row is done several "
        "times. Of the sum of the rows per second that both reach alone, a step reaches:",
        "",
        "| second device is slower by | equal shares | planned shares | 2 / (1 + k) | shares |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for pair in record["pairs"]:
        reached = _reached(pair)
        k = median(pair["seconds"]["slow_alone"]) / median(pair["seconds"]["fast_alone"])
        shares = " : ".join(str(share) for share in pair["shares"])
        lines.append(
            f"| k = {pair['slower']} (measured {k:.2f}) | {_spread(reached['equal'])} | "
            f"**{_spread(reached['planned'])}** | {2 / (1 + k):.2f} | {shares} |"
        )
    lines += [
        "",
        f"A batch of {shape} in float32, cut for two replicas by TensorFlow "
        "(`experimental_distribute_dataset`) and here, in the same loop by hand: milliseconds of a "
        "step, and the share of TensorFlow's time.",
        "",
        "| cut into | a step that adds up the pixels | | a small convolution network | |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in splitting["reading"]:
        cells = []
        for kind in ("reading", "training"):
            own, even = splitting[kind][name], splitting[kind]["TensorFlow, even"]
            ratio = median(a / b for a, b in zip(own, even, strict=True))
            cells += [_spread(own), f"{ratio:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _reached(pair: dict[str, Any]) -> dict[str, list[float]]:
    """The share of the ideal rows per second in each round: the sum of what each reaches alone."""
    seconds, rows = pair["seconds"], pair["rows"]
    ideal = [
        (rows - 1) / fast + (rows - 1) / slow
        for fast, slow in zip(seconds["fast_alone"], seconds["slow_alone"], strict=True)
    ]
    return {
        name: [rows / one / most for one, most in zip(seconds[name], ideal, strict=True)]
        for name in ("equal", "planned")
    }


def _spread(values: list[float]) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
