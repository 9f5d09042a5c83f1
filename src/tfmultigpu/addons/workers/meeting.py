"""The meeting of all workers before TensorFlow starts.

TensorFlow waits for missing workers in a call that Ctrl-C cannot interrupt, does not name them all,
and joins workers that disagree. So each worker first calls the first one and shows its card. When
all have come, the first worker says go; else it tells them what is wrong. The connections stay
open: a worker that is killed closes its own, and the others know at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfmultigpu.addons.workers.channels import Channel, connect, listen
from tfmultigpu.addons.workers.cluster import Cluster
from tfmultigpu.errors import ClusterError

_TELL_SECONDS = 5.0  # To tell what is wrong to workers that start a little later.
_PAUSE = 0.1
_CURE = "Start every worker, and let them reach each other's ports."


def meet(
    cluster: Cluster, card: Mapping[str, str], timeout: float, problem: str | None = None
) -> dict[int, Channel]:
    """Waits until every worker is here and shows the same card; then frees the port.

    Args:
        cluster: The workers, and which of them this is.
        card: What must be the same on all workers, by name.
        timeout: Seconds to wait for the others.
        problem: Why this worker cannot start. The others are told; then it is raised here.

    Returns:
        The connections: of the first worker to all others, of the others to the first one.

    Raises:
        ClusterError: A worker is missing, disagrees or cannot start. Every worker that has called
            the first one raises it.
    """
    listener = None
    try:
        listener = listen(cluster)  # Until TensorFlow needs the port no other program takes it.
    except ClusterError as error:
        problem = problem or str(error)
    if problem is not None:
        problem = f"{cluster.name(cluster.index or 0)} cannot start: {problem}"
    try:
        if cluster.index == 0:
            return _Gathering(cluster, card, problem).hold(listener, timeout)
        return _call_the_first(cluster, card, timeout, problem)
    finally:
        if listener is not None:
            listener.close()


def _call_the_first(
    cluster: Cluster, card: Mapping[str, str], timeout: float, problem: str | None
) -> dict[int, Channel]:
    end = time.monotonic() + (timeout if problem is None else min(timeout, _TELL_SECONDS))
    seen = ""
    while time.monotonic() < end:
        channel = None
        try:
            channel = connect(cluster.workers[0])
            channel.send({"index": cluster.index, "card": dict(card), "problem": problem})
            answer = channel.receive(end + _TELL_SECONDS - time.monotonic())["problem"]
            if answer is None:
                return {0: channel}
            problem, end = answer, 0.0
        except (ValueError, KeyError):
            seen = "another program answers there"
        except OSError as error:
            seen = error.strerror or str(error)
        if channel is not None:
            channel.close()
        time.sleep(_PAUSE)
    missing = f"{cluster.name(0)}, the first one, did not come within {timeout:g} s ({seen})."
    raise ClusterError(problem or f"{missing} {_CURE}")


class _Gathering:
    """The part of the first worker, which waits for the others."""

    def __init__(self, cluster: Cluster, card: Mapping[str, str], problem: str | None) -> None:
        self.cluster, self.card, self.problem = cluster, card, problem
        self.came: dict[int, Channel] = {}
        self.changed = threading.Condition()

    def hold(self, listener: socket.socket | None, timeout: float) -> dict[int, Channel]:
        if listener is not None:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            self._wait(lambda: self.problem is not None or not self._missing(), timeout)
            if self.problem is not None:
                self._wait(lambda: not self._missing(), min(timeout, _TELL_SECONDS))
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread that accepts.
            listener.close()
        missing = self._missing()
        if self.problem is None and missing:
            with ThreadPoolExecutor(min(len(missing), 100)) as threads:
                seen = list(threads.map(self._look, missing))
            self.problem = (
                f"{len(missing)} of {len(self.cluster.workers)} workers did not come within "
                f"{timeout:g} s: {', '.join(seen)}. {_CURE}"
            )
        for channel in self.came.values():
            channel.send({"problem": self.problem})
            if self.problem is not None:
                channel.close()
        if self.problem is not None:
            raise ClusterError(self.problem)
        return self.came

    def _wait(self, until: Callable[[], bool], seconds: float) -> None:
        with self.changed:
            self.changed.wait_for(until, seconds)

    def _missing(self) -> list[int]:
        for index, channel in list(self.came.items()):
            if not channel.is_open():
                self.came.pop(index).close()
        return [i for i in range(1, len(self.cluster.workers)) if i not in self.came]

    def _look(self, worker: int) -> str:
        seen = "something listens there, and has not called"
        try:
            connect(self.cluster.workers[worker]).close()
        except OSError as error:
            seen = error.strerror or str(error)
        return f"{self.cluster.name(worker)} ({seen})"

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # It is closed at the end of the meeting.
            while True:
                channel = Channel(listener.accept()[0])
                threading.Thread(target=self._hear, args=(channel,), daemon=True).start()

    def _hear(self, channel: Channel) -> None:
        """Reads the card of a caller; ignores what is not one."""
        try:
            caller = channel.receive(_TELL_SECONDS)
            index, problem = int(caller["index"]), self._difference(caller) or caller["problem"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            channel.close()
            return
        with self.changed:
            known = self.came.get(index)
            if known is not None and known.is_open():
                problem = f"Two processes say that they are {self.cluster.name(index)}."
                channel.send({"problem": problem})
                channel.close()
            else:
                self.came[index] = channel
            self.problem = self.problem or problem
            self.changed.notify_all()

    def _difference(self, caller: Mapping[str, Any]) -> str | None:
        for name, first in self.card.items():
            other = caller["card"].get(name)
            if other != first:
                return (
                    f"The workers disagree about {name}: worker 0 has {first}, worker "
                    f"{caller['index']} has {other}. Give every worker the same program, cluster, "
                    "devices and versions; only its index differs."
                )
        return None
