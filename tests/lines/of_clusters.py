"""What several workers are told: each example runs on both workers of a cluster at once."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from law import worker_functions
from problems import network

import tfmultigpu as tmg
from lines.messages import EXAMPLES, Told, example, told
from lines.of_state import Calls, CountsRows, counting_in, table
from lines.parts import X, Y, dense

BATCH = X, Y


def run_on_a_worker(name: str) -> None:
    """Runs an example of this file on this worker, which has joined the cluster."""
    (chosen,) = [one for one in EXAMPLES if one.run.__name__ == name]
    chosen.run(functools.partial(told, chosen.messages()))


def strategy() -> Any:
    return worker_functions.joined["strategy"]


def worker() -> int:
    return int(strategy().cluster_resolver.task_id)


def compiled(**options: Any) -> Any:
    keras.utils.set_random_seed(1)
    with strategy().scope():
        model = dense()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def step(optimizer: Any = None, model: Any = None, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    with strategy().scope():
        model = model or dense()
        optimizer = optimizer or keras.optimizers.SGD(0.1)
    return tmg.make_train_step(model, optimizer, "mse", strategy(), verify=False, **options)


fit = functools.partial(tmg.fit, verbose=0, verify=False)


@example("The workers call fit with different arguments")
def other_epochs(told: Told) -> None:
    model = compiled()
    words = f"Received: epochs={1 + worker()} on worker {worker()}, and another value on worker"
    with told(tmg.errors.ClusterError, words):
        fit(model, BATCH, epochs=1 + worker())
    fit(model, BATCH, epochs=1)


@example("Only some workers changed their learning rate or weights")
def a_callback_on_one_worker(told: Told) -> None:
    class Halves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate.assign(0.05)

    model = compiled()
    rate = "0.05" if worker() else "0.1"
    words = f"Received: learning rate {rate}.* of this worker.*Give callbacks that change training"
    with told(tmg.errors.ClusterError, words):
        fit(model, BATCH, epochs=2, callbacks=[Halves()] if worker() else [])
    model = compiled()
    fit(model, BATCH, epochs=2, callbacks=[Halves()])


@example("If one of several workers runs out of memory")
def find_batch_size_in_a_cluster(told: Told) -> None:
    with told(), strategy().scope():
        tmg.find_batch_size(lambda size: None, limit=4)
    assert tmg.find_batch_size(lambda size: None, limit=4) == 4  # As in a separate process.


@example("The workers begin with different values of {}")
def weights_on_one_worker(told: Told) -> None:
    trained = step()
    if worker() == 0:
        trained.model.set_weights([np.zeros_like(w) for w in trained.model.get_weights()])
    with told():
        trained(BATCH)
    trained = step()
    trained.model.set_weights([np.zeros_like(w) for w in trained.model.get_weights()])
    trained(BATCH)


@example("The workers train with a different {}")
def other_clipping(told: Told) -> None:
    with told():
        step(clip_norm=1.0 + worker())(BATCH)
    step(clip_norm=1.0)(BATCH)


@example("This process has joined a cluster already")
def joining_twice(told: Told) -> None:
    with told():
        tmg.create_strategy("multi_worker", fallback=False)
    assert strategy().num_replicas_in_sync == 2


@example("An optimizer in strategy.run would add gradients over the workers once more")
def an_optimizer_in_replicas(told: Told) -> None:
    keras.utils.set_random_seed(1)
    with strategy().scope():
        model, optimizer = dense(), keras.optimizers.SGD(0.1)
        variables = model.trainable_variables
        optimizer.build(variables)
        window = tmg.GradientAccumulator(variables)

    def replica(batch: Any) -> None:
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum("mse", batch[1], model(batch[0]))
        window.add(tape.gradient(pair.sum, variables), pair.weight)

    def apply(gradients: Any) -> None:
        optimizer.apply(gradients, variables)

    def inside(batch: Any) -> None:
        strategy().run(replica, args=(batch,))
        strategy().run(apply, args=(window.reduce()[0],))

    def outside(batch: Any) -> None:
        strategy().run(replica, args=(batch,))
        tmg.apply_reduced_gradients(optimizer, window.reduce()[0], variables)

    (batch,) = tmg.distribute_dataset(BATCH, strategy(), batch_size=8)
    with told(tmg.TfMultiGpuError, r"tmg\.accumulation\.apply_reduced_gradients\("):
        tf.function(inside, autograph=False)(batch)
    tf.function(outside, autograph=False)(batch)


@example("The workers see different checkpoints in {}")
def folders_of_their_own(told: Told) -> None:
    model = compiled()
    checkpoints = tmg.Checkpoints(f"own-{worker()}", model, model.optimizer)
    if worker() == 0:
        checkpoints.directory.mkdir(exist_ok=True)
    checkpoints.save()
    with told(tmg.CheckpointError, r"step of each worker: \[0, -1\]\. Give"):
        tmg.Checkpoints(f"own-{worker()}", model, model.optimizer).restore()
    tmg.Checkpoints("shared", model, model.optimizer).save()
    tmg.Checkpoints("shared", model, model.optimizer).restore()


@example("Callbacks of workers {} write to one path")
def one_file_of_all_workers(told: Told) -> None:
    model = compiled()

    def logged(*callbacks: Any) -> None:
        fit(model, BATCH, callbacks=callbacks)

    with told():
        logged(keras.callbacks.CSVLogger("losses.csv"))
    logged(keras.callbacks.CSVLogger(filename=tmg.workers.own_path("losses.csv")))
    callback = keras.callbacks.CSVLogger("alone.csv")
    logged(*([callback] if tmg.workers.is_first() else []))


def counting(in_a_table: bool = False) -> Any:
    with strategy().scope():
        layer = Calls(counting_in(kept := table()), kept) if in_a_table else CountsRows()
        model = network(4, layer, keras.layers.Dense(2))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@example("Keras can save this model only on all workers at once")
def saved_by_one_worker(told: Told) -> None:
    keras.utils.set_random_seed(1)
    model = counting()
    alone = keras.callbacks.ModelCheckpoint("first.keras", monitor="loss")
    with told():
        fit(model, BATCH, callbacks=[alone] if tmg.workers.is_first() else [])
    path = tmg.workers.own_path("model.keras")
    fit(model, BATCH, callbacks=[keras.callbacks.ModelCheckpoint(path)])


@example("Workers hold different tables, and a checkpoint has one")
def tables_of_each_worker(told: Told) -> None:
    trained = step(model=counting(in_a_table=True))
    checkpoints = tmg.Checkpoints("table", train_step=trained)
    trained((X[:7], Y[:7]))
    with told():
        checkpoints.save()
    trained = step(model=counting())
    checkpoints = tmg.Checkpoints("variable", train_step=trained)
    for _ in range(2):
        trained((X[:7], Y[:7]))
    checkpoints.save()
    assert float(trained.model.layers[0].rows.numpy()) == 14.0
