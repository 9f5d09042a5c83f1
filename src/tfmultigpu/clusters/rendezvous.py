"""Meet the other workers before TensorFlow does: plain sockets, on the addresses of the cluster.

TensorFlow waits an hour for a worker that never comes, with Ctrl-C dead, and for ever where workers
disagree. So every worker first listens on its own address and dials all others, and they compare
cards. When all have all cards the first worker says go, and only then does anybody give up its
port: no worker is still looking for a port that TensorFlow has taken over. The connections of the
first worker to the others may stay: a `WorkerLink`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence

from tfmultigpu.clusters.connection import WorkerLink
from tfmultigpu.clusters.jobs import Job
from tfmultigpu.clusters.meeting import Meeting
from tfmultigpu.clusters.meeting_messages import Words

__all__ = ["meet"]

_NO_JOB = Job()
_CANCEL_SECONDS = 2.0


def meet(
    addresses: Sequence[str],
    index: int,
    card: Mapping[str, str],
    timeout: float,
    *,
    cures: Mapping[str, str] | None = None,
    problem: str | None = None,
    source: str = "TF_CONFIG",
    stay: bool = False,
    job: Job = _NO_JOB,
) -> WorkerLink | None:
    """Wait until every worker is there and shows the same card; the port is free again after.

    Listens on `addresses[index]` and nowhere else. Only what is signed with the secret of the job
    is heard, if it has one.

    Args:
        addresses: `host:port` of all workers, in an order that is the same for all.
        index: which one this process is.
        card: what all must agree on, compared in this order.
        timeout: seconds to wait for the others.
        cures: for a field of the card, what to change where it differs.
        problem: why this worker cannot start; the others are told, then it is raised here.
        source: what lists the addresses, for the messages.
        stay: keep connections open, so that each worker knows when another ends.
        job: what the workers of other jobs are told apart by.

    Returns:
        The connections, where they stay and there is more than one worker.

    Raises:
        ClusterError: a worker is missing, disagrees or cannot start, or this port is taken. Every
            worker that can be reached raises too.

    Example:
        >>> meet(["localhost:23456"], 0, {"tensorflow": "2.21.0"}, timeout=5.0)
    """
    words = Words(addresses, index, source, cures or {})
    meeting = Meeting(tuple(addresses), index, dict(card), timeout, words, job, source)
    link = WorkerLink(addresses, index) if stay and len(addresses) > 1 else None
    loop = asyncio.new_event_loop()
    failures: list[BaseException] = []
    met = threading.Event()

    async def hold() -> None:
        try:
            connections = await meeting.hold(problem, keep=link is not None)
        except BaseException as error:
            failures.append(error)
            return
        finally:
            met.set()
        if link is not None:
            await link.serve(connections)

    def run() -> None:
        # A thread of its own: the caller may be a notebook, whose thread has a loop running.
        try:
            loop.run_until_complete(hold())
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="tfmultigpu-rendezvous", daemon=True)
    thread.start()
    try:
        met.wait()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(meeting.cancel)
        thread.join(timeout=_CANCEL_SECONDS)
        raise
    if link is None or failures:
        thread.join()
    if failures:
        raise failures[0]
    return link
