"""The meeting of all workers before TensorFlow starts.

TensorFlow waits for missing workers in a call that Ctrl-C cannot interrupt, does not name them all,
and joins workers that disagree. So each worker first calls the first one and shows its card. When
all have come, the first worker says go; else it tells all what is wrong. The connections stay open:
a worker that is killed closes its own, and the others know at once.
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

__all__ = ["meet"]

_TELL_SECONDS = 5.0  # To tell what is wrong to workers that start a little later.
_PAUSE = 0.1


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
        ClusterError: A worker is missing, disagrees or cannot start. Every worker that can be
            reached raises it.

    Example:
        >>> meet(Cluster(["localhost:23456"], 0), {"tensorflow": "2.21.0"}, 5.0)
        {}
    """
    return _Meeting(cluster, card, timeout).hold(problem)


class _Meeting:
    def __init__(self, cluster: Cluster, card: Mapping[str, str], timeout: float) -> None:
        self.cluster, self.timeout = cluster, timeout
        self.deadline = time.monotonic() + timeout
        self.card: dict[str, Any] = {
            "index": cluster.index,
            "address": cluster.address,
            "card": dict(card),
        }
        self.came: dict[int, Channel] = {}  # Those that wait for the word of the first worker.
        self.told: set[int] = set()  # Those that know what is wrong.
        self.problem: str | None = None
        self.changed = threading.Condition()

    def hold(self, problem: str | None) -> dict[int, Channel]:
        listener = None
        try:
            if problem is not None:
                raise ClusterError(problem)
            listener = listen(self.cluster)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        except ClusterError as error:
            self._end(f"{self.cluster.name(self.cluster.index or 0)} cannot start: {error}")
        try:
            channels = self._wait_for_all() if self.cluster.is_chief else self._call_the_first()
        finally:
            if listener is not None:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread that accepts.
                listener.close()
        for channel in self.came.values():
            channel.send({"problem": self.problem})
        if self.problem is not None:
            for channel in {*self.came.values(), *channels.values()}:
                channel.close()
            raise ClusterError(self.problem)
        return channels

    def _wait_for_all(self) -> dict[int, Channel]:
        with self.changed:
            self._wait(lambda: self.problem is not None or not self._missing(), self.deadline)
            problem, missing = self.problem, self._missing()
            if problem is not None:
                end = min(self.deadline, time.monotonic() + _TELL_SECONDS)
                self._wait(lambda: not self._missing(), end)
        if problem is None and not missing:
            return self.came
        with ThreadPoolExecutor(max(1, min(len(missing), 100))) as threads:
            if problem is None:
                seen = threads.map(self._look, missing)
                names = [self.cluster.name(worker) for worker in missing]
                listed = ", ".join(f"{n} ({s})" for n, s in zip(names, seen, strict=True))
                self._end(
                    f"{len(missing)} of {len(self.cluster.workers)} workers did not come within "
                    f"{self.timeout:g} s: {listed}. Start every worker, and let them reach each "
                    "other's ports."
                )
            list(threads.map(self._tell, missing))
        return {}

    def _missing(self) -> list[int]:
        for index, channel in list(self.came.items()):
            if not channel.is_open():
                self.came.pop(index).close()
        known = self.told.union(self.came)
        return [i for i in range(1, len(self.cluster.workers)) if i not in known]

    def _look(self, worker: int) -> str:
        try:
            connect(self.cluster.workers[worker]).close()
        except OSError as error:
            return error.strerror or str(error)
        return "something listens there, and has not called"

    def _tell(self, worker: int) -> None:
        """Tells a worker that has not called what is wrong; it may know better."""
        with contextlib.suppress(OSError, ValueError):
            channel = connect(self.cluster.workers[worker])
            with contextlib.closing(channel):
                channel.send({**self.card, "problem": self.problem})
                self.problem = channel.receive(_TELL_SECONDS).get("problem") or self.problem

    def _call_the_first(self) -> dict[int, Channel]:
        seen = ""
        cannot_start = self.problem is not None
        end = (
            min(self.deadline, time.monotonic() + _TELL_SECONDS) if cannot_start else self.deadline
        )
        while time.monotonic() < end and (cannot_start or self.problem is None):
            with contextlib.ExitStack() as stack:
                try:
                    channel = stack.enter_context(
                        contextlib.closing(connect(self.cluster.workers[0]))
                    )
                    channel.send({**self.card, "problem": self.problem})
                    reply = channel.receive(end + _TELL_SECONDS - time.monotonic())
                except ValueError:
                    seen = "another program answers there"
                except OSError as error:
                    seen = error.strerror or str(error)
                else:
                    stack.pop_all()
                    self._end(reply.get("problem"))
                    return {0: channel}
            time.sleep(_PAUSE)
        self._end(
            f"{self.cluster.name(0)}, the first one, did not come within {self.timeout:g} s "
            f"({seen}). Start every worker, and let them reach each other's ports."
        )
        return {}

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # It is closed at the end of the meeting.
            while True:
                channel = Channel(listener.accept()[0])
                threading.Thread(target=self._hear, args=(channel,), daemon=True).start()

    def _hear(self, channel: Channel) -> None:
        """Reads the card of a caller; ignores what is not one."""
        try:
            caller = channel.receive(max(1.0, self.deadline - time.monotonic()))
            index, problem = int(caller["index"]), caller["problem"]
            difference = self._difference(caller)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            channel.close()
            return
        with self.changed:
            known = self.came.get(index)
            if index == self.cluster.index or (known is not None and known.is_open()):
                problem = f"Two processes say that they are {self.cluster.name(index)}."
            self.problem = difference or self.problem or problem
            if self.problem is None and self.cluster.is_chief:
                self.came[index] = channel
            else:
                self.told.add(index)
                channel.send({"problem": self.problem})
                channel.close()
            self.changed.notify_all()

    def _difference(self, caller: Mapping[str, Any]) -> str | None:
        for name, own in self.card["card"].items():
            other = caller["card"].get(name)
            if other != own:
                sides = sorted(
                    f"worker {side['index']} at {side['address']} has {value}"
                    for side, value in ((self.card, own), (caller, other))
                )
                return (
                    f"The workers disagree about {name}: {', '.join(sides)}. Give every worker the "
                    "same program, cluster, devices and versions; only its index differs."
                )
        return None

    def _end(self, problem: str | None) -> None:
        """Ends the meeting; the first problem counts."""
        with self.changed:
            self.problem = self.problem or problem
            self.changed.notify_all()

    def _wait(self, until: Callable[[], bool], deadline: float) -> None:
        self.changed.wait_for(until, max(0.0, deadline - time.monotonic()))
