"""Variables that live on one device alone, for models that do not fit on one."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import lock_of, wrap_for_good
from tfmultigpu.addons.sharding import _private, tables
from tfmultigpu.addons.sharding.loads import Limits, Loads
from tfmultigpu.addons.sharding.reads import ShardedReads
from tfmultigpu.arguments import brief, check_count
from tfmultigpu.data.spread import AT_LEAST, next_device, rows_of_devices
from tfmultigpu.devices.discovery import known_memory
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import ClusterError, DataError, ScopeError, TfMultiGpuError
from tfmultigpu.strategies.attached import attached
from tfmultigpu.strategies.collectives import value_of_first_worker
from tfmultigpu.strategies.row_parts import RowParts
from tfmultigpu.strategies.topology import describe, is_mirrored, is_sharded
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import KerasVariable

# Dtypes of kernels of ``layer.quantize``, which never change: of four bits two are in each number.
_QUANTIZED = (tf.int8, tf.uint8)
_loads: weakref.WeakKeyDictionary[Any, Loads] = weakref.WeakKeyDictionary()


@contextmanager
def sharded_variables(
    *, at_least: int = AT_LEAST, memory: Mapping[str, float] | None = None
) -> Iterator[None]:
    """Keeps each large trainable variable on one device only, for models too large for a device.

    Enter it inside the scope of the strategy, and create the model in it. All replicas read such a
    variable from its device. A train step adds its gradients there and updates it there, with the
    optimizer state beside it. The results equal the results of a mirrored model and of one device.

    A variable goes to the device with the smallest part of its memory in use. The table of a
    ``keras.layers.Embedding`` is divided by rows over the devices if it takes more than half of the
    largest free memory of a device, or from 64 MiB on if memory is unknown. Small variables, and
    those that are not trained, such as moving statistics, stay mirrored; kernels that
    ``layer.quantize`` makes in the same two contexts are sharded too. A model that is built later,
    from its first batch, is sharded by the last arguments given. Each of several workers spreads
    all variables over its own devices, and all workers must enter this context.

    Args:
        at_least: Bytes from which a variable is large.
        memory: Bytes by device name; if workers differ, the least counts. None: the memory limits
            of the devices, or what the driver reports; if unknown, as for CPUs, equal parts.

    Raises:
        ScopeError: It is entered outside the scope of a strategy.
        TfMultiGpuError: The strategy is not a mirrored one.
        DataError: ``memory`` does not fit the devices; or, later, the variables do not fit.
        ClusterError: The workers give different values of ``at_least``, or later create different
            variables.

    Example:
        >>> import keras, tensorflow as tf, tfmultigpu as tmg
        >>> strategy = tmg.create_strategy()
        >>> with strategy.scope(), tmg.sharded_variables():
        ...     model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256)])
        >>> len(strategy.experimental_local_results(model.layers[0].kernel.value))
        1
    """
    at_least = check_count("at_least", at_least, 0)
    if not tf.distribute.has_strategy():
        raise ScopeError(
            "sharded_variables was entered outside the scope of a strategy.",
            "",
            "Write both in this order: with strategy.scope(), tmg.sharded_variables():",
        )
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1 or len(strategy.extended.worker_devices) == 1:
        yield
        return
    if not is_mirrored(strategy):
        raise TfMultiGpuError(
            "Variables can be sharded over the devices of a mirrored strategy only.",
            describe(strategy),
            'Write tmg.create_strategy(prefer="mirrored").',
        )
    devices = strategy.extended.worker_devices
    with lock_of(strategy):  # Once, whichever thread is first.
        if strategy not in _loads:
            _loads[strategy] = Loads(devices)
            _serve_optimizers(strategy)
            # The core finds these here: it does not know of add-ons.
            attached(strategy).serve(ShardedReads, functools.partial(_creating, strategy))
    loads = _loads[strategy]
    loads.give(Limits(at_least, memory_of_devices(devices, memory)))
    with _creating(strategy):
        yield


@contextmanager
def _creating(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Enters the scope of a strategy to create a model in, by the limits that were given last."""
    loads = _loads[strategy]

    def create(create_mirrored: Any, **options: Any) -> Any:
        # The innermost context decides. Only Keras says for each variable whether it is trained.
        trainable = options.get("trainable") is True
        is_kept = trainable or options["dtype"] in _QUANTIZED
        if limits is not entered[-1] or not is_kept:
            return create_mirrored(**options)
        initial = options["initial_value"]
        if not callable(initial) and not tf.executing_eagerly():  # It may be of this graph.
            return create_mirrored(**options)
        # The size is known once there is a value, which is made where there is most room.
        room = np.subtract(limits.memory or 0, loads.bytes)
        with tf.init_scope(), tf.device(loads.devices[room.argmax()]):
            value = tables.made(initial) if callable(initial) else initial
            if isinstance(value, tables.Weight):
                if (parts := divide(value, options["name"])) is not None:
                    return parts
                if value.size >= limits.at_least:  # Before it is made, which may not be possible.
                    number = next_device(loads.bytes, limits.memory, value.size)
                    loads.check(number, options["name"], value.size, limits.memory)
                value = value.make()
            value = tf.convert_to_tensor(value, options["dtype"])
        size = value.shape.num_elements() * value.dtype.size
        if size < limits.at_least:
            return create_mirrored(**{**options, "initial_value": lambda: value})
        name = options["name"]
        _check_alike(strategy, name, value)
        with loads.lock:  # Threads may create models at one time.
            number = next_device(loads.bytes, limits.memory, size)
            device = loads.devices[number]
            with tf.init_scope(), tf.device(device):
                value = tf.identity(value)
            loads.check(number, name, size, limits.memory)
            loads.add(number, size)
        value = value_of_first_worker(strategy, value, device)
        variable = _on_device(strategy, device, value, name, trainable=trainable)
        weakref.finalize(variable, loads.forget, number, size)
        return variable

    def divide(table: tables.Weight, name: str) -> RowParts | None:
        if table.size < limits.at_least:
            return None
        with loads.lock:
            rows = rows_of_devices(table, loads.bytes, limits.memory)
            if rows is None:
                return None
            _check_alike(strategy, name, table)
            places = [number for number, count in enumerate(rows) if count]
            row = table.size // table.shape[0]
            for place, number in enumerate(places):
                part = tables.part_in_words(place, len(places), name)
                loads.check(number, name, rows[number] * row, limits.memory, part=part)
            for number in places:
                loads.add(number, rows[number] * row)
        counts = [rows[number] for number in places]
        devices = [loads.devices[number] for number in places]
        values = _of_first_worker(strategy, table.make_parts(counts), devices)
        make = functools.partial(_on_device, strategy)
        divided = tables.create_parts(make, devices, values, name, trainable=True)
        for number, of_device in zip(places, divided.parts, strict=True):
            weakref.finalize(of_device, loads.forget, number, rows[number] * row)
        return divided

    def create_or_note(create_mirrored: Any, **options: Any) -> Any:
        try:
            return create(create_mirrored, **options)
        except DataError as error:
            attached(strategy).note_refused(error)
            _compat.forget_empty_variables()
            raise

    for _ in range(3 if any(loads.alive) else 0):  # Unused models are found in a third pass.
        gc.collect()
    limits = loads.agree(strategy, loads.limits())
    entered = loads.given.entered
    entered.append(limits)
    try:
        with strategy.scope(), tf.variable_creator_scope(create_or_note), tables.telling_weights():
            yield
    finally:
        entered.pop()


def _of_first_worker(
    strategy: tf.distribute.Strategy, values: Iterator[Any], devices: Sequence[str]
) -> Iterator[tf.Tensor]:
    """Yields the values that the first worker has, each of which is made on the next device."""
    for device in devices:
        value = tf.convert_to_tensor(next(values))
        yield value_of_first_worker(strategy, value, device)


def _check_alike(
    strategy: tf.distribute.Strategy, name: str, value: tf.Tensor | tables.Weight
) -> None:
    """Checks that all workers create this variable now, and do nothing else meanwhile."""
    exchange = WorkerExchange(strategy)
    with tf.init_scope():
        other = exchange.find_difference(
            "creating a variable", {"shape": tuple(value.shape), "dtype": value.dtype.name}
        )
    if other is not None:
        raise ClusterError(
            "The workers create different variables.",
            f"{name!r} of shape {tuple(value.shape)} and {value.dtype.name} on worker "
            f"{exchange.worker}, and another {other[0]} on worker {other[1]}",
            "Create the same model on every worker.",
        )


def _serve_optimizers(strategy: tf.distribute.Strategy) -> None:
    """Has Keras optimizers keep slots of a sharded variable beside it, and not update it N times.

    TensorFlow takes mirrored variables only, and says so by an assertion.
    """

    def colocate_vars_with(colocate: Any, variable: KerasVariable) -> Any:
        if not is_sharded(variable):
            return colocate(variable)
        if isinstance(variable, RowParts):
            return tf.variable_creator_scope(variable.create_like)

        def beside(_: Any, **options: Any) -> Any:
            with tf.init_scope(), tf.device(variable.device):
                value = tf.convert_to_tensor(options["initial_value"](), options["dtype"])
            return _on_device(strategy, variable.device, value, options["name"], trainable=False)

        return tf.variable_creator_scope(beside)

    def update_mirrored(
        update: Any, variable: KerasVariable, function: Any, args: Any = (), **options: Any
    ) -> Any:
        if not is_sharded(variable):
            return update(variable, function, args, **options)
        # Keras' `finalize_variable_values` brings an average. Replicas bring values of each, or
        # none, for weight decay.
        if args and not any(isinstance(one, tf.distribute.DistributedValues) for one in args):
            with tf.device(variable.device):
                return function(variable, *args, **(options.get("kwargs") or {}))
        where = parse_device_name(variable.device)
        if isinstance(variable, RowParts):
            where = f"{len(variable.parts)} devices"
        raise TfMultiGpuError(
            "A sharded variable is updated once, not by every replica.",
            f"optimizer.apply, or Keras' own fit, for {variable.name!r} on {where}",
            "Write tmg.fit(model, data) or tmg.make_train_step(model, optimizer, loss, strategy).",
        )

    wrap_for_good(strategy.extended, "colocate_vars_with", colocate_vars_with)
    wrap_for_good(strategy.extended, "update", update_mirrored)


def _refuse_replicas(part: str, variable: KerasVariable, write: str) -> None:
    """Raises an error if a replica writes to a sharded variable, which each would do once more.

    Args:
        part: The part of a table that the variable is, in words; "" for a whole variable.
        variable: The variable.
        write: The name of the method that writes.
    """
    context: Any = tf.distribute.get_replica_context()
    if context is None or context.strategy is not variable.distribute_strategy:
        return
    raise TfMultiGpuError(
        "All replicas share a sharded variable, so none may write to it.",
        f"{write} of {part or repr(variable.name)} in a replica",
        "Create it by add_weight(..., trainable=False), which is mirrored, or outside "
        "tmg.sharded_variables().",
    )


def _on_device(*args: Any, trainable: bool, part: str = "") -> Any:
    """Creates a variable as ``variable_on_device`` does, to which no replica may write."""
    check = functools.partial(_refuse_replicas, part)
    return _private.variable_on_device(*args, trainable=trainable, check_write=check)


def memory_of_devices(
    devices: Sequence[str], memory: Mapping[str, float] | None
) -> tuple[float, ...] | None:
    """Returns the bytes of each device: those given, else those known; None if one is not known."""
    names = [parse_device_name(device) for device in devices]
    if memory is None:
        known = [known_memory(name) for name in names]
        return None if None in known else tuple(float(free) for free in known if free is not None)
    given = {parse_device_name(name): float(size) for name, size in memory.items()}
    if set(given) != set(names) or not all(0 < size < math.inf for size in given.values()):
        raise DataError(
            "memory has a positive number of bytes for each device of the strategy.",
            f"memory={brief(memory)} for {', '.join(names)}",
        )
    return tuple(given[name] for name in names)
