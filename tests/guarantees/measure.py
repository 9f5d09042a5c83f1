"""Measures every case on both sides and writes guarantees.json and .md of docs/contributing."""

from __future__ import annotations

import argparse
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
from guarantee import SIDES, Outcome  # noqa: E402
from page import cell, write  # noqa: E402


def rounded(outcome: Outcome) -> dict[str, Any]:
    """The record keeps two digits: the rest changes with every computer."""
    found = outcome.as_json()
    if outcome.difference is not None and math.isfinite(outcome.difference):
        found["difference"] = float(f"{outcome.difference:.1e}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names: show these and write nothing")
    names = parser.parse_args().names
    cases = [case for case in CASES if not names or any(name in case.name for name in names)]
    found = isolated.measured(cases)
    for (name, side), outcome in found.items():
        print(f"{name:30} {side:5} {cell(outcome)}")
    wrong = [case.name for case in cases if case.fault(found[case.name, "ours"])]
    if wrong:
        print(f"Nothing was written: tfmultigpu does not do what it is held to in {wrong}.")
        return 1
    if not names:
        outcomes = {
            case.name: case.described() | {side: rounded(found[case.name, side]) for side in SIDES}
            for case in cases
        }
        write({"tensorflow": tf.__version__, "keras": keras.__version__, "cases": outcomes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
