"""What to run on: plan it, say why, and create the strategy.

A missing device, a dead TPU address and a missing worker are found here, in seconds, before
TensorFlow is asked: it would wait for them, for ever or for an hour.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.clusters.failures import watch
from tfmultigpu.clusters.sources import Cluster, cluster_from_environment, preflight, why_no_cluster
from tfmultigpu.devices.configure import list_devices, list_logical_devices, logical_to_physical
from tfmultigpu.errors import (
    ClusterError,
    DeviceSettingsError,
    StrategyFallbackWarning,
    StrategyUnavailableError,
)
from tfmultigpu.strategies.communication import (
    built_with_nccl,
    explaining_tf_config,
    measured_strategy,
    mirrored_strategy,
)
from tfmultigpu.strategies.plan import MachineInfo, StrategyPlan, added_by, choose
from tfmultigpu.strategies.registry import living
from tfmultigpu.strategies.stop_signals import keeping_handler
from tfmultigpu.strategies.tpu import Tpu, connect_tpu, find_tpu

__all__ = ["StrategyPlan", "create_strategy", "devices_started", "plan_strategy"]

_log = logging.getLogger("tfmultigpu")

# What TensorFlow itself can have only once in a process.
_ring_over: tuple[str, ...] | None = None
_ring: tf.distribute.Strategy | None = None
_joined: str | None = None
# All are there when TensorFlow starts them, so this is long.
_JOIN_SECONDS = 60.0


def plan_strategy(
    prefer: str = "auto",
    devices: int | str | Sequence[str] | None = None,
    communication: str = "auto",
    *,
    cluster: Cluster | None = None,
) -> StrategyPlan:
    """Say what `create_strategy` would create with the same arguments, and why.

    Starts no device and changes nothing. A TPU address in the environment is dialled once.

    Args:
        prefer: `"auto"`, or `"tpu"`, `"multi_worker"`, `"mirrored"`, `"one_device"`.
        devices: see `create_strategy`.
        communication: see `create_strategy`.
        cluster: see `create_strategy`.

    Returns:
        The plan; `str` of it is for a person.

    Raises:
        ClusterError: the description of the cluster is wrong.
        DeviceNotFoundError: a device is asked for that does not exist.
        DeviceSettingsError: TensorFlow cannot start the devices with the settings made before.
        StrategyUnavailableError: the arguments contradict each other.
        ValueError: an argument is none of the choices.

    Example:
        >>> plan_strategy(prefer="one_device").num_replicas
        1
    """
    return choose(_look_around(prefer, devices, cluster), prefer, devices, communication)


def create_strategy(
    prefer: str = "auto",
    devices: int | str | Sequence[str] | None = None,
    communication: str = "auto",
    fallback: bool = True,
    startup_timeout: float = 60.0,
    *,
    cluster: Cluster | None = None,
) -> tf.distribute.Strategy:
    """Create the strategy for the devices that are here.

    In order: a TPU that answers; the workers of `TF_CONFIG` or `srun`; all GPUs, mirrored; one GPU;
    the CPU. `prefer` starts further down. Several logical CPUs are used only when asked for.

    Args:
        prefer: `"auto"`, or `"tpu"`, `"multi_worker"`, `"mirrored"`, `"one_device"`.
        devices: names, such as `["GPU:0", "GPU:1"]`, or how many, of the GPUs if there are any
            and of the logical CPUs otherwise; `None` for all. With `prefer="tpu"` its address.
        communication: how replicas add gradients: `"auto"`, `"nccl"`, `"ring"`,
            `"hierarchical_copy"`, `"one_device"` (added on one device, then copied), or
            `"measured"`: the fastest of those, timed by `measure_communication` once for these
            devices. Another run may then choose otherwise, and differ in the last bits.
        fallback: what was asked for and this machine cannot do: `True` warns with the reason and
            takes the next in order, `False` raises. A missing device, a wrong cluster and a
            missing worker always raise: other devices than those named, or one worker training
            alone, would be a silently different run.
        startup_timeout: seconds to wait for the other workers.
        cluster: the workers, and which of them this is, in place of what the environment says.

    Returns:
        A `tf.distribute` strategy. Several may be created in one process, except over several
        workers; asked for again, a ring is the strategy it was before.

    Raises:
        ClusterError: the description of the cluster is wrong, a worker is missing, disagrees or
            cannot start, or this process has joined a cluster before.
        DeviceNotFoundError: a device is asked for that does not exist.
        StrategyUnavailableError: the arguments contradict each other, or ask for what cannot be
            had, with `fallback=False`.
        ValueError: an argument is none of the choices.

    Example:
        >>> strategy = create_strategy(prefer="one_device")
        >>> strategy.num_replicas_in_sync
        1
    """
    if isinstance(startup_timeout, bool) or not startup_timeout > 0:
        raise ValueError(
            "startup_timeout is how many seconds to wait for the other workers, above 0. "
            f"Received: startup_timeout={startup_timeout!r}"
        )
    facts = _look_around(prefer, devices, cluster)
    plan = choose(facts, prefer, devices, communication)
    _accept(plan, fallback)
    if plan.kind == "tpu":
        try:
            strategy = connect_tpu(str(facts.tpu.address))
        except (ValueError, RuntimeError, tf.errors.OpError) as error:
            facts = dataclasses.replace(facts, tpu=_dead(facts.tpu, error))
            plan = choose(facts, prefer, devices, communication)
            _accept(plan, fallback)
        else:
            _log.info("%s", plan)
            return living.note(strategy)
    if plan.kind == "multi_worker" and _joined is not None:
        raise ClusterError(
            f"This process has joined a cluster already, as {_joined}. TensorFlow can do that once "
            "in a process; a second time it hangs or mixes up the shapes. Keep the first strategy "
            "and use it again."
        )
    _say(plan, facts, devices)
    if plan.kind == "multi_worker" and facts.cluster is not None:
        return living.note(_join(plan, facts.cluster, startup_timeout))
    contradiction = _contradicting_settings()
    if contradiction is not None:
        raise DeviceSettingsError(f"{contradiction}.")
    if plan.kind == "mirrored":
        return living.note(_mirror(plan, facts))
    with explaining_tf_config():
        return tf.distribute.OneDeviceStrategy(f"/device:{plan.devices[0]}")


def _look_around(
    prefer: str, devices: int | str | Sequence[str] | None, cluster: Cluster | None
) -> MachineInfo:
    if cluster is not None and not isinstance(cluster, Cluster):
        raise ClusterError(
            "cluster must be a tmg.clusters.Cluster(workers=[...], index=...). Received: "
            f"cluster={cluster!r}"
        )
    wants_tpu = prefer == "tpu" or (prefer == "auto" and devices is None)
    if cluster is None and prefer in ("auto", "tpu", "multi_worker"):
        cluster = cluster_from_environment()
    names = list_logical_devices("TPU")
    tpu = Tpu(None, "", "it was not asked for")
    if wants_tpu:
        address = _tpu_address(devices) if prefer == "tpu" else None
        tpu = find_tpu(os.environ, address=address, local=len(names))
    return MachineInfo(
        devices=logical_to_physical(),
        tpu=tpu,
        cluster=cluster,
        no_cluster=why_no_cluster(),
        nccl=built_with_nccl(),
        no_gpu=_why_no_gpu(),
        ring_over=_ring_over,
        environment=frozenset(os.environ),
    )


def _tpu_address(devices: int | str | Sequence[str] | None) -> str | None:
    names = (devices,) if isinstance(devices, str) else devices
    if names is None:
        return None
    if isinstance(names, int) or len(names) != 1 or not names[0].startswith(("grpc://", "local")):
        raise ValueError(
            "With prefer='tpu', devices is the address of the TPU, 'grpc://host:port' or 'local', "
            f"or is left out: a TPU is used whole. Received: devices={devices!r}"
        )
    return names[0]


def _dead(tpu: Tpu, error: Exception) -> Tpu:
    """A TPU that answered and could not be started; an error where there is no way back."""
    missing = f"{tpu.source}={tpu.address!r} answers, but TensorFlow finds no TPU there: {error}"
    if tpu.address == "local":
        return Tpu(tpu.address, tpu.source, missing)
    raise StrategyUnavailableError(
        f"{missing} This process is connected to that machine now, and its operations would run "
        f"there, so it does not fall back. Correct {tpu.source}, or unset it, and start again."
    ) from error


def _why_no_gpu() -> str:
    """Why, in case there is none; names the likeliest first."""
    test: Any = tf.test
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if list_devices("GPU"):
        return "all GPUs are hidden from TensorFlow (restrict_devices, set_visible_devices)"
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides them"
    if not test.is_built_with_gpu_support():
        return "this TensorFlow is built without GPU support"
    return "TensorFlow finds none"


def _accept(plan: StrategyPlan, fallback: bool) -> None:
    if not plan.unmet:
        return
    what = "; ".join(plan.unmet)
    how = added_by(plan.communication)
    taken = f"{plan.kind} on {', '.join(plan.devices)}, gradients added by {how}"
    if not fallback:
        raise StrategyUnavailableError(
            f"Asked for, and not to be had here: {what}. Change that argument, or allow "
            f"fallback=True to run on {taken}."
        )
    warnings.warn(
        f"Asked for, and not to be had here: {what}. Running on {taken} instead. To get an error "
        "here, pass fallback=False.",
        StrategyFallbackWarning,
        stacklevel=3,
    )


def _say(plan: StrategyPlan, facts: MachineInfo, devices: int | str | Sequence[str] | None) -> None:
    if facts.tpu.address is not None and facts.tpu.missing is not None:
        _log.warning("No TPU: %s", facts.tpu.missing)
    if devices is None and not facts.of_kind("GPU"):
        _log.warning(
            "No GPU: %s. Training runs on %s. If there should be a GPU, see that nvidia-smi lists "
            "it, and install its libraries: pip install 'tensorflow[and-cuda]'.",
            facts.no_gpu,
            ", ".join(plan.devices),
        )
    _log.info("%s", plan)


def _mirror(plan: StrategyPlan, facts: MachineInfo) -> tf.distribute.Strategy:
    global _ring, _ring_over
    if plan.communication == "measured":
        return measured_strategy(plan.devices, facts)
    if plan.communication != "ring":
        return mirrored_strategy(plan.devices, plan.communication)
    # A second ring, over the same devices too, takes the numbers of the first one's collectives:
    # as soon as their shapes differ, TensorFlow aborts both.
    if _ring is None or _ring_over != plan.devices:
        _ring, _ring_over = mirrored_strategy(plan.devices, "ring"), plan.devices
    return _ring


def _join(plan: StrategyPlan, cluster: Cluster, timeout: float) -> tf.distribute.Strategy:
    global _joined
    problem = _contradicting_settings()
    if devices_started():
        problem = (
            "TensorFlow had started its devices before create_strategy, and cannot join a cluster "
            "after that. The first tensor, variable, dataset, Keras object or strategy starts "
            "them. Move create_strategy up, directly after the imports"
        )
    kind = plan.devices[0].split(":")[0]
    link = preflight(
        cluster,
        devices=f"{len(plan.devices)} {kind}",
        communication=plan.communication,
        timeout=timeout,
        problem=problem,
    )
    _joined = str(cluster)
    watch(cluster, link)
    distribute: Any = tf.distribute
    job = "chief" if cluster.has_chief and cluster.index == 0 else "worker"
    resolver = distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.jobs),
        task_type=job,
        task_id=cluster.jobs[job].index(str(cluster.address)),
        num_accelerators={"GPU": len(plan.devices)} if kind == "GPU" else {},
        rpc_layer="grpc",
    )
    options = distribute.experimental.CommunicationOptions(
        implementation=distribute.experimental.CommunicationImplementation[
            plan.communication.upper()
        ]
    )
    try:
        with keeping_handler(signal.SIGTERM), _not_for_ever(max(timeout, _JOIN_SECONDS)):
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
def _not_for_ever(seconds: float) -> Iterator[None]:
    """End this process if it is still here then.

    For a worker that left after the meeting TensorFlow waits an hour, holding Python's lock: no
    signal is heard and no thread runs. Only this watchdog, which is none of Python's threads, can
    end that; it says where the process was.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def devices_started() -> bool:
    """Returns whether TensorFlow has started its devices; starts none.

    Example:
        >>> import tensorflow as tf
        >>> from tfmultigpu.strategies.factory import devices_started
        >>> _ = tf.zeros([])
        >>> devices_started()
        True
    """
    # TensorFlow has no question for it, but refuses some settings from then on: try one, and put
    # it back.
    threading: Any = tf.config.threading
    if _contradicting_settings() is not None:
        return False  # No device can have started by them.
    before = threading.get_inter_op_parallelism_threads()
    try:
        threading.set_inter_op_parallelism_threads(before + 1)
    except RuntimeError:
        return True
    with contextlib.suppress(RuntimeError):
        threading.set_inter_op_parallelism_threads(before)
    return False


def _contradicting_settings() -> str | None:
    """Why TensorFlow cannot start its devices as they are set; None where it can."""
    threading: Any = tf.config.threading
    try:
        threading.get_inter_op_parallelism_threads()
    except ValueError as error:
        return (
            f"TensorFlow cannot start its devices: {error}. Write tmg.enable_memory_growth(), for "
            "all GPUs, in place of tf.config.experimental.set_memory_growth for one"
        )
    return None
