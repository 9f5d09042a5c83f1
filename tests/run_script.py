"""Python programs that a test runs in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run_script(script: str) -> str:
    """Returns what a program printed; fails with the end of its errors."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
