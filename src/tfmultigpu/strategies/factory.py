"""Planning and creating the strategy.

A missing device, a dead TPU address and a missing worker are found here within seconds. TensorFlow
would wait for them for an hour or for ever.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.devices.configure import devices_started
from tfmultigpu.devices.discovery import logical_to_physical
from tfmultigpu.devices.missing_gpus import why_no_more_gpus
from tfmultigpu.errors import (
    ClusterError,
    StrategyFallbackWarning,
    StrategyUnavailableError,
    TfMultiGpuError,
)
from tfmultigpu.strategies.plan import MachineInfo, StrategyPlan, choose
from tfmultigpu.strategies.process_state import ClusterDescription, process_state
from tfmultigpu.strategies.tensorflow_log import leave_out_progress
from tfmultigpu.strategies.tpu import NO_TPU, connect_tpu, find_tpu
from tfmultigpu.types import Communication, Prefer, Strategy

_log = logging.getLogger("tfmultigpu")
_distribute: Any = tf.distribute
_ADDITIONS = {
    "nccl": _distribute.NcclAllReduce,
    "hierarchical_copy": _distribute.HierarchicalCopyAllReduce,
    "one_device": _distribute.ReductionToOneDevice,
}


def plan_strategy(
    prefer: Prefer = "auto",
    devices: int | str | Sequence[str] | None = None,
    communication: Communication = "auto",
    *,
    cluster: ClusterDescription | None = None,
) -> StrategyPlan:
    """Returns what ``create_strategy`` would create with the same arguments, and why.

    Starts no device and changes nothing. Calls a TPU address in the environment once. Print the
    plan to read it.

    Example:
        >>> plan_strategy(prefer="one_device").num_replicas
        1
    """
    return choose(_look_around(prefer, devices, cluster), prefer, devices, communication)


def create_strategy(
    prefer: Prefer = "auto",
    devices: int | str | Sequence[str] | None = None,
    communication: Communication = "auto",
    fallback: bool = True,
    startup_timeout: float = 60.0,
    *,
    cluster: ClusterDescription | None = None,
) -> Strategy:
    """Creates the strategy for the devices of this machine.

    The order is: a TPU that answers; the workers of a cluster that the environment describes; all
    GPUs, mirrored; one GPU; the CPU. ``prefer`` starts further down. Several logical CPUs are used
    only on request. Joining a cluster takes the timer of ``faulthandler.dump_traceback_later``; set
    your own afterwards.

    Args:
        prefer: ``"auto"``, or ``"tpu"``, ``"multi_worker"``, ``"mirrored"``, ``"one_device"``.
        devices: Names, such as ``["GPU:0", "GPU:1"]``, or a count: of the GPUs if there are any,
            of the logical CPUs otherwise. None for all. With ``prefer="tpu"`` its address.
        communication: How replicas add gradients: ``"auto"``, ``"nccl"``, ``"hierarchical_copy"``,
            ``"one_device"`` (added on one device, then copied), or between workers ``"ring"``.
        fallback: Whether to take the next in order, with a warning that says why, if this machine
            cannot do what was requested; else that is an error. A missing device, a wrong cluster
            and a missing worker always are.
        startup_timeout: Seconds to wait for the other workers.
        cluster: The workers, and which of them this is; None to read the environment.

    Returns:
        A ``tf.distribute`` strategy. A process may create several, except over several workers.

    Raises:
        ClusterError: The description of the cluster is wrong, a worker is missing, disagrees or
            cannot start, or this process has joined a cluster before.
        DeviceNotFoundError: A device does not exist.
        StrategyUnavailableError: The arguments contradict each other, or the request is not
            available and ``fallback`` is False.
        TfMultiGpuError: TensorFlow cannot start the devices with the settings made before.
        ValueError: An argument is not one of the choices.

    Example:
        >>> strategy = create_strategy(prefer="one_device")
        >>> strategy.num_replicas_in_sync
        1
    """
    if isinstance(startup_timeout, bool) or not startup_timeout > 0:
        raise ValueError(
            "startup_timeout must be a number of seconds above 0, to wait for the other workers. "
            f"Received: startup_timeout={startup_timeout!r}."
        )
    if not isinstance(fallback, bool):
        raise TypeError(f"fallback must be True or False. Received: fallback={fallback!r}.")
    leave_out_progress()
    facts = _look_around(prefer, devices, cluster)
    plan = choose(facts, prefer, devices, communication)
    _accept(plan, fallback)
    strategy = None
    if plan.kind == "tpu":
        strategy, missing = connect_tpu(facts.tpu)
        if missing is not None:
            facts = dataclasses.replace(facts, tpu=missing)
            plan = choose(facts, prefer, devices, communication)
            _accept(plan, fallback)
    if facts.tpu.address is not None and facts.tpu.missing is not None:
        _log.warning("No TPU: %s", facts.tpu.missing)
    if plan.more_gpus and not plan.unmet and not facts.of_kind("GPU"):
        _log.warning("No GPU. Training runs on %s. %s", ", ".join(plan.devices), plan.more_gpus)
    _log.info("%s", plan)
    if plan.kind == "multi_worker":
        strategy = _join(plan, startup_timeout)
    noted: Strategy = process_state.note(strategy or _on_this_machine(plan))
    return noted


def _look_around(
    prefer: str, devices: int | str | Sequence[str] | None, cluster: ClusterDescription | None
) -> MachineInfo:
    # The add-on is asked for by whoever may train on several workers.
    from tfmultigpu.addons.workers.cluster import Cluster
    from tfmultigpu.addons.workers.sources import cluster_from_environment, why_no_cluster

    if cluster is not None and not isinstance(cluster, Cluster):
        raise ClusterError(
            "cluster must be a tmg.workers.Cluster(workers=[...], index=...). Received: "
            f"cluster={cluster!r}."
        )
    if cluster is None and prefer in ("auto", "tpu", "multi_worker"):
        cluster = cluster_from_environment()
    names = logical_to_physical()
    tpu = NO_TPU
    if prefer == "tpu" or (prefer == "auto" and devices is None):
        local = any(name.startswith("TPU:") for name in names)
        tpu = find_tpu(os.environ, devices if prefer == "tpu" else None, local=local)
    test: Any = tf.test
    nccl = bool(test.is_built_with_gpu_support()) and os.name == "posix"
    return MachineInfo(names, tpu, cluster, why_no_cluster(), nccl, why_no_more_gpus())


def _accept(plan: StrategyPlan, fallback: bool) -> None:
    """Warns of what the plan cannot meet, or raises."""
    if not plan.unmet:
        return
    what = f"Requested but unavailable on this machine: {'; '.join(plan.unmet)}."
    taken = f"{plan.kind} on {', '.join(plan.devices)}, gradients added by {plan.communication}"
    if not fallback:
        raise StrategyUnavailableError(
            f"{what} Change that argument, or pass fallback=True to run {taken}. {plan.more_gpus}"
        )
    warnings.warn(
        f"{what} Running {taken} instead. Pass fallback=False to get an error. {plan.more_gpus}",
        StrategyFallbackWarning,
        stacklevel=3,
    )


def _on_this_machine(plan: StrategyPlan) -> Strategy:
    problem = _contradicting_settings()
    if problem is not None:
        raise TfMultiGpuError(f"{problem}.")
    names = [f"/device:{name}" for name in plan.devices]
    strategy: Strategy
    try:
        if plan.kind == "one_device":
            strategy = _distribute.OneDeviceStrategy(names[0])
        else:
            strategy = _distribute.MirroredStrategy(names, _ADDITIONS[plan.communication]())
    except json.JSONDecodeError as error:
        raise ClusterError(
            "TF_CONFIG is not JSON, and TensorFlow reads it for local strategies too. Received: "
            f"TF_CONFIG={os.environ.get('TF_CONFIG')!r}, {error}. Unset it: "
            'os.environ.pop("TF_CONFIG").'
        ) from error
    return strategy


def _join(plan: StrategyPlan, timeout: float) -> Strategy:
    from tfmultigpu.addons.workers.joining import join

    if process_state.cluster is not None:
        raise ClusterError(
            f"This process has joined a cluster already, as {process_state.cluster}. TensorFlow "
            "can do that once in a process; a second time it hangs or mixes up the shapes. Keep "
            "the first strategy and use it again."
        )
    problem = _contradicting_settings()
    if problem is None and devices_started():
        problem = (
            "TensorFlow had started its devices before create_strategy, and cannot join a cluster "
            "after that. The first tensor, variable, dataset, Keras object or strategy starts "
            "them. Move create_strategy up, directly after the imports"
        )
    cluster: Any = plan.cluster
    strategy: Strategy = join(cluster, plan.devices, plan.communication, timeout, problem)
    return strategy


def _contradicting_settings() -> str | None:
    """Returns why TensorFlow cannot start its devices as they are set; None if it can."""
    threading: Any = tf.config.threading
    try:
        threading.get_inter_op_parallelism_threads()
    except ValueError as error:
        return (
            f"TensorFlow cannot start its devices: {error}. Write tmg.enable_memory_growth(), for "
            "all GPUs, in place of tf.config.experimental.set_memory_growth for one"
        )
    return None
