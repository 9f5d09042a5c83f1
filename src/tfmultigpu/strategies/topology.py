"""Questions of the layers above to a strategy: its devices, its replicas, its description."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfmultigpu.devices.discovery import list_devices, logical_to_physical
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.types import KerasModel, KerasVariable, Shard


@dataclass(frozen=True)
class Kind:
    """Describes what a class of strategies can do.

    Attributes:
        mirrors: Whether it keeps a copy of each variable on each of its devices here.
        shares_copies: Whether replicas would all update one copy, which is refused.
        may_trace_once: Whether one trace may be called for each replica of this process.
        sends_lists: Whether its collectives send lists of rows.
        counts_draws: Whether a generator of its devices can start to count further on.
    """

    mirrors: bool = False
    shares_copies: bool = False
    may_trace_once: bool = False
    sends_lists: bool = True
    counts_draws: bool = True


_distribute: Any = tf.distribute
_CENTRAL = Kind(shares_copies=True)
# A class that is none of these, such as OneDeviceStrategy, is of the plain kind.
_KINDS: dict[type, Kind] = {
    _distribute.MirroredStrategy: Kind(mirrors=True, may_trace_once=True),
    _distribute.MultiWorkerMirroredStrategy: Kind(mirrors=True),
    _distribute.TPUStrategy: Kind(sends_lists=False, counts_draws=False),
    _distribute.experimental.CentralStorageStrategy: _CENTRAL,
    _distribute.experimental.ParameterServerStrategy: _CENTRAL,
    _distribute.ParameterServerStrategy: _CENTRAL,
}


def kind_of(strategy: object) -> Kind:
    """Returns what a strategy can do by its class; nothing else asks for its class."""
    for known, kind in _KINDS.items():
        if isinstance(strategy, known):
            return kind
    return Kind()


def is_default(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this is TensorFlow's default strategy, of one device."""
    return not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy()


def is_mirrored(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a strategy keeps a copy of each variable on each of several local devices."""
    return kind_of(strategy).mirrors and len(strategy.extended.worker_devices) > 1


def is_sharded(variable: KerasVariable) -> bool:
    """Returns whether a variable has one copy, on one of several devices of its strategy."""
    value = tf_variable(variable)
    strategy: Any = getattr(value, "distribute_strategy", None)
    return is_mirrored(strategy) and len(strategy.experimental_local_results(value)) == 1


def is_on_read(variable: KerasVariable) -> bool:
    """Returns whether a variable, of Keras or TensorFlow, is added up when it is read."""
    when = variable.synchronization
    return bool(getattr(when, "name", when).lower() == "on_read")


def devices_of(model: KerasModel) -> tuple[str, ...]:
    """Returns the devices of the weights of a model on one replica, in the order of its layers."""
    names = dict.fromkeys(parse_device_name(v.value.device) for v in getattr(model, "weights", ()))
    return tuple(names)


def owner_of(variable: KerasVariable, devices: Sequence[str]) -> int:
    """Returns the number, among some devices, of the one that a sharded variable lives on."""
    names = list(map(parse_device_name, devices))
    return names.index(parse_device_name(tf_variable(variable).device))


def tf_variable(variable: KerasVariable) -> KerasVariable:
    """Returns the ``tf.Variable`` of a Keras variable, or the ``tf.Variable`` that is given."""
    value = getattr(variable, "value", variable)
    if callable(value):
        return variable
    return value


def describe(strategy: tf.distribute.Strategy) -> str:
    """Returns the kind and the size of a strategy, for an error."""
    if is_default(strategy):
        return "TensorFlow's default strategy of one device, taken if none is given"
    return f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replica(s)"


def is_one_process(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all replicas are in this process; asked at each step."""
    replicas = strategy.num_replicas_in_sync
    # The default strategy, of one replica, does not say where it runs.
    return bool(replicas == 1 or len(strategy.extended.worker_devices) >= replicas)


def local_replicas(strategy: tf.distribute.Strategy) -> tuple[int, ...]:
    """Returns the numbers, among all replicas, of those whose parts this process needs."""
    resolver = strategy.cluster_resolver
    if is_one_process(strategy) or resolver is None:
        return tuple(range(strategy.num_replicas_in_sync))
    count = len(strategy.extended.worker_devices)
    chiefs = len(resolver.cluster_spec().as_dict().get("chief", ()))
    worker = resolver.task_id
    if resolver.task_type == "worker":
        worker += chiefs  # The chief comes first.
    return tuple(range(worker * count, (worker + 1) * count))


def strategy_of(model: KerasModel) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope a model was created; the default one where in none."""
    for variable in getattr(model, "variables", ()):
        strategy = getattr(getattr(variable, "value", variable), "distribute_strategy", None)
        if strategy is not None:
            return strategy
    # A model without variables so far was at least made somewhere.
    return getattr(model, "distribute_strategy", None) or tf.distribute.get_strategy()


def per_replica(strategy: tf.distribute.Strategy, values: list[Shard]) -> Shard:
    """Returns one value per local replica as what ``strategy.run`` hands to each its own of."""
    if strategy.num_replicas_in_sync == 1:
        return values[0]
    turn = iter(values)
    return strategy.experimental_distribute_values_from_function(lambda _: next(turn))


def kernels_of(strategy: tf.distribute.Strategy) -> str:
    """Returns what decides the last bits of kernels: the models of GPUs, or the threads of a CPU.

    TensorFlow cuts a convolution into as many parts as it has threads, and adds them.
    """
    physical = logical_to_physical()
    used = {physical.get(name, name) for name in strategy_devices(strategy)}
    models = {each.description for each in list_devices("GPU") if each.name in used}
    if models:
        return ", ".join(sorted(models))
    threads: int = tf.config.threading.get_intra_op_parallelism_threads()
    asked = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    if not threads and asked.isdecimal():
        threads = int(asked)
    return f"CPU with {threads or len(os.sched_getaffinity(0))} threads"


def strategy_devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the devices of a strategy in this process; none for TensorFlow's default strategy."""
    try:
        names: Any = strategy.extended.worker_devices
    except RuntimeError:
        return ()  # The default strategy has none of its own, and says so.
    return tuple(map(parse_device_name, names))
