"""Prints the table of ``programs.CASES``: ``python tests/parity/run.py [parts of names]``."""

from __future__ import annotations

import sys

from comparing import compare
from programs import CASES
from more_programs import MORE_CASES

import tfmultigpu as tmg


def main(*parts: str) -> int:
    devices = tmg.split_device("CPU:0", parts=2)
    strategy = tmg.create_strategy(devices=list(devices))
    wrong = 0
    print("| program | two replicas | apart / moved | what is said |\n|---|---|---|---|")
    for case in (*CASES, *MORE_CASES):
        if not parts or any(part in case.name for part in parts):
            try:
                found = compare(case, strategy)
            except Exception as e:
                print("CRASH", case.name, type(e).__name__, str(e)[:600], flush=True); continue
            wrong += found.said != case.outcome
            numbers = f"{found.apart:.1e} / {found.moved:.1e}"
            print(f"| {case.name} | {found.said} | {numbers} | {found.text[:260]} |", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
