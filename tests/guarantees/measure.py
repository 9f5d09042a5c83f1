"""Measures every case on both sides and writes docs/guarantees.json and docs/guarantees.md."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import isolated  # noqa: E402
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from catalogue import CASES  # noqa: E402
from guarantee import Outcome  # noqa: E402
from page import cell, render  # noqa: E402

DOCS = HERE.parent.parent / "docs"
RECORD, PAGE = DOCS / "guarantees.json", DOCS / "guarantees.md"


def rounded(outcome: Outcome) -> dict[str, Any]:
    """The record keeps two digits: the rest changes with every computer."""
    found = outcome.as_json()
    if outcome.difference is not None and math.isfinite(outcome.difference):
        found["difference"] = float(f"{outcome.difference:.1e}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names: show these and write nothing")
    parser.add_argument("--parallel", type=int, default=2, help="processes at a time (2)")
    parser.add_argument("--isolate", action="store_true", help="each case in its own process")
    options = parser.parse_args()
    cases = [c for c in CASES if not options.names or any(n in c.name for n in options.names)]
    jobs = isolated.jobs_for(cases, size=1 if options.isolate else isolated.TOGETHER)
    found: dict[tuple[str, str], Outcome] = {}
    for name, side, outcome, seconds in isolated.run(jobs, options.parallel):
        found[name, side] = outcome
        print(f"{name:30} {side:5} {seconds:5.1f} s  {cell(outcome)}", flush=True)
    if options.names:
        return 0
    wrong = [
        case.name
        for case in CASES
        if found[case.name, "ours"].kind != case.ours_kind
        or case.ours_says not in found[case.name, "ours"].message
    ]
    if wrong:
        print(f"Nothing was written: tfmultigpu does not do what it is held to in {wrong}.")
        return 1
    record = {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "cases": {
            case.name: {
                **case.described(),
                "plain": rounded(found[case.name, "plain"]),
                "ours": rounded(found[case.name, "ours"]),
            }
            for case in CASES
        },
    }
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(render(record))
    print(f"{len(CASES)} cases: {RECORD} and {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
