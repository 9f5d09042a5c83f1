"""Joining the other workers: TensorFlow's strategy over all of them, or an error that says why."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.workers.failures import watch
from tfmultigpu.addons.workers.preflight import preflight
from tfmultigpu.addons.workers.spec import Cluster
from tfmultigpu.errors import ClusterError

__all__ = ["join"]

# All workers are there when TensorFlow starts, so this is long.
_JOIN_SECONDS = 60.0


def join(
    cluster: Cluster,
    devices: Sequence[str],
    communication: str,
    timeout: float,
    problem: str | None = None,
) -> tf.distribute.Strategy:
    """Joins the other workers.

    Args:
        cluster: The workers, and which of them this is.
        devices: The devices of this worker.
        communication: How the workers add their gradients.
        timeout: Seconds to wait for the others.
        problem: Why this worker cannot start. The others are told; then it is raised here.

    Raises:
        ClusterError: A worker is missing, differs or cannot start.
    """
    kind = devices[0].split(":")[0]
    link = preflight(
        cluster,
        devices=f"{len(devices)} {kind}",
        communication=communication,
        timeout=timeout,
        problem=problem,
    )
    watch(cluster, link)
    distribute: Any = tf.distribute
    job = "chief" if cluster.has_chief and cluster.index == 0 else "worker"
    resolver = distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.jobs),
        task_type=job,
        task_id=cluster.jobs[job].index(str(cluster.address)),
        num_accelerators={"GPU": len(devices)} if kind == "GPU" else {},
        rpc_layer="grpc",
    )
    options = distribute.experimental.CommunicationOptions(
        implementation=distribute.experimental.CommunicationImplementation[communication.upper()]
    )
    try:
        with _keeping_handler(signal.SIGTERM), _not_for_ever(max(timeout, _JOIN_SECONDS)):
            strategy: tf.distribute.Strategy = distribute.MultiWorkerMirroredStrategy(
                cluster_resolver=resolver, communication_options=options
            )
    except (RuntimeError, ValueError, tf.errors.OpError) as error:
        raise ClusterError(
            f"The workers met, but TensorFlow could not start {cluster}: {error} Restart every "
            "worker: TensorFlow cannot try twice in a process."
        ) from error
    return strategy


@contextlib.contextmanager
def _keeping_handler(number: int) -> Iterator[None]:
    """Restores the handler of a signal after the block, in any thread.

    TensorFlow replaces the handler of SIGTERM when it joins a cluster, unknown to Python. Its own
    handler only tells the other workers, so the process would live on. ``signal.signal`` cannot
    return the handler, works in the main thread only, and does not know of the replacement.
    """
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.restype = put.restype = ctypes.c_void_p
    get.argtypes, put.argtypes = [ctypes.c_int], [ctypes.c_int, ctypes.c_void_p]
    before = get(number)
    try:
        yield
    finally:
        put(number, before)


@contextlib.contextmanager
def _not_for_ever(seconds: float) -> Iterator[None]:
    """Ends this process, with a traceback, if the block takes longer.

    TensorFlow waits an hour for a worker that left after the meeting.
    """
    # It holds Python's lock meanwhile: a thread that should run twice a second did not run once in
    # 24 seconds (TensorFlow 2.21), and no signal is handled. The timer of faulthandler needs no
    # lock. A process has one, and Python cannot read it, so one that the user set is not restored;
    # create_strategy says so.
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
