"""Private attributes of TensorFlow and Keras; no other file of the core touches any.

Each function names the attribute, why the public API is not enough, and what happens without it.
``tests/test_compat.py`` fails if one of them changes.
"""

from __future__ import annotations

import copy
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import tensorflow as tf

from tfmultigpu.types import (
    ConcreteFunction,
    Data,
    Function,
    Graph,
    KerasLayer,
    KerasMetric,
    KerasModel,
    KerasOptimizer,
    KerasVariable,
    Operation,
    Options,
    SeedGenerator,
    Shard,
    Tensor,
    Untyped,
)

_MASK = "_keras_mask"


def keras_mask(tensor: Tensor) -> Tensor | None:
    """Returns the mask that Keras layers attached to a tensor, or None.

    Private: ``tensor._keras_mask``. The public ``layer.compute_mask`` would walk through the layers
    again. Without it a masked loss would divide by every element.
    """
    return getattr(tensor, _MASK, None)


def set_keras_mask(tensor: Tensor, mask: Tensor) -> None:
    """Attaches a mask to a tensor, as Keras layers do; private as above."""
    setattr(tensor, _MASK, mask)


def waits_for_shapes(metric: KerasMetric) -> bool:
    """Returns whether a metric creates variables in its first update.

    Private: ``metric._built`` of ``F1Score`` and ``R2Score``. Without it only metrics without any
    variable are recognised, and ``R2Score`` fails inside a trace.
    """
    return not metric.variables or not getattr(metric, "_built", True)


def layers_inside(model: KerasModel) -> list[KerasLayer]:
    """Returns every layer inside a model or layer.

    Private: ``layer._flatten_layers``. The public ``model.layers`` leaves out the layers inside a
    user-defined layer, which is all that is seen without it.
    """
    if not hasattr(model, "_flatten_layers"):
        return list(getattr(model, "layers", ()))
    return list(model._flatten_layers(include_self=False))


def keeping_sums() -> Options:
    """Returns attributes with which ``optimizer.apply`` does not all-reduce gradients once more.

    Private: ``optimizer._all_reduce_sum_gradients``, of which these make the identity. Keras offers
    no public way to apply gradients that are already summed, and clipping, skipping and loss
    scaling need the sum first. Without it gradients would be divided by the number of replicas, for
    Keras to sum again: exact, but with twice the traffic.
    """
    return {"_all_reduce_sum_gradients": lambda pairs: pairs}


def strategy_of_optimizer(optimizer: KerasOptimizer) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope a Keras optimizer was created.

    Private: ``optimizer._distribution_strategy``. A variable of a ``OneDeviceStrategy`` does not
    tell its strategy. Without it the strategy in effect is taken.
    """
    own = getattr(optimizer, "_distribution_strategy", None)
    return tf.distribute.get_strategy() if own is None else own


def strategies_were_made() -> bool:
    """Returns whether this process has made a strategy other than TensorFlow's default one.

    Private: ``tensorflow.python.distribute.distribute_lib.distribution_strategy_replica_gauge``,
    which the constructor of every strategy sets. Without it True is returned, and a search for
    strategies looks all objects of the process each time.
    """
    from tensorflow.python.distribute import distribute_lib

    gauge: Untyped = getattr(distribute_lib, "distribution_strategy_replica_gauge", None)
    return gauge is None or gauge.get_cell("num_replicas").value() > 0


def variables_of(concrete: ConcreteFunction) -> list[tuple[Tensor, tf.DType]]:
    """Returns the handle and the dtype of each variable that a concrete function can assign.

    Private: ``_handle_data`` of a resource, which tells the dtype of a variable. ``variables`` of a
    function leaves out those that it only assigns.
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


def is_stateful(operation: str) -> bool:
    """Returns whether operations of a type change something, or read what others change.

    Private: ``tensorflow.python.framework.op_def_registry``. An operation of a graph has its
    ``op_def``; those in the functions that it calls are only names. Without it they are not seen.
    """
    definition = _definition_of(operation)
    return definition is not None and definition.is_stateful


def types_of_inputs(operation: str) -> list[tf.DType]:
    """Returns the dtypes of the inputs of a type of operations; private as above."""
    definition = _definition_of(operation)
    arguments = () if definition is None else definition.input_arg
    return [tf.as_dtype(argument.type) for argument in arguments if argument.type]


def _definition_of(operation: str) -> Operation:
    try:
        get: Function = pkgutil.resolve_name("tensorflow.python.framework.op_def_registry:get")
    except (ImportError, AttributeError):
        return None
    return get(operation)


@contextmanager
def waiting_for(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Has all that is computed and assigned in the context wait for tensors, but for scalars.

    Private: ``operation._add_control_inputs``. With ``tf.control_dependencies`` the learning rate
    and the powers of Adam, a dozen scalars for each variable, wait as well, and are not folded.
    """
    gate, graph = tf.group(*tensors), tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    for new in graph.get_operations()[before:]:
        assigns = new.op_def.is_stateful and new.type != "ReadVariableOp"
        if new.type != "Placeholder" and (assigns or any(t.shape.rank != 0 for t in new.outputs)):
            add_control_inputs(new, [gate])


def add_control_inputs(operation: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Has an operation of a graph wait for others.

    Private: ``operation._add_control_inputs``. ``tf.control_dependencies`` must be known when the
    operation is made, and Keras reads a weight before it says what it is for.
    """
    operation._add_control_inputs(list(others))


def clip_as_set(optimizer: KerasOptimizer, gradients: list[Tensor]) -> list[Tensor]:
    """Clips gradients by what is set on an optimizer, its ``clipnorm`` for example.

    Private: ``optimizer._clip_gradients``. Keras calls it in ``apply`` with what it is given, and
    it fails for values that replicas hold each of. No public function reads all three settings.
    """
    return list(optimizer._clip_gradients(gradients))


# Functions that Keras and TensorFlow look up at each call, to draw or to normalize.
_KERAS_SEEDS = "keras.src.random.seed_generator"
_GLOBAL_SEEDS = "global_seed_generator"
_DRAWS = {
    _GLOBAL_SEEDS: _KERAS_SEEDS,
    "stateless_uniform": "tensorflow:random",
    "stateless_normal": "tensorflow:random",
    "stateless_truncated_normal": "tensorflow:random",
    "stateless_categorical": "tensorflow:random",
    "stateless_gamma": "tensorflow:random",
    "stateless_binomial": "tensorflow:random",
    "stateless_random_uniform": "tensorflow.python.ops.stateless_random_ops",
    "next": "keras:random.SeedGenerator",
    "_moments": "keras:layers.BatchNormalization",
    "sum": "keras.src.ops",
}


def global_seeds() -> SeedGenerator | None:
    """Returns the generator for draws without a seed; None before the first such draw.

    Private: ``keras.src.backend.common.global_state``. The public function would create one, and
    take a number from Python's generator for it.
    """
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute(_GLOBAL_SEEDS)


def set_global_seeds(generator: SeedGenerator) -> None:
    """Sets the generator for draws without a seed; private as above."""
    from keras.src.backend.common import global_state

    global_state.set_global_attribute(_GLOBAL_SEEDS, generator)


def home_of(name: str) -> Untyped:
    """Returns the module or class that has a function by which Keras draws or normalizes.

    Private: ``keras.src.random.seed_generator.global_seed_generator``, the source of draws without
    a seed. Without it they fail on replicas, or depend on their number. Private:
    ``tensorflow.python.ops.stateless_random_ops.stateless_random_uniform``, with which dropout and
    ``tf.image.stateless_random_flip_left_right`` draw. Without it all replicas drop and flip alike.
    Private: ``keras.layers.BatchNormalization._moments``, which ignores ``synchronized`` for masked
    inputs, and ``keras.src.ops.sum``, with which it adds. Without them each replica normalizes by
    its own rows.
    """
    # After a colon nothing is imported: a second tensorflow.random would not be that of the user.
    return pkgutil.resolve_name(_DRAWS[name])


def optimizer_trains(optimizer: KerasOptimizer) -> list[KerasVariable]:
    """Returns the variables an optimizer was built for; [] if unknown.

    Private: ``optimizer._trainable_variables``. Without it each part of a ``MultiOptimizer`` would
    get the gradients of all, and Keras would tell of unknown variables inside a trace.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "_trainable_variables", []))


def additions_over_workers(strategy: tf.distribute.Strategy) -> list[Function]:
    """Returns functions that add tensors over the workers of a strategy, one per local device.

    Each takes lists of tensors of one dtype on its device, and returns the sums in one list. A list
    is sent as one message. The workers must call them alike and in the same order.

    Private: ``strategy.extended._cross_device_ops``, its ``_launchers``, which add over all
    replicas, and their ``_collective_keys``, ``_group_key`` and ``_group_size``. Their copies keep
    the options, the order on a device, and keys that are new in each call. The public
    ``strategy.reduce`` adds over workers on the CPUs alone, and ``tf.raw_ops.CollectiveReduceV2``
    needs keys that the strategy does not use.
    """
    devices = strategy.extended.worker_devices
    extended: Untyped = strategy.extended
    found = []
    for device, one in zip(devices, extended._cross_device_ops._launchers, strict=True):
        launcher = copy.copy(one)
        launcher._group_key = one._collective_keys.get_group_key([device])
        launcher._group_size = one._group_size // len(devices)
        found.append(launcher.batch_all_reduce)
    return found


def numbers_collectives(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a strategy adds by collectives, which TensorFlow numbers at each call.

    Private: ``strategy.extended._cross_device_ops``. No public name tells how a strategy adds, and
    one that TensorFlow made adds otherwise than the strategies of ``create_strategy``. Without it
    all strategies of several replicas are taken for such, whose steps wait for each other.
    """
    distribute: Untyped = tf.distribute
    others = (
        distribute.NcclAllReduce,
        distribute.HierarchicalCopyAllReduce,
        distribute.ReductionToOneDevice,
    )
    ways = getattr(strategy.extended, "_cross_device_ops", None)
    return strategy.num_replicas_in_sync > 1 and not isinstance(ways, others)


def custom_gradients() -> tuple[Untyped, str]:
    """Returns the module and the name of what each custom gradient in a graph goes through.

    Private: ``tensorflow.python.ops.custom_gradient._graph_mode_decorator``, which is called with
    the function, its arguments, and those by name. ``keras.remat`` may have wrapped a function long
    before a step is made, and no public name is called when the function is. Without it what is
    computed again draws other numbers than the forward pass, and assigns again.
    """
    return pkgutil.resolve_name("tensorflow.python.ops.custom_gradient"), "_graph_mode_decorator"


def rematerialized(function: Function) -> Function | None:
    """Returns what ``keras.remat`` wraps in the function of a custom gradient; None of others.

    Private: the name ``recompute_grad.<locals>.inner``, and its free variable ``f``. TensorFlow
    marks these functions in no other way. Without it each is left to TensorFlow, as above.
    """
    if getattr(function, "__qualname__", "") != "recompute_grad.<locals>.inner":
        return None
    inner: Function | None = inspect.getclosurevars(function).nonlocals.get("f")
    return inner


def graphs_inside(operation: Operation) -> list[Graph]:
    """Returns the graphs of the functions that an operation calls, such as the body of a loop.

    Private: ``graph._get_function``. The public ``graph.as_graph_def()`` copies the whole graph.
    Without it what a loop draws or assigns is not seen.
    """
    names = [attr.name for attr in operation.op_def.attr if attr.type == "func"]
    functions = [operation.graph._get_function(operation.get_attr(name).name) for name in names]
    return [function.graph for function in functions if function is not None]


class KerasReading(NamedTuple):
    """Data that the loops of Keras read batch by batch, in Python.

    Attributes:
        batches: Returns the batches of a new pass. If it is closed, its threads and processes end.
        looked_at: Returns the batches that Keras looks at before the first pass, on this thread.
        hooks: The ``PyDataset`` itself, which hears of passes and knows their length; or None.
    """

    batches: Callable[[], Iterator[Shard]]
    looked_at: Callable[[], Iterator[Shard]]
    hooks: Data


def reading_of_keras(data: Data) -> KerasReading | None:
    """Returns how ``fit`` of Keras reads data by batches; None if it does not.

    Private: ``keras.src.trainers.data_adapters.get_data_adapter``, and ``adapter.enqueuer``. Keras
    has no public name for how it reads a ``PyDataset``, with threads, or a torch ``DataLoader``.
    Without it neither is read. Without ``enqueuer`` threads of a pass that is broken off stay.
    """
    import keras

    adapters: Untyped = pkgutil.resolve_name("keras.src.trainers.data_adapters")
    make_adapter = adapters.get_data_adapter
    try:
        is_array = type(make_adapter(data)).__name__ == "ArrayDataAdapter"
    except ValueError:
        return None
    if is_array:
        return None

    def batches(data: Data = data) -> Iterator[Shard]:
        # A new adapter for each pass: one that was broken off leaves batches in its queue.
        adapter = make_adapter(data)
        try:
            if adapter.num_batches != 0:
                yield from adapter.get_numpy_iterator()
        finally:
            enqueuer = getattr(adapter, "enqueuer", None)
            if enqueuer is not None:
                enqueuer.stop()

    if not isinstance(data, keras.utils.PyDataset):
        return KerasReading(batches, batches, None)

    class WithoutWorkers(keras.utils.PyDataset):  # type: ignore[misc]
        """The same batches, made on the thread that asks for them."""

        num_batches = property(lambda self: data.num_batches)

        def __getitem__(self, index: int) -> Shard:
            return data[index]

    return KerasReading(batches, lambda: batches(WithoutWorkers()), data)


def is_part_of_keras(source: object) -> bool:
    """Returns whether Keras itself defines a class or a function."""
    return str(getattr(source, "__module__", "")).split(".")[0] == "keras"
