"""The meeting of all workers before TensorFlow starts.

TensorFlow waits for missing workers in a call that Ctrl-C cannot interrupt, does not name them all,
and joins workers that disagree. So each worker first calls the first one and shows its card. When
all have come, the first worker says go; else it tells them what is wrong. The connections stay
open: a worker that is killed closes its own, and the others know at once.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait

from tfmultigpu.addons.workers.channels import Message, as_channel, connect, listen, receive, send
from tfmultigpu.clusters import Cluster
from tfmultigpu.errors import ClusterError

_TELL_SECONDS = 5.0  # To tell what is wrong to workers that start a little later.
_PAUSE = 0.1
_CURE = "Start every worker, and let them reach each other's ports."


def meet(
    cluster: Cluster, card: Mapping[str, str], timeout: float, problem: ClusterError | None = None
) -> dict[int, Connection]:
    """Waits until every worker is here and shows the same card; then frees the port.

    ``card`` is what must be the same on all workers, ``problem`` why this one cannot start: the
    others hear it, then it is raised here. Returns the connections: of the first worker to all
    others, of the others to the first one. If a worker is missing, disagrees or cannot start, every
    worker that has called the first one raises ``ClusterError``.
    """
    listener = None
    try:
        listener = listen(cluster)  # Until TensorFlow needs the port no other program takes it.
    except ClusterError as error:
        problem = problem or error
    if problem is not None:
        what = f"{cluster.name(cluster.index or 0)} cannot start: {problem.what}"
        problem = ClusterError(what, problem.received, problem.write)
    with listener or contextlib.nullcontext():
        if cluster.index == 0:
            return _gather(cluster, card, timeout, problem, listener)
        return _call_the_first(cluster, card, timeout, problem)


def _call_the_first(
    cluster: Cluster, card: Mapping[str, str], timeout: float, problem: ClusterError | None
) -> dict[int, Connection]:
    end = time.monotonic() + (timeout if problem is None else min(timeout, _TELL_SECONDS))
    seen = ""
    while time.monotonic() < end:
        channel = None
        try:
            channel = connect(cluster.workers[0])
            mine = {"index": cluster.index, "card": dict(card), "problem": _fields(problem)}
            send(channel, mine)
            answer = receive(channel, end + _TELL_SECONDS - time.monotonic())["problem"]
            if answer is None:
                return {0: channel}
            problem, end = ClusterError(*answer), 0.0
        except (ValueError, KeyError, TypeError):
            seen = "another program answers there"
        except OSError as error:
            seen = error.strerror or str(error)
        if channel is not None:
            channel.close()
        time.sleep(_PAUSE)
    if problem is not None:
        raise problem
    raise ClusterError(
        f"{cluster.name(0)}, the first one, did not come within {timeout:g} s ({seen}).", "", _CURE
    )


def _gather(
    cluster: Cluster,
    card: Mapping[str, str],
    timeout: float,
    problem: ClusterError | None,
    listener: socket.socket | None,
) -> dict[int, Connection]:
    """Waits for the others, as the first worker, and tells them to continue or what is wrong."""
    came: dict[int, Connection] = {}
    callers: list[Connection] = []
    end, tell_end = time.monotonic() + timeout, float("inf")
    others = missing = {*range(1, len(cluster.workers))}
    while listener is not None and missing and time.monotonic() < end:
        if problem is not None and tell_end > end:
            end = tell_end = min(end, time.monotonic() + _TELL_SECONDS)
        # A worker says nothing after its card: if one can be read again, it is gone.
        ready = wait([listener, *callers, *came.values()], max(0.0, end - time.monotonic()))
        came = {index: channel for index, channel in came.items() if channel not in ready}
        if listener in ready:
            callers.append(as_channel(listener.accept()[0]))
        for channel in [caller for caller in callers if caller in ready]:
            callers.remove(channel)
            try:
                caller = receive(channel, 0.0)
                index, wrong = int(caller["index"]), _problem_of(caller, card)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                channel.close()  # Not a worker.
                continue
            if index in came:
                wrong = ClusterError(
                    f"Two processes say that they are worker {index}.",
                    "",
                    "Give each process another index, and start each worker once.",
                )
                send(channel, {"problem": _fields(wrong)})
            else:
                came[index] = channel
            problem = problem or wrong
        missing = others - {*came}
    if problem is None and missing:
        names = ", ".join(cluster.name(index) for index in sorted(missing))
        problem = ClusterError(
            f"{len(missing)} of {len(cluster.workers)} workers did not come within {timeout:g} s: "
            f"{names}.",
            "",
            _CURE,
        )
    for channel in came.values():
        send(channel, {"problem": _fields(problem)})
    if problem is not None:
        raise problem
    return came


def _fields(problem: ClusterError | None) -> list[str] | None:
    """Returns an error as it is sent."""
    if problem is None:
        return None
    return [problem.what, problem.received, problem.write]


def _problem_of(caller: Message, card: Mapping[str, str]) -> ClusterError | None:
    """Returns what is wrong with a worker that calls: its card, or what it says itself."""
    for name, first in card.items():
        other = caller["card"].get(name)
        if other != first:
            return ClusterError(
                f"The workers disagree about {name}: worker 0 has {first}, worker "
                f"{caller['index']} has {other}.",
                "",
                "Give every worker the same program, cluster, devices and versions; only its index "
                "differs.",
            )
    fields = caller["problem"]
    if fields is None:
        return None
    return ClusterError(*fields)
