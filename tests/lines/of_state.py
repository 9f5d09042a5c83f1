"""State that is not a variable: tables, queues, Python code, draws of tf.random."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from problems import network

import tfmultigpu as tmg
from lines.messages import Told, example
from lines.parts import X, Y, compiled, made, step

BATCH = X, Y


class Calls(keras.layers.Layer):
    """Calls a function on the rows of a replica, and keeps what belongs to it."""

    def __init__(self, function: Any, kept: Any = None) -> None:
        super().__init__()
        self.function, self.kept = function, kept

    def call(self, x: Any) -> Any:
        return tf.ensure_shape(self.function(x), x.shape)


class CountsRows(keras.layers.Layer):
    """Counts rows in a variable that adds the replicas."""

    def build(self, shape: Any) -> None:
        shared = {"aggregation": "sum", "synchronization": "on_read"}
        self.rows = keras.Variable(0.0, trainable=False, name="rows", **shared)

    def call(self, x: Any) -> Any:
        self.rows.assign(self.rows + tf.cast(tf.shape(x)[0], tf.float32))
        return x


def trained(layer: Any, verify: Any = False) -> Any:
    """Returns a step that has trained a model with the layer that ``layer()`` creates."""
    model = made(lambda: network(4, layer(), keras.layers.Dense(2)))
    of_model = step(model, verify=verify)
    of_model(BATCH)
    return of_model


def table() -> Any:
    return tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)


def counting_in(table: Any) -> Any:
    def counted(x: Any) -> Any:
        key = tf.constant([0], tf.int64)
        rows = table.lookup(key) + tf.shape(x, tf.int64)[0]
        with tf.control_dependencies([table.insert(key, rows)]):
            return tf.identity(x)

    return counted


def queueing(queue: Any) -> Any:
    def queued(x: Any) -> Any:
        with tf.control_dependencies([queue.enqueue(tf.shape(x)[0])]):
            return tf.identity(x)

    return queued


def by_python(x: Any) -> Any:
    return tf.py_function(lambda x: 2.0 * x, [x], tf.float32)


def by_python_without_state(x: Any) -> Any:
    return tf.numpy_function(lambda x: 2 * x, [x], tf.float32, stateful=False)


@example("it runs Python code in {}, and what that remembers cannot be put back")
def python_code_that_is_verified(told: Told) -> None:
    with told():
        trained(lambda: Calls(by_python), verify="first")
    trained(lambda: Calls(by_python_without_state), verify="first")


@example("it changes a resource in {} that is not a variable")
def a_queue_that_is_verified(told: Told) -> None:
    queue = tf.queue.FIFOQueue(100, [tf.int32], [()])
    with told():
        trained(lambda: Calls(queueing(queue)), verify="first")
    trained(CountsRows, verify="first")
    trained(lambda: Calls(counting_in(kept := table()), kept), verify="first")


@example("The training changes state that the checkpoint would not hold")
def state_that_is_not_saved(told: Told) -> None:
    def saved(layer: Any, **options: Any) -> None:
        tmg.Checkpoints("run", train_step=trained(layer), **options).save()

    queue, other = tf.queue.FIFOQueue(100, [tf.int32], [()]), table()
    for function in (by_python, queueing(queue), counting_in(other)):
        with told():
            saved(lambda function=function: Calls(function))
    saved(lambda: Calls(by_python_without_state))
    saved(CountsRows)
    saved(lambda: Calls(counting_in(kept := table()), kept))
    saved(lambda: Calls(counting_in(other)), extra={"table": [other]})


@example("The training draws by tf.random in {}")
def draws_of_tensorflow(told: Told) -> None:
    class Noisy(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, x: Any) -> Any:
            return x + keras.random.normal(tf.shape(x), seed=self.seeds)

    def saved(name: str, layer: Any) -> None:
        tmg.Checkpoints(name, train_step=trained(layer)).save()

    with told():
        saved("first", lambda: Calls(lambda x: x + tf.random.normal([])))
    saved("second", Noisy)


@example("The checkpoint is of another model or has other extra objects")
def other_extra_tables(told: Told) -> None:
    model = compiled()

    def run(directory: str = "run", **extra: Any) -> Any:
        return tmg.Checkpoints(directory, model, model.optimizer, extra=extra)

    run(seen=[table()]).save()
    changed = [weight + 1 for weight in model.get_weights()]
    model.set_weights(changed)
    with told():
        run(found=[table()]).restore()
    for now, before in zip(model.get_weights(), changed, strict=True):
        assert (now == before).all(), "a checkpoint that is refused has changed the model"
    run(seen=[table()]).restore()
    run("another", found=[table()]).restore()
