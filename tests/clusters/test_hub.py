"""The first worker is the hub of a meeting: few connections, and the same words as without it."""

from __future__ import annotations

import contextlib
import functools
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from meetings import CARD, PATIENCE, together

from tfmultigpu.addons.workers import meeting, ports
from tfmultigpu.addons.workers.jobs import Job
from tfmultigpu.addons.workers.meeting_lines import Pen
from tfmultigpu.addons.workers.ports import allow_open_files, split_address
from tfmultigpu.addons.workers.processes import free_addresses
from tfmultigpu.addons.workers.rendezvous import meet
from tfmultigpu.errors import ClusterError


def meet_as(addresses: Sequence[str], index: int, timeout: float, job: Job) -> Callable[[], Any]:
    return lambda: meet(addresses, index, CARD, timeout, job=job)


def meet_all(addresses: Sequence[str], but: int | None = None, timeout: float = PATIENCE) -> Any:
    indices = [index for index in range(len(addresses)) if index != but]
    return together([meet_as(addresses, index, timeout, Job()) for index in indices])


@contextlib.contextmanager
def answering(address: str, answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """A program at an address: it handles each connection with a function, and leaves it open."""
    kept: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                kept.append(connection)
                with contextlib.suppress(OSError, ValueError):
                    answer(connection)

    with socket.create_server(split_address(address)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)
    for one in kept:
        one.close()


def showing_card(pen: Pen) -> Callable[[socket.socket], None]:
    """A worker that answers each call with its card, and does nothing more."""

    def answer(connection: socket.socket) -> None:
        greeting, nonce = pen.greeting()
        connection.sendall(greeting)
        asked = pen.read_call(connection.makefile("rb").readline(), nonce)
        connection.sendall(pen.answer("card", None, asked.nonce))

    return answer


# Few connections ----------------------------------------------------------------------------------


def test_workers_call_the_first_and_it_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = free_addresses(8)
    called: list[tuple[str, str]] = []

    async def call(address: str, limit: int) -> Any:
        made = await ports.call(address, limit)
        called.append((threading.current_thread().name, address))
        return made

    monkeypatch.setattr(meeting, "call", call)
    assert meet_all(addresses) == [None] * 8
    others = [address for _, address in called if address != addresses[0]]
    assert set(others) == set(addresses[1:])
    # Two for each would do. A worker that was slow to answer is called again.
    assert 14 <= len(called) < 28, called


def test_the_limit_of_open_files_is_raised_as_far_as_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: limits.append(limit))
    allow_open_files(200)
    assert limits == [(1024, 4096)]
    allow_open_files(1000)
    assert limits[1:] == [(2512, 4096)]
    limits.append((2512, 4000))
    with pytest.raises(ClusterError, match=r"needs 4084 .* 2010 workers, and may have 4000\. .*-n"):
        allow_open_files(2010)
    limits.append((256, 300))
    allow_open_files(2)  # A small limit is enough for few workers.
    assert limits[-1] == (300, 300)


# The first worker is missing ----------------------------------------------------------------------


def test_every_other_worker_names_the_first_where_nothing_listens() -> None:
    addresses = free_addresses(4)
    texts = meet_all(addresses, but=0, timeout=1.0)
    for index, text in enumerate(texts, 1):
        assert text.startswith("1 of 4 workers did not come within 1 s: worker 0 at ")
        assert f"worker 0 at {addresses[0]} (nothing listens there). This is worker {index}" in text


def test_a_first_worker_whose_name_does_not_resolve_is_named() -> None:
    addresses = ["no-such-host.invalid:4567", *free_addresses(1)]
    with pytest.raises(ClusterError, match=r"worker 0 at no-such.* \(its name does not resolve\)"):
        meet(addresses, 1, CARD, 1.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda connection: None, "no answer"),
        (lambda connection: connection.sendall(b"220 hello\r\n"), "another program answers there"),
    ],
)
def test_a_stranger_in_place_of_the_first_worker_is_named(
    answer: Callable[[socket.socket], object], said: str
) -> None:
    addresses = free_addresses(2)
    with (
        answering(addresses[0], answer),
        pytest.raises(ClusterError, match=rf"worker 0 at {addresses[0]} \({said}\)"),
    ):
        meet(addresses, 1, CARD, 1.0)


def test_a_first_worker_that_never_says_go_is_named() -> None:
    """It is frozen: its machine takes calls, and nobody reads them."""
    addresses = free_addresses(2)
    with (
        answering(addresses[0], showing_card(Pen(Job(), 0, CARD))),
        pytest.raises(ClusterError, match=r"\(it answers, but has not said go\)"),
    ):
        meet(addresses, 1, CARD, 1.0)


def test_the_first_worker_that_cannot_start_tells_all_others() -> None:
    addresses = free_addresses(3)
    port = split_address(addresses[0])[1]
    with answering(addresses[0], lambda connection: connection.sendall(b"220 hello\r\n")):
        texts = meet_all(addresses)
    for text in texts:
        assert f"worker 0 at {addresses[0]} cannot start: port {port} is taken" in text


def test_a_first_worker_that_was_started_again_is_met() -> None:
    addresses = free_addresses(2)
    pen = Pen(Job(), 0, CARD)

    def two_lives() -> None:
        with socket.create_server(split_address(addresses[0])) as server:
            connection, _ = server.accept()
            showing_card(pen)(connection)
            time.sleep(0.2)
            connection.close()
        meet(addresses, 0, CARD, PATIENCE)

    assert together([two_lives, lambda: meet(addresses, 1, CARD, PATIENCE)]) == [None, None]


# Another is missing -------------------------------------------------------------------------------


def test_a_worker_whose_time_is_over_asks_the_first_who_is_missing() -> None:
    addresses = free_addresses(3)
    texts = together(
        [
            lambda: meet(addresses, 0, CARD, PATIENCE),
            lambda: meet(addresses, 1, CARD, 3.0),
        ]
    )
    for text in texts:
        assert text is not None
        assert text.startswith("1 of 3 workers did not come before the time of worker 1 at ")
        assert f"was over: worker 2 at {addresses[2]} (nothing listens there). This is" in text


def test_of_many_missing_workers_some_are_named() -> None:
    addresses = free_addresses(40)
    with pytest.raises(ClusterError) as caught:
        meet(addresses, 0, CARD, 0.5)
    text = str(caught.value)
    assert text.startswith("39 of 40 workers did not come within 0.5 s: worker 1 at ")
    assert f"worker 20 at {addresses[20]} (nothing listens there) and 19 more. This is" in text
    assert "worker 21" not in text


def test_a_worker_that_shows_its_card_and_does_not_call_is_missing() -> None:
    addresses = free_addresses(3)
    with answering(addresses[2], showing_card(Pen(Job(), 2, CARD))):
        texts = meet_all(addresses, but=2, timeout=1.0)
    for text in texts:
        assert f"(it answers, but has not called worker 0 at {addresses[0]})" in text


def test_a_worker_that_leaves_while_it_waits_is_missing_again() -> None:
    addresses = free_addresses(4)
    pen = Pen(Job(), 1, CARD)

    def short_life() -> None:
        with answering(addresses[1], showing_card(pen)):
            deadline = time.monotonic() + PATIENCE
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    line = socket.create_connection(split_address(addresses[0]), timeout=30.0)
                    break
                assert time.monotonic() < deadline
            with line, line.makefile("rb") as said:
                line.sendall(pen.call("ready", None, pen.read_greeting(said.readline()))[0])
                assert b'"kind": "card"' in said.readline()
                time.sleep(0.3)

    texts = together(
        [
            lambda: meet(addresses, 0, CARD, 2.0),
            lambda: meet(addresses, 2, CARD, 2.0),
            short_life,
        ]
    )
    for text in texts[:2]:
        assert text is not None
        assert text.startswith("2 of 4 workers did not come within 2 s: worker 1 at ")
        assert f"worker 1 at {addresses[1]} (it came, and left again: nothing listens the" in text
    assert texts[2] is None


def test_nobody_takes_the_place_of_a_worker_that_waits() -> None:
    addresses = free_addresses(3)
    links: dict[int, Any] = {}
    heard: list[bytes] = []

    def worker(index: int) -> None:
        links[index] = meet(addresses, index, CARD, PATIENCE, stay=True)

    def stranger_and_last() -> None:
        time.sleep(0.5)
        pen = Pen(Job(), 1, CARD)
        with (
            socket.create_connection(split_address(addresses[0]), timeout=60.0) as line,
            line.makefile("rb") as said,
        ):
            line.sendall(pen.call("ready", None, pen.read_greeting(said.readline()))[0])
            said.readline()
            time.sleep(0.5)
            worker(2)
            heard.append(said.readline())

    assert together([lambda: worker(0), lambda: worker(1), stranger_and_last]) == [None] * 3
    assert heard == [b""]
    found: list[Any] = [None] * 3

    def compare(index: int) -> None:
        found[index] = links[index].compare("a", index, 60.0)

    together([functools.partial(compare, index) for index in range(3)])
    assert found == [{0: 0, 1: 1, 2: 2}] * 3


def test_jobs_are_told_apart_by_a_first_worker_that_knows_none() -> None:
    addresses = free_addresses(3)
    jobs = [Job(), Job("Slurm job 7"), Job("Slurm job 8")]
    texts = together([meet_as(addresses, i, PATIENCE, job) for i, job in enumerate(jobs)])
    for text in texts:
        assert text is not None
        assert "Workers of two jobs met. worker " in text
        assert "belongs to the job 'Slurm job " in text
        assert "'Slurm job 7'" in text
        assert "'Slurm job 8'" in text
