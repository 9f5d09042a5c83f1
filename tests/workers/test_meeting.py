"""Before TensorFlow starts: all workers are here and alike, or each is told what is wrong."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest

from tfmultigpu.addons.workers.channels import connect, listen
from tfmultigpu.addons.workers.ends import BROKEN_OFF, FINISHED, End, Ends
from tfmultigpu.addons.workers.meeting import meet
from tfmultigpu.addons.workers.processes import free_addresses
from tfmultigpu.clusters import Cluster, split_address
from tfmultigpu.errors import ClusterError

Result = dict[int, Connection] | str


def hold(
    clusters: Sequence[Cluster],
    cards: Sequence[dict[str, str]] = (),
    problems: Sequence[ClusterError | None] = (),
    late: float = 0.0,
    timeout: float = 20.0,
) -> list[Result]:
    """Returns each worker's connections or error; a thread is a worker."""

    def worker(place: int) -> Result:
        time.sleep(late * place)
        card = cards[place] if cards else {"version": "1"}
        try:
            return meet(clusters[place], card, timeout, problems[place] if problems else None)
        except ClusterError as error:
            return str(error)

    start = time.monotonic()
    with ThreadPoolExecutor(len(clusters)) as threads:
        results = list(threads.map(worker, range(len(clusters))))
    assert time.monotonic() - start < 60.0  # The default of `startup_timeout`.
    return results


def alike(count: int) -> list[Cluster]:
    addresses = free_addresses(count)
    return [Cluster(addresses, index) for index in range(count)]


def close(results: Sequence[Result]) -> None:
    for result in results:
        assert not isinstance(result, str), result
        for channel in result.values():
            channel.close()


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_all_meet_and_their_ports_are_free(late: float) -> None:
    clusters = alike(4)
    results = hold(clusters, late=late)
    assert [sorted(result) for result in results] == [[1, 2, 3], [0], [0], [0]]
    for cluster in clusters:
        listen(cluster).close()
    close(results)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_missing_worker_is_named(absent: int) -> None:
    clusters = alike(3)
    results = hold([c for c in clusters if c.index != absent], timeout=1.5)
    for result in results:
        assert f"worker {absent} of 3 at {clusters[absent].address}" in result
        assert "did not come within 1.5 s" in result


def test_workers_that_differ_see_both_values() -> None:
    results = hold(alike(3), cards=[{"version": v} for v in "112"])
    for result in results:
        assert "The workers disagree about version: worker 0 has 1, worker 2 has 2." in result


def test_two_first_workers_name_each_other() -> None:
    addresses = free_addresses(2)
    clusters = [Cluster(addresses, 0), Cluster(addresses[::-1], 0)]
    results = hold(clusters, timeout=1.5)
    assert f"did not come within 1.5 s: worker 1 of 2 at {addresses[1]}. " in results[0]
    assert f"did not come within 1.5 s: worker 1 of 2 at {addresses[0]}. " in results[1]


@pytest.mark.parametrize("place", [0, 1])
def test_a_worker_that_cannot_start_tells_the_others(place: int) -> None:
    problems: list[ClusterError | None] = [None, None, None]
    problems[place] = ClusterError("TensorFlow started too early.")
    results = hold(alike(3), problems=problems)
    for result in results:
        assert f"worker {place} of 3 at " in result
        assert "cannot start: TensorFlow started too early" in result


def test_a_taken_port_is_told_to_all() -> None:
    clusters = alike(2)
    with socket.create_server(split_address(clusters[1].address or "")):
        results = hold(clusters)
    for result in results:
        assert "worker 1 of 2" in result
        assert "is taken by another program" in result


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(ClusterError, match=r"192\.0\.2\.1:2222 is not an address of this machine"):
        listen(Cluster(["192.0.2.1:2222", "b:1"], 0))


def test_the_same_worker_twice_is_told() -> None:
    clusters = alike(3)
    twin = Cluster(clusters[1].workers, 1)
    with pytest.MonkeyPatch.context() as patch:
        # As on another machine, where the port is free.
        free = listen(Cluster(free_addresses(1), 0))
        patch.setattr(
            "tfmultigpu.addons.workers.meeting.listen",
            lambda cluster: free if cluster is twin else listen(cluster),
        )
        results = hold([clusters[0], clusters[1], twin], timeout=5.0)
    assert any("Two processes say that they are worker 1." in result for result in results)
    assert all(isinstance(result, str) for result in results)


# A message is its length and JSON. No card is in these, and the last ends before it should.
FRAMED = [struct.pack("!i", len(t)) + t for t in (b"\xff", b"[1]", b'{"index": "x"}', b"{}")]
FRAMED += [struct.pack("!i", 9) + b"{}"]


def test_strangers_are_ignored_and_another_program_is_named() -> None:
    clusters = alike(2)

    def disturb() -> None:
        for text in (b"", b"\xff\xfe\n", b"GET / HTTP/1.1\r\n\r\n", *FRAMED):
            for _ in range(50):
                try:
                    stranger = socket.create_connection(split_address(clusters[0].address or ""))
                except OSError:
                    time.sleep(0.05)
                    continue
                stranger.sendall(text)
                stranger.close()
                break

    threading.Thread(target=disturb).start()
    results = hold(clusters, late=1.0)
    close(results)

    def answer(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as connection:
                    connection.sendall(b"\x00\x00\x06\xff\xfe\x01\n")  # As TensorFlow's does.

    worker = alike(2)[1]
    with socket.create_server(split_address(worker.workers[0])) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        (result,) = hold([worker], timeout=0.5)
        server.shutdown(socket.SHUT_RDWR)
    assert "another program answers there" in result or "reset by peer" in result


def test_a_call_that_reaches_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    monkeypatch.setattr(socket, "create_connection", lambda *_: itself)
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1:1")


def test_ends_are_passed_on_in_their_order() -> None:
    clusters = alike(3)
    results = hold(clusters)
    ends = [Ends(index, result) for index, result in enumerate(results)]
    assert ends[0].wait(0.05) == {}
    ends[2].leave(FINISHED)
    assert ends[1].wait(20.0) == {2: FINISHED}
    for channel in results[1].values():
        with socket.socket(fileno=os.dup(channel.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)  # As after kill -9.

    def wait_for(worker: int, other: int) -> list[tuple[int, End]]:
        deadline = time.monotonic() + 20.0
        while other not in ends[worker].wait(0.0) and time.monotonic() < deadline:
            time.sleep(0.01)
        return list(ends[worker].wait(0.0).items())

    assert wait_for(0, 1) == [(2, FINISHED), (1, BROKEN_OFF)]
    failed = End("it ended with WorkerLostError: no", lost_another=True)
    ends[0].leave(failed)
    assert (0, failed) in wait_for(2, 0)
    close(results)
