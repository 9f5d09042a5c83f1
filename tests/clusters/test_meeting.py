"""Who may speak when workers meet: jobs are told apart, and strangers are ignored and named."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from each import each
from meetings import CARD, PATIENCE, together

from tfmultigpu.addons.workers.jobs import JOB_ID, JOB_SECRET, Job, new_job, read_job
from tfmultigpu.addons.workers.meeting import Meeting
from tfmultigpu.addons.workers.meeting_lines import PROTOCOL, Pen, StrangeLineError, readable
from tfmultigpu.addons.workers.meeting_messages import Words
from tfmultigpu.addons.workers.ports import split_address
from tfmultigpu.addons.workers.preflight import preflight
from tfmultigpu.addons.workers.processes import free_addresses
from tfmultigpu.addons.workers.rendezvous import meet
from tfmultigpu.addons.workers.sources import SOURCES
from tfmultigpu.addons.workers.spec import Cluster
from tfmultigpu.errors import ClusterError

SECRET = Job("train 1", b"0123456789abcdef")


def connect(address: str) -> tuple[socket.socket, bytes]:
    """A connection to a worker that waits for others, and its greeting."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            connection = socket.create_connection(split_address(address), timeout=30.0)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    return connection, connection.makefile("rb").readline()


def say(address: str, line: bytes) -> bytes:
    """The answer of a worker to a line; nothing where it hangs up."""
    connection, _ = connect(address)
    with connection, contextlib.suppress(OSError):
        connection.sendall(line + b"\n")
        return connection.makefile("rb").readline()
    return b""


def line(**changes: Any) -> bytes:
    """A card of worker 1 that nobody has signed."""
    fields = {
        "protocol": PROTOCOL,
        "kind": "card",
        "from": 1,
        "process": "0" * 16,
        "job": None,
        "card": CARD,
        "problem": None,
        "nonce": "0" * 32,
    }
    return b"- " + json.dumps({**fields, **changes}).encode()


# Jobs ---------------------------------------------------------------------------------------------


def test_the_job_is_read_from_the_environment() -> None:
    assert read_job({}, SOURCES) == Job(None, None)
    assert read_job({"SLURM_JOB_ID": "7"}, SOURCES) == Job("Slurm job 7", None)
    # Components of one job have numbers of their own beside one for all.
    assert read_job({"SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "7"}, SOURCES).id == "Slurm job 7"
    assert read_job({"SLURM_JOB_ID": "8", JOB_ID: "mine"}, SOURCES).id == "mine"
    made = read_job(new_job("launch"), SOURCES)
    assert made.id is not None
    assert made.id.startswith("launch ")
    assert made.secret is not None
    assert len(made.secret) == 64
    assert made.secret.decode() not in repr(made)


@each(
    ("environ", "message"),
    [
        ({JOB_ID: ""}, r"TFMULTIGPU_JOB_ID must be 1 to 200 printable characters.*=''$"),
        ({JOB_ID: "a\nb"}, r"must be 1 to 200 printable.*Received: TFMULTIGPU_JOB_ID='a\\nb'"),
        ({JOB_SECRET: "short"}, r"at least 16 characters.*token_hex.*Received: 5 characters$"),
    ],
)
def test_a_job_that_cannot_be_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        read_job(environ, SOURCES)
    assert "short" not in str(caught.value)


def test_a_wrong_secret_is_told_before_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_SECRET, "short")
    (address,) = free_addresses(1)
    with pytest.raises(ClusterError, match=r"worker 0 at .* cannot start: TFMULTIGPU_JOB_SECRET"):
        preflight(Cluster([address], 0), devices="1 CPU", communication="ring", timeout=1.0)


def test_workers_of_two_jobs_are_told_both_and_who_spoke() -> None:
    addresses = free_addresses(2)
    texts = together(
        [
            lambda: meet(addresses, 0, CARD, PATIENCE, job=Job("Slurm job 7")),
            lambda: meet(addresses, 1, CARD, PATIENCE, job=Job("Slurm job 8")),
        ]
    )
    for text in texts:
        assert text is not None
        assert "Workers of two jobs met." in text
        assert "'Slurm job 7'" in text
        assert "'Slurm job 8'" in text
        assert "set TFMULTIGPU_JOB_ID to the same name" in text
        assert "spoke from 127.0.0.1:" in text


def test_a_worker_that_does_not_know_its_job_may_come() -> None:
    addresses = free_addresses(2)
    assert together(
        [
            lambda: meet(addresses, 0, CARD, PATIENCE, job=Job("Slurm job 7")),
            lambda: meet(addresses, 1, CARD, PATIENCE),
        ]
    ) == [None, None]


# Secrets ------------------------------------------------------------------------------------------


def test_workers_with_one_secret_meet() -> None:
    addresses = free_addresses(3)
    calls = [lambda i=i: meet(addresses, i, CARD, PATIENCE, job=SECRET) for i in range(3)]
    assert together(calls) == [None] * 3


def test_a_worker_with_another_secret_is_ignored_and_named_at_the_timeout() -> None:
    addresses = free_addresses(2)
    other = Job("train 1", b"another secret of 16")
    texts = together(
        [
            lambda: meet(addresses, 0, CARD, 2.0, job=SECRET),
            lambda: meet(addresses, 1, CARD, 2.0, job=other),
        ]
    )
    for index, text in enumerate(texts):
        assert text is not None
        assert "1 of 2 workers did not come within 2 s" in text
        assert "(it hangs up on this worker; it may have another TFMULTIGPU_JOB_SECRET)" in text
        assert "Ignored: an unauthenticated line came from 127.0.0.1:" in text
        assert f"claiming to be worker {1 - index}" in text


def test_a_worker_without_the_secret_is_told_at_once() -> None:
    addresses = free_addresses(2)
    texts = together(
        [
            lambda: meet(addresses, 0, CARD, 3.0, job=SECRET),
            lambda: meet(addresses, 1, CARD, PATIENCE),
        ]
    )
    assert texts[1] is not None
    assert "Worker 0 signs its lines, which came from" in texts[1]
    assert f"worker 1 at {addresses[1]} has no TFMULTIGPU_JOB_SECRET." in texts[1]
    assert texts[0] is not None
    assert "an unauthenticated line came from" in texts[0]


def test_a_signed_line_serves_once_and_in_one_direction() -> None:
    first, second = Pen(SECRET, 0, CARD), Pen(SECRET, 1, CARD)
    greeting, nonce = first.greeting()
    assert second.read_greeting(greeting) == nonce
    called, asked = second.call("card", None, nonce)
    assert first.read_call(called, nonce).card == CARD
    answered = first.answer("card", None, asked)
    assert second.read_answer(answered, asked).sender == 0
    recorded: list[tuple[Callable[[bytes, str], object], bytes, str]] = [
        (first.read_call, called, first.greeting()[1]),  # On another connection.
        (first.read_answer, called, nonce),
        (first.read_answer, answered, nonce),
        (second.read_call, answered, asked),
        (first.read_call, called.replace(b'"from": 1', b'"from": 2'), nonce),
        (first.read_call, called.replace(b"1 CPU", b"2 CPU"), nonce),
        (first.read_call, b"- " + called.partition(b" ")[2], nonce),
        (first.read_call, called.partition(b" ")[2], nonce),
        (first.read_call, "é ".encode() + called.partition(b" ")[2], nonce),
        (Pen(Job("train 1", b"another secret of 16"), 0, CARD).read_call, called, nonce),
    ]
    for read, what, where in recorded:
        with pytest.raises(StrangeLineError) as caught:
            read(what, where)
        assert caught.value.kind == "unsigned", what
    with pytest.raises(StrangeLineError) as caught:
        Pen(Job(), 0, CARD).read_call(called, nonce)
    assert (caught.value.kind, caught.value.claims) == ("signed", 1)


# Strangers ----------------------------------------------------------------------------------------

DEEP = b'{"protocol": "' + PROTOCOL.encode() + b'", "card": ' + b"[" * 100_000
FOREIGN = [
    b"",
    b"GET / HTTP/1.1\r",
    b"\xff\xfe\x00",
    b"- null",
    b"- []",
    b"- " + b"1" * 10_000,
    b"- " + b"[" * 100_000,
    b"- " + DEEP,
    b'- {"protocol": 1}',
    line(kind="gone"),
    line(kind=["card"]),
    line(card=None),
    line(card=[]),
    line(card={"the cluster": 1}),
    line(card={f"{number}": "" for number in range(100)}),
    line(problem=7),
    line(problem="a cold"),
    line(kind="problem"),
    line(job=7),
    line(process=None),
    line(process="../etc"),
    line(nonce=None),
    line(nonce="short"),
    line(**{"from": True}),
    line(**{"from": -1}),
    line(**{"from": 1.0}),
    line(**{"from": 10**30}),
    line(**{"from": None}),
]


@each("text", FOREIGN)
def test_a_line_with_anything_wrong_is_foreign(text: bytes) -> None:
    pen = Pen(Job(), 0, CARD)
    with pytest.raises(StrangeLineError) as caught:
        pen.read_call(text, "0" * 32)
    assert caught.value.kind == "foreign"
    # What is wrong with it is wrong without its being signed, too.
    with pytest.raises(StrangeLineError):
        pen.read_greeting(text)


def test_nothing_a_stranger_says_ends_a_meeting() -> None:
    addresses = free_addresses(2)
    links: list[Any] = [None, None]

    def worker(index: int) -> None:
        links[index] = meet(addresses, index, CARD, PATIENCE, job=SECRET, stay=True)

    def strangers_and_worker() -> None:
        for text in [*FOREIGN, b"x" * (1 << 20), line(), line(card={}), line(kind="ready")]:
            assert say(addresses[0], text) == b""
        worker(1)

    assert together([lambda: worker(0), strangers_and_worker]) == [None, None]
    # The connections are those of the workers, not of a stranger.
    found: list[Any] = [None, None]
    together([lambda i=i: found.__setitem__(i, links[i].compare("a", i, 60.0)) for i in range(2)])
    assert found == [{0: 0, 1: 1}] * 2


def test_without_a_secret_ready_is_heard_only_of_the_process_at_its_address() -> None:
    addresses = free_addresses(2)
    links: list[Any] = [None, None]

    def worker(index: int) -> None:
        links[index] = meet(addresses, index, CARD, PATIENCE, stay=True)

    stranger: list[socket.socket] = []

    def forged_and_worker() -> None:
        connection, _ = connect(addresses[0])
        connection.sendall(line(kind="ready") + b"\n")
        stranger.append(connection)
        worker(1)

    assert together([lambda: worker(0), forged_and_worker]) == [None, None]
    found: list[Any] = [None, None]
    together([lambda i=i: found.__setitem__(i, links[i].compare("a", i, 60.0)) for i in range(2)])
    assert found == [{0: 0, 1: 1}] * 2
    # It is shown the card, as whoever calls is, and never hears go.
    with stranger[0], stranger[0].makefile("rb") as said:
        assert b'"kind": "card"' in said.readline()
        assert said.readline() == b""


def test_a_worker_that_was_started_again_takes_its_place() -> None:
    """A pod may end and come back at its address while the others wait."""
    addresses = free_addresses(3)
    pen = Pen(Job(), 1, CARD)

    def first_life_and_second() -> None:
        with socket.create_server(split_address(addresses[1])) as server:
            connection, _ = server.accept()
            greeting, nonce = pen.greeting()
            connection.sendall(greeting)
            asked = pen.read_call(connection.makefile("rb").readline(), nonce)
            connection.sendall(pen.answer("card", None, asked.nonce))
            connection.close()
        meet(addresses, 1, CARD, PATIENCE)

    def late() -> None:
        time.sleep(1.0)
        meet(addresses, 2, CARD, PATIENCE)

    texts = together([lambda: meet(addresses, 0, CARD, PATIENCE), first_life_and_second, late])
    assert texts == [None] * 3


@each(
    ("card", "said"),
    [
        ({"the cluster": "one"}, "about their devices: worker 0 at {} has 1 CPU, worker 1 at {} "),
        ({**CARD, "their devices": "9" * 9000}, "9" * 2000 + "... TensorFlow"),
        ({**CARD, "their devices": "\x1b[2J"}, "has ?[2J. TensorFlow"),
    ],
)
def test_what_a_worker_without_a_secret_is_told_may_be_anything(
    card: dict[str, str], said: str
) -> None:
    addresses = free_addresses(2)
    texts = together(
        [
            lambda: meet(addresses, 0, CARD, PATIENCE),
            lambda: say(addresses[0], line(card=card)),
        ]
    )
    assert texts[0] is not None
    assert said.replace("9... ", "9.... ").format(*addresses) in texts[0]
    assert len(texts[0]) < 3000


def test_a_problem_says_who_told_it() -> None:
    addresses = free_addresses(2)
    texts = together(
        [
            lambda: meet(addresses, 0, CARD, PATIENCE),
            lambda: say(addresses[0], line(kind="problem", problem="a cold\x07")),
        ]
    )
    assert texts[0] is not None
    assert texts[0].startswith("a cold? (Worker 1 said so, from 127.0.0.1:")


def test_another_version_of_this_library_is_named() -> None:
    addresses = free_addresses(2)
    old = json.dumps({"protocol": "tfmultigpu rendezvous 1", "kind": "card", "from": 1})
    texts = together(
        [
            lambda: meet(addresses, 0, CARD, PATIENCE),
            lambda: say(addresses[0], old.encode()),
        ]
    )
    assert texts[0] is not None
    assert "The workers run different versions of tfmultigpu" in texts[0]
    assert "'tfmultigpu rendezvous 1' came from 127.0.0.1:" in texts[0]


def test_silent_and_slow_strangers_hold_nobody_up() -> None:
    addresses = free_addresses(2)
    with contextlib.ExitStack() as stack:

        def crowd() -> None:
            # Each keeps its connection; every other one says a little at a time.
            for number in range(150):
                connection, _ = connect(addresses[0])
                stack.enter_context(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(b"{" if number % 2 else b"")
            meet(addresses, 1, CARD, PATIENCE)

        assert together([lambda: meet(addresses, 0, CARD, PATIENCE), crowd]) == [None, None]


def test_a_connection_kept_by_a_task_that_ends_last_is_closed() -> None:
    addresses = free_addresses(2)
    words = Words(addresses, 0, SOURCES[0], {})
    meeting = Meeting(tuple(addresses), 0, CARD, 0.2, words, Job(None, None), SOURCES[0])

    async def hold() -> asyncio.StreamWriter:
        pair = socket.socketpair()
        with pair[1]:
            kept = await asyncio.open_connection(sock=pair[0])

            async def keep() -> None:
                try:
                    await asyncio.sleep(PATIENCE)
                finally:
                    meeting.ready[1] = kept

            task = asyncio.create_task(keep())
            await asyncio.sleep(0)
            with pytest.raises(ClusterError, match="did not come"):
                await meeting.hold(None, keep=True)
            assert task.cancelled()
            return kept[1]

    assert asyncio.run(hold()).is_closing()


def test_one_process_listed_twice_is_named() -> None:
    (address,) = free_addresses(1)
    port = split_address(address)[1]
    with pytest.raises(ClusterError, match=r"worker 1, but this process itself answers there\."):
        meet([address, f"localhost:{port}"], 0, CARD, PATIENCE)


def test_what_others_say_is_made_readable() -> None:
    assert readable("line\nnext \x00\x1b") == "line\nnext ??"
    assert readable("abcdef", most=3) == "abc..."
