"""Prints the table of all programs: ``python tests/parity/run.py [parts of names]``."""

from __future__ import annotations

import sys

from comparing import compare
from more_programs import MORE_CASES
from programs import CASES

import tfmultigpu as tmg


def main(*parts: str) -> int:
    devices = tmg.split_device("CPU:0", parts=2)
    strategy = tmg.create_strategy(devices=list(devices))
    wrong = 0
    print("| program | two replicas | apart / moved | what is said |\n|---|---|---|---|")
    for case in (*CASES, *MORE_CASES):
        if not parts or any(part in case.name for part in parts):
            found = compare(case, strategy)
            wrong += found.said != case.outcome
            numbers = f"{found.apart:.1e} / {found.moved:.1e}"
            print(f"| {case.name} | {found.said} | {numbers} | {found.text[:160]} |", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
