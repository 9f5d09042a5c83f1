"""The meeting of all workers before TensorFlow starts, over plain sockets.

TensorFlow waits an hour for a worker that never comes, ignoring Ctrl-C, and for ever if workers
disagree. So every worker first listens on its own address. It calls the first worker, which calls
each of the others, and they compare cards. When all have come, the first worker says go. Only then
do workers free their ports, so no worker still calls a port that TensorFlow has taken over. The
connections of the first worker to the others may stay open, as a ``WorkerLink``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence

from tfmultigpu.addons.workers.connection import WorkerLink
from tfmultigpu.addons.workers.jobs import Job
from tfmultigpu.addons.workers.meeting import Meeting
from tfmultigpu.addons.workers.meeting_messages import Words
from tfmultigpu.addons.workers.spec import WRITTEN, ClusterSource

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
    source: ClusterSource = WRITTEN,
    stay: bool = False,
    job: Job = _NO_JOB,
) -> WorkerLink | None:
    """Waits until every worker is there and shows the same card; then frees the port.

    Listens on ``addresses[index]`` and on nothing else. If the job has a secret, lines without its
    signature are ignored.

    Args:
        addresses: ``host:port`` of all workers, in an order that is the same for all.
        index: The position of this process among them.
        card: The facts on which all must agree, compared in this order.
        timeout: Seconds to wait for the others.
        cures: The line that corrects a field of the card that differs, by field.
        problem: Why this worker cannot start. The others are told; then it is raised here.
        source: The source that lists the addresses, for the messages.
        stay: Whether connections stay open, so that each worker knows when another one ends.
        job: The job of this worker, which tells it apart from workers of other jobs.

    Returns:
        The connections if they stay open and there are several workers, otherwise None.

    Raises:
        ClusterError: A worker is missing, disagrees or cannot start, or this port is taken. Every
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
        # In another thread: that of the caller may have a running loop, as in a notebook.
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
