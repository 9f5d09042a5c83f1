"""Planning and creating the strategy: what is missing is reported in seconds, not waited for."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import brief
from tfmultigpu.clusters import Cluster, Scheduler
from tfmultigpu.devices.configure import devices_started
from tfmultigpu.devices.discovery import logical_to_physical, why_no_more_gpus
from tfmultigpu.errors import ClusterError, StrategyFallbackWarning, StrategyUnavailableError
from tfmultigpu.strategies.marked_runs import keep_offsets_of_runs
from tfmultigpu.strategies.plan import MachineInfo, StrategyPlan, choose
from tfmultigpu.strategies.process_state import process_state
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
    cluster: Cluster | None = None,
) -> StrategyPlan:
    """Returns what ``create_strategy`` would create with the same arguments, and why.

    Starts no device and changes nothing. Print the plan to read it.

    Args:
        prefer: As for ``create_strategy``, like all other arguments.
        devices: Names of devices, or a count.
        communication: How replicas add gradients.
        cluster: A ``tmg.workers.Cluster``; None to read the environment.

    Returns:
        The plan. Requests that this machine cannot meet are in ``plan.unmet``.

    Raises:
        ClusterError: The description of the cluster is wrong.
        DeviceNotFoundError: A device does not exist.
        StrategyUnavailableError: The arguments contradict each other.
        ValueError: An argument is not one of the choices.

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
    cluster: Cluster | None = None,
) -> Strategy:
    """Creates the strategy for the devices of this machine.

    The order is: a TPU that answers; the workers of a cluster that the environment describes; all
    GPUs, mirrored; one GPU; the CPU. ``prefer`` starts at a later place. Several logical CPUs are
    used only on request.

    Args:
        prefer: ``"auto"``, or ``"tpu"``, ``"multi_worker"``, ``"mirrored"``, ``"one_device"``.
        devices: Names, such as ``["GPU:0", "GPU:1"]``, or a count: of the GPUs if there are any,
            of the logical CPUs otherwise. None for all.
        communication: How replicas add gradients: ``"auto"``, ``"nccl"``, ``"hierarchical_copy"``,
            ``"one_device"`` (added on one device, then copied), or between workers ``"ring"``.
        fallback: Whether to take the next in order, with a warning, if this machine cannot do what
            was requested. A missing device or worker and a wrong cluster are always errors.
        startup_timeout: Seconds to wait for the other workers.
        cluster: A ``tmg.workers.Cluster``; None to read the environment.

    Returns:
        A ``tf.distribute`` strategy. A process may create several, except over several workers.

    Raises:
        ClusterError: The description of the cluster is wrong; or a worker is missing, disagrees,
            cannot start, or has joined before.
        DeviceNotFoundError: A device does not exist.
        StrategyUnavailableError: The arguments contradict each other, or the request is not
            available and ``fallback`` is False.
        ValueError: An argument is not one of the choices.

    Example:
        >>> strategy = create_strategy(prefer="one_device")
        >>> strategy.num_replicas_in_sync
        1
    """
    if isinstance(startup_timeout, bool) or not startup_timeout > 0:
        raise ValueError(
            "startup_timeout must be a number of seconds above 0, to wait for the other workers. "
            f"Received: startup_timeout={brief(startup_timeout)}."
        )
    if "TFMULTIGPU_WATCH" in os.environ:
        from tfmultigpu.addons.watching.watches import watch_as_the_launcher_asks

        watch_as_the_launcher_asks()
    facts = _look_around(prefer, devices, cluster)
    plan = choose(facts, prefer, devices, communication)
    _accept(plan, fallback)
    if facts.tpu.address is not None and facts.tpu.missing is not None:
        _log.warning("No TPU: %s", facts.tpu.missing)
    counted = devices is None or isinstance(devices, Real)
    if counted and plan.kind != "tpu" and not facts.of_kind("GPU"):
        where = ", ".join(plan.devices)
        if plan.kind == "multi_worker":
            where += f" of {facts.cluster}, {plan.num_replicas} replicas in all"
        if process_state.note_without_gpu():
            _log.info("Training runs on %s, without a GPU: %s", where, facts.no_more_gpus)
    _log.info("%s", plan)
    names = [f"/device:{name}" for name in plan.devices]
    strategy: Strategy
    if plan.kind == "tpu":
        strategy = connect_tpu(facts.tpu)
    elif plan.kind == "multi_worker":
        strategy = _join(facts.cluster, plan, startup_timeout)
    elif plan.kind == "mirrored":
        strategy = _distribute.MirroredStrategy(names, _ADDITIONS[plan.communication]())
    else:
        strategy = _distribute.OneDeviceStrategy(names[0])
    keep_offsets_of_runs(strategy)
    return strategy


def known_schedulers() -> tuple[Scheduler, ...]:
    """Returns what may describe a cluster to this process."""
    from tfmultigpu.addons.workers.sources import SCHEDULERS

    return SCHEDULERS


def _look_around(
    prefer: str, devices: int | str | Sequence[str] | None, cluster: Cluster | None
) -> MachineInfo:
    # The add-on is asked for by whoever may train on several workers.
    from tfmultigpu.addons.workers.sources import cluster_from_environment, why_no_cluster

    if cluster is None and prefer in ("auto", "tpu", "multi_worker"):
        cluster = cluster_from_environment()
    names = logical_to_physical()
    tpu = NO_TPU
    if prefer in ("auto", "tpu") and devices is None:
        tpu = find_tpu(os.environ, local=any(name.startswith("TPU:") for name in names))
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
            what, "", f"Change that argument, or pass fallback=True to run {taken}."
        )
    warnings.warn(
        f"{what} Running {taken} instead. Pass fallback=False to get an error.",
        StrategyFallbackWarning,
        stacklevel=3,
    )


def _join(cluster: Cluster | None, plan: StrategyPlan, timeout: float) -> Strategy:
    from tfmultigpu.addons.workers.joining import join

    assert cluster is not None, "the plan has found one"
    if process_state.cluster is not None:
        raise ClusterError(
            f"This process has joined a cluster already, as {process_state.cluster}, and "
            "TensorFlow would hang if it joined again.",
            "",
            "Use the first strategy again.",
        )
    problem = None
    if devices_started():
        problem = ClusterError(
            "TensorFlow had started its devices before create_strategy, with the first tensor, "
            "dataset, Keras object or strategy, and cannot join a cluster after that.",
            "",
            "Move create_strategy up, directly after the imports.",
        )
    strategy: Strategy = join(cluster, plan.devices, plan.communication, timeout, problem)
    return strategy
