"""Checks and measures this library on a GPU, in under ten minutes, and writes a report.

``python benchmarks/run_gpu.py`` writes ``gpu.json`` and ``gpu.md`` to ``build/gpu-report``. It
needs TensorFlow with its GPU libraries and NumPy, from wherever: neither pytest, nor an index of
packages, nor an installation of this library. Everything runs in processes of its own, one after
the other, the most telling first; what there is no time for is named in the report, for ``--only``.
With ``--rehearse`` the same runs on virtual CPUs with tiny networks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "gpu")]

from gpu.cases import CASES, measure  # noqa: E402
from gpu.parts import GROUPS, environment, missing, python, run_part  # noqa: E402
from gpu.report import missed, not_run, to_markdown  # noqa: E402

__all__ = ["CASES", "GROUPS", "ORDER", "main", "missing", "run_part", "seen_gpus"]

_FIRST = ("two_parts", "growth", "peak", "transformer-bfloat16-32", "resnet-bfloat16-256", "limit")
ORDER = tuple(dict.fromkeys((*_FIRST, "memory-transformer-bfloat16-32", *GROUPS, *CASES)))
# What one command runs in ten minutes, in this order; (f) is pytest, see contributing/speed.md.
SETS = {
    "a": (
        "peak",
        "transformer-bfloat16-32",
        "resnet-bfloat16-256",
        "transformer-bfloat16-32-xla",
        "resnet-bfloat16-256-xla",
    ),
    "b": ("profile-transformer-bfloat16-32", "profile-resnet-bfloat16-256"),
    "c": ("2-parts-transformer", "4-parts-transformer", "2-parts-resnet", "4-parts-resnet"),
    "d": ("bert-bfloat16-32", "gemma-bfloat16-8"),
    "e": ("remat-bfloat16-32", "transformer-float16-32", "embedding-float32-256"),
    "g": ("bits-transformer", "bits-resnet"),
    "h": ("plan-transformer-bfloat16-32", "plan-resnet-bfloat16-256"),
}
FIND_GPUS = "import tensorflow as tf; print('GPUS', len(tf.config.list_physical_devices('GPU')))"
TO_START = 300.0  # seconds: the first import of TensorFlow from a cold disk, compiling its Python


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 where something failed or missed its target; 2 where nothing can be run."""
    asked = _arguments(arguments)
    if asked.case:
        return _measure_here(asked.case[0], Path(asked.case[1]), asked.rehearse)
    began = time.monotonic()
    if not asked.rehearse:
        count, said = seen_gpus()
        if not count:
            print(NO_GPU, *([f"\nTensorFlow said:\n{said}"] if said else []), file=sys.stderr)
            return 2
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
        _write(asked.out / "gpu.md", "# GPU report\n\nNothing has ended yet.\n", only_if_new=True)
    except OSError as error:
        print(f"The report cannot be written: {error}. Give another --out.", file=sys.stderr)
        return 2
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/run_gpu.py", *(arguments or sys.argv[1:])]),
        "rehearsal": asked.rehearse,
        "machine": {},
        "checks": [],
        "benchmarks": [],
        "seconds": 0,
    }
    wanted = [name for name in ORDER if name in (asked.only or ORDER)]
    end = began + 60 * asked.minutes
    for name in wanted:
        found = run_part(name, end - time.monotonic(), asked.rehearse, asked.out / "gpu.log")
        for one in found:
            record["machine"] = one.pop("machine", None) or record["machine"]
            last = one.get("error", "").strip().splitlines()[-1:]
            print(f"{one['name']}: {one['status']} {' '.join(last)}", flush=True)
        record["checks" if name in GROUPS else "benchmarks"] += found
        record["seconds"] = round(time.monotonic() - began)
        # After each part: whatever happens next, this is known.
        try:
            _write(asked.out / "gpu.json", json.dumps(_plain(record), indent=1) + "\n")
            _write(asked.out / "gpu.md", to_markdown(record))
        except OSError as error:
            print(f"The report cannot be written: {error}", file=sys.stderr)
            print(json.dumps(_plain(found)), flush=True)  # What there is, where it can be seen.
    problems = list(missed(record))
    left_out = not_run(record)
    ran = [one for one in record["checks"] + record["benchmarks"] if one["status"] != "not run"]
    if not ran:
        problems = ["nothing was run"]
    print(f"\nwrote {asked.out / 'gpu.json'} and gpu.md in {record['seconds']} s")
    print("\n".join(problems) or "nothing failed", f"\n{len(left_out)} not run")
    return int(bool(problems))


NO_GPU = (
    "TensorFlow sees no GPU here, so nothing was run. `python -m tfmultigpu doctor` says why; "
    "`--rehearse` runs everything on virtual CPUs, which shows that it works and says nothing "
    "about a GPU."
)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny, on virtual CPUs")
    parser.add_argument("--minutes", type=float, default=9.5, help="9.5 by default")
    parser.add_argument("--only", nargs="+", choices=ORDER, help="some of it", metavar="NAME")
    parser.add_argument("--set", choices=SETS, help="what belongs together: contributing/speed.md")
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu-report"), help="folder to write to"
    )
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.set:
        asked.only = [*SETS[asked.set], *(asked.only or ())]
    if not 0 < asked.minutes < 24 * 60:
        parser.error(f"--minutes is a positive number. Received: {asked.minutes}")
    return asked


def seen_gpus() -> tuple[int, str]:
    """Returns how many GPUs TensorFlow sees, asked in a process of its own, and what it said."""
    try:
        done = subprocess.run(
            [*python(), "-c", FIND_GPUS],
            env=environment() | {"TF_CPP_MIN_LOG_LEVEL": "0"},
            capture_output=True,
            text=True,
            timeout=TO_START,
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"TensorFlow does not start within {TO_START:.0f} s") from None
    counts = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("GPUS ")]
    if done.returncode or not counts:
        raise SystemExit(f"TensorFlow does not start: {done.stderr[-2000:]}")
    about = ("dlopen", "cuda", "gpu", "driver")
    lines = [one for one in done.stderr.splitlines() if any(word in one.lower() for word in about)]
    return int(counts[-1]), "\n".join(line[:300] for line in lines[-8:])


def _measure_here(name: str, file: Path, rehearse: bool) -> int:
    with file.open("a") as lines:

        def write(one: dict[str, Any]) -> None:
            print(json.dumps(_plain(one)), file=lines, flush=True)

        found = measure(CASES[name], rehearse=rehearse, write=write)
        write(found)
    sys.stdout.flush()
    # An orderly end would let go of TensorFlow's iterators, and each can take a minute for that.
    os._exit(int(found["status"] == "failed"))


def _plain(value: Any) -> Any:
    """A value as JSON knows it: what it does not know becomes text, infinities too."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # A number of NumPy's is one of Python's.
    return _plain(value.item()) if getattr(value, "shape", None) == () else str(value)


def _write(file: Path, text: str, *, only_if_new: bool = False) -> None:
    """Writes a file whole or not at all; with ``only_if_new`` just finds out whether it could."""
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(text)
    if only_if_new and file.exists():
        beside.unlink()
    else:
        beside.replace(file)


def _ended(*_: Any) -> None:
    raise SystemExit(143)  # By way of ``finally``, so that no process is left on the GPU.


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _ended)
    sys.exit(main())
