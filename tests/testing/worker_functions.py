"""What the tests of ``run_workers`` run in workers.

Without TensorFlow, which every process would take four seconds to import.
"""

from __future__ import annotations

import os
import signal
import time


def greet(name: str) -> str:
    print("working")
    return f"{name} {os.environ.get('TF_CONFIG', 'alone')}"


def fail_second() -> None:
    if '"index": 1' in os.environ["TF_CONFIG"]:
        print("about to fail")
        raise ValueError("the second worker's own error")
    time.sleep(600)


def leave_early() -> None:
    raise SystemExit(0)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
