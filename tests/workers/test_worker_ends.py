"""Real workers: whatever ends one of them, all processes end, the error their last words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfmultigpu.addons.workers.processes import free_addresses, worker_environment

SCRIPT = Path(__file__).with_name("worker_ends.py")
LONGEST = 300.0  # Seconds; whatever holds one of them holds it for ever.


def freeze(workers: list[subprocess.Popen[bytes]]) -> None:
    """Wakes the worker up again when the other one has ended without it."""
    workers[1].send_signal(signal.SIGSTOP)
    workers[0].wait(LONGEST)
    workers[1].send_signal(signal.SIGCONT)


# What happens to worker 1.
EVENTS: dict[str, Callable[[Any], None]] = {"error": lambda workers: None, "freeze": freeze}


@pytest.mark.slow
@pytest.mark.parametrize("event", EVENTS)
def test_all_workers_end(event: str) -> None:
    addresses = free_addresses(2)
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), event],
            env=worker_environment(addresses, index, quiet),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for index in range(2)
    ]
    printed: list[list[str]] = [[], []]
    ready = [threading.Event() for _ in workers]

    def read(index: int) -> None:
        for line in workers[index].stdout or ():
            printed[index].append(line.decode())
            if line == b"READY\n":
                ready[index].set()
        ready[index].set()

    readers = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    try:
        for reader in readers:
            reader.start()
        for one in ready:
            assert one.wait(LONGEST)
        EVENTS[event](workers)
        codes = [worker.wait(LONGEST) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
        for reader in readers:
            reader.join()
        for worker in workers:
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
    output = "".join(printed[0]) + "".join(printed[1])
    assert codes == [1, 1], output
    last = [lines[-1] for lines in printed]
    assert last[0].startswith("tfmultigpu.errors.WorkerLostError: Another worker is gone"), output
    assert f"First to go: worker 1 of 2 at {addresses[1]}: " in last[0], output
    if event == "error":
        assert last[1] == "ValueError: my own\n", output
    if event == "freeze":
        assert last[1].startswith("tfmultigpu.errors.WorkerLostError: Another worker"), output
