"""Real worker processes on loopback, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, found by asking the system for them all at once."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def run_script(script: Path, *arguments: str, workers: int = 0, timeout: float = 120) -> list[str]:
    """Runs a script, as one process or as several workers, and returns what each printed.

    A process that fails, or does not end in time, fails the test with everybody's output.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(workers)]
    processes = []
    for index in range(max(workers, 1)):
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        if workers:
            task = {"type": "worker", "index": index}
            cluster = {"worker": addresses}
            environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [printed for printed, _ in outputs]
