"""Measures how many workers meet on one machine: ``python benchmarks/meeting.py``.

Workers are threads of a few processes, without TensorFlow, each with its own sockets and event
loop; the first worker has a process to itself. All start at the same time. Prints a table: the
seconds until the last worker has met the others, CPU seconds and memory of the first worker, and
the most sockets that it and another worker had open. Then, on the connections that stay, the
seconds of a comparison, of equal and of different values, until all know that one worker has
ended, and until all know that every worker has, each with the CPU seconds of the first worker.

All workers share the cores of the machine, so the seconds are those of all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfmultigpu.addons.workers.rendezvous import meet

from tfmultigpu.errors import ClusterError

COUNTS = (8, 64, 256, 1024)
FIRST_PORT, LAST_PORT = 10240, 32767  # The system lends callers none of these.
SOCKETS_OF_A_LOOP = 2
FINISHED = "its program ended without an error"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--processes", type=int, default=8, help="that hold the other workers")
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--missing", type=int, default=0, help="so many workers do not come")
    asked = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    columns = ["workers", "s", "CPU s of the first", "MB of the first", "sockets of the first"]
    columns += ["of another", "connections made", "compare s", "different s", "one ends s"]
    print(f"| {' | '.join([*columns, 'all end s'])} |\n|{'---|' * (len(columns) + 1)}", flush=True)
    for count in asked.workers:
        print(f"| {count} |", end="", flush=True)
        for cell in measure(count, asked.processes, asked.timeout, asked.missing):
            print(f" {cell} |", end="", flush=True)
        print(flush=True)


def measure(count: int, processes: int, timeout: float, missing: int) -> Iterator[str]:
    """Measures the cells of a row; fewer if the workers did not meet."""
    context = multiprocessing.get_context("fork")
    addresses = free_addresses(count)
    groups = [[0], *(list(range(1 + i, count - missing, processes)) for i in range(processes))]
    groups = [group for group in groups if group]
    start = context.Barrier(len(groups))
    ends = [context.Pipe(duplex=False) for _ in groups]
    before = connections_made()
    workers = [
        context.Process(target=run, args=(addresses, group, timeout, start, end[1]), daemon=True)
        for group, end in zip(groups, ends, strict=True)
    ]
    for worker in workers:
        worker.start()
    found = [end.recv() for end, _ in ends]
    hub, others = found[0], found[1:]
    seconds = max(one["seconds"] for one in found)
    texts = {text[:300] for one in found for text in one["errors"]}
    sockets = max((one["sockets"] / one["workers"] for one in others), default=0.0)
    yield from [f"{seconds:.2f}", f"{hub['cpu']:.2f}", f"{hub['memory']:.1f}"]
    yield from [f"{hub['sockets']}", f"{sockets:.1f}", f"{found[-1]['made'] - before}"]
    if texts:
        failed = sum(len(one["errors"]) for one in found)
        yield f"{failed} raised {len(texts)} texts, such as: {min(texts)}"
    else:
        for _ in PHASES:
            told = [end.recv() for end, _ in ends]
            yield f"{max(seconds for seconds, _ in told):.2f} ({told[0][1]:.2f})"
    for worker in workers:
        worker.join()


PHASES = ("alike", "different", "one ends", "all end")


def run(
    addresses: Sequence[str], group: Sequence[int], timeout: float, start: Any, end: Any
) -> None:
    """Runs some of the workers, one thread for each, and sends what was measured."""
    links: dict[int, Any] = {}
    errors: list[str] = []
    found: dict[str, Any] = {"workers": len(group)}
    card = {"the cluster": f"worker {list(addresses)}", "their devices": "1 GPU"}

    def join(index: int) -> None:
        try:
            links[index] = meet(addresses, index, card, timeout, stay=True)
        except ClusterError as error:
            errors.append(str(error))

    if 0 not in group:
        os.nice(10)  # The first worker would have a core to itself.
    sampler = Sampler()
    start.wait()
    memory, cpu, began = resident_mb(), time.process_time(), time.monotonic()
    each(group, join)
    found |= {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu}
    found |= {"memory": resident_mb() - memory, "errors": errors, "made": connections_made()}
    found["sockets"] = sampler.stop() - SOCKETS_OF_A_LOOP * len(group)
    end.send(found)
    with contextlib.suppress(threading.BrokenBarrierError):
        start.wait()
        if errors:
            start.abort()
        for phase in PHASES:
            start.wait()
            began, cpu = time.monotonic(), time.process_time()
            each(group, functools.partial(act, phase, links))
            end.send((time.monotonic() - began, time.process_time() - cpu))
        start.wait()  # Who leaves earlier breaks off the connections of the others.


def act(phase: str, links: Mapping[int, Any], index: int) -> None:
    """One worker's part in what is measured after the meeting."""
    link = links[index]
    count = len(link.addresses)
    if phase in ("alike", "different"):
        value = "0" * 32 if phase == "alike" else f"{link.index:032d}"
        assert link.compare(phase, value, 600.0) is not None
    elif phase == "one ends":
        if link.index == 1:
            link.leave(FINISHED)
        else:
            assert link.wait_for_end(600.0)
    else:
        if link.index != 1:
            link.leave(FINISHED)
        deadline = time.monotonic() + 600.0
        while len(link.ended()) < count - 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def each(group: Sequence[int], function: Callable[[int], None]) -> None:
    """Calls a function for each worker, all at the same time."""
    threads = [threading.Thread(target=function, args=(index,)) for index in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Sampler:
    """The most sockets that this process has had open."""

    def __init__(self) -> None:
        self._most, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._most

    def _run(self) -> None:
        while not self._done.wait(0.02):
            self._most = max(self._most, open_sockets())


def open_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")  # noqa: PTH115
        except OSError:  # It was closed in between.
            continue
    return count


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def connections_made() -> int:
    """Connections that this machine has made since it started, those of other programs too."""
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = (line.split()[1:] for line in lines if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["ActiveOpens"])


def free_addresses(count: int) -> list[str]:
    """Returns addresses that no caller is given while their workers do not listen yet."""
    found = []
    for port in range(FIRST_PORT, LAST_PORT):
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("", port))
            except OSError:
                continue
        found.append(f"127.0.0.1:{port}")
        if len(found) == count:
            return found
    raise RuntimeError(f"There are not {count} free ports.")


if __name__ == "__main__":
    main()
