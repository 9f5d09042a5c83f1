"""Faults in the middle of everything: kills, signals, and a long run whose memory is watched.

``python tests/faults/run.py kills 100``, ``stops 50``, ``soak 10`` (minutes), or ``plain``, which
shows what TensorFlow itself keeps of each call with collectives. ``--seed 1`` has other moments,
``--folder DIR`` is where logs and checkpoints go. The exit code is how much went otherwise than the
documentation says.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from kills import kills
from soak import plain, soak
from stops import stops


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kills", "stops", "soak", "plain"))
    parser.add_argument(
        "number", type=int, nargs="?", default=100, help="faults, or minutes of the soak"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", help="one program")
    given = parser.parse_args(arguments)
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    print(f"logs and checkpoints: {folder}", flush=True)
    only = {"programs": (given.only,)} if given.only else {}
    if given.what == "kills":
        return kills(given.number, folder, given.seed, **only)
    if given.what == "stops":
        return stops(given.number, folder, given.seed, **only)
    return soak(given.number, folder) if given.what == "soak" else plain(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
