"""Workers stay in touch: each knows at once when another ends, and how; a lost one is named."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from each import each

from tfmultigpu.addons.workers import failures as lost_workers
from tfmultigpu.addons.workers.connection import BROKEN_OFF, NOT_A_WORKER, WorkerLink
from tfmultigpu.addons.workers.exits import Watchdog
from tfmultigpu.addons.workers.failures import explaining_lost_workers, link_of_workers, watch
from tfmultigpu.addons.workers.processes import free_addresses
from tfmultigpu.addons.workers.rendezvous import meet
from tfmultigpu.addons.workers.spec import Cluster
from tfmultigpu.errors import ClusterError, WorkerLostError
from tfmultigpu.steps.failures import explaining_failures
from tfmultigpu.strategies.process_state import process_state

FINISHED = "its program ended without an error, at its last line or by sys.exit"


def linked(count: int) -> list[WorkerLink]:
    """One end for each worker, all in this process."""
    addresses = free_addresses(count)
    links: list[Any] = [None] * count

    def join(index: int) -> None:
        links[index] = meet(addresses, index, {}, timeout=60.0, stay=True)

    together([lambda i=i: join(i) for i in range(count)])
    return links


def together(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)


def break_off(link: WorkerLink) -> None:
    """What the system does to the connections of a process that was killed."""
    # All at once: between two, this worker would notice the first and tell the second.
    writers = list(link._writers.values())
    link._loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in writers])


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_worker_has_nobody_to_stay_in_touch_with() -> None:
    (address,) = free_addresses(1)
    assert meet([address], 0, {}, timeout=5.0, stay=True) is None
    assert meet([address], 0, {}, timeout=5.0) is None


def test_the_port_is_free_while_connections_stay() -> None:
    links = linked(3)
    for address in links[0].addresses:
        with socket.socket() as tensorflow:
            tensorflow.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tensorflow.bind(("0.0.0.0", int(address.rpartition(":")[2])))
            tensorflow.listen()
    assert [link.ended() for link in links] == [{}, {}, {}]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_everybody_knows_who_broke_off(lost: int) -> None:
    links = linked(3)
    break_off(links[lost])
    others = [link for link in links if link.index != lost]
    for link in others:
        assert link.wait_for_end(5.0) == {lost: BROKEN_OFF}


def test_half_a_message_is_a_connection_that_broke_off() -> None:
    links = linked(2)
    writer, loop = links[1]._writers[0], links[1]._loop
    loop.call_soon_threadsafe(lambda: (writer.write(b'{"kind": "en'), writer.close()))
    assert links[0].wait_for_end(5.0) == {1: BROKEN_OFF}


@each(
    "line",
    [
        b"hello",
        b"[]",
        b"[" * 100_000,
        b"1" * 10_000,
        b'{"kind": "gone"}',
        b'{"kind": "ended", "worker": 1}',
        b'{"kind": "ended", "worker": 1, "how": 7}',
        b'{"kind": "ended", "worker": true, "how": "x"}',
        b'{"kind": "ended", "worker": 0, "how": "one worker speaks for another"}',
        b'{"kind": "value", "worker": 1, "key": ["a"], "value": 1}',
        b'{"kind": "value", "worker": 1, "key": "a"}',
        b'{"kind": "values", "key": "a", "values": {"0": 1, "1": 1}}',
    ],
)
def test_a_message_of_no_worker_is_not_taken_in(line: bytes) -> None:
    links = linked(2)
    writer, loop = links[1]._writers[0], links[1]._loop
    loop.call_soon_threadsafe(lambda: writer.write(line + b"\n"))
    assert links[0].wait_for_end(60.0) == {1: NOT_A_WORKER}


def test_a_line_without_an_end_is_a_connection_that_broke_off() -> None:
    links = linked(2)
    writer, loop = links[1]._writers[0], links[1]._loop
    loop.call_soon_threadsafe(lambda: writer.write(b"x" * (1 << 22)))
    assert links[0].wait_for_end(60.0) == {1: BROKEN_OFF}


@each("values", ['{"0": 1}', '{"0": 1, "one": 1}', "[1, 1]"])
def test_the_first_worker_is_not_trusted_blindly_either(values: str) -> None:
    links = linked(2)
    writer, loop = links[0]._writers[1], links[0]._loop
    line = f'{{"kind": "values", "key": "a", "values": {values}}}\n'.encode()
    loop.call_soon_threadsafe(lambda: writer.write(line))
    assert links[1].wait_for_end(60.0) == {0: NOT_A_WORKER}


def test_everybody_knows_the_order_in_which_workers_ended() -> None:
    links = linked(3)
    links[2].leave("it ended with ValueError: my own")
    for link in links[:2]:
        assert link.wait_for_end(5.0) == {2: "it ended with ValueError: my own"}
    # That its connection then closes is no news.
    break_off(links[2])
    links[0].leave(FINISHED)
    wait_until(lambda: 0 in links[1].ended())
    assert list(links[1].ended().items()) == [
        (2, "it ended with ValueError: my own"),
        (0, FINISHED),
    ]


def test_values_are_compared_by_key_in_any_order() -> None:
    links = linked(3)
    found: list[dict[str, Any]] = [{} for _ in links]

    def say(index: int) -> None:
        keys = ["a", "b"] if index != 1 else ["b", "a"]
        threads = [
            threading.Thread(
                target=lambda key=key: found[index].update(
                    {key: links[index].compare(key, [key, index], 60.0)}
                )
            )
            for key in keys
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)

    together([lambda i=i: say(i) for i in range(3)])
    expected = {key: {i: [key, i] for i in range(3)} for key in "ab"}
    assert found == [expected] * 3


def test_equal_values_are_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    send = WorkerLink._send

    async def noted(link: WorkerLink, *messages: Any) -> None:
        sent.extend(json.dumps(message) for message in messages if link.index == 0)
        await send(link, *messages)

    monkeypatch.setattr(WorkerLink, "_send", noted)
    links = linked(3)
    found: list[Any] = [None] * 3

    def say(key: str, index: int) -> None:
        found[index] = links[index].compare(key, [7, key == "b" and index == 2], 60.0)

    for key in "ab":
        together([lambda i=i, key=key: say(key, i) for i in range(3)])
        assert found == [{0: [7, False], 1: [7, False], 2: [7, key == "b"]}] * 3
    assert sent[0] == '{"kind": "values", "key": "a", "all": [7, false]}'
    assert '"values": {' in sent[1]


def test_a_frozen_worker_keeps_nothing_from_the_others() -> None:
    links = linked(3)

    class Full:
        """A connection that takes no more, as its reader is frozen."""

        def __init__(self, writer: Any) -> None:
            self.write, self.close, self.wait_closed = (
                writer.write,
                writer.close,
                writer.wait_closed,
            )

        async def drain(self) -> None:
            await asyncio.sleep(600)

    links[0]._writers[1] = Full(links[0]._writers[1])  # type: ignore[assignment]
    found: list[Any] = [None] * 3

    def say(index: int) -> None:
        found[index] = links[index].compare("a", index, 60.0)

    together([lambda i=i: say(i) for i in range(3)])
    assert found == [{0: 0, 1: 1, 2: 2}] * 3


def test_all_may_end_at_once() -> None:
    links = linked(8)
    together([lambda link=link: link.leave(FINISHED) for link in links])
    for link in links:
        others = set(range(8)) - {link.index}
        wait_until(lambda link=link, others=others: link.ended().keys() == others)
        assert set(link.ended().values()) == {FINISHED}


def test_nobody_waits_for_a_value_for_ever() -> None:
    links = linked(2)
    assert links[0].compare("a", 1, 0.2) is None
    break_off(links[1])
    assert links[0].compare("b", 1, 600.0) is None
    assert links[1].compare("b", 1, 600.0) is None


# What it means to the user ------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    process_state.forget()
    monkeypatch.setattr(lost_workers, "_NEWS_SECONDS", 0.5)
    monkeypatch.setattr(atexit, "register", lambda function: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(Watchdog, "start", lambda self: None)
    yield
    process_state.forget()


# As TensorFlow 2.21 put it where real workers were killed, raised an error, or were frozen.
HEARTBEATS = (
    "Graph execution error:\n\nDetected at node CollectiveReduceV2\n\n"
    "Collective ops is aborted by: Error reported from /job:worker/task:1: The following tasks are "
    "unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:1\nThe tasks have crashed."
)
SAID = {
    "killed": (tf.errors.UnavailableError, HEARTBEATS),
    "chief": (
        tf.errors.UnavailableError,
        "Collective ops is aborted by: recvmsg:Connection reset by peer\nAdditional GRPC error "
        "information from remote target /job:worker/replica:0/task:0",
    ),
    "closed": (tf.errors.UnavailableError, "Collective ops is aborted by: Socket closed\n"),
    "frozen": (
        tf.errors.DeadlineExceededError,
        "Collective ops is aborted by: Deadline Exceeded\n\nRPC: "
        "/tensorflow.CoordinationService/Heartbeat",
    ),
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.usefixtures("fresh")
def test_a_lost_worker_is_named_with_what_to_do(said: str) -> None:
    kind, text = SAID[said]
    links = linked(3)
    watch(Cluster(links[0].addresses, 0), links[0])
    assert link_of_workers() is links[0]
    break_off(links[2])
    with pytest.raises(WorkerLostError) as caught, explaining_lost_workers():
        raise kind(None, None, text)
    found = str(caught.value)
    assert found.startswith(
        "Another worker is gone, and the others cannot continue without it. First to go: worker 2 "
        f"of 3 at {links[0].addresses[2]}: {BROKEN_OFF}. Its log"
    )
    assert "Start all workers again; they resume from the last checkpoint" in found
    assert "launch --restarts" in found
    assert "task:1" not in found.split("TensorFlow says: ")[0]
    assert isinstance(caught.value.__cause__, kind)


@pytest.mark.usefixtures("fresh")
def test_steps_name_a_lost_worker_too() -> None:
    links = linked(2)
    watch(Cluster(links[1].addresses, 1), links[1])
    links[0].leave("it ended with OutOfMemoryError: GPU:0 has not enough memory")
    with (
        pytest.raises(WorkerLostError, match=r"worker 0 of 2 .*: it ended with OutOfMemoryError: "),
        explaining_failures(tf.distribute.get_strategy()),
    ):
        raise tf.errors.UnavailableError(None, None, SAID["closed"][1])


@pytest.mark.usefixtures("fresh")
def test_a_frozen_worker_is_named_as_tensorflow_does() -> None:
    """Its connections are open, so only TensorFlow's heartbeats tell."""
    links = linked(2)
    watch(Cluster(links[0].addresses, 0, has_chief=True), links[0])
    text = HEARTBEATS.replace("replica:0/task:1", "replica:0/task:0")
    with pytest.raises(WorkerLostError, match=r"go: worker 1 of 2 at .*: it does not answer\."):  # noqa: SIM117
        with explaining_lost_workers():
            raise tf.errors.UnavailableError(None, None, text)


@pytest.mark.usefixtures("fresh")
def test_workers_of_a_strategy_of_ones_own_are_named_too() -> None:
    with pytest.raises(WorkerLostError, match=r"go: task 1 of job worker: it does not answer\."):  # noqa: SIM117
        with explaining_lost_workers():
            raise tf.errors.UnavailableError(None, None, HEARTBEATS)


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.InternalError(None, None, "CUDA_ERROR_LAUNCH_FAILED"),
        tf.errors.AbortedError(None, None, "Collective ops is aborted by: Inconsistent shapes"),
        tf.errors.InvalidArgumentError(None, None, "Socket closed"),
        ValueError("Connection reset by peer"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("fresh")
def test_other_errors_pass_unchanged(error: Exception) -> None:
    links = linked(2)
    watch(Cluster(links[0].addresses, 0), links[0])
    with pytest.raises(type(error)) as caught, explaining_lost_workers():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.InternalError(
            None,
            None,
            "Collective ops is aborted by: Collective instance 9 expected type 0 and data_type 1",
        ),
        tf.errors.InvalidArgumentError(
            None, None, "Shape mismatch in the collective instance 9. Op at device /job:worker"
        ),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_workers_that_called_different_things_are_told_so(error: Exception) -> None:
    links = linked(2)
    watch(Cluster(links[0].addresses, 0), links[0])
    with pytest.raises(ClusterError) as caught, explaining_lost_workers():
        raise error
    assert "do not call the same things" in str(caught.value)
    assert f"This is worker 0 of 2 at {links[0].addresses[0]}" in str(caught.value)
    assert "ollective instance 9" in str(caught.value)
    assert caught.value.__cause__ is error


GOODBYE = """
import json, sys
from tfmultigpu.addons.workers.spec import Cluster
from tfmultigpu.addons.workers.failures import watch
from tfmultigpu.addons.workers.rendezvous import meet
addresses = json.loads(sys.argv[1])
watch(Cluster(addresses, 1), meet(addresses, 1, {}, timeout=300.0, stay=True))
exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        ("raise ValueError('my own\\nsecond line')", 1, "it ended with ValueError: my own"),
        ("sys.exit(3)", 3, FINISHED),
    ],
)
def test_a_process_says_how_it_ends(last: str, code: int, said: str) -> None:
    addresses = free_addresses(2)
    other = subprocess.Popen(
        [sys.executable, "-c", GOODBYE, json.dumps(addresses), last],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    link = meet(addresses, 0, {}, timeout=300.0, stay=True)
    assert link is not None
    assert link.wait_for_end(150.0) == {1: said}
    assert other.wait() == code


STUCK = """
import time
from tfmultigpu.addons.workers import failures as lost_workers
from tfmultigpu.addons.workers import exits as worker_ends
lost_workers._EXIT_SECONDS, worker_ends._ABORT_SECONDS, worker_ends._END_SECONDS = 0.5, 0.3, 2.0
class Stuck:
    def __del__(self): time.sleep(600)
"""
ENDS = {
    # The end of the interpreter waits for something, and the error is the last that is said.
    "error": "stuck = Stuck(); raise ValueError('my own')",
    # A call waits for a worker that has ended, in C++ as far as Python can tell.
    "call": "print('waits', flush=True)\nwith lost_workers.explaining_lost_workers():\n"
    "    while True: time.sleep(600)",
    # One that needs nobody may take its time, and one with steps inside may go on.
    "lives": "with lost_workers.naming_lost_workers(): time.sleep(4)\n"
    "with lost_workers.explaining_lost_workers():\n"
    "    for _ in range(8):\n"
    "        with lost_workers.explaining_lost_workers(): time.sleep(0.5)\nprint('done')",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends(how: str) -> None:
    addresses = free_addresses(2)
    with subprocess.Popen(
        [sys.executable, "-c", GOODBYE, json.dumps(addresses), STUCK + ENDS[how]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    ) as other:
        link = meet(addresses, 0, {}, timeout=300.0, stay=True)
        assert link is not None
        link.leave(FINISHED)
        printed, said = other.communicate(timeout=300)
    if how == "lives":
        assert (other.returncode, printed) == (0, "done\n")
        return
    assert other.returncode == 1
    last = said.splitlines()[-1]
    if how == "error":
        assert last == "ValueError: my own"
        assert link.wait_for_end(60.0) == {1: "it ended with ValueError: my own"}
    else:
        assert printed == "waits\n"
        assert last.startswith("tfmultigpu.errors.WorkerLostError: Another worker is gone")
        assert f"First to go: worker 0 of 2 at {addresses[0]}: its program ended without" in last


def test_a_program_that_ends_without_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    assert lost_workers._how_this_process_ends() == FINISHED
