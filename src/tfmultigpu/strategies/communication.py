"""Measurement of the fastest way to add over the devices of this machine.

Each way runs a real all-reduce, and must give the right sum before its time counts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.clusters.process_state import process_state
from tfmultigpu.devices.configure import logical_to_physical
from tfmultigpu.devices.names import listed
from tfmultigpu.errors import ClusterError, StrategyUnavailableError
from tfmultigpu.strategies.plan import MachineInfo, choose, measurable

__all__ = [
    "CommunicationTimes",
    "built_with_nccl",
    "communication_times",
    "explaining_tf_config",
    "measure_communication",
    "measured_strategy",
    "mirrored_strategy",
]

_log = logging.getLogger("tfmultigpu")

_BYTES = 16 * 1024**2
_ROUNDS = 10
# A model has many gradients, and some ways cost something for each of them.
_TENSORS = 16
_FLOAT_BYTES = 4
_LONGEST_REASON = 200
# Within this factor the clock decides by chance, and runs would differ without a reason.
_AS_FAST = 1.05


@dataclass(frozen=True)
class CommunicationTimes:
    """Times of the ways to add over some devices.

    Attributes:
        devices: The devices, one replica on each.
        num_bytes: The bytes that each replica added, in float32.
        seconds: The median time of a call with one all-reduce, for each way that was measured and
            gave the right sum. Empty if there was only one way, and nothing to measure.
        left_out: For each other way, why it was not measured or does not count.
        fastest: The way to take: ``create_strategy(devices=..., communication=times.fastest)``. Of
            those within a twentieth of the least time, the one that ``"auto"`` prefers.
    """

    devices: tuple[str, ...]
    num_bytes: int
    seconds: Mapping[str, float]
    left_out: Mapping[str, str]
    fastest: str

    def __str__(self) -> str:
        """Returns a table, the fastest way first, then the ways that were left out, and why."""
        over = f"over {listed(self.devices)}"
        lines = [f"Nothing to measure {over}: {self.fastest} is the only way."]
        if self.seconds:
            lines = [f"Adding {_size(self.num_bytes)} {over}:"]
        width = max(map(len, [*self.seconds, *self.left_out]), default=0)
        least = min(self.seconds.values(), default=1.0)
        for way, taken in sorted(self.seconds.items(), key=lambda item: item[1]):
            lines.append(f"  {way:{width}}  {1000 * taken:8.3f} ms  {taken / least:5.2f} x")
        lines += [f"  {way:{width}}  not: {why}" for way, why in self.left_out.items()]
        return "\n".join(lines)


def measure_communication(
    devices: int | str | Sequence[str] | None = None,
    num_bytes: int = _BYTES,
    rounds: int = _ROUNDS,
) -> CommunicationTimes:
    """Times each way to add tensors over the devices of this process, one replica on each.

    A way runs only if it can work: NCCL not on CPUs nor on two parts of one GPU, the hierarchical
    copy not over an odd number of devices. A ring is never measured, because TensorFlow can have
    one only once in a process. Each way runs in a replica, inside a ``tf.function``, over 16
    tensors of equal size. The sums of all replicas are compared with the right ones; a way with a
    wrong sum or an error does not count. The ways take turns, after a first turn that does not
    count.

    The times include the cost of a call, the same for all. With one device, or one way, nothing
    runs. Otherwise TensorFlow's devices are started, so a cluster can no longer be joined.

    Args:
        devices: As for ``create_strategy``; None for all GPUs, or all logical CPUs without a GPU.
        num_bytes: The bytes that each replica adds, such as those of a model's gradients; at least
            the 4 of one float32.
        rounds: How often each way is timed.

    Returns:
        The times, why the others were left out, and the fastest way.

    Raises:
        ClusterError: ``TF_CONFIG`` is not JSON; TensorFlow reads it here too.
        DeviceNotFoundError: A device does not exist.
        StrategyUnavailableError: No way gives the right sum, the devices are of several kinds, or
            the call is inside a ``tf.function`` or the scope of a strategy.
        TypeError: ``num_bytes`` or ``rounds`` is not a whole number.
        ValueError: ``num_bytes`` or ``rounds`` is too small.

    Example:
        >>> import tfmultigpu as tmg
        >>> times = tmg.strategies.measure_communication(devices=["CPU:0"])
        >>> print(times.fastest, dict(times.seconds))
        one_device {}
    """
    num_bytes = check_count("num_bytes", num_bytes, _FLOAT_BYTES)
    rounds = check_count("rounds", rounds)
    facts = MachineInfo(logical_to_physical(), nccl=built_with_nccl())
    plan = choose(facts, "mirrored", devices)
    return _measure(plan.devices, facts, num_bytes, rounds)


def communication_times(strategy: tf.distribute.Strategy) -> CommunicationTimes | None:
    """Returns the times by which the communication of a strategy was chosen.

    Args:
        strategy: The result of ``create_strategy(communication="measured")``.

    Returns:
        The times; the strategy adds in their ``fastest`` way. None if nothing was measured for it.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.strategies.communication_times(tmg.create_strategy(devices=["CPU:0"])) is None
        True
    """
    times: CommunicationTimes | None = process_state.description(strategy)
    return times


def measured_strategy(devices: tuple[str, ...], facts: MachineInfo) -> tf.distribute.Strategy:
    """Creates the strategy that adds in the fastest way; measures once for these devices."""
    key = ("communication times", devices)
    known = process_state.keeps(key)
    times = process_state.keep(key, lambda: _measure(devices, facts, _BYTES, _ROUNDS))
    if known:
        _log.info("Gradients are added by %s, the fastest when measured before.", times.fastest)
    else:
        _log.info("Gradients are added by %s, the fastest. %s", times.fastest, times)
    strategy = mirrored_strategy(devices, times.fastest)
    process_state.describe(strategy, times)
    return strategy


def mirrored_strategy(devices: Sequence[str], way: str) -> tf.distribute.Strategy:
    """Creates a mirrored strategy that adds in this way."""
    distribute: Any = tf.distribute
    # TensorFlow's default, collectives, works for one set of devices in a process; only "ring"
    # needs them.
    makers: dict[str, Callable[[], Any]] = {
        "nccl": distribute.NcclAllReduce,
        "hierarchical_copy": distribute.HierarchicalCopyAllReduce,
        "one_device": distribute.ReductionToOneDevice,
        "ring": lambda: None,
    }
    names = [f"/device:{name}" for name in devices]
    with explaining_tf_config():
        strategy: tf.distribute.Strategy = distribute.MirroredStrategy(names, makers[way]())
    return strategy


@contextlib.contextmanager
def explaining_tf_config() -> Iterator[None]:
    """Raises a ClusterError if TensorFlow cannot read TF_CONFIG."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise ClusterError(
            "TF_CONFIG is not JSON, and TensorFlow reads it for local strategies too. Received: "
            f"TF_CONFIG={os.environ.get('TF_CONFIG')!r}, {error}. Unset it: "
            'os.environ.pop("TF_CONFIG").'
        ) from error


def built_with_nccl() -> bool:
    """Returns whether this TensorFlow has NCCL."""
    test: Any = tf.test
    return bool(test.is_built_with_gpu_support()) and os.name == "posix"


def _measure(
    devices: tuple[str, ...], facts: MachineInfo, num_bytes: int, rounds: int
) -> CommunicationTimes:
    ways, why = measurable(devices, facts)
    left_out = dict(why)
    if len(ways) == 1:
        return CommunicationTimes(devices, num_bytes, {}, left_out, ways[0])
    _check_place()
    calls: dict[str, Callable[[], None]] = {}
    for way in ways:
        strategy = mirrored_strategy(devices, way)
        try:
            calls[way] = _all_reduce(strategy, num_bytes)
        except Exception as error:
            left_out[way] = _failed(error)
    times: dict[str, list[float]] = {way: [] for way in calls}
    for turn in range(rounds + 1):
        # The ways take turns, so that a slow moment of the machine slows each of them.
        for way in list(times):
            start = time.perf_counter()
            try:
                calls[way]()
            except Exception as error:
                left_out[way] = _failed(error)
                del times[way]
                continue
            if turn:
                times[way].append(time.perf_counter() - start)
    seconds = {way: statistics.median(taken) for way, taken in times.items()}
    if not seconds:
        raise StrategyUnavailableError(
            f"No way to add over {listed(devices)} gives the right sum, so a model cannot train on "
            f"them together: {'; '.join(f'{way}: {left_out[way]}' for way in ways)}. Name other "
            "devices, or one: tmg.create_strategy(devices=1)."
        )
    # The ways are in the order in which "auto" prefers them.
    least = min(seconds.values())
    fastest = next(way for way in seconds if seconds[way] <= _AS_FAST * least)
    return CommunicationTimes(devices, num_bytes, seconds, left_out, fastest)


def _all_reduce(strategy: tf.distribute.Strategy, num_bytes: int) -> Callable[[], None]:
    """Compiles an all-reduce and checks its sum; returns a function that runs it to its end."""
    replicas = strategy.num_replicas_in_sync
    given = _given(num_bytes, replicas)
    total = [np.sum([one[part] for one in given], axis=0) for part in range(len(given[0]))]
    values = []
    for device, parts in zip(strategy.extended.worker_devices, given, strict=True):
        with tf.device(device):
            values.append([tf.constant(part) for part in parts])

    def add(own: list[tf.Tensor]) -> list[tf.Tensor]:
        context: Any = tf.distribute.get_replica_context()
        # An argument has no device while it is traced, and NCCL asks for one.
        placed = [tf.identity(one) for one in own]
        sums: list[tf.Tensor] = context.all_reduce(tf.distribute.ReduceOp.SUM, placed)
        return sums

    def add_and_wait(own: list[tf.Tensor]) -> tf.Tensor:
        # One number that needs every sum: returning the sums themselves would take longer.
        return tf.add_n([one[0] for one in add(own)])

    whole, timed = (_compiled(strategy, function, values) for function in (add, add_and_wait))
    for result, right in zip(whole(values), total, strict=True):
        for replica, sums in enumerate(strategy.experimental_local_results(result)):
            wrong = np.flatnonzero(sums.numpy() != right)
            if len(wrong):
                raise ArithmeticError(
                    f"wrong sum on replica {replica}: {len(wrong)} of {len(right)} numbers differ, "
                    f"{sums.numpy()[wrong[0]]:g} instead of {right[wrong[0]]:g}"
                )

    def call() -> None:
        for last in strategy.experimental_local_results(timed(values)):
            last.numpy()

    return call


def _compiled(
    strategy: tf.distribute.Strategy, replica: Callable[[Any], Any], values: Any
) -> Callable[[Any], Any]:
    """Compiles ``strategy.run`` for values of all replicas.

    The values are arguments: TensorFlow never frees a graph that a mirrored strategy was run in,
    nor the tensors that it captured.
    """
    distribute: Any = strategy

    def run(of_all: Any) -> Any:
        turn = iter(of_all)
        own = distribute.experimental_distribute_values_from_function(lambda _: next(turn))
        return strategy.run(replica, args=(own,))

    compiled: Callable[[Any], Any] = tf.function(run, autograph=False).get_concrete_function(values)
    return compiled


def _given(num_bytes: int, replicas: int) -> list[list[np.ndarray[Any, Any]]]:
    """Returns the numbers of each replica, small enough that every order gives the same sum.

    Each replica has a power of two: one that is left out or counts twice changes the sum.
    """
    numbers = num_bytes // _FLOAT_BYTES
    parts = [part for part in np.array_split(np.arange(numbers) % 31, _TENSORS) if len(part)]
    return [
        [(2.0 ** (replica % 16) * (1 + part)).astype(np.float32) for part in parts]
        for replica in range(replicas)
    ]


def _failed(error: Exception) -> str:
    said = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    if isinstance(error, ArithmeticError):
        return said
    return f"it fails here with {type(error).__name__}: {said[:_LONGEST_REASON]}"


def _check_place() -> None:
    inside = "a tf.function" if tf.inside_function() else "the scope of a strategy"
    if tf.inside_function() or tf.distribute.has_strategy():
        raise StrategyUnavailableError(
            "Measuring runs each way to add with a new strategy, and TensorFlow cannot do that "
            f"inside {inside}. Move the call up, in front of it."
        )


def _size(num_bytes: int) -> str:
    for unit, name in ((1024**2, "MiB"), (1024, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} bytes"
