"""Joining the other workers: TensorFlow's strategy over all of them, or an error that says why."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import platform
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._version import __version__, version_of_keras
from tfmultigpu.addons.workers.ends import Ends, note_joined
from tfmultigpu.addons.workers.lost import JoinedWorkers
from tfmultigpu.addons.workers.meeting import meet
from tfmultigpu.addons.workers.sources import job_id
from tfmultigpu.clusters import Cluster
from tfmultigpu.errors import ClusterError
from tfmultigpu.strategies.process_state import process_state

# All workers are here when TensorFlow starts, so these are long.
_REGISTER_SECONDS = 30.0
_JOIN_SECONDS = 60.0
_HEARTBEAT_SECONDS = 10.0


def join(
    cluster: Cluster,
    devices: Sequence[str],
    communication: str,
    timeout: float,
    problem: ClusterError | None = None,
) -> tf.distribute.Strategy:
    """Joins the other workers; of the arguments only ``cluster.index`` differs between them."""
    kind = devices[0].split(":")[0]
    card = {
        "the cluster": f"{list(cluster.workers)}",
        "the job": job_id(os.environ),
        "their devices": f"{len(devices)} {kind}",
        "communication": communication,
        "the version of tfmultigpu": __version__,
        "the version of tensorflow": tf.__version__,
        "the version of keras": version_of_keras(),
        "the version of python": ".".join(platform.python_version_tuple()[:2]),
    }
    channels = meet(cluster, card, timeout, problem)
    ends = Ends(cluster.index or 0, channels)
    distribute: Any = tf.distribute
    options = distribute.experimental.CommunicationOptions(implementation=communication)
    resolver = distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(cluster.workers)}),
        task_type="worker",
        task_id=cluster.index,
        num_accelerators={"GPU": len(devices)} if kind == "GPU" else {},
    )
    _compat.configure_coordination(len(cluster.workers), _REGISTER_SECONDS, _HEARTBEAT_SECONDS)
    try:
        with _as_tensorflow_holds_the_lock(_JOIN_SECONDS):
            strategy: tf.distribute.Strategy = distribute.MultiWorkerMirroredStrategy(
                cluster_resolver=resolver, communication_options=options
            )
    except (RuntimeError, ValueError, tf.errors.OpError) as error:
        left = "; ".join(f"{cluster.name(i)}: {end.how}" for i, end in ends.wait(0.0).items())
        raise ClusterError(
            f"The workers met, but TensorFlow could not start {cluster}. "
            f"{left or 'No worker has ended'}.",
            "",
            "Restart every worker: TensorFlow cannot try twice in a process. TensorFlow says: "
            f"{error}",
        ) from error
    note_joined()
    process_state.note_joined(JoinedWorkers(cluster, ends))
    return strategy


@contextlib.contextmanager
def _as_tensorflow_holds_the_lock(seconds: float) -> Iterator[None]:
    """Ends the process on Ctrl-C, or if the block takes longer; restores the handler of SIGTERM.

    TensorFlow holds Python's lock while it joins, so Python handles no signal; the timer of
    ``faulthandler`` needs no lock, and replaces one that the user set. TensorFlow also replaces the
    handler of SIGTERM, unknown to Python, by one that only tells the other workers.
    """
    number, pointer = ctypes.c_int, ctypes.c_void_p
    get = ctypes.PYFUNCTYPE(pointer, number)(("PyOS_getsig", ctypes.pythonapi))
    put = ctypes.PYFUNCTYPE(pointer, number, pointer)(("PyOS_setsig", ctypes.pythonapi))
    before = {signal.SIGTERM: get(signal.SIGTERM), signal.SIGINT: get(signal.SIGINT)}
    put(signal.SIGINT, int(signal.SIG_DFL))
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for sent, handler in before.items():
            put(sent, handler)
