"""Private attributes of TensorFlow and Keras that the library needs: loud when one changes."""

from __future__ import annotations

import pkgutil
import re
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases.case import Case, hold
from law.model import Training
from law.processes import pool
from one_device import cut, strategy_of
from problems import X, Y, crossentropy, mlp

import tfmultigpu as tmg
from tfmultigpu import _compat
from tfmultigpu._compat import keras as of_keras
from tfmultigpu._patch import patching, setting
from tfmultigpu.addons.sharding import _private

BATCHES = cut((X, Y), (7, 2, 9, 1, 5))


def built(optimizer, *variables):
    optimizer.build(list(variables))
    return optimizer


def test_every_private_attribute_of_the_bridge_is_tested_here():
    """The list below is what the files name; a new one needs a test."""
    files = [*Path(_compat.__file__).parent.glob("[!_]*.py"), Path(_private.__file__)]
    source = "".join(path.read_text() for path in files)
    # An attribute, a text, a method that is called by others.
    private = set(re.findall(r'(?:\.|"|def (?=\w+\(self))(_[a-z]\w+)', source))
    assert private == {
        "_add_control_inputs",
        "_all_reduce_sum_gradients",
        "_built",
        "_clip_gradients",
        "_collective_keys",
        "_compile_config",
        "_compile_metrics",
        "_current_frames",
        "_cross_device_ops",
        "_distribute_strategy",
        "_distributed_container",
        "_distribution_strategy",
        "_export_to_saved_model_graph",
        "_flat_metrics",
        "_flat_weighted_metrics",
        "_flatten_layers",
        "_get_function",
        "_gradient_op_type",
        "_graph_mode_decorator",
        "_group_key",
        "_group_size",
        "_handle_data",
        "_keras_mask",
        "_launchers",
        "_model",
        "_moments",
        "_noinline",
        "_nospecialize",
        "_non_trainable_variables",
        "_params",
        "_read_variable_op",
        "_resolved_output_names",
        "_seed_generators",
        "_self_",
        "_should_trace",
        "_strided_slice_assign",
        "_symbolic_build",
        "_trainable_variables",
        "_unique_id",
        "_update_input",
    }


# Threads ------------------------------------------------------------------------------------------


def test_the_frame_of_each_thread_is_found():
    runs, ends = threading.Event(), threading.Event()

    def waits_here():
        runs.set()
        ends.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    runs.wait()
    frame, names = _compat.frames_of_threads()[thread.ident], []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    ends.set()
    thread.join()
    assert "waits_here" in names


# Layers and metrics -------------------------------------------------------------------------------


def test_layers_inside_a_layer_of_the_user_are_found():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.hidden = [keras.layers.Dense(2), keras.layers.BatchNormalization()]

        def call(self, x):
            return self.hidden[1](self.hidden[0](x))

    block = Block()
    model = keras.Sequential([keras.Input((3,)), block])
    assert {block, *block.hidden} <= set(_compat.layers_inside(model))


def test_the_variables_of_layers_alone_are_those_of_the_model():
    layers = keras.layers
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.Dropout(0.5),
                              layers.BatchNormalization()])  # fmt: skip
    own = []
    for layer in (model, *_compat.layers_inside(model)):
        own += _compat.own_variables(layer)
    assert list(map(id, own)) == list(map(id, model.variables))
    assert _compat.own_variables(model) == []
    model.layers[0].enable_lora(1)
    assert len(_compat.own_variables(model.layers[0])) == 4


def test_metrics_that_wait_for_shapes_are_known():
    cases = {
        "F1Score": (True, tf.one_hot([0, 1], 2), tf.eye(2)),
        "R2Score": (True, tf.zeros([2, 1]), tf.ones([2, 1])),
        "SparseCategoricalAccuracy": (False, tf.zeros([2, 1]), tf.eye(2)),
    }
    for name, (waits, labels, predictions) in cases.items():
        metric = getattr(keras.metrics, name)()
        assert _compat.waits_for_shapes(metric) == waits, name
        metric.update_state(labels, predictions)
        assert not _compat.waits_for_shapes(metric), name


# Masks --------------------------------------------------------------------------------------------


def test_keras_attaches_masks_to_tensors():
    tokens = np.array([[1, 2, 0], [3, 0, 0]])
    output = keras.layers.Embedding(5, 2, mask_zero=True)(tokens)
    np.testing.assert_array_equal(_compat.keras_mask(output), tokens > 0)
    assert _compat.keras_mask(tf.zeros([2])) is None


# Fails if layers hear in another way that they train: what remat computes again would not.
def test_layers_hear_from_the_call_around_them_that_they_train():
    heard = []

    class Asks(keras.layers.Layer):
        def call(self, x, training=None):
            heard.append(training)
            return x

    class Calls(keras.layers.Layer):
        def call(self, x):
            self.around = _compat.layer_call()
            return ask(x)

    ask, outer = Asks(), Calls()
    assert _compat.layer_call() is None
    outer(tf.zeros([1]), training=True)
    with _compat.inside_layer_call(outer.around):
        ask(tf.zeros([1]))
    ask(tf.zeros([1]))
    assert heard == [True, True, None]
    assert _compat.layer_call() is None


# Gradients that are already summed ----------------------------------------------------------------


def test_keras_sums_gradients_and_the_bridge_keeps_it_from_that():
    strategy = strategy_of(3)
    with strategy.scope():
        variable = keras.Variable([0.0])
        optimizer = built(keras.optimizers.SGD(1.0), variable)

    def apply():
        optimizer.apply([tf.constant([1.0])], [variable])

    tf.function(lambda: strategy.run(apply))()
    assert variable.numpy().tolist() == [-3.0], "Keras no longer adds over the replicas"

    with setting(optimizer, **_compat.keeping_gradients(clipped=False)):
        tf.function(lambda: strategy.run(apply))()
    assert variable.numpy().tolist() == [-4.0], "Keras no longer calls _all_reduce_sum_gradients"
    tf.function(lambda: strategy.run(apply))()
    assert variable.numpy().tolist() == [-7.0], "the optimizer was not given back as it was"
    assert "_all_reduce_sum_gradients" not in vars(optimizer)


def test_an_optimizer_clips_by_what_is_set_on_it_and_knows_its_strategy():
    strategy = strategy_of(2)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    gradients = _compat.clip_as_set(optimizer, [tf.constant([3.0]), tf.constant([4.0])])
    np.testing.assert_allclose(gradients, [[0.6], [0.8]], rtol=1e-6)
    assert _compat.strategy_of_optimizer(optimizer) is strategy
    alone, variable = keras.optimizers.SGD(1.0, global_clipnorm=1.0), keras.Variable([0.0])
    assert _compat.strategy_of_optimizer(alone) is tf.distribute.get_strategy()
    alone.build([variable])
    with setting(alone, **_compat.keeping_gradients(clipped=True)):
        alone.apply([tf.constant([3.0])], [variable])
    assert variable.numpy().tolist() == [-3.0], "Keras no longer calls _clip_gradients"


# Random draws -------------------------------------------------------------------------------------

KERAS_DRAWS = {
    "stateless_uniform": lambda: keras.random.uniform((2,), seed=1),
    "stateless_normal": lambda: keras.random.normal((2,), seed=1),
    "stateless_truncated_normal": lambda: keras.random.truncated_normal((2,), seed=1),
    "stateless_categorical": lambda: keras.random.categorical(tf.zeros([2, 3]), 1, seed=1),
    "stateless_gamma": lambda: keras.random.gamma((2,), 2.0, seed=1),
    "stateless_binomial": lambda: keras.random.binomial((2,), 9.0, 0.5, seed=1),
    "stateless_random_uniform": lambda: keras.random.dropout(tf.ones([2]), 0.5, seed=1),
    "global_seed_generator": lambda: keras.random.normal((2,)),
    "next": lambda: keras.random.normal((2,), seed=keras.random.SeedGenerator(1)),
}


def test_keras_looks_up_at_each_call_what_it_draws_by():
    calls, shapes = [], {}
    for name, draw in KERAS_DRAWS.items():

        def replacement(original, *args, name=name, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        with patching(_compat.home_of(name), name, replacement):
            shapes[name] = draw().shape
    assert list(dict.fromkeys(calls)) == list(KERAS_DRAWS), (
        "Keras draws otherwise: replicas would draw the same numbers"
    )
    assert shapes == {name: draw().shape for name, draw in KERAS_DRAWS.items()}
    assert set(of_keras._DRAWS) == set(KERAS_DRAWS)


# Fails if Keras takes the moments of a batch, or adds the rows that a mask leaves, otherwise.
def test_keras_looks_up_at_each_call_what_it_normalizes_by():
    calls = []

    def replacement(original, *args, **kwargs):
        calls.append(original.__name__)
        return original(*args, **kwargs)

    norm = keras.layers.BatchNormalization()
    rows, mask = tf.ones([2, 3]), tf.constant([True, False])
    with patching(*_compat.moments_of_batch(), replacement):
        norm(rows, training=True)
    with patching(*_compat.sum_in_moments(), replacement):
        norm(rows, training=True, mask=mask)
    assert list(dict.fromkeys(calls)) == ["_moments", "sum"]


def test_a_module_that_was_imported_before_is_the_one_that_is_replaced():
    from tensorflow import random

    assert _compat.home_of("stateless_uniform") is random is tf.random


def test_the_generator_of_draws_without_a_seed_can_be_seen_and_set():
    keras.utils.set_random_seed(3)
    assert _compat.global_seeds() is None
    keras.random.normal((2,))
    made = _compat.global_seeds()
    np.testing.assert_array_equal(made.state.numpy()[1] > 0, True)
    other = keras.random.SeedGenerator(77)
    _compat.set_global_seeds(other)
    before = other.state.numpy()
    keras.random.normal((2,))
    assert not np.array_equal(other.state.numpy(), before), "Keras draws from another one"
    assert _compat.global_seeds() is other


# Callbacks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batches", "expected"), [(0, False), (2, True), ((3, 5), True)], ids=str)
def test_whether_batches_are_profiled_is_known(tmp_path, batches, expected):
    callback = keras.callbacks.TensorBoard(tmp_path, profile_batch=batches)
    assert _compat.profiles_batches(callback) is expected


# Fails if the loops of Keras set something else in a callback, which a checkpoint would keep.
def test_what_the_loops_of_keras_set_in_callbacks_is_known():
    callback = keras.callbacks.Callback()
    callback.set_params({"epochs": 1})
    callback.set_model(mlp())
    assert "_model" in vars(callback)
    assert vars(callback).keys() <= _compat.set_by_loops()


# What an optimizer was built for ------------------------------------------------------------------


def test_an_optimizer_says_what_it_was_built_for():
    variable = keras.Variable([1.0])
    optimizer = keras.optimizers.Adam()
    assert _compat.optimizer_trains(optimizer) == []
    built(optimizer, variable)
    assert [v is variable for v in _compat.optimizer_trains(optimizer)] == [True]
    wrapped = built(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), variable)
    assert [v is variable for v in _compat.optimizer_trains(wrapped)] == [True]
    assert _compat.optimizer_trains(object()) == []


# Fails if TensorFlow sets other attributes in an optimizer that is restored: a step would take them
# for settings.
def test_what_tensorflow_keeps_for_checkpoints_is_known(tmp_path):
    optimizer = built(keras.optimizers.SGD(), keras.Variable([1.0]))
    before = dict(vars(optimizer))
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    checkpoint.restore(checkpoint.save(tmp_path / "saved"))
    changed = [name for name, value in vars(optimizer).items() if value is not before.get(name)]
    assert changed
    assert all(map(_compat.is_for_checkpoints, changed))
    assert not any(map(_compat.is_for_checkpoints, ("learning_rate", "_learning_rate")))


def test_an_optimizer_that_does_not_say_still_trains(monkeypatch):
    monkeypatch.setattr(_compat, "optimizer_trains", lambda optimizer: [])

    def build():
        return Training(mlp(), keras.optimizers.SGD(), crossentropy())

    hold(Case("it does not say", build, BATCHES))


# Graphs that are thrown away ----------------------------------------------------------------------


def test_variables_of_a_function_are_known_that_it_only_assigns():
    counter, other = tf.Variable(5, dtype=tf.int64), tf.Variable([1.0])

    @tf.function(autograph=False)
    def step(x):
        counter.assign_add(1)
        total = x + tf.cast(counter, tf.float32)
        other.assign([7.0])
        return total

    concrete = step.get_concrete_function(tf.constant(0.0))
    found = {id(handle): dtype for handle, dtype in _compat.variables_of(concrete)}
    assert found == {id(counter.handle): tf.int64, id(other.handle): tf.float32}


def test_the_handle_of_a_copy_leads_to_the_variable_of_all_replicas():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = tf.Variable(1.0)
    for copy in strategy.experimental_local_results(variable):
        assert _compat.variable_of_handle(copy.handle) is variable
    alone = tf.Variable(1.0)
    assert _compat.variable_of_handle(alone.handle) is None
    assert _compat.variable_of_handle(tf.constant(1.0)) is None


class Doubled(_compat.ComposedVariable):
    dtype, shape = tf.float32, tf.TensorShape([])

    def __init__(self):
        """The base class makes no variable."""


def refuse_export():
    raise ZeroDivisionError


# Fails if Keras, a strategy or the writer of a SavedModel asks a variable for other names.
def test_a_composed_variable_is_asked_as_those_of_tensorflow(tmp_path):
    strategy, optimizer = strategy_of(2), keras.optimizers.SGD()
    variable = Doubled()
    variable.take_place("its identity", strategy, refuse_export)
    assert optimizer._var_key(variable) == "its identity"
    assert strategy.extended.variable_created_in_scope(variable)
    assert not strategy_of(3).extended.variable_created_in_scope(variable)
    holder = tf.Module()
    holder.variable = variable
    with pytest.raises(ZeroDivisionError):
        tf.saved_model.save(holder, tmp_path)


# What a model was compiled with -------------------------------------------------------------------


def test_keras_keeps_what_compile_was_given():
    model, function = mlp(), lambda y_true, y_pred: y_pred
    metrics = [function, keras.metrics.AUC()]
    model.compile(loss=function, metrics=metrics, loss_weights=0.5)
    arguments = _compat.compile_arguments(model)
    assert arguments["loss"] is function
    assert arguments["loss_weights"] == 0.5
    assert arguments["metrics"] is metrics
    assert arguments["weighted_metrics"] is None
    assert _compat.compile_arguments(model) is arguments
    model.compile(loss="mse")
    assert _compat.compile_arguments(model) is not arguments


def test_keras_makes_the_compiled_metrics_from_shapes():
    inputs = keras.Input((6,))
    outputs = {"b": keras.layers.Dense(3)(inputs), "a": keras.layers.Dense(1)(inputs)}
    model = keras.Model(inputs, outputs)
    model.compile(loss="mse", metrics={"b": ["accuracy", "mae"]}, weighted_metrics={"a": "acc"})
    labels = {"b": tf.TensorSpec([None]), "a": tf.TensorSpec([None, 1])}
    container, plain, weighted, keys = _compat.compiled_metrics(model, labels, model.output)
    by_key = dict(zip(keys, plain, strict=True))
    assert [type(one).__name__ for one in by_key["b"]] == [
        "SparseCategoricalAccuracy",
        "MeanAbsoluteError",
    ]
    assert by_key["a"] == []
    ((name, (one,)),) = [(k, v) for k, v in zip(keys, weighted, strict=True) if v]
    assert (name, type(one).__name__) == ("a", "BinaryAccuracy")
    assert set(container.result()) == {"b_accuracy", "b_mae", "a_acc"}
    assert container in model.metrics
    again, same, *_ = _compat.compiled_metrics(model, labels, model.output)
    assert again is container
    assert same == plain
    without = mlp()
    without.compile(loss="mse")
    assert _compat.compiled_metrics(without, labels, None) == (None, [], [], None)


def test_the_loops_of_keras_do_not_build_what_they_are_kept_from():
    with strategy_of(2).scope():
        model = mlp()
        model.compile(loss="mse", metrics=["mae"])
    for attributes in (_compat.without_building(), {}):
        with setting(model, **attributes):
            model._maybe_symbolic_build(data_batch=(X, X[:, :4]))
        assert model._compile_metrics.built is (not attributes)


def made_before_and_after() -> list[bool]:
    made = [_compat.strategies_were_made()]
    tf.distribute.get_strategy().run(tf.ones, args=([],))
    made.append(_compat.strategies_were_made())
    tf.distribute.OneDeviceStrategy("CPU:0")
    return [*made, _compat.strategies_were_made()]


def test_tensorflow_tells_whether_a_strategy_was_made(monkeypatch):
    """In a process of its own, which has made none; without the gauge one may have been made."""
    worker = pool().start()
    assert worker.call(made_before_and_after) == [False, False, True]
    worker.end()
    from tensorflow.python.distribute import distribute_lib

    monkeypatch.delattr(distribute_lib, "distribution_strategy_replica_gauge")
    assert _compat.strategies_were_made()


# Collectives that wait for a worker ---------------------------------------------------------------


def add_and_abort() -> list[object]:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    groups = [(0,), (1, 2)]
    (add,) = _compat.additions_over_workers(strategy, groups, 0)
    rows = tf.IndexedSlices(tf.ones([2, 1]), tf.constant([5, 3], tf.int64))

    @tf.function
    def added() -> object:
        return add([tf.ones([2]), tf.constant(3.0)]), add([rows])[0].indices

    sums = [total.numpy().tolist() for total in tf.nest.flatten(added())]
    ((again,), (other,)) = (_compat.additions_over_workers(strategy, groups, n) for n in (0, 1))
    (launcher,), (same,), (of_others,) = add.args, again.args, other.args
    (all_replicas,) = strategy.extended._cross_device_ops._launchers
    assert same._group_key == launcher._group_key
    keys = launcher._group_key, of_others._group_key, all_replicas._group_key
    assert len(set(keys)) == 3
    assert of_others._group_size == 2
    assert same is not all_replicas
    assert same._ordering_token is all_replicas._ordering_token
    _compat.abort_collectives("no more")
    options = {"merge_op": "Add", "final_op": "Id", "subdiv_offsets": [0]}
    keys = {"group_size": 2, "group_key": 1, "instance_key": 1}
    with pytest.raises(tf.errors.UnavailableError, match="no more"):
        tf.function(lambda: tf.raw_ops.CollectiveReduce(input=1.0, **keys, **options))()
    return sums


def test_collectives_have_groups_of_their_own_and_can_be_ended():
    """In a process of its own, of one worker: it has none afterwards."""
    worker = pool().start()
    assert worker.call(add_and_abort) == [[1.0, 1.0], 3.0, [5, 3]]
    worker.end()


def configured_and_told() -> list[object]:
    _compat.configure_coordination(1, 7.0, 9.0)
    tf.distribute.MultiWorkerMirroredStrategy()
    _compat.set_cluster_value("told", "yes")
    _compat.set_cluster_value("told", "no")
    return [_compat.cluster_value("told", 60.0), _compat.cluster_value("never told", 0.2)]


# Fails if a cluster starts otherwise, or if its workers can no longer tell each other values.
def test_a_worker_is_configured_and_tells_values():
    (worker,) = pool().cluster(1)
    assert worker.call(configured_and_told) == ["yes", None]
    worker.end()


# Fails if TensorFlow expands the short forms of Slurm otherwise, or no longer refuses others.
def test_short_forms_of_slurm_are_expanded():
    assert _compat.expand_slurm("n[9-10],m", "2(x2),1") == (["n9", "n10", "m"], [2, 2, 1])
    with pytest.raises(ValueError, match="n\\["):
        _compat.expand_slurm("n[", "1")


# Variables on one device of several ---------------------------------------------------------------


def variable_alone(strategy, value, refused=()):
    def check_write(variable, name):
        if name in refused:
            raise ZeroDivisionError(name)

    with strategy.scope():
        device = strategy.extended.worker_devices[1]
        return _private.variable_on_device(
            strategy, device, value, "alone", trainable=True, check_write=check_write
        )


def test_keras_finds_the_slot_of_a_variable_by_the_identity_that_it_shares():
    first, second = (variable_alone(strategy_of(2), tf.zeros([3])) for _ in range(2))
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    optimizer.build([first])
    with pytest.raises(KeyError):
        optimizer.update_step(tf.ones([3]), second, 1.0)
    _private.share_identity([first, second])
    for _ in range(2):
        optimizer.update_step(tf.ones([3]), second, 1.0)
    np.testing.assert_allclose(second.numpy(), [-2.5] * 3)
    assert not first.numpy().any()


def test_a_strategy_that_adds_by_collectives_is_known_and_its_steps_take_turns():
    """TensorFlow numbers collectives at each call: two at one time would meet each other's."""

    def shared_locks(strategy):
        locks = []
        for _ in range(2):
            with strategy.scope():
                model, optimizer = mlp(), keras.optimizers.SGD()
            step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
            locks.append(set(map(id, step.runner.locks)))
        return len(locks[0] & locks[1])

    of_tensorflow = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert _compat.numbers_collectives(of_tensorflow)
    assert not _compat.numbers_collectives(strategy_of(2))
    assert not _compat.numbers_collectives(tf.distribute.get_strategy())
    assert (shared_locks(of_tensorflow), shared_locks(strategy_of(2))) == (1, 0)


def test_a_variable_of_a_strategy_can_be_on_one_of_its_devices():
    strategy = strategy_of(2)
    variable = variable_alone(strategy, tf.ones([3]), ("assign_add", "_strided_slice_assign"))
    assert variable.device.endswith("CPU:1")
    assert variable.distribute_strategy is strategy
    assert strategy.extended.variable_created_in_scope(variable)
    assert len(strategy.experimental_local_results(variable)) == 1
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(variable * 2.0)
    assert tape.gradient(total, variable).numpy().tolist() == [2.0, 2.0, 2.0]
    variable.assign(tf.zeros([3]))
    for write in (lambda: variable.assign_add(tf.ones([3])), lambda: variable[0].assign(1.0)):
        with pytest.raises(ZeroDivisionError):
            write()
    assert variable.numpy().tolist() == [0.0, 0.0, 0.0]


def test_operations_of_a_graph_can_be_changed():
    graph = tf.Graph()
    with graph.as_default():
        first, second = tf.constant(1.0), tf.constant(2.0)
        total = first + first
        _private.replace_input(total.op, 1, second)
        _compat.add_control_inputs(total.op, [second.op])
    assert total.op.inputs[1] is second
    assert [one.name for one in total.op.control_inputs] == [second.op.name]
    with tf.compat.v1.Session(graph=graph) as session:
        assert session.run(total) == 3.0


# Fails if operations in the functions of a trace are no longer known, so that what they change is
# missed; or if a table is taken for a variable.
def test_operations_are_known_by_their_names():
    assert all(map(_compat.is_stateful, ("EagerPyFunc", "LookupTableInsertV2", "While", "If")))
    assert not any(map(_compat.is_stateful, ("AddV2", "PyFuncStateless", "StatelessWhile", "None")))
    assert tf.resource in _compat.types_of_inputs("LookupTableInsertV2")
    assert tf.resource not in _compat.types_of_inputs("EagerPyFunc")
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    assert not _compat.is_variable_handle(table.resource_handle)
    assert _compat.is_variable_handle(tf.Variable(1.0).handle)
    assert _compat.is_variable_handle(tf.random.Generator.from_seed(1).state.handle)


def test_a_rematerialized_function_is_known_where_a_graph_calls_it():
    seen = []

    def differentiate(original, function, args, kwargs):
        seen.append((_compat.rematerialized(function), kwargs))
        return original(function, args, {})

    @tf.custom_gradient
    def other(x):
        return x * 2.0, lambda upstream: upstream

    def doubled(x, **_):
        return x * 2.0

    wrapped = keras.remat(doubled)  # Before anything is patched.
    with patching(*_compat.custom_gradients(), differentiate):
        tf.function(lambda x: other(wrapped(x, named=1)), autograph=False)(tf.ones([2]))
    assert seen == [(doubled, {"named": 1}), (None, {})]


def test_the_gradients_of_a_tensor_are_added_where_it_is_replaced():
    added = []

    def add(original, inputs, name=None):
        added.append(len(inputs))
        return original(inputs, name)

    @tf.function(autograph=False)
    def program(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x) * tf.exp(x) + tf.sin(x)
        tf.add_n([x, x, y, y])
        return tape.gradient(y, x)

    with patching(*_compat.additions(), add):
        program.get_concrete_function(tf.TensorSpec([2]))
    assert added == [4, 3]


def test_what_loops_and_branches_do_is_seen():
    @tf.function(autograph=False)
    def program(x):
        (x,) = tf.while_loop(lambda x: x < 9.0, lambda x: [x + tf.random.uniform([])], [x])
        return tf.cond(x > 3.0, lambda: x * 2.0, lambda: x)

    operations = program.get_concrete_function(tf.TensorSpec([])).graph.get_operations()
    inside = {one.type: _compat.graphs_inside(one) for one in operations}
    assert not inside["Placeholder"]
    branches = [len(graphs) for kind, graphs in inside.items() if "While" in kind or "If" in kind]
    assert branches == [2, 2]
    assert any(
        node.type == "RandomUniform"
        for kind, graphs in inside.items()
        if "While" in kind
        for graph in graphs
        for node in graph.get_operations()
    )


# Fails if what is in a loop or a branch is passed over.
def test_operations_are_found_inside_of_others():
    @tf.function
    def program(x):
        for _ in tf.range(2):
            x += tf.random.uniform([])
        return x

    graph = program.get_concrete_function(tf.TensorSpec([])).graph
    outside = {operation.type for operation in graph.get_operations()}
    kinds = [operation.type for operation in _compat.operations_of(graph)]
    assert "RandomUniform" not in outside
    assert kinds.count("RandomUniform") == 1


# Fails if TensorFlow no longer takes, or keeps, the attributes by which calls stay calls of one.
def test_a_function_can_be_kept_whole():
    whole = tf.function(lambda x: x + 1.0, autograph=False, **_compat.called_as_whole())
    definition = whole.get_concrete_function(tf.TensorSpec([])).function_def
    assert definition.attr["_noinline"].b
    assert definition.attr["_nospecialize"].b


# Fails if TensorFlow rewrites the graph all the same, or is left with other options.
def test_a_function_can_run_as_it_was_traced():
    rounds = tf.function(lambda x: (x + 1e5) - 1e5, autograph=False)
    value = tf.constant([0.3])
    with _compat.without_rewriting():
        assert float(rounds(value)[0]) != 0.3
        traced = rounds(value).numpy()
    plain = (np.float32(0.3) + np.float32(1e5)) - np.float32(1e5)
    np.testing.assert_array_equal(traced, [plain])
    np.testing.assert_allclose(rounds(value), [0.3], rtol=1e-6)


def test_tensorflow_says_whether_its_kernels_are_deterministic():
    from tensorflow.python.framework import config

    assert not _compat.kernels_are_deterministic()
    tf.config.experimental.enable_op_determinism()
    try:
        assert _compat.kernels_are_deterministic()
    finally:
        config.disable_op_determinism()


def test_a_mask_is_attached_as_keras_does():
    tensor, mask = tf.ones([2, 3]), tf.constant([[True, False, True]] * 2)
    _compat.set_keras_mask(tensor, mask)
    whole = keras.layers.GlobalAveragePooling1D()(tensor[..., None] * [[[1.0], [5.0], [3.0]]])
    assert float(whole[0, 0]) == 3.0
    assert _compat.keras_mask(tensor) is mask


def test_keras_says_how_it_reads_batches_and_what_reads_them_ahead():
    class Numbers(keras.utils.PyDataset):
        num_batches = 4

        def __getitem__(self, index):
            return (np.full(2, index),)

    assert _compat.reading_of_keras(np.zeros(3)) is None
    assert _compat.reading_of_keras(object()) is None
    for workers in (1, 2):
        data = Numbers(workers=workers)
        reading = _compat.reading_of_keras(data)
        assert reading.hooks is data
        assert [batch[0].tolist() for batch in reading.batches()] == [[i, i] for i in range(4)]
        before = threading.active_count()
        assert len(list(reading.looked_at())) == 4
        assert threading.active_count() == before, "on this thread"
        broken_off = reading.batches()
        next(broken_off)
        broken_off.close()
        # Keras names the thread that fills the queue, and joins it when it stops the enqueuer.
        assert not [one for one in threading.enumerate() if one.name.startswith("Worker_")]
    adapters = pkgutil.resolve_name("keras.src.trainers.data_adapters")
    assert adapters.get_data_adapter(data).enqueuer is not None


# Fails if Keras takes an adapter of the user for data that it has yet to adapt.
def test_keras_takes_an_adapter_as_it_is():
    adapter = type("Adapter", (_compat.data_adapter(),), {})()
    adapters = pkgutil.resolve_name("keras.src.trainers.data_adapters")
    assert adapters.get_data_adapter(adapter) is adapter


def test_a_variable_that_is_combined_when_it_is_read_has_this_class():
    with tmg.create_strategy(devices=2).scope():
        variable = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    assert isinstance(variable, _compat.variables_summed_when_read())


def test_a_gradient_of_the_user_is_known_by_its_operation():
    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), lambda gradient: tf.clip_by_norm(gradient, 1.0)

    def are_known(function):
        concrete = tf.function(function).get_concrete_function(tf.TensorSpec([2]))
        return any(map(_compat.may_not_be_linear, concrete.graph.get_operations()))

    assert are_known(clipped)
    assert are_known(tf.function(clipped))
    assert not are_known(lambda x: tf.nn.relu(x) * 2.0)


def test_keras_divides_a_loss_by_the_replicas_under_these_names():
    module, names = _compat.division_of_losses()
    loss = keras.losses.MeanSquaredError()
    for name in names:
        assert callable(getattr(module, name))

    def value():
        return loss(tf.ones([4, 1]), tf.zeros([4, 1]))

    strategy = tmg.create_strategy(devices=2)
    with strategy.scope():
        assert float(value()) == 0.5
        with patching(module, names[0], lambda original, value: value):
            assert float(value()) == 1.0


def test_keras_tries_again_what_it_could_not_create_unless_it_forgets():
    empty = keras.Variable(keras.initializers.Ones(), shape=(2,))
    state = pkgutil.resolve_name("keras.src.backend.common.global_state")
    state.set_global_attribute("uninitialized_variables", [empty])
    _compat.forget_empty_variables()
    assert state.get_global_attribute("uninitialized_variables") == []
