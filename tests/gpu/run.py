"""Runs the checks of one group in this process and writes JSON: their names, then each result.

``python tests/gpu/run.py GROUP FILE`` on a GPU; with ``--rehearse`` on virtual CPUs. It needs
TensorFlow, NumPy and this library, and neither pytest nor an installed package.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Returns 0, or 1 where a check failed."""
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    from gpu_checks.groups import GROUPS, names_of, run_group

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=sorted(GROUPS))
    parser.add_argument("file", type=Path, help="where to add the lines")
    parser.add_argument("--rehearse", action="store_true", help="on virtual CPUs")
    asked = parser.parse_args()
    failed = False
    with asked.file.open("a") as lines:
        print(json.dumps({"expected": names_of(asked.group)}), file=lines, flush=True)
        for result in run_group(asked.group, "CPU" if asked.rehearse else "GPU"):
            print(json.dumps(dataclasses.asdict(result)), file=lines, flush=True)
            first = result.error.strip().splitlines()[-1:] or [str(result.facts)]
            print(f"{result.name}: {result.status}, {result.seconds} s. {first[0]}", flush=True)
            failed |= result.status == "failed"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
