"""Runs cases in copies of one process that has imported TensorFlow and started nothing.

A case may abort its process, hang, or leave TensorFlow's collectives broken; the next one must not
notice. Importing TensorFlow takes seconds, a copy of the process does not.

Reads ``{"parallel": 2, "jobs": [{"side": "plain", "names": [...]}, ...]}`` from standard input, the
cases of a job in one copy, and writes a line of JSON for each of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from guarantee import SIDES, Case, Outcome

HERE = Path(__file__).parent
TOGETHER = 14  # cases in one process, so that two processes have equally much to do


def jobs_for(
    cases: Iterable[Case], sides: Iterable[str] = SIDES, size: int = TOGETHER
) -> list[Any]:
    """Cases that can share a process, by side; the longest first."""
    groups: dict[Any, list[list[str]]] = {}
    for case in cases:
        for side in sides:
            alone = case.name if case.alone and side == "plain" else None
            key = (side, alone, case.virtual_cpus, case.replicas if side == "plain" else 0)
            parts = groups.setdefault(key, [[]])
            if len(parts[-1]) == size:
                parts.append([])
            parts[-1].append(case.name)
    jobs = [{"side": key[0], "names": part} for key, parts in groups.items() for part in parts]
    return sorted(jobs, key=lambda job: -len(job["names"]))


def run(
    jobs: list[Any], parallel: int = 2, first_path: Sequence[str] = ()
) -> Iterator[tuple[str, str, Outcome, float]]:
    """Yields name, side, outcome and seconds of each case of the catalogue.

    The catalogue is that in the first of the folders ``first_path``, else the one beside this file.
    """
    # TensorFlow switches oneDNN on by the kind of CPU, and errors differ with it.
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "1"}
    # With as few threads as cores, collectives of more replicas than that can wait for each other.
    environment["TF_NUM_INTEROP_THREADS"] = "16"
    environment["CUDA_VISIBLE_DEVICES"] = "-1"
    environment.pop("TF_CONFIG", None)
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        json.dump({"parallel": parallel, "jobs": jobs, "path": list(first_path)}, process.stdin)
        process.stdin.close()
        for line in process.stdout:
            found = json.loads(line)
            outcome = Outcome.from_json(found["outcome"])
            yield found["name"], found["side"], outcome, found["seconds"]
        if process.wait():
            errors.seek(0)
            raise RuntimeError(f"the process that runs the cases failed:\n{errors.read()[-4000:]}")


@dataclasses.dataclass
class _Copy:
    """A copy of this process that works on a job."""

    pid: int
    pipe: int
    job: Any
    log: Path
    unread: bytes = b""
    current: str | None = None
    since: float = 0.0
    done: set[str] = dataclasses.field(default_factory=set)


def main() -> None:
    request = json.load(sys.stdin)
    sys.path[:0] = request["path"]
    import catalogue  # Imports TensorFlow, Keras and this library.

    cases = {case.name: case for case in catalogue.CASES}
    waiting = deque(request["jobs"])
    running: list[_Copy] = []
    while waiting or running:
        while waiting and len(running) < request["parallel"]:
            running.append(_start(waiting.popleft(), cases))
        ready, _, _ = select.select([copy.pipe for copy in running], [], [], 0.2)
        for copy in list(running):
            ended = copy.pipe in ready and _read(copy)
            # Ours is promised to answer, and a machine may be five times as slow.
            times = 1 if copy.job["side"] == "plain" else 5
            late = (
                copy.current
                and time.monotonic() - copy.since > times * cases[copy.current].patience
            )
            if not ended and not late:
                continue
            running.remove(copy)
            status = _end(copy)
            if copy.current is not None:
                seconds = time.monotonic() - copy.since
                patience = times * cases[copy.current].patience
                died = Outcome("abort", message=_last_words(copy.log, status))
                outcome = Outcome("hang", seconds=patience) if late else died
                _report(copy.current, copy.job["side"], outcome, seconds)
                copy.done.add(copy.current)
            left = [name for name in copy.job["names"] if name not in copy.done]
            if left:
                waiting.appendleft({**copy.job, "names": left})


def _start(job: Any, cases: dict[str, Case]) -> _Copy:
    log = Path(tempfile.mkstemp(prefix="guarantees-", suffix=".log")[1])
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # The processes a case starts end with it.
        os.close(receive)
        output = os.open(log, os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = 1
        try:
            _work(job, cases, send)
            status = 0
        finally:
            os._exit(status)
    os.close(send)
    return _Copy(pid, receive, job, log, since=time.monotonic())


def _work(job: Any, cases: dict[str, Case], send: int) -> None:
    import tensorflow as tf

    parts = cases[job["names"][0]].virtual_cpus
    if parts:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(parts)]
        )
    for name in job["names"]:
        os.write(send, json.dumps({"begin": name}).encode() + b"\n")
        outcome = cases[name].measure(job["side"])
        os.write(send, json.dumps({"outcome": outcome.as_json()}).encode() + b"\n")


def _read(copy: _Copy) -> bool:
    """Takes what a copy has written; True at the end."""
    data = os.read(copy.pipe, 65536)
    *lines, copy.unread = (copy.unread + data).split(b"\n")
    for line in lines:
        found = json.loads(line)
        if "begin" in found:
            copy.current, copy.since = found["begin"], time.monotonic()
        else:
            seconds = time.monotonic() - copy.since
            _report(copy.current, copy.job["side"], Outcome.from_json(found["outcome"]), seconds)
            copy.done.add(str(copy.current))
            copy.current = None
    return not data


def _end(copy: _Copy) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(copy.pid, signal.SIGKILL)
    os.close(copy.pipe)
    return os.waitstatus_to_exitcode(os.waitpid(copy.pid, 0)[1])


def _last_words(log: Path, status: int) -> str:
    name = signal.Signals(-status).name if status < 0 else f"exit {status}"
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if "Check failed" in line
    ]
    return f"{name} {lines[-1].split('] ', 1)[-1]}" if lines else name


def _report(name: str | None, side: str, outcome: Outcome, seconds: float) -> None:
    found = {"name": name, "side": side, "outcome": outcome.as_json(), "seconds": seconds}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
