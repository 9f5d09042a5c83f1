"""Private names of TensorFlow outside of graphs, and of Python."""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import tensorflow as tf

from tfmultigpu.types import Function, Tensor

# Variables: found by the handles in a function, and made of others --------------------------------


def variables_of(concrete: Any) -> list[tuple[Tensor, tf.DType]]:
    """Returns the handle and the dtype of each variable that a concrete function can assign.

    Private: ``_handle_data`` of a resource, which tells the dtype of a variable. ``variables`` of a
    function leaves out those that it only assigns. Without it none is found.
    """
    handles = [tensor for tensor in concrete.captured_inputs if tensor.dtype == tf.resource]
    found = []
    for handle in handles:
        data = getattr(handle, "_handle_data", None)
        with tf.device(handle.device):
            if data and data.is_set and tf.raw_ops.VarIsInitializedOp(resource=handle):
                dtype = tf.as_dtype(data.shape_and_type[0].dtype)
                found.append((handle, dtype))
    return found


def is_variable_handle(handle: Tensor) -> bool:
    """Returns whether a resource is a variable, not a table, a queue or an iterator.

    Private: ``_handle_data`` of a resource, as above. Without it every resource would be a
    variable.
    """
    data = getattr(handle, "_handle_data", None)
    return bool(data and data.is_set) or not hasattr(handle, "_handle_data")


def variable_of_handle(handle: Tensor) -> tf.Variable | None:
    """Returns the variable of a strategy one of whose copies has a handle; None for another tensor.

    Private: ``handle._distributed_container``. A function captures the handles of the copies on one
    replica, and no public name leads from there to the other copies. Without it each replica needs
    a trace of its own.
    """
    container: Function = getattr(handle, "_distributed_container", lambda: None)
    variable: tf.Variable | None = container()
    return variable


def variables_summed_when_read() -> Any:
    """Returns the class of variables with a value on each replica, combined when they are read.

    Private: ``tensorflow.python.distribute.values.SyncOnReadVariable``; ``tf.Variable`` makes one
    under a strategy, and no public name is called when it is assigned. Without it each replica adds
    the rows of a small batch, of which all have a copy.
    """
    return pkgutil.resolve_name("tensorflow.python.distribute.values:SyncOnReadVariable")


class ComposedVariable(tf.Variable):
    """A variable made of others, of which Keras and TensorFlow ask what they ask of their own.

    Private: ``_unique_id``, by which Keras finds what an optimizer keeps of a variable;
    ``_distribute_strategy``, by which a strategy knows its variables; and
    ``_export_to_saved_model_graph``, which writes one to a SavedModel. The public class says
    nothing of them. Without them an optimizer has no slots of the variable, the strategy does not
    take it for one of its own, and TensorFlow says in words of its own that it cannot be exported.
    """

    def take_place(
        self,
        identity: str,
        strategy: tf.distribute.Strategy,
        refuse_export: Callable[[], NoReturn],
    ) -> None:
        """Sets the identity, the strategy in whose scope it is, and who raises for a SavedModel."""
        self._unique_id = identity
        self._distribute_strategy = self.distribute_strategy = strategy
        self.refuse_export = refuse_export

    def _export_to_saved_model_graph(self, *_: object, **__: object) -> NoReturn:
        self.refuse_export()


def is_for_checkpoints(attribute: str) -> bool:
    """Returns whether TensorFlow keeps something for checkpoints in attributes of that name.

    Private: the prefix ``_self_`` of attributes that TensorFlow sets in each object which a
    checkpoint may hold; no public name lists them. Without it an optimizer that was restored would
    seem to have other settings, and its steps would be traced once more.
    """
    return attribute.startswith("_self_")


# Strategies: whether there are any, and how they add ----------------------------------------------


def strategies_were_made() -> bool:
    """Returns whether this process has made a strategy other than TensorFlow's default one.

    Private: ``tensorflow.python.distribute.distribute_lib.distribution_strategy_replica_gauge``,
    which the constructor of every strategy sets. Without it True is returned, and a search for
    strategies looks all objects of the process each time.
    """
    from tensorflow.python.distribute import distribute_lib

    gauge: Any = getattr(distribute_lib, "distribution_strategy_replica_gauge", None)
    return gauge is None or gauge.get_cell("num_replicas").value() > 0


def additions_over_workers(
    strategy: tf.distribute.Strategy, groups: Sequence[Sequence[int]], worker: int
) -> list[Function]:
    """Returns functions that add tensors over the workers of a group, one per local device.

    Each takes a list of tensors of one dtype on its device, which are sent as one message, or of
    one ``IndexedSlices``; it returns the sums in a list. All workers must ask for the same groups
    and call the functions alike, in the same order.

    Private: ``strategy.extended._cross_device_ops``, its ``_launchers``, which add over all
    replicas, and their ``_collective_keys``, ``_group_key`` and ``_group_size``. Their copies keep
    the options, the order on a device, and keys that are new in each call. The public
    ``strategy.reduce`` adds over all workers on the CPUs alone, and
    ``tf.raw_ops.CollectiveReduceV2`` needs keys that the strategy does not use. Without them no
    step is traced whose replicas are on several workers.

    Args:
        strategy: The strategy.
        groups: The numbers of the workers of each group, at most one of which has this worker.
        worker: The number of this worker.
    """
    devices = strategy.extended.worker_devices
    extended: Any = strategy.extended
    found: list[Function] = []
    for device, one in zip(devices, extended._cross_device_ops._launchers, strict=True):
        for group in groups:
            # Keys are numbered as they are asked for, so all workers ask for all groups.
            key = one._collective_keys.get_group_key([device, f"workers {group}"])
            if worker in group:
                launcher = copy.copy(one)
                launcher._group_key, launcher._group_size = key, len(group)
                found.append(functools.partial(_add_by, launcher))
    return found


def _add_by(launcher: Any, tensors: Sequence[Any]) -> list[Any]:
    if isinstance(tensors[0], tf.IndexedSlices):
        return [launcher.all_reduce_indexed_slices(tensors[0])]
    return list(launcher.batch_all_reduce([tensors]))


def numbers_collectives(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a strategy adds by collectives, which TensorFlow numbers at each call.

    Private: ``strategy.extended._cross_device_ops``. No public name tells how a strategy adds, and
    one that TensorFlow made adds otherwise than the strategies of ``create_strategy``. Without it
    all strategies of several replicas are taken for such, whose steps wait for each other.
    """
    distribute: Any = tf.distribute
    others = (
        distribute.NcclAllReduce,
        distribute.HierarchicalCopyAllReduce,
        distribute.ReductionToOneDevice,
    )
    ways = getattr(strategy.extended, "_cross_device_ops", None)
    return strategy.num_replicas_in_sync > 1 and not isinstance(ways, others)


# Workers of a cluster: how they meet, tell each other values, and end -----------------------------


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


# Threads ------------------------------------------------------------------------------------------


def frames_of_threads() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread, by the identity of the thread.

    Private: ``sys._current_frames``, which Python documents. ``faulthandler``, which is public,
    writes a text without names of threads and without the lines of code. Without it a watch could
    not say what a thread waits for.
    """
    return sys._current_frames()
