"""Runs scripts of this folder one after the other: it is the start of a worker that costs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

for name in sys.argv[1:]:
    print("SCRIPT", name, flush=True)
    runpy.run_path(str(Path(__file__).with_name(f"worker_{name}.py")))
