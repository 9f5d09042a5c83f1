"""Workers meet, or every one of them says why not, in time, with its port free again."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from each import each

from tfmultigpu.addons.workers import ports
from tfmultigpu.addons.workers.ports import split_address
from tfmultigpu.addons.workers.rendezvous import meet
from tfmultigpu.errors import ClusterError

# Seconds. What goes wrong at the start is promised within ten, and a machine may be five times as
# slow. Whoever is waited for must come; a test that waits for all of this has failed.
PROMISED, PATIENCE = 10.0, 120.0
CARD = {"the cluster": "one", "their devices": "1 CPU"}


def free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def together(calls: Sequence[Callable[[], None]]) -> tuple[list[str | None], list[float]]:
    """What each call raised (its text) and how many seconds it took, all at the same time."""
    texts: list[str | None] = [None] * len(calls)
    seconds = [0.0] * len(calls)

    def run(place: int) -> None:
        start = time.monotonic()
        try:
            calls[place]()
        except ClusterError as error:
            texts[place] = str(error)
        seconds[place] = time.monotonic() - start

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts, seconds


def can_bind(address: str) -> bool:
    """Whether a server can have the port now, as TensorFlow's will want it."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", split_address(address)[1]))
            server.listen()
        except OSError:
            return False
        return True


# A connection that the kernel accepted as the meeting ended is closed with the garbage.
def test_a_call_that_reaches_itself_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may give a caller the very port that it calls, if nobody listens there yet."""
    addresses = free_addresses(2)
    new_caller = ports._new_caller
    own: list[bool] = []

    def caller_of_the_second(family: int) -> socket.socket:
        one = new_caller(family)
        if len(own) >= 3:
            return one
        one.bind(("127.0.0.1", split_address(addresses[1])[1]))
        own.append(True)
        return one

    monkeypatch.setattr(ports, "_new_caller", caller_of_the_second)

    def late() -> None:
        while len(own) < 3:
            time.sleep(0.01)
        meet(addresses, 1, CARD, timeout=PATIENCE)

    texts, _ = together([lambda: meet(addresses, 0, CARD, timeout=PATIENCE), late])
    assert texts == [None, None]
    assert len(own) == 3


@each("count", [1, 2, 3, 8])
def test_workers_that_agree_meet_at_once_and_free_their_ports(count: int) -> None:
    addresses = free_addresses(count)
    free = [False] * count

    def one(index: int) -> None:
        meet(addresses, index, CARD, timeout=PATIENCE)
        free[index] = can_bind(addresses[index])

    texts, _ = together([lambda index=index: one(index) for index in range(count)])
    assert texts == [None] * count
    assert free == [True] * count


def test_nobody_leaves_before_the_last_has_come() -> None:
    addresses = free_addresses(3)
    left: list[float] = []
    came: list[float] = []

    def one(index: int, delay: float) -> None:
        time.sleep(delay)
        if delay:
            came.append(time.monotonic())
        meet(addresses, index, CARD, timeout=PATIENCE)
        left.append(time.monotonic())

    delays = [0.0, 0.0, 0.7]
    texts, _ = together([lambda i=i, d=d: one(i, d) for i, d in enumerate(delays)])
    assert texts == [None] * 3
    assert min(left) >= came[0]


def test_meeting_again_on_the_same_ports_works() -> None:
    addresses = free_addresses(2)
    for _ in range(10):
        texts, _ = together(
            [lambda i=i: meet(addresses, i, CARD, timeout=PATIENCE) for i in range(2)]
        )
        assert texts == [None, None]


def test_a_missing_worker_is_named_with_its_address_at_the_timeout() -> None:
    addresses = free_addresses(3)
    texts, seconds = together([lambda i=i: meet(addresses, i, CARD, timeout=2.0) for i in (0, 1)])
    for text in texts:
        assert text is not None
        assert "1 of 3 workers did not come within 2 s" in text
        assert f"worker 2 at {addresses[2]} (nothing listens there)" in text
        assert "startup_timeout" in text
    # The promise is the timeout; a machine may be five times as slow.
    assert min(seconds) > 1.9, seconds


@each("field", list(CARD))
def test_disagreement_is_told_to_every_worker_with_both_values(field: str) -> None:
    addresses = free_addresses(3)
    cards = [CARD, CARD, {**CARD, field: "different"}]
    texts, _ = together(
        [
            lambda i=i: meet(addresses, i, cards[i], timeout=PATIENCE, cures={field: "Do this."})
            for i in range(3)
        ]
    )
    for text in texts:
        assert text is not None
        assert f"The workers disagree about {field}" in text
        assert f"has {CARD[field]}, worker 2 at {addresses[2]} has different" in text
        assert "TensorFlow would wait for ever. Do this." in text


def test_workers_that_disagree_on_the_leader_find_out() -> None:
    first, second, nobody = free_addresses(3)
    texts, _ = together(
        [
            lambda: meet([first, second], 0, {"the cluster": "a"}, timeout=PATIENCE),
            lambda: meet([nobody, second], 1, {"the cluster": "b"}, timeout=PATIENCE),
        ]
    )
    assert all(text is not None and "disagree about the cluster" in text for text in texts), texts


def test_a_taken_port_is_an_error_on_every_worker() -> None:
    addresses = free_addresses(2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", split_address(addresses[1])[1]))
        other.listen()
        texts, _ = together(
            [lambda i=i: meet(addresses, i, CARD, timeout=PATIENCE) for i in range(2)]
        )
    port = split_address(addresses[1])[1]
    for text in texts:
        assert text is not None
        assert f"worker 1 at {addresses[1]} cannot start: port {port} is taken" in text


def test_an_address_of_another_machine_is_named() -> None:
    # 192.0.2.0/24 is kept for documentation: nobody has it.
    with pytest.raises(ClusterError, match=r"192\.0\.2\.1:4567 is not an address of this machine"):
        meet(["192.0.2.1:4567"], 0, CARD, timeout=1.0)


def test_a_name_that_does_not_resolve_is_named() -> None:
    with pytest.raises(ClusterError, match=r"no-such-host\.invalid:4567 does not resolve"):
        meet(["no-such-host.invalid:4567"], 0, CARD, timeout=1.0)


def test_a_worker_that_cannot_start_says_so_to_the_others() -> None:
    addresses = free_addresses(2)
    texts, _ = together(
        [
            lambda: meet(addresses, 0, CARD, timeout=PATIENCE),
            lambda: meet(addresses, 1, CARD, timeout=PATIENCE, problem="it has a cold"),
        ]
    )
    text = f"worker 1 at {addresses[1]} cannot start: it has a cold"
    assert texts[1] == text
    assert texts[0] is not None
    # Who heard of it says from where.
    assert texts[0].startswith(f"{text} (Worker 1 said so, from 127.0.0.1:")


def test_two_workers_with_one_index_are_named() -> None:
    first, second, third = free_addresses(3)
    texts, _ = together(
        [
            lambda: meet([first, second], 0, CARD, timeout=PATIENCE),
            lambda: meet([third, first], 0, CARD, timeout=PATIENCE),
        ]
    )
    assert all(text is not None for text in texts)
    assert "Two processes say they are worker 0 of 2" in f"{texts}", texts


def test_strangers_on_the_port_disturb_nobody() -> None:
    addresses = free_addresses(2)

    def stranger() -> None:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", split_address(addresses[0])[1]), 0.2) as one,
            ):
                one.sendall(b"GET / HTTP/1.1\r\n\r\n")
            time.sleep(0.01)

    def late() -> None:
        time.sleep(0.4)
        meet(addresses, 1, CARD, timeout=PATIENCE)

    texts, _ = together([lambda: meet(addresses, 0, CARD, timeout=PATIENCE), late, stranger])
    assert texts == [None] * 3


def test_a_program_that_holds_a_workers_port_is_named_at_the_timeout() -> None:
    addresses = free_addresses(2)

    def echo(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"220 hello\r\n")

    with socket.socket() as server:
        server.bind(("127.0.0.1", split_address(addresses[1])[1]))
        server.listen()
        thread = threading.Thread(target=echo, args=(server,), daemon=True)
        thread.start()
        with pytest.raises(ClusterError, match=r"\(another program answers there\)"):
            meet(addresses, 0, CARD, timeout=1.0)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_ipv6_hosts_lose_their_brackets() -> None:
    assert split_address("[::1]:2222") == ("::1", 2222)
    assert split_address("host.example:1") == ("host.example", 1)
