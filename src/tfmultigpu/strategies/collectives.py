"""Adding what replicas computed, once per step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import lock_of, setting
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.lists import pick, present
from tfmultigpu.strategies.process_state import explaining_lost_workers
from tfmultigpu.strategies.row_lists import is_list, joined, unique
from tfmultigpu.strategies.topology import is_one_process, kind_of, local_replicas, per_replica
from tfmultigpu.types import Context, Tensor

REDUCED = "_tfmultigpu_reduced"  # An attribute of gradients that are those of all replicas.
_LARGE = 2**16  # Bytes from which a tensor is sent between workers by itself.
_MESSAGE = 25 * 10**6  # Bytes from which tensors are sent, while others are still computed.

LISTED = "lists_of_rows_of_replicas"  # The scope of their addition: a graph that has it sends them.
_sends_lists: ContextVar[bool] = ContextVar("sends_lists", default=False)
_in_pairs: ContextVar[bool] = ContextVar("in_pairs", default=False)
_in_memory: bool | None = None  # Set by ``forcing_addition``.


@contextmanager
def forcing_addition(*, in_memory: bool) -> Iterator[None]:
    """Has steps that are traced meanwhile add one way, whatever their devices.

    For tests without accelerators, which hold both ways to one device.
    """
    global _in_memory
    before, _in_memory = _in_memory, in_memory
    try:
        yield
    finally:
        _in_memory = before


def replicas_share_memory(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether tensors of all replicas are added in memory, not by collectives.

    This is the one branch between CPUs and accelerators: replicas on the CPUs of one process share
    its memory. A step keeps the way it was traced with.
    """
    if strategy.num_replicas_in_sync == 1:
        return True  # The default strategy does not say where it runs.
    if _in_pairs.get():
        return is_one_process(strategy)
    if _in_memory is not None:
        return _in_memory
    devices = strategy.extended.worker_devices
    return is_one_process(strategy) and all("CPU" in device.upper() for device in devices)


def adds_lists(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether replicas add lists of rows as they are; others add tensors.

    Replicas that share no memory send lists. In one call TensorFlow allows a collective one shape
    only, and lists differ from batch to batch. So they are sent where it is known that a call adds
    them once: outside of functions, and in functions of this library. A TPU knows no lists.
    """
    if replicas_share_memory(strategy):
        return True
    if not kind_of(strategy).sends_lists:
        return False
    return _sends_lists.get() or not tf.inside_function()


@contextmanager
def adding_in_pairs() -> Iterator[None]:
    """Has what is traced meanwhile be added in pairs, neighbours first, on any devices.

    Collectives of more than two devices add in an order of their own.
    """
    token = _in_pairs.set(True)
    try:
        yield
    finally:
        _in_pairs.reset(token)


def adds_in_pairs() -> bool:
    """Returns whether what is traced now is to have the same bits on any number of devices."""
    return _in_pairs.get()


@contextmanager
def sending_lists(*, once_a_call: bool) -> Iterator[None]:
    """Has what is traced meanwhile send lists of rows, if that is done once in each call of it."""
    token = _sends_lists.set(once_a_call)
    try:
        yield
    finally:
        _sends_lists.reset(token)


def locks_of_calls(strategy: tf.distribute.Strategy) -> list[threading.RLock]:
    """Returns the lock of the calls of a strategy that adds by collectives; none for any other.

    TensorFlow numbers collectives on each device when a function is called, and collectives of one
    number meet. In two calls at one time, replicas would add what the other model computed.
    """
    if not _compat.numbers_collectives(strategy):
        return []
    return [lock_of(strategy, "calls")]


def sum_over_replicas(
    strategy: tf.distribute.Strategy, values: list[list[tf.Tensor]]
) -> list[list[tf.Tensor]]:
    """Adds tensors over all replicas; call in a cross-replica context.

    Replicas that share memory add there: that is cheapest, and leaves alone TensorFlow's collective
    groups, which a second strategy in one process would break. So does, if it adds in pairs, a
    worker before it meets others. All others send messages of about 25 MB, the last tensors first,
    whose gradients are known first in the backward pass.
    """
    if strategy.num_replicas_in_sync == 1:
        return values
    if _in_pairs.get() or replicas_share_memory(strategy):
        places = [strategy.extended.worker_devices[0]] * len(values[0])
        return [sum_over_workers(strategy, sum_on_devices(values, places), places)]

    def reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        # A tensor captured by a branch or a loop has no device of its own, which some strategies
        # need to know where to reduce to.
        placed = list(map(tf.identity, tensors))
        summed: dict[int, tf.Tensor] = {}
        for message in _messages(placed):
            sums = all_reduce_sum(tf.distribute.get_replica_context(), pick(placed, message))
            summed.update(zip(message, sums, strict=True))
        return pick(summed, range(len(tensors)))

    results = strategy.run(reduce, args=(per_replica(strategy, values),))
    of_replicas: list[list[tf.Tensor]] = [[] for _ in values]
    for result in results:
        parts = strategy.experimental_local_results(result)
        for of_replica, part in zip(of_replicas, parts, strict=True):
            of_replica.append(part)
    return of_replicas


def _messages(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Returns the numbers of the tensors in each message, in the order in which they are sent.

    The last tensor of all holds sums that are known late, and goes with the first layers.
    """
    *gradients, last = range(len(tensors))
    messages: list[list[int]] = [[]]
    size = 0  # The bytes of the last message.
    for i in reversed(gradients):
        if size >= _MESSAGE:
            messages.append([])
            size = 0
        messages[-1].append(i)
        size += _bytes(tensors[i])
    messages[-1].append(last)
    for message in messages:
        message.sort()
    return messages


@contextmanager
def refusing_to_meet(error: Exception) -> Iterator[None]:
    """Raises an error if this replica waits for the others inside the context; replica context."""
    context: Any = tf.distribute.get_replica_context()
    refused: list[bool] = []

    def refuse(*_: object, **__: object) -> None:
        refused.append(True)
        raise error

    attributes = {}
    if context.num_replicas_in_sync > 1:
        attributes["merge_call"] = refuse  # All ways to wait for the others call it.
    try:
        with setting(context, **attributes):
            yield
    except Exception as raised:
        if refused and raised is not error:  # Keras puts words of its own around it.
            raise error from raised
        raise


def sum_on_devices(values: list[list[tf.Tensor]], devices: Sequence[str]) -> list[tf.Tensor]:
    """Adds tensors over the replicas of one process, each on its device.

    ``values`` has a list for each replica. A tensor that is the sum already is in the first one,
    with None in the others.
    """
    return [add_on_device(parts, device) for device, *parts in zip(devices, *values, strict=True)]


def add_on_device(parts: Sequence[Tensor], device: str) -> Tensor:
    """Adds the tensors, or the lists of rows, of replicas that are not None on a device.

    They are added in pairs, neighbours first, or a resumed run would end with other bits. Given
    three tensors or more, ``AddN`` first takes one whose memory it may write to, which depends on
    what has run so far; and TensorFlow makes one ``AddN`` of additions on one device. So two are
    added at a time, and no two additions that follow each other are on one device.
    """
    addends = present(parts)
    if len(addends) == 1:
        (only,) = addends
        with tf.device(device):
            return only if is_list(only) else tf.identity(only)
    half = 1 << (len(addends) - 1).bit_length() - 1  # The others pass up.
    halves: list[Any] = []
    for part in (addends[:half], addends[half:]):
        where = device
        for addend in part:
            if len(part) > 1 and addend.device != device:
                where = addend.device
                break
        halves.append(part[0] if len(part) == 1 else add_on_device(part, where))
    if is_list(halves[0]):
        if len(addends) > 2:
            halves = list(map(unique, halves))
        with tf.device(device):
            return joined(halves)
    with tf.device(device):
        return tf.add_n(halves)


@contextmanager
def keeping_additions() -> Iterator[None]:
    """Has additions of two stay as they are, in a graph.

    Of those that follow each other on one device TensorFlow makes one ``AddN``, of an order of its
    own, but for those that wait for another operation.
    """
    wait = tf.compat.v1.placeholder_with_default(tf.zeros([]), [])
    with tf.control_dependencies([wait]):
        yield


def sum_over_workers(
    strategy: tf.distribute.Strategy, values: Sequence[Any], devices: Sequence[str]
) -> list[Any]:
    """Adds sums of this worker, each on its device, over the workers; all must call it.

    In pairs, the tree over the devices of each worker continues over the workers.
    """
    if is_one_process(strategy):
        return list(values)
    names = list(map(parse_device_name, strategy.extended.worker_devices))
    owners = [names.index(parse_device_name(device)) for device in devices]
    workers = strategy.num_replicas_in_sync // len(names)
    number = local_replicas(strategy)[0] // len(names)
    meetings = [[tuple(range(workers))]]
    if _in_pairs.get():
        meetings = list(meetings_in_pairs(workers))

    added = list(values)
    packs = _packs(values, owners)
    for groups in meetings:
        adders = _compat.additions_over_workers(strategy, groups, number)
        for group in groups:
            if number not in group:  # Also of all groups: an odd one passes up.
                continue
            is_idle = _in_pairs.get() and number not in (group[0], group[-1])
            for pack in packs:
                with tf.device(devices[pack[0]]), _scope_of(added[pack[0]]):
                    addends = pick(added, pack)
                    if is_list(addends[0]):
                        addends = list(map(unique, addends))
                    if is_idle:
                        addends = list(map(_nothing, addends))
                    sums = adders[owners[pack[0]]](addends)
                for i, total in zip(pack, sums, strict=True):
                    added[i] = total
    return added


def _scope_of(value: Any) -> Context:
    return tf.name_scope(LISTED) if is_list(value) else nullcontext()


def _packs(values: Sequence[Any], owners: Sequence[int]) -> list[list[int]]:
    """Returns the numbers of the values in each message between workers, in their order.

    Small ones of one device and dtype travel together; a large one is not copied to be packed.
    """
    packs: list[list[int]] = []
    small: dict[tuple[int, tf.DType], list[int]] = {}
    for i, (value, owner) in enumerate(zip(values, owners, strict=True)):
        if is_list(value) or _bytes(value) >= _LARGE:
            packs.append([i])
        elif (owner, value.dtype) in small:
            small[owner, value.dtype].append(i)
        else:
            packs.append(small.setdefault((owner, value.dtype), [i]))
    return packs


def _nothing(value: Any) -> Any:
    """Returns what leaves each bit of a sum as it is: no rows, or zeros, which are -0.0."""
    if is_list(value):
        return tf.IndexedSlices(value.values[:0], value.indices[:0])
    return -tf.zeros_like(value)


def meetings_in_pairs(workers: int) -> Iterator[list[tuple[int, ...]]]:
    """Returns which workers meet at each level of the tree over their sums, neighbours first.

    The first and the last of a group add what they have. The others, if the right half of a tree
    is smaller, have the same as the first: they give nothing, and learn the sum. So the order in
    which a group adds does not matter.
    """
    size = 1
    while size < workers:
        groups: list[tuple[int, ...]] = []
        for first in range(0, workers - size, 2 * size):
            half = min(size, workers - first - size)  # The last one may be smaller.
            for last in range(first + size, first + size + half):
                groups.append((*range(last - size, first + size, half), last))
        yield groups
        size *= 2


def value_of_first_worker(
    strategy: tf.distribute.Strategy, value: tf.Tensor, device: str
) -> tf.Tensor:
    """Returns the value that the first worker has of a tensor on a device; all must call it."""
    if is_one_process(strategy):
        return value
    with tf.init_scope(), tf.device(device), explaining_lost_workers():
        addend = value if local_replicas(strategy)[0] == 0 else tf.zeros_like(value)
        first: tf.Tensor = sum_over_workers(strategy, [addend], [device])[0]
    return first


def _bytes(tensor: Tensor) -> int:
    if is_list(tensor):  # A message of its own, whose size is not known before it is sent.
        return 0
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)


def all_reduce_sum(context: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Adds over all replicas in a replica context: one ``all_reduce`` for each dtype and list.

    Lists of all replicas are joined end to end, so only their rows are sent.
    """
    add = tf.distribute.ReduceOp.SUM
    reduced: dict[int, Tensor] = {}
    numbers: dict[tf.DType, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if is_list(tensor):
            with _scope_of(tensor):
                reduced[i] = context.all_reduce(add, unique(tensor))
        else:
            numbers.setdefault(tensor.dtype, []).append(i)
    for chosen in numbers.values():  # It takes one dtype a call.
        sums = context.all_reduce(add, pick(tensors, chosen))
        reduced.update(zip(chosen, sums, strict=True))
    return pick(reduced, range(len(tensors)))
