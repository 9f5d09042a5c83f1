"""Checks and measures this library on a GPU, in under ten minutes, and writes a report.

``python benchmarks/run_gpu.py`` writes ``gpu.json`` and ``gpu.md`` to ``build/gpu-report``. It
needs TensorFlow with its GPU libraries and NumPy, from wherever: neither pytest, nor an index of
packages, nor an installation of this library. Everything runs in processes of its own, one after
the other, the most telling first; what there is no time for is named in the report. With
``--rehearse`` the same runs on virtual CPUs with tiny networks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CHECKS = ROOT / "tests" / "gpu"
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(CHECKS)]

from gpu.cases import CASES, measure  # noqa: E402
from gpu.report import missed, not_run, to_markdown  # noqa: E402

GROUPS = ("two_parts", "growth", "limit", "four_parts")
OUT = Path("build/gpu-report")
AT_MOST = 240.0  # seconds of one process
AT_LEAST = 25.0  # starting TensorFlow on a GPU and tracing a network
FIND_GPUS = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 where something failed or missed its target; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny, on virtual CPUs")
    parser.add_argument("--minutes", type=float, default=9.5, help="9.5 by default")
    parser.add_argument("--only", nargs="+", choices=(*GROUPS, *CASES), help="some of it")
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu-report"), help="folder to write to"
    )
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.case:
        return _measure_here(asked.case[0], Path(asked.case[1]), asked.rehearse)
    began = time.monotonic()
    if not asked.rehearse and not seen_gpus():
        print(
            "TensorFlow sees no GPU here, so nothing was run. `python -m tfmultigpu doctor` says "
            "why; `--rehearse` runs everything on virtual CPUs, which shows that it works and "
            "says nothing about a GPU.",
            file=sys.stderr,
        )
        return 2
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/run_gpu.py", *(arguments or sys.argv[1:])]),
        "rehearsal": asked.rehearse,
        "machine": {},
        "checks": [],
        "benchmarks": [],
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    end = began + 60 * asked.minutes
    for name in asked.only or (*GROUPS, *CASES):
        found = run_part(name, min(AT_MOST, end - time.monotonic()), asked.rehearse)
        for one in found:
            record["machine"] = one.pop("machine", None) or record["machine"]
            last = one.get("error", "").strip().splitlines()[-1:]
            print(f"{one['name']}: {one['status']} {' '.join(last)}", flush=True)
        record["checks" if name in GROUPS else "benchmarks"] += found
        record["seconds"] = round(time.monotonic() - began)
        # After each part: whatever happens next, this is known.
        (asked.out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
        (asked.out / "gpu.md").write_text(to_markdown(record))
    problems = list(missed(record))
    print(f"\nwrote {asked.out / 'gpu.json'} and gpu.md in {record['seconds']} s")
    print("\n".join(problems) or "nothing failed", f"\n{len(not_run(record))} not run")
    return int(bool(problems))


def seen_gpus() -> int:
    """Returns how many GPUs TensorFlow sees, asked in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", FIND_GPUS], env=_environment(), capture_output=True, text=True
    )
    said = done.stdout.split()
    if done.returncode or not said:
        raise SystemExit(f"TensorFlow does not start: {done.stderr[-2000:]}")
    return int(said[-1])


def run_part(name: str, seconds: float, rehearse: bool) -> list[dict[str, Any]]:
    """Runs a group of checks or a case, in a process of its own.

    Args:
        name: One of ``GROUPS`` or ``CASES``.
        seconds: How long it may take.
        rehearse: On virtual CPUs.

    Returns:
        The records it wrote, and one for each check that it did not come to.
    """
    if seconds < AT_LEAST:
        return missing(name, [], "not run", "no time was left: give more --minutes")
    options = ["--rehearse"] if rehearse else []
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        lines.touch()
        group = [str(CHECKS / "run.py"), name, str(lines)]
        case = [str(HERE / "run_gpu.py"), "--case", name, str(lines)]
        command = [sys.executable, *(group if name in GROUPS else case), *options]
        try:
            done = subprocess.run(
                command,
                env=_environment(),
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            problem = f"ended with {done.returncode}: {done.stderr[-1500:]}"
        except subprocess.TimeoutExpired:
            problem = f"took longer than {seconds:.0f} s"
        found = [json.loads(line) for line in lines.read_text().splitlines()]
    return missing(name, found, "failed", problem)


def missing(
    name: str, found: list[dict[str, Any]], status: str, error: str
) -> list[dict[str, Any]]:
    """Returns the records of a part: those it wrote, and one for each check it did not come to.

    Args:
        name: One of ``GROUPS`` or ``CASES``.
        found: What it wrote; a group begins with what it was going to run.
        status: Of what is missing.
        error: Why it is missing.
    """
    wrote = [one for one in found if "expected" not in one]
    if name in CASES:
        kind = CASES[name].kind
        return wrote or [{"name": name, "kind": kind, "status": status, "error": error}]
    expected = found[0]["expected"] if found else [name]
    there = {one["name"] for one in wrote}
    empty = {"status": status, "seconds": 0.0, "facts": {}, "error": error}
    return wrote + [{"name": one, **empty} for one in expected if one not in there]


def _measure_here(name: str, file: Path, rehearse: bool) -> int:
    found = measure(CASES[name], rehearse=rehearse)
    with file.open("a") as lines:
        print(json.dumps(found), file=lines, flush=True)
    sys.stdout.flush()
    # An orderly end would let go of TensorFlow's iterators, and each can take a minute for that.
    os._exit(int(found["status"] == "failed"))


def _environment() -> dict[str, str]:
    """For processes that find the library beside this file, in whatever state the machine is."""
    found = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow", **os.environ}
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return found | {"PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    sys.exit(main())
