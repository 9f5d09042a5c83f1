"""Workers of a cluster: how they meet, tell each other values, and end; their names in Slurm."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

import tensorflow as tf


def configure_coordination(workers: int, register_seconds: float, heartbeat_seconds: float) -> None:
    """Sets how long TensorFlow waits for the workers of a cluster that is joined next.

    Private: ``context().configure_coordination_service``. ``MultiWorkerMirroredStrategy`` keeps a
    configuration that it finds, and has no argument for one. Without it TensorFlow waits an hour
    for a worker that left after the meeting.
    """
    context = _eager_context()
    context.configure_coordination_service(
        "standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=int(1000 * register_seconds),
        heartbeat_timeout_in_ms=int(1000 * heartbeat_seconds),
    )
    config = context.coordination_service
    config.coordinated_job_list.add(name="worker", num_tasks=workers)
    config.cluster_register_with_barrier = True


def set_cluster_value(name: str, value: str) -> None:
    """Tells all workers a value; the first one of a name stays. For the first worker only.

    Private: ``context().set_config_key_value``, as ``cluster_value``. It holds Python's lock until
    the first worker answers, as most of the service does.
    """
    with suppress(tf.errors.OpError):  # The name has a value.
        _eager_context().set_config_key_value(name, value)


def cluster_value(name: str, seconds: float) -> str | None:
    """Returns the value that the first worker told; None if it did not within so many seconds.

    Private: ``context().get_config_key_value``. Collectives, which are public, cannot be used
    while a step may run. Without it the data of workers goes unchecked. Another ``OpError`` than
    the one of a time that is over says that the first worker is gone.
    """
    try:
        return str(_eager_context().get_config_key_value(name, max(1, int(1000 * seconds))))
    except tf.errors.DeadlineExceededError:
        return None


def abort_collectives(message: str) -> None:
    """Ends waiting and future collectives with an ``UnavailableError``.

    Private: ``context().abort_collective_ops``; nothing public ends a collective that waits for
    another worker. Without it the process ends instead of raising an error.
    """
    with suppress(tf.errors.OpError):  # They may have ended before.
        _eager_context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def expand_slurm(hosts: str, tasks_per_node: str) -> tuple[list[str], list[int]]:
    """Expands Slurm's short forms ``n[1-3],m`` and ``2(x3),1``; raises ``ValueError`` for others.

    Private: the module of ``SlurmClusterResolver``, which sorts hosts as text and asks for GPUs.
    Without it Slurm's jobs need ``tmg.workers.Cluster``.
    """
    slurm: Any = importlib.import_module(
        "tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver"
    )
    return slurm.expand_hostlist(hosts), slurm.expand_tasks_per_node(tasks_per_node)


def _eager_context() -> Any:
    context: Any = importlib.import_module("tensorflow.python.eager.context")
    return context.context()
