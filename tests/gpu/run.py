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
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Returns 0, or 1 where a check failed."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(Path(__file__).parent)]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    from gpu_checks.groups import GROUPS, names_of, run_group

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=sorted(GROUPS))
    parser.add_argument("file", type=Path, help="where to add the lines")
    parser.add_argument("--rehearse", action="store_true", help="on virtual CPUs")
    parser.add_argument("--only", nargs="+", help="some of its checks, GROUP.CHECK")
    asked = parser.parse_args()
    names = [name for name in names_of(asked.group) if name in (asked.only or [name])]
    failed = False
    with asked.file.open("a") as lines:

        def write(one: dict[str, Any]) -> None:
            # Whatever a check measured, it must not cost the ones after it.
            print(json.dumps(one, default=str), file=lines, flush=True)

        write({"expected": names})

        def begin(name: str) -> None:
            write({"begun": name})  # If it ends this process, it is known which one it was.

        for result in run_group(asked.group, "CPU" if asked.rehearse else "GPU", names, begin):
            write(dataclasses.asdict(result))
            first = result.error.strip().splitlines()[-1:] or [str(result.facts)]
            print(f"{result.name}: {result.status}, {result.seconds} s. {first[0]}", flush=True)
            failed |= result.status == "failed"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
