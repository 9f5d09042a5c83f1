"""Private names of Keras, by what they are of."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.types import (
    KerasLayer,
    KerasModel,
    KerasOptimizer,
    KerasVariable,
    Nested,
    Options,
    Shard,
    Tensor,
)

# Layers: calls, masks, variables ------------------------------------------------------------------


_MASK = "_keras_mask"
_CALL = "current_call_ctx"


def keras_mask(tensor: Tensor) -> Tensor | None:
    """Returns the mask that Keras layers attached to a tensor, or None.

    Private: ``tensor._keras_mask``. The public ``layer.compute_mask`` would walk through the layers
    again. Without it a masked loss would divide by every element.
    """
    return getattr(tensor, _MASK, None)


def set_keras_mask(tensor: Tensor, mask: Tensor) -> None:
    """Attaches a mask to a tensor, as Keras layers do; private as above."""
    setattr(tensor, _MASK, mask)


def layer_call() -> Any:
    """Returns what a layer that is called now hands down to layers inside it: whether it trains.

    Private: ``keras.src.backend.common.global_state``, in which the outermost call of a layer keeps
    it. From Keras 3.16 on layers do not pass ``training`` on in any other way. Without it the
    layers of a rematerialized model are computed again as in a prediction.
    """
    from keras.src.backend.common import global_state

    return copy.copy(global_state.get_global_attribute(_CALL))


@contextmanager
def inside_layer_call(call: Any) -> Iterator[None]:
    """Has layers called as inside an earlier call, of ``layer_call``; private as above."""
    from keras.src.backend.common import global_state

    before = global_state.get_global_attribute(_CALL)
    global_state.set_global_attribute(_CALL, call)
    try:
        yield
    finally:
        global_state.set_global_attribute(_CALL, before)


def layers_inside(model: KerasModel) -> list[KerasLayer]:
    """Returns every layer inside a model or layer.

    Private: ``layer._flatten_layers``. The public ``model.layers`` leaves out the layers inside a
    user-defined layer, which is all that is seen without it.
    """
    if not hasattr(model, "_flatten_layers"):
        return list(getattr(model, "layers", ()))
    return list(model._flatten_layers(include_self=False))


def forget_empty_variables() -> None:
    """Has Keras forget the variables that it could not create, when one of them has failed.

    Private: the global attribute ``uninitialized_variables``. Keras would try them again with each
    later model, and fail again. The public ``keras.utils.clear_session`` forgets all names too.
    """
    state: Any = pkgutil.resolve_name("keras.src.backend.common.global_state")
    state.set_global_attribute("uninitialized_variables", [])


def own_variables(layer: KerasLayer) -> list[KerasVariable]:
    """Returns the variables of a layer itself, its seeds too, without the variables of its layers.

    Private: the lists of a layer. ``layer.variables`` visits all layers inside each time, and a
    step asks at each call; without the lists it would.
    """
    seeds = [generator.state for generator in getattr(layer, "_seed_generators", ())]
    if not hasattr(layer, "_trainable_variables"):
        return list(layer.variables)
    return [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]


def is_part_of_keras(source: object) -> bool:
    """Returns whether Keras itself defines a class or a function."""
    return str(getattr(source, "__module__", "")).split(".")[0] == "keras"


# Batch normalization ------------------------------------------------------------------------------


def moments_of_batch() -> tuple[Any, str]:
    """Returns the class and the name of what gives the mean and the variance of a batch.

    Private: ``keras.layers.BatchNormalization._moments``, which ignores ``synchronized`` for masked
    inputs. No public method is called between the moments and the normalization. Without it each
    replica normalizes masked inputs by its own rows.
    """
    return pkgutil.resolve_name("keras:layers.BatchNormalization"), "_moments"


def sum_in_moments() -> tuple[Any, str]:
    """Returns the module and the name of what adds the rows that a mask leaves.

    Private: ``keras.src.ops.sum``, of which the public ``keras.ops.sum`` is another name, which
    Keras does not look up. Without it each replica normalizes masked inputs by its own rows.
    """
    return pkgutil.resolve_name("keras.src.ops"), "sum"


# Draws --------------------------------------------------------------------------------------------


# Functions that Keras and TensorFlow look up at each call, to draw.
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
}


def global_seeds() -> Any:
    """Returns the generator for draws without a seed; None before the first such draw.

    Private: ``keras.src.backend.common.global_state``. The public function would create one, and
    take a number from Python's generator for it. Without it no step is traced.
    """
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute(_GLOBAL_SEEDS)


def set_global_seeds(generator: Any) -> None:
    """Sets the generator for draws without a seed; private as above."""
    from keras.src.backend.common import global_state

    global_state.set_global_attribute(_GLOBAL_SEEDS, generator)


def home_of(name: str) -> Any:
    """Returns the module or class that has a function by which Keras draws.

    Private: ``keras.src.random.seed_generator.global_seed_generator``, the source of draws without
    a seed. Without it they fail on replicas, or depend on their number. Private:
    ``tensorflow.python.ops.stateless_random_ops.stateless_random_uniform``, with which dropout and
    ``tf.image.stateless_random_flip_left_right`` draw. Without it all replicas drop and flip alike.
    """
    # After a colon nothing is imported: the user has the first tensorflow.random, not a second one.
    return pkgutil.resolve_name(_DRAWS[name])


# Optimizers ---------------------------------------------------------------------------------------


def keeping_gradients(clipped: bool) -> Options:
    """Returns attributes with which ``optimizer.apply`` does not add or clip gradients once more.

    Private: ``optimizer._all_reduce_sum_gradients``, and ``optimizer._clip_gradients`` if they are
    ``clipped``, of which these make the identity. Keras offers no public way to apply gradients
    that are already summed, and clipping, skipping and loss scaling need the sum first. Without the
    first gradients would be divided by the number of replicas, for Keras to sum again: exact, but
    with twice the traffic. Without the second three settings would be hidden.
    """
    options: Options = {"_all_reduce_sum_gradients": _same}
    return {**options, "_clip_gradients": _same} if clipped else options


def _same(gradients: list[Tensor]) -> list[Tensor]:
    return gradients


def clip_as_set(optimizer: KerasOptimizer, gradients: list[Tensor]) -> list[Tensor]:
    """Clips gradients by what is set on an optimizer, its ``clipnorm`` for example.

    Private: ``optimizer._clip_gradients``. Keras calls it in ``apply`` with what it is given, and
    it fails for values that replicas hold each of. No public function reads all three settings.
    Without it a step whose optimizer clips is not traced.
    """
    return list(optimizer._clip_gradients(gradients))


def strategy_of_optimizer(optimizer: KerasOptimizer) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope a Keras optimizer was created.

    Private: ``optimizer._distribution_strategy``. A variable of a ``OneDeviceStrategy`` does not
    tell its strategy. Without it the strategy in effect is taken.
    """
    own = getattr(optimizer, "_distribution_strategy", None)
    return tf.distribute.get_strategy() if own is None else own


def optimizer_trains(optimizer: KerasOptimizer) -> list[KerasVariable]:
    """Returns the variables an optimizer was built for; [] if unknown.

    Private: ``optimizer._trainable_variables``. Without it each part of a ``MultiOptimizer`` would
    get the gradients of all, and Keras would tell of unknown variables inside a trace.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "_trainable_variables", []))


# What model.compile was given ---------------------------------------------------------------------


_OfOutputs = list[list[Any]]


def compile_arguments(model: KerasModel) -> Options:
    """Returns the arguments of ``model.compile`` by name.

    Each call of ``compile`` has a new dict. Private: ``model._compile_config``. The public
    ``model.get_compile_config()`` serialises them, which loses user-defined functions and metrics.
    Without it ``evaluate`` has no loss and no metrics; ``make_eval_step`` does not need it.
    """
    arguments: Options = model._compile_config.config
    return arguments


def compiled_metrics(
    model: KerasModel, y_true: Nested, y_pred: Nested
) -> tuple[Any, _OfOutputs, _OfOutputs, list[str] | None]:
    """Returns the metrics of a compiled model, which Keras builds from the shapes of a batch.

    Private: ``model._compile_metrics`` and in it ``_flat_metrics``, ``_flat_weighted_metrics`` and
    ``_resolved_output_names``. The public ``model.metrics`` does not tell the output of a metric or
    whether sample weights apply, and is empty until Keras has trained. Without them the library
    would guess the meaning of names such as "accuracy", and the names of the results.
    """
    container = model._compile_metrics
    if container is None:
        return None, [], [], None
    if not container.built:
        container.build(y_true, y_pred)
    plain = list(map(_metrics_of, container._flat_metrics))
    weighted = list(map(_metrics_of, container._flat_weighted_metrics))
    return container, plain, weighted, getattr(container, "_resolved_output_names", None)


def _metrics_of(output: Any) -> list[Any]:
    return list(getattr(output, "metrics", ()))


def division_of_losses() -> tuple[Any, tuple[str, str]]:
    """Returns the module and the names of what divides losses by the replicas, and undoes it.

    Private: both, in ``keras.src.losses.loss``. A Keras loss divides its mean by the replicas, for
    loops that add gradients. Without it a ``forward`` that calls one gets a part of the mean.
    """
    module = pkgutil.resolve_name("keras.src.losses.loss")
    return module, ("scale_loss_for_distribution", "unscale_loss_for_distribution")


def waits_for_shapes(metric: Any) -> bool:
    """Returns whether a metric creates variables in its first update.

    Private: ``metric._built`` of ``F1Score`` and ``R2Score``. Without it only metrics without any
    variable are recognised, and ``R2Score`` fails inside a trace.
    """
    return not metric.variables or not getattr(metric, "_built", True)


def without_building() -> Options:
    """Returns attributes of a model with which the loops of Keras do not build it from a batch.

    Private: ``model._symbolic_build``. Keras would build what its ``train_step`` needs, which may
    fail, and offers no other way to leave that out. Without it Keras builds.
    """
    return {"_symbolic_build": lambda **_: None}


# Data as the loops of Keras read it ---------------------------------------------------------------


class KerasReading(NamedTuple):
    """Data that the loops of Keras read batch by batch, in Python.

    Attributes:
        batches: Returns the batches of a new pass. If it is closed, its threads and processes end.
        looked_at: Returns the batches that Keras looks at before the first pass, on this thread.
        hooks: The ``PyDataset`` itself, which hears of passes and knows their length; or None.
    """

    batches: Callable[[], Iterator[Shard]]
    looked_at: Callable[[], Iterator[Shard]]
    hooks: Any


def reading_of_keras(data: Any) -> KerasReading | None:
    """Returns how ``fit`` of Keras reads data by batches; None if it does not.

    Private: ``keras.src.trainers.data_adapters.get_data_adapter``, and ``adapter.enqueuer``. Keras
    has no public name for how it reads a ``PyDataset``, with threads, or a torch ``DataLoader``.
    Without it neither is read. Without ``enqueuer`` threads of a pass that is broken off stay.
    """
    import keras

    adapters: Any = pkgutil.resolve_name("keras.src.trainers.data_adapters")
    make_adapter = adapters.get_data_adapter
    try:
        is_array = type(make_adapter(data)).__name__ == "ArrayDataAdapter"
    except ValueError:
        return None
    if is_array:
        return None

    def batches(data: Any = data) -> Iterator[Shard]:
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


def data_adapter() -> type:
    """Returns the base class of what the loops of Keras take as data without looking into it.

    Private: ``keras.src.trainers.data_adapters.data_adapter.DataAdapter``. Keras has no public name
    for it, and would distribute anything else a second time. Without it ``fit`` is not imported.
    """
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    adapter: type = DataAdapter
    return adapter


# Callbacks ----------------------------------------------------------------------------------------


def profiles_batches(callback: Any) -> bool:
    """Returns whether a ``keras.callbacks.TensorBoard`` was given a ``profile_batch``.

    Private: ``callback._should_trace``. The callback does not keep the argument. False without the
    attribute: the callback then counts calls instead of batches.
    """
    return bool(getattr(callback, "_should_trace", False))


def set_by_loops() -> set[str]:
    """Returns the names of attributes that the loops of Keras set in each callback.

    Private: ``callback._model``, which the public ``callback.model`` returns; ``_params`` likewise.
    Without it a checkpoint would keep a model as the state of its callbacks.
    """
    return {"model", "params", "_model", "_params"}
