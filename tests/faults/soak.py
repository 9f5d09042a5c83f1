"""Trains for minutes on two workers with all that communicates; what a process holds stays flat."""

from __future__ import annotations

import json
from pathlib import Path

from copies import Copies
from runs import HANGS_AFTER, Attempt

# What a process may hold at the end beyond what it held after a third of the time. TensorFlow
# itself keeps 1.4 KB of each all-reduce of each call of a function: see collectives.py.
MOST_BYTES_PER_STEP = 16 << 10
MOST = {"files": 3, "threads": 8, "objects": 3000}


def plain(folder: Path) -> int:
    """Prints what plain TensorFlow keeps of each call of a function with collectives."""
    folder.mkdir(parents=True, exist_ok=True)
    with Copies() as copies:
        attempt = Attempt(copies, "collectives", 2, folder)
        attempt.wait(4 * HANGS_AFTER)
    print("\n".join(one for one in attempt.said[0] if "all-reduces" in one))
    return sum(copy.code != 0 for copy in attempt.copies)


def soak(minutes: int, folder: Path) -> int:
    """Trains, prints what both workers held over time, and returns how much was not flat."""
    folder.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with Copies() as copies:
        attempt = Attempt(copies, "soak", 2, folder, 60.0 * minutes)
        took = attempt.wait(60.0 * minutes + 4 * HANGS_AFTER)
        codes = [copy.code for copy in attempt.copies]
    print(f"{took:.0f} s, exit codes {codes}")
    for index, said in enumerate(attempt.said):
        held = [json.loads(one[7:]) for one in said if one.startswith("MEMORY ")]
        print(f"worker {index}\n{'steps':>8} {'MB':>7} {'files':>6} {'threads':>8} {'objects':>8}")
        for one in held[:: max(1, len(held) // 12)] + held[-1:]:
            megabytes = one["bytes"] / 2**20
            rest = f"{one['files']:6} {one['threads']:8} {one['objects']:8}"
            print(f"{one['steps']:8} {megabytes:7.1f} {rest}")
        if len(held) < 6 or codes[index] != 0:
            wrong += 1
            print(f"  ! worker {index} said too little: {said[-1:]}")
            continue
        first, last = held[len(held) // 3], held[-1]
        grown = {name: last[name] - first[name] for name in last}
        per_step = grown["bytes"] / max(1, grown["steps"])
        print(f"since step {first['steps']}: {per_step:.0f} bytes a step, {grown}")
        for name, most in {**MOST, "bytes": MOST_BYTES_PER_STEP * grown["steps"]}.items():
            if grown[name] > most:
                wrong += 1
                print(f"  ! worker {index}: {grown[name]} more {name}, at most {most} are expected")
    return wrong
