"""Compares the speed of training steps: by hand, Keras ``fit`` and this library.

``python benchmarks/run.py`` measures everything (about ten minutes on two cores), writes
``benchmarks/speed.json`` and the tables in ``docs/benchmarks.md``. With ``--quick``,
``--workload`` or ``--replicas`` it prints and writes nothing; ``--rounds`` and ``--steps`` go into
the record.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from speed import report
from speed.measure import TOLERANCE, measure
from speed.workloads import WORKLOADS

HERE = Path(__file__).parent
RECORD = HERE / "speed.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
REPLICAS = (1, 2, 4)


def main() -> int:
    """Returns 0, or 1 where the contenders did not train the same model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), action="append")
    parser.add_argument("--replicas", type=int, action="append", help="1, 2 and 4 by default")
    parser.add_argument("--rounds", type=int, help="turns of each contender, 9 by default")
    parser.add_argument("--steps", type=int, help="steps of a turn, 50 by default")
    parser.add_argument("--page-only", action="store_true", help="write the page from the record")
    asked = parser.parse_args()
    if asked.page_only:
        report.place(PAGE, report.to_markdown(json.loads(RECORD.read_text())))
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    rounds, steps = (3, 20) if asked.quick else (9, 50)
    rounds, steps = asked.rounds or rounds, asked.steps or steps
    record = {**_circumstances(), "rounds": rounds, "steps": steps, "results": []}
    disagree = False
    for workload in asked.workload or WORKLOADS:
        for replicas in asked.replicas or REPLICAS:
            result = _in_child(workload, replicas, rounds, steps)
            record["results"].append(result)
            print(report.table(result), flush=True)
            for name, difference in report.disagreements(result).items():
                disagree = True
                print(f"  WRONG: {name} is {difference:.1e} off, allowed is {TOLERANCE:.0e}")
    partial = asked.quick or asked.workload or asked.replicas
    if not (partial or disagree):
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        report.place(PAGE, report.to_markdown(record))
        print(f"wrote {RECORD} and {PAGE}")
    return int(disagree)


def _in_child(*arguments: Any) -> dict[str, Any]:
    context = get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sending, arguments))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"The process that measured {arguments} ended with exit code {process.exitcode}; "
            "what it printed is above."
        ) from None


def _child(sending: Any, arguments: tuple[Any, ...]) -> None:
    sending.send(measure(*arguments))
    sending.close()
    # An orderly end would let go of TensorFlow's iterators, and each can take a minute for that.
    os._exit(0)


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
