"""Sharded variables, tuning, verification, tools for tests, descriptions of a cluster."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from law.processes import pool
from one_device import unused_strategy
from problems import network

import tfmultigpu as tmg
from lines.messages import Told, example
from lines.parts import X, Y, batches, compiled, dense, distribute, fit, made, step, strategy_of
from tfmultigpu.addons.watching.causes import in_words_of, read_reports
from tfmultigpu.addons.workers.launcher import launch
from tfmultigpu.demo import load_digits

BATCH = X, Y
hold = tmg.testing.assert_replica_invariant


def sharded(build: Any = dense, **options: Any) -> Any:
    with strategy_of(2).scope(), tmg.sharded_variables(at_least=0, **options):
        return build()


# Sharded variables --------------------------------------------------------------------------------


def table_in_parts(optimizer: Any = keras.optimizers.Adagrad) -> Any:
    """Returns a model whose table is larger than each of two devices."""
    memory = {"CPU:0": 2e6, "CPU:1": 2e6}
    with unused_strategy(2).scope(), tmg.sharded_variables(memory=memory):
        table = keras.layers.Embedding(8192, 32, name="items")
        layers = [keras.Input((1,), dtype="int32"), table, keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        model.compile(optimizer(), "mse")
        return model


IDS = np.ones((8, 1), "int32")


@example("The rows of a table are on several devices, and this optimizer needs")
def an_optimizer_that_needs_the_whole_table(told: Told) -> None:
    with told():
        tmg.fit(table_in_parts(keras.optimizers.Lamb), IDS, Y, batch_size=8, verbose=0)
    for optimizer in (keras.optimizers.Adagrad, keras.optimizers.Adam):
        tmg.fit(table_in_parts(optimizer), IDS, Y, batch_size=8, verbose=0)


@example("The rows of this table are on several devices, so it is not one variable")
def a_tape_over_a_table_in_parts(told: Told) -> None:
    model = table_in_parts()
    with told(), tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(IDS))
        tape.gradient(loss, model.trainable_variables)
    strategy = model.trainable_variables[0].value.distribute_strategy
    loss = keras.losses.MeanSquaredError()
    tmg.make_train_step(model, model.optimizer, loss, strategy, verify=False)((IDS, Y))


@example("TensorFlow writes no SavedModel of a table whose rows")
def a_saved_model_of_a_table_in_parts(told: Told) -> None:
    model = table_in_parts()
    with tempfile.TemporaryDirectory() as folder:
        with told():
            model.export(f"{folder}/saved", verbose=False)
        model.save_weights(f"{folder}/model.weights.h5")
        layers = [keras.layers.Embedding(8192, 32), keras.layers.Flatten(), keras.layers.Dense(2)]
        alone = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
        alone.load_weights(f"{folder}/model.weights.h5")
        alone.export(f"{folder}/saved", verbose=False)


@example("Layers are placed by hand on one replica")
def layers_by_hand_on_two_replicas(told: Told) -> None:
    with told(tmg.TfMultiGpuError, "LayersByHand and 2 replicas"):
        step(features=[tmg.sharding.LayersByHand()])
    by_hand = [tmg.sharding.LayersByHand()]
    alone = tf.distribute.get_strategy()
    tmg.make_train_step(dense(), keras.optimizers.SGD(), "mse", alone, features=by_hand)(BATCH)


@example("A pipeline needs several micro-batches")
def a_pipeline_of_one_micro_batch(told: Told) -> None:
    def placed(micro_batches: int) -> Any:
        return tmg.make_train_step(
            dense(), keras.optimizers.SGD(), "mse", tf.distribute.get_strategy(),
            micro_batches=micro_batches, features=[tmg.sharding.LayersByHand(pipeline=True)],
        )  # fmt: skip

    with told(tmg.TfMultiGpuError, r"micro_batches=1\. Write"):
        placed(1)
    placed(8)(BATCH)


@example("XLA cannot read a variable on another device")
def sharded_by_xla(told: Told) -> None:
    with told(tmg.TfMultiGpuError):
        step(sharded(), jit_compile=True)(BATCH)
    step(sharded())(BATCH)
    step(made(), jit_compile=True)(BATCH)


class Counts(keras.layers.Layer):
    """Assigns a weight of its own in each call."""

    def __init__(self, trainable: bool) -> None:
        super().__init__()
        self.dense, self.of_trained = keras.layers.Dense(2), trainable

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(4,), trainable=self.of_trained)
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(tf.ones(4))
        return self.dense(x) + 0.0 * tf.reduce_sum(self.calls)


@example("All replicas share a sharded variable, so none may write to it")
def a_layer_that_assigns_a_sharded_variable(told: Told) -> None:
    def counting(trainable: bool) -> Any:
        return network(4, Counts(trainable))

    model = sharded(lambda: counting(trainable=True))
    kernel = model.layers[0].calls
    with told():
        strategy_of(2).run(lambda: kernel.assign(tf.ones(4)))
    step(sharded(lambda: counting(trainable=False)))(BATCH)
    other = made(lambda: counting(trainable=True)).layers[0].calls
    strategy_of(2).run(lambda: other.assign(tf.ones(4)))


@example("sharded_variables was entered outside the scope of a strategy")
def sharded_outside_the_scope(told: Told) -> None:
    with told(tmg.ScopeError, r"with strategy\.scope\(\), tmg\.sharded"), tmg.sharded_variables():
        dense()
    with strategy_of(2).scope(), tmg.sharded_variables():
        dense()


@example("Variables can be sharded over the devices of a mirrored strategy only")
def sharded_centrally(told: Told) -> None:
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with told(tmg.TfMultiGpuError), central.scope(), tmg.sharded_variables():
        dense()
    strategy = tmg.create_strategy(prefer="mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope(), tmg.sharded_variables():
        dense()


@example("A sharded variable is updated once, not by every replica")
def apply_to_sharded_variables(told: Told) -> None:
    model = sharded()
    with strategy_of(2).scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    variables = model.trainable_variables
    gradients = [tf.zeros(variable.shape) for variable in variables]
    model.optimizer.build(variables)
    with told():
        strategy_of(2).run(model.optimizer.apply, args=(gradients, variables))
    fit(X, Y, model=model)
    step(model, "mse", model.optimizer)(BATCH)


@example("memory has a positive number of bytes for each device of the strategy")
def memory_of_one_of_two(told: Told) -> None:
    with told(tmg.errors.DataError, "for each device"):
        sharded(memory={"CPU:0": 22e9})
    sharded(memory={"CPU:0": 22e9, "CPU:1": 8e9})


@example("One variable is larger than every device")
def larger_than_every_device(told: Told) -> None:
    memory = {"CPU:0": 5e3, "CPU:1": 5e3}

    def build(*widths: int, dtype: str = "float32") -> Any:
        x = keras.Input((4,))
        parts = [keras.layers.Dense(width, dtype=dtype)(x) for width in widths]
        return keras.Model(x, keras.ops.concatenate(parts, axis=-1) if widths[1:] else parts[0])

    with told():
        sharded(lambda: build(400), memory=memory)
    sharded(lambda: build(200, 200), memory=memory)
    gc.collect()  # Of that model, which counts as long as it lives.
    sharded(lambda: build(400, dtype="bfloat16"), memory=memory)


# Tuning -------------------------------------------------------------------------------------------


@example("A batch of one example does not fit into memory")
def nothing_fits(told: Told) -> None:
    def needs(room: int) -> Any:
        def try_batch(size: int) -> None:
            if size > room:
                raise MemoryError

        return try_batch

    with told():
        tmg.find_batch_size(needs(0), limit=4)
    assert tmg.find_batch_size(needs(2), limit=4) == 2  # A model of half the size.


@example("The memory of {} {}. Or give it in bytes")
def memory_of_cpus(told: Told) -> None:
    strategy = strategy_of(2)
    with told():
        tmg.memory_capacities(strategy)
    tmg.memory_capacities(strategy, memory={"CPU:0": 8 * 1024**3, "CPU:1": 8 * 1024**3})


@example("memory must be a positive number of bytes for replicas of this process")
def memory_of_zero(told: Told) -> None:
    strategy = strategy_of(2)
    with told():
        tmg.memory_capacities(strategy, memory={"CPU:0": 0, "CPU:1": 1e9})
    tmg.memory_capacities(strategy, memory={"CPU:0": 8 * 1024**3, "CPU:1": 1e9})


@example("This is not a report of tmg.watch")
def no_report_of_a_watch(told: Told) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "other.json")
        file.write_text("{}")
        for wrong in (str(file), folder):
            with told(tmg.TfMultiGpuError):
                read_reports([wrong])
        with tmg.watch(0.05, folder):
            while not list(Path(folder).glob("watch-*.json")):
                time.sleep(0.01)
        assert "Likely cause: " in in_words_of(read_reports([folder]))


@example("There is no batch to profile")
def nothing_to_profile(told: Told) -> None:
    trained = step()
    with told(tmg.errors.DataError):
        tmg.tuning.profile_step(trained, distribute(batches().take(0)))
    tmg.tuning.profile_step(trained, distribute(batches()), steps=2)


@example("plan_memory takes a train step")
def plan_of_a_model(told: Told) -> None:
    trained = step()
    with told(TypeError, "Received: step="):
        tmg.plan_memory(trained.model, BATCH)
    assert tmg.plan_memory(trained, BATCH).devices


@example("memory is the bytes of each device")
def a_plan_for_no_memory(told: Told) -> None:
    with told(ValueError, "memory=0"):
        tmg.plan_memory(step(), BATCH, memory=0)
    assert tmg.plan_memory(step(), BATCH, memory=24 * 1024**3).devices


@example("The plan has no such option")
def an_option_of_a_plan(told: Told) -> None:
    plan = tmg.plan_memory(step(), BATCH)
    with told(ValueError, r"Write one of \['.*Received: 'remat'"):
        plan.option("remat")
    assert plan.option(plan.options[0].write)


@example("A probe needs devices that count their memory, such as GPUs")
def probe_of_a_cpu(told: Told) -> None:
    trained = step()
    with told(tmg.TfMultiGpuError):
        tmg.plan_memory(trained, BATCH, probe=True)
    tmg.plan_memory(trained, BATCH)


@example("profile_step reads the data again where it ends, which an iterator cannot")
def profile_of_an_iterator(told: Told) -> None:
    trained = step()
    with told(tmg.errors.DataError):
        tmg.tuning.profile_step(trained, iter(distribute(batches())))
    tmg.tuning.profile_step(trained, distribute(batches()), steps=2)


@example("batch must be a whole global batch of arrays or tensors")
def speeds_of_a_divided_batch(told: Told) -> None:
    trained = step()
    trained(BATCH)
    (batch,) = distribute(batches(size=8))
    x, y = (np.concatenate([array] * 32) for array in BATCH)
    with told():
        tmg.measured_capacities(trained, batch)
    measured(trained, (x[:256], y[:256]))


def measured(trained: Any, batch: Any, *seconds: float) -> None:
    """Measures with these seconds: of one example for each replica, and of the rest on one."""
    times = f"{tmg.measured_capacities.__module__}._fastest_times"
    with mock.patch(times, return_value=list(seconds or (1.0, 2.0, 3.0))):
        tmg.measured_capacities(trained, batch, repeats=1)


@example("More examples did not take a replica longer")
def speeds_that_do_not_show(told: Told) -> None:
    trained = step()
    trained(BATCH)
    with told():
        measured(trained, BATCH, 1.0, 1.0, 0.5)
    x, y = (np.concatenate([array] * 32) for array in BATCH)
    measured(trained, (x, y))


@example("The batch is too small to measure speeds")
def speeds_of_a_small_batch(told: Told) -> None:
    trained = step()
    trained(BATCH)
    with told(tmg.errors.DataError, r"7 examples for 2 replicas\. Give 8 or more"):
        tmg.measured_capacities(trained, (X[:7], Y[:7]))
    measured(trained, (X[:8], Y[:8]))


@example("Measuring trains and then restores the variables")
def speeds_of_a_new_step(told: Told) -> None:
    trained = step(made(lambda: keras.Sequential([keras.layers.Dense(2)])))
    with told(tmg.errors.DataError, r"Call step\(batch\) once\."):
        tmg.measured_capacities(trained, BATCH)
    trained(BATCH)
    measured(trained, BATCH)


# Verification and tools for tests -----------------------------------------------------------------


@example("The step could not be compared with one device")
def what_one_device_cannot_run(told: Told) -> None:
    def forward(model: Any, batch: Any, training: bool) -> Any:
        if tf.distribute.get_strategy().num_replicas_in_sync == 1:
            raise RuntimeError("needs two replicas")
        return tmg.loss_sum("mse", batch[1], model(batch[0]))

    with told():
        step(None, None, forward=forward, verify="first")(BATCH)
    step(None, None, forward=forward, verify=False)(BATCH)


@example("The result depends on how the batch was cut")
def rows_that_meet(told: Told) -> None:
    rows = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")

    def train(layer: Any = None, forward: Any = None, change: Any = None) -> None:
        layers = [layer()] if layer else []
        model = made(lambda: network(4, *layers, keras.layers.Dense(2)))
        if change is not None:
            change(model)
        loss = None if forward else "mse"
        step(model, loss, forward=forward, verify="first")((rows, rows[:, :2]))

    # BatchNormalization: tmg.synchronize_batch_norm(model).
    with told():
        train(keras.layers.BatchNormalization)
    train(keras.layers.BatchNormalization, change=tmg.synchronize_batch_norm)

    # A loss over the whole batch: tmg.gather_rows(tensor).
    def spread(gather: Any) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            outputs = model(batch[0])
            values = tf.reduce_sum(tf.square(outputs - tf.reduce_mean(gather(outputs), 0)), -1)
            return tmg.LossSum(tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32))

        return forward

    with told():
        train(forward=spread(lambda outputs: outputs))
    train(forward=spread(tmg.gather_rows))

    # A draw for two parts: one draw for each.
    seeds = made(lambda: network(4, keras.layers.Dropout(0.1))).layers[0].seed_generator

    def noise(draw: Any) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            both = tf.concat([batch[0], 2.0 * batch[0]], 0)
            values = tf.square(model(both)) * draw(tf.shape(batch[0])[0])
            return tmg.LossSum(tf.reduce_sum(values), tf.size(values))

        return forward

    with told(tmg.ReplicaDependenceWarning, r"first axis is 2 \* rows\. .*Draw once for each part"):
        train(forward=noise(lambda rows: keras.random.normal((2 * rows, 1), seed=seeds)))
    parts = range(2)
    train(
        forward=noise(
            lambda rows: tf.concat([keras.random.normal((rows, 1), seed=seeds) for _ in parts], 0)
        )
    )

    # A mean in place of a sum: tmg.LossSum(tf.reduce_sum(values), tf.size(values)).
    def weighted(mean: bool) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            values = tf.square(model(batch[0]) - batch[1])
            if mean:
                return tmg.LossSum(tf.reduce_mean(values), tf.ones([]))
            return tmg.LossSum(tf.reduce_sum(values), tf.size(values))

        return forward

    with told():
        step(None, None, forward=weighted(mean=True), verify="first")((rows[:7], rows[:7, :2]))
    train(forward=weighted(mean=False))

    # A sum over rows that a layer adds: self.add_loss(values).
    class Adds(keras.layers.Layer):
        total = False

        def call(self, x: Any) -> Any:
            values = tf.reduce_sum(tf.square(x), -1)
            self.add_loss(tf.reduce_sum(values) if self.total else values)
            return x

    class AddsTheSum(Adds):
        total = True

    with told(tmg.ReplicaDependenceWarning, r"self\.add_loss\(values\) takes one for each row"):
        train(AddsTheSum)
    train(Adds)


def returning(value: Any) -> Any:
    return lambda strategy: value


@example("train returned nothing to compare")
def nothing_returned(told: Told) -> None:
    with told():
        hold(returning(None))
    hold(lambda strategy: made(replicas=2).get_weights())


@example("train returned what cannot be compared")
def a_model_returned(told: Told) -> None:
    model = dense()
    with told():
        hold(returning(model))
    hold(returning(model.get_weights()))


@example("One device has no finite number to compare with")
def nan_returned(told: Told) -> None:
    with told():
        hold(returning({"loss": np.nan, "weights": 1.0}))
    hold(returning({"weights": 1.0}))


@example("strategy.run returns a value for each replica, and one device has one")
def values_of_replicas_returned(told: Told) -> None:
    def train(strategy: Any, reduce: bool = True) -> Any:
        with strategy.scope():
            value = strategy.run(lambda: tf.ones([]) / strategy.num_replicas_in_sync)
            return strategy.reduce("SUM", value, axis=None) if reduce else value

    with told():
        hold(lambda strategy: train(strategy, reduce=False))
    hold(train)


@example("Received: replicas={}, tolerance={}")
def no_replicas(told: Told) -> None:
    with told(ValueError, r"replicas=\(\)"):
        hold(returning(1.0), replicas=())
    hold(returning(1.0), replicas=(2, 3), tolerance=1e-6)


@example("dataset must yield global batches")
def one_batch_in_place_of_a_list(told: Told) -> None:
    def build() -> Any:
        return tmg.testing.Training(dense(), keras.optimizers.SGD(0.1), "mse")

    with told(tmg.TfMultiGpuError):
        hold(build, BATCH)
    hold(build, [BATCH, BATCH])
    hold(build, tf.data.Dataset.from_tensor_slices(BATCH).batch(8))


@example("build must return a Training")
def a_model_built(told: Told) -> None:
    with told(
        tmg.TfMultiGpuError, r"Received: Sequential\. Write def build\(\): return tmg\.testing"
    ):
        hold(dense, [BATCH])
    hold(lambda: tmg.testing.Training(dense(), keras.optimizers.SGD(0.1), "mse"), [BATCH])


@example("A function that takes the strategy trains and predicts by itself")
def options_of_a_function(told: Told) -> None:
    def train(strategy: Any) -> Any:
        with strategy.scope():
            model, optimizer = dense(kernel_initializer="ones"), keras.optimizers.SGD(0.1)
        trained = tmg.make_train_step(model, optimizer, "mse", strategy, micro_batches=2)
        trained(BATCH)
        return model.get_weights()

    with told():
        hold(train, micro_batches=2)
    hold(train)


@example("A worker process cannot be sent this")
def a_lambda_in_workers(told: Told) -> None:
    with told(ValueError, "from the top level of a module"):
        tmg.testing.run_workers(lambda: None, workers=1)
    tmg.testing.run_workers(os.getpid, workers=1)
    Path("train.py").write_text("print('trained')")
    tmg.testing.run_workers("train.py", workers=1)


# Descriptions of a cluster ------------------------------------------------------------------------

WORKERS = ["host1:2222", "host2:2222"]
TASK = {"type": "worker", "index": 0}


def planned(config: Any = None, **environ: str) -> Any:
    """Plans where TF_CONFIG is this; there is no side effect."""
    if config is not None:
        environ["TF_CONFIG"] = config if isinstance(config, str) else json.dumps(config)
    with mock.patch.dict(os.environ, environ):
        return tmg.plan_strategy()


def config_of(cluster: Any = None, task: Any = None, **more: Any) -> Any:
    return {"cluster": cluster or {"worker": WORKERS}, "task": task or TASK, **more}


def right_config() -> None:
    assert planned(config_of()).kind == "multi_worker"


def wrong_configs(told: Told, *configs: Any, words: str = "^TF_CONFIG: ") -> None:
    for config in configs:
        with told(tmg.errors.ClusterError, words):
            planned(config)
    right_config()


@example('has "sparseCluster"')
def sparse_cluster(told: Told) -> None:
    wrong_configs(told, config_of(sparseCluster={}), words="enableDynamicWorker")
    planned(config_of())


@example('"rpc_layer" must be "grpc"')
def rpc_layer(told: Told) -> None:
    wrong_configs(told, config_of(rpc_layer="http"), words="Received: .http")
    planned(config_of())


@example("task.type is not in the cluster")
def a_task_without_cluster(told: Told) -> None:
    config = config_of(task={"type": "chief", "index": 0})
    wrong_configs(told, config, words=r"It has \['worker'\]")
    planned(config_of({"chief": WORKERS[:1], "worker": WORKERS[1:]}, {"type": "chief", "index": 0}))


@example("task.index is out of range, or not a whole number")
def a_task_out_of_range(told: Told) -> None:
    config = config_of(task={"type": "worker", "index": 2})
    wrong_configs(told, config, words=r"cluster\.worker has 2 .*: 0 to 1")
    planned(config_of(task={"type": "worker", "index": 1}))


@example("is not JSON")
def not_json(told: Told) -> None:
    wrong_configs(told, "{")
    planned()  # Unset: it trains alone.


@example('must be a JSON object with an object "{}"')
def no_task(told: Told) -> None:
    wrong_configs(told, {"cluster": {"worker": WORKERS}})
    right_config()


@example('"cluster" has an unknown task type')
def parameter_servers(told: Told) -> None:
    config = config_of({"worker": WORKERS[:1], "ps": WORKERS[1:]})
    wrong_configs(told, config, words=r"'ps'\. .*Parameter servers \(ps\) are ")
    planned(config_of({"worker": WORKERS}))


@example("cluster.{} must be a list of addresses")
def addresses_as_text(told: Told) -> None:
    wrong_configs(told, config_of({"worker": "host1:2222"}), words="Received: 'host1:2222'")
    right_config()


@example('"cluster" must have one chief')
def two_chiefs(told: Told) -> None:
    wrong_configs(told, config_of({"chief": WORKERS}))
    planned(config_of({"chief": WORKERS[:1], "worker": WORKERS[1:]}))


@example("TF_CONFIG: {}. Received: {}. {}.")
def any_wrong_config(told: Told) -> None:
    wrong_configs(told, "[]")
    right_config()


@example("workers must be a list of addresses")
def workers_as_text(told: Told) -> None:
    with told(tmg.errors.ClusterError, "Received: 'host1:2222'"):
        tmg.workers.Cluster("host1:2222", 0)
    tmg.workers.Cluster(workers=["host1:2222", "host2:2222"], index=0)


@example("index must be a whole number")
def an_index_as_text(told: Told) -> None:
    for wrong in ("0", True):
        with told(tmg.errors.ClusterError, f"Received: {wrong!r}"):
            tmg.workers.Cluster(WORKERS, wrong)  # type: ignore[arg-type]
    tmg.workers.Cluster(workers=["host1:2222", "host2:2222"], index=0)


@example("{}: {}. Received: {}. {}.")
def any_wrong_cluster(told: Told) -> None:
    with told(tmg.errors.ClusterError, "^Cluster: .* It looks like Clus"):
        tmg.workers.Cluster([], 0)
    tmg.workers.Cluster(workers=["host1:2222", "host2:2222"], index=0)


@example("index is out of range")
def an_index_out_of_range(told: Told) -> None:
    with told(tmg.errors.ClusterError, r"Received: 2\. There are 2 workers: 0 to 1\."):
        tmg.workers.Cluster(WORKERS, 2)
    tmg.workers.Cluster(WORKERS, 1)


@example("workers[{}] must be host:port, without a scheme")
def an_address_with_a_scheme(told: Told) -> None:
    with told():
        tmg.workers.Cluster(["grpc://host1:2222"], 0)
    tmg.workers.Cluster(["host1:2222"], 0)


@example("workers[{}] is listed twice")
def an_address_twice(told: Told) -> None:
    with told():
        tmg.workers.Cluster(["host1:2222", "host1:2222"], 0)
    tmg.workers.Cluster(["host1:2222", "host1:2223"], 0)


SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[9-10]", "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NODEID": "1", "SLURM_PROCID": "2",
}  # fmt: skip


@example("there are {} tasks on {} nodes, and not {}")
def slurm_of_another_step(told: Told) -> None:
    with told():
        planned(**{**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2"})
    assert planned(**SLURM).kind == "multi_worker"


@example("task {} is not on node {}, as if Slurm had not numbered")
def slurm_that_deals_tasks(told: Told) -> None:
    with told(tmg.errors.ClusterError, "task 2 is not on node 1.*Write srun --distribution=block"):
        planned(**{**SLURM, "SLURM_NODEID": "0"})
    assert planned(**SLURM).kind == "multi_worker"  # As srun --distribution=block sets it.


@example("{} Received: {}. Start the program with srun")
def slurm_without_variables(told: Told) -> None:
    partly = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    with told(tmg.errors.ClusterError, "SLURM_STEP_NODELIST is not set"):
        planned(**partly)
    assert planned(**SLURM).kind == "multi_worker"
    alone = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NUM_TASKS"}
    assert planned(**alone).kind != "multi_worker"


@example("cannot be combined with the cluster of {}")
def devices_beside_a_cluster(told: Told) -> None:
    with mock.patch.dict(os.environ, {"TF_CONFIG": json.dumps(config_of())}):
        with told():
            tmg.plan_strategy(devices=["CPU:0", "CPU:1"])
        assert tmg.plan_strategy().kind == "multi_worker"
        assert tmg.plan_strategy("mirrored", devices=["CPU:0", "CPU:1"]).kind == "mirrored"


@example("There is no such script")
def a_script_that_is_missing(told: Told) -> None:
    with told(ValueError, r"Received: 'train\.py', in /"):
        launch("train.py", workers=1)
    Path("train.py").write_text("print('trained')")
    command = [sys.executable, "-m", "tfmultigpu", "launch", "--workers", "1"]
    assert subprocess.run([*command, "train.py"], check=False).returncode == 0
    assert subprocess.run([*command, "-m", "this"], check=False).returncode == 0


@example("Workers are a number, the smallest and the largest number, or all that fit")
def numbers_of_workers_that_make_no_sense(told: Told) -> None:
    Path("train.py").write_text("import os; open(os.environ['TFMULTIGPU_JOINED'], 'w').close()")
    with told(tmg.errors.ClusterError, "Received: --workers 4:1"):
        launch("train.py", workers="4:1")
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "-1"}):
        assert [launch("train.py", workers=text) for text in ("4", "1:4", "1,2,4")] == [0] * 3


@example("{} workers need a GPU each, and there are {}")
def more_workers_than_gpus(told: Told) -> None:
    Path("train.py").write_text("print('trained')")
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0"}):
        with told(tmg.DeviceNotFoundError, r"2 workers need a GPU each, .* 1\. Write --work"):
            launch("train.py", workers=2)
        assert launch("train.py", workers=1) == 0
    # Says that the workers have joined, as create_strategy does, which would import TensorFlow.
    Path("train.py").write_text("import os; open(os.environ['TFMULTIGPU_JOINED'], 'w').close()")
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "-1"}):
        assert launch("train.py", workers=2) == 0


@example("tf.distribute trains Keras models on the TensorFlow backend only")
def another_backend(told: Told) -> None:
    with mock.patch.object(keras.config, "backend", return_value="jax"), told():
        tmg.fit(compiled(), (X, Y))
    worker = pool().start(KERAS_BACKEND="jax")
    worker.call(first_import_of_keras)
    worker.end()


def first_import_of_keras() -> None:
    """Imports Keras after the line of the message, as if it had not been imported before."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "keras"]:
        del sys.modules[name]
    os.environ["KERAS_BACKEND"] = "tensorflow"
    imported = importlib.import_module("keras")
    assert imported is not keras
    assert imported.config.backend() == "tensorflow"


@example("{} has not enough memory for this step")
def out_of_memory(told: Told) -> None:
    def needing(most: int) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            rows = tf.shape(batch[0])[0]
            bytes_ = tf.where(rows > most, tf.constant(2**50, tf.int64), 1)
            waste = tf.reduce_sum(tf.fill([bytes_], 1.0))
            pair = tmg.loss_sum("mse", batch[1], model(batch[0]))
            return tmg.LossSum(pair.sum + 0.0 * waste, pair.weight)

        return forward

    uneven = X[:7], Y[:7]  # On one replica: TensorFlow waits ten seconds for memory on each.
    small = step(None, None, forward=needing(3))
    with told():
        small(uneven)
    assert "Memory of a step" in str(tmg.plan_memory(small, uneven))
    step(None, None, forward=needing(3), micro_batches=2)(uneven)
    trained = step(None, None, forward=needing(5))
    for batch in tmg.distribute_dataset(batches(size=8), strategy_of(2), shares=(3, 5)):
        trained(batch)


@example("The digits need scikit-learn")
def without_scikit_learn(told: Told) -> None:
    with mock.patch.dict(sys.modules, {"sklearn": None}), told():
        load_digits()
    load_digits()  # As after pip install scikit-learn.
