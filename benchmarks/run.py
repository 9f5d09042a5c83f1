"""Compares the speed of training steps: by hand, Keras ``fit`` and this library.

``python benchmarks/run.py`` measures everything (about half an hour on two idle cores) and
writes ``benchmarks/speed.json``, and from it the tables of ``docs/benchmarks.md``.
``--only PART ...`` measures parts again and puts them into the record; with ``--quick`` or
``--replicas`` what was measured is printed and nothing is written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from speed import page, report
from speed.costs import SERIES, measure_series, measure_tracing
from speed.measure import TOLERANCE, measure
from speed.memory import measure_peak, memory_cases
from speed.workloads import WORKLOADS

HERE = Path(__file__).parent
RECORD = HERE / "speed.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
REPLICAS = (1, 2, 4)
PARTS = (*WORKLOADS, "memory", "costs", "unequal")


def main() -> int:
    """Returns 0, or 1 where the contenders did not train the same model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="parts to measure")
    parser.add_argument("--replicas", type=int, nargs="+", help="1, 2 and 4 by default")
    parser.add_argument("--rounds", type=int, help="turns of each contender")
    parser.add_argument("--steps", type=int, help="steps of a turn, a multiple of ten")
    parser.add_argument("--page-only", action="store_true", help="write the page from the record")
    asked = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"parts": {}}
    if asked.page_only:
        write_page(record)
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    wrong = False
    for part in asked.only or PARTS:
        began = time.perf_counter()
        if part == "unequal":
            extra = ["--quick"] if asked.quick else []
            subprocess.run([sys.executable, str(HERE / "run_unequal.py"), *extra], check=True)
            continue
        found: dict[str, Any] = _circumstances()
        if part == "memory":
            found.update(_memory())
        elif part == "costs":
            found.update(_costs(asked.rounds or (3 if asked.quick else 7)))
        else:
            found["results"] = _speed(part, asked)
            wrong |= any(report.disagreements(result) for result in found["results"])
        found["seconds"] = round(time.perf_counter() - began)
        print(f"{part}: {found['seconds']} s", flush=True)
        record["parts"][part] = found
        if not (asked.quick or asked.replicas or wrong):
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
            write_page(record)
            print(f"wrote {RECORD} and {PAGE}", flush=True)
    return int(wrong)


def write_page(record: dict[str, Any]) -> None:
    """Writes the measured part of the page."""
    report.place(PAGE, page.to_markdown(record))


def _speed(part: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    workload = WORKLOADS[part]
    rounds, steps = (3, 20) if asked.quick else (workload.rounds, workload.steps)
    results = []
    for replicas in asked.replicas or REPLICAS:
        result = _in_child(measure, part, replicas, asked.rounds or rounds, asked.steps or steps)
        results.append(result)
        print(report.table(result), flush=True)
        for name, difference in report.disagreements(result).items():
            print(f"  WRONG: {name} is {difference:.1e} off, allowed is {TOLERANCE:.0e}")
    return results


def _memory() -> dict[str, Any]:
    peaks = {}
    for name, arguments in memory_cases().items():
        # What the allocator keeps differs by some MB from process to process.
        tries = [_in_child(measure_peak, **arguments) for _ in range(3)]
        peaks[name] = sorted(tries, key=lambda one: one["peak"])[1]
        sizes = {key: f"{peaks[name][key] / 1e6:.0f} MB" for key in ("peak", "optimizer")}
        print(f"memory, {name}: {sizes}", flush=True)
    return {"cases": memory_cases(), "peaks": peaks}


def _costs(rounds: int) -> dict[str, Any]:
    series = {}
    for name in SERIES:
        series[name] = _in_child(measure_series, name, rounds)
        for who, times in series[name]["milliseconds"].items():
            medians = {at: round(report.Spread.of(t).median, 2) for at, t in times.items()}
            print(f"cost by {name}, {who}: {medians} ms", flush=True)
    tracing = _in_child(measure_tracing)
    print(f"first steps: {tracing['seconds']}", flush=True)
    return {"rounds": rounds, "series": series, "tracing": tracing}


def _in_child(function: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sending, function, arguments, options))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"The process that measured {function.__name__}{arguments or options} ended with exit "
            f"code {process.exitcode}; what it printed is above."
        ) from None


def _child(sending: Any, function: Any, arguments: Any, options: Any) -> None:
    status = 1
    try:
        sending.send(function(*arguments, **options))
        sending.close()
        status = 0
    except Exception:
        traceback.print_exc()
    # An orderly end would let go of TensorFlow's iterators, and each can take a minute for that.
    os._exit(status)


def _circumstances() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
            "load": os.getloadavg()[0],
        },
        "versions": {
            "Python": platform.python_version(),
            **{name: version(name) for name in ("tensorflow", "keras", "numpy")},
        },
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
