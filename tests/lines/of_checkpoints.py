"""Checkpoints, and the data that they resume in."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from problems import network

import tfmultigpu as tmg
from lines.messages import Told, example
from lines.parts import X, Y, batches, compiled, fit, made, optimizer_of, step


def small(units: int = 2) -> tuple[Any, Any]:
    model = network(3, keras.layers.Dense(units))
    return model, keras.optimizers.SGD(0.1)


@contextlib.contextmanager
def without_a_seed() -> Iterator[None]:
    """Runs code as in a program that sets no seed; those before it in this process may have."""
    tf.random.set_seed(None)
    try:
        yield
    finally:
        keras.utils.set_random_seed(1)


def counted(checkpoints: Any, epochs: int = 1) -> None:
    """Counts the steps of some epochs, without training."""
    for _ in checkpoints.epochs(epochs):
        for _ in checkpoints.data:
            checkpoints.after_step()


class Remembers(keras.callbacks.Callback):
    """Has an attribute that no file can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.what = deque([1])

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.what.append(batch)


class RemembersByHand(Remembers):
    def state(self) -> Any:
        return list(self.what)

    def set_state(self, value: Any) -> None:
        self.what = deque(value)


@example("Checkpoints cannot save these attributes of callbacks")
def attributes_of_a_callback(told: Told) -> None:
    model = compiled()

    def trained(directory: str, callback: Any, **options: Any) -> None:
        checkpoints = tmg.Checkpoints(directory, model, model.optimizer)
        callbacks = [callback, checkpoints.callback(**options)]
        fit(X, Y, model=model, callbacks=callbacks)

    with told():
        trained("first", Remembers())
    trained("second", RemembersByHand())


@example("Checkpoints hold one fit")
def a_second_fit(told: Told) -> None:
    model = compiled()
    checkpoints = tmg.Checkpoints("run", model, model.optimizer)
    fit(X, Y, model=model, callbacks=[checkpoints.callback()])
    with told(tmg.CheckpointError, r"call checkpoints\.restore\(\) again"):
        fit(X, Y, model=model, callbacks=[checkpoints.callback()])
    other = tmg.Checkpoints("another", model, model.optimizer)
    other.restore()
    fit(X, Y, model=model, callbacks=[other.callback()])


@example("The fit of Keras cannot resume")
def checkpoints_in_keras_fit(told: Told) -> None:
    model = compiled()
    checkpoints = tmg.Checkpoints("run", model, model.optimizer)
    with told(tmg.CheckpointError, r"or tmg\.prepare\(model\) before it"):
        model.fit(X, Y, callbacks=[checkpoints.callback()], verbose=0)
    fit(X, Y, model=model, callbacks=[checkpoints.callback()])
    with tmg.prepare(model):
        other = tmg.Checkpoints("other", model, model.optimizer)
        model.fit(X, Y, callbacks=[other.callback()], verbose=0)


@example("All checkpoints in {} are damaged")
def all_damaged(told: Told) -> None:
    tmg.Checkpoints("run", *small()).save().write_bytes(b"")
    with told():
        tmg.Checkpoints("run", *small()).restore()
    tmg.Checkpoints("another", *small()).restore()


@example("A checkpoint is damaged and was skipped")
def one_damaged(told: Told) -> None:
    checkpoints = tmg.Checkpoints("run", *small())
    checkpoints.save()
    checkpoints.after_step()
    checkpoints.save().write_bytes(b"")
    with told():
        assert tmg.Checkpoints("run", *small()).restore() == 0
    assert tmg.Checkpoints("run", *small()).restore() == 0  # The damaged one is put aside.


@example("it has format {} and {} of {} arrays")
def of_another_format(told: Told) -> None:
    checkpoints = tmg.Checkpoints("run", *small())
    path = checkpoints.save()
    with np.load(path) as arrays:
        kept = dict(list(arrays.items())[:-1])
    checkpoints.after_step()
    later = checkpoints.save()
    np.savez(later, **kept)
    with told():
        tmg.Checkpoints("run", *small()).restore()
    assert tmg.Checkpoints("run", *small()).restore() == 0


@example("The chief cannot save step {} to {}")
def a_directory_that_is_a_file(told: Told) -> None:
    Path("file").write_text("")
    with told():
        tmg.Checkpoints("file/run", *small()).save()
    tmg.Checkpoints("another", *small()).save()


@example("it has step {}, which this run has not reached")
def a_run_that_was_not_restored(told: Told) -> None:
    first = tmg.Checkpoints("run", *small())
    first.after_step(10)
    first.save()
    again = tmg.Checkpoints("run", *small())
    with told():
        again.save()
    again.restore()
    again.save()
    tmg.Checkpoints("another", *small()).save()


@example("directory must be a folder for this run, not a URL")
def a_url(told: Told) -> None:
    with told(ValueError, "Mount remote storage and give its path"):
        tmg.Checkpoints("gs://bucket/run", *small())
    tmg.Checkpoints("mounted/run", *small()).save()


@example("The position in the data is unknown")
def steps_that_are_not_counted(told: Told) -> None:
    def checkpoints(name: str) -> Any:
        return tmg.Checkpoints(name, *small(), data=tf.data.Dataset.range(10).batch(2))

    first = checkpoints("first")
    with told():
        for _ in first.epochs(1):
            first.after_step()
    counted(checkpoints("second"))
    third = checkpoints("third")
    for _ in third.epochs(1):
        iterator = iter(third.data)
        for _ in range(5):
            next(iterator)
            third.after_step()


def stopped_in_the_middle(name: str, data: Any) -> None:
    """Saves after two of five steps."""
    checkpoints = tmg.Checkpoints(name, *small(), data=data)
    for _ in checkpoints.epochs(1):
        iterator = iter(checkpoints.data)
        for _ in range(2):
            next(iterator)
            checkpoints.after_step()
        checkpoints.save()
        break


def resumed(name: str, data: Any) -> None:
    checkpoints = tmg.Checkpoints(name, *small(), data=data)
    checkpoints.restore()
    counted(checkpoints)


@example("The data differs from the data of the checkpoint")
def an_unseeded_shuffle(told: Told) -> None:
    numbers = tf.data.Dataset.range(100)

    def of_epoch(epoch: int) -> Any:
        return numbers.shuffle(100, seed=epoch).batch(20)

    def shuffled(seed: int | None) -> Any:
        return numbers.shuffle(100, seed=seed).batch(20)

    with without_a_seed(), pytest.warns(UserWarning, match="without a seed"):
        stopped_in_the_middle("run", shuffled(None))
    with without_a_seed(), told(), pytest.warns(UserWarning, match="without a seed"):
        resumed("run", shuffled(None))
    assert tmg.Checkpoints("run", *small()).restore() is not None
    stopped_in_the_middle("seeded", shuffled(1))
    resumed("seeded", shuffled(1))
    stopped_in_the_middle("epochs", of_epoch)
    resumed("epochs", of_epoch)


@example("The checkpoint is of another model, optimizer or loss scale")
def another_model(told: Told) -> None:
    tmg.Checkpoints("run", *small()).save()
    with told():
        tmg.Checkpoints("run", *small(3)).restore()
    tmg.Checkpoints("run", *small()).restore()
    tmg.Checkpoints("another", *small(3)).save()


@example("The training changes variables that the checkpoint would not hold")
def seeds_that_are_not_saved(told: Told) -> None:
    def noisy(extra: Any = None) -> None:
        from lines.parts import strategy_of

        with strategy_of(2).scope():
            seeds = keras.random.SeedGenerator(1)
        model, optimizer = made(), optimizer_of()

        def forward(model: Any, batch: Any, training: bool) -> Any:
            x = batch[0] + keras.random.normal(tf.shape(batch[0]), seed=seeds)
            return tmg.loss_sum("mse", batch[1], model(x))

        trained = step(model, None, optimizer, forward=forward)
        more = {"extra": {"seeds": [seeds.state]}} if extra else {}
        name = "saved" if extra else "run"
        checkpoints = tmg.Checkpoints(name, train_step=trained, **more)
        trained((X, Y))
        checkpoints.save()

    with told(tmg.CheckpointError, r"Received: 1 variables \['seed"):
        noisy()
    noisy(extra=True)


@example("Checkpoints save only variables of numbers")
def a_number_as_extra(told: Told) -> None:
    with told(TypeError, "Received: extra={'accuracy'"):
        tmg.Checkpoints("run", *small(), extra={"accuracy": 0.5})
    metric = keras.metrics.Mean()
    tmg.Checkpoints("run", *small(), extra={"accuracy": metric}).save()
    tmg.Checkpoints("other", *small(), extra={"more": [tf.Variable(1.0)]}).save()
    both = tmg.chain_steps(step(), step(), names=("first", "second"))
    tmg.Checkpoints("steps", train_step=both).save()


@example("train_step must come from tmg.make_train_step or tmg.chain_steps")
def a_step_beside_a_model(told: Told) -> None:
    trained = step()
    with told():
        tmg.Checkpoints("run", trained.model, train_step=trained)
    trained((X, Y))
    tmg.Checkpoints("run", train_step=trained).save()


@example("Checkpoints save a model with its optimizer, or a train step")
def a_directory_alone(told: Told) -> None:
    with told(TypeError):
        tmg.Checkpoints("run")
    model, optimizer = small()
    tmg.Checkpoints("run", model, optimizer).save()


@example("A loop over checkpointed data inside a tf.function")
def a_loop_over_checkpointed_data(told: Told) -> None:
    trained = step()
    checkpoints = tmg.Checkpoints(
        "run", train_step=trained, data=tmg.distribute_dataset(batches(), trained.strategy)
    )

    def over() -> Any:
        count = tf.constant(0)
        for _ in checkpoints.data:
            count += 1
        return count

    with told():
        tf.function(over)()
    for _ in checkpoints.epochs(1):
        iterator = iter(checkpoints.data)
        steps = int(trained.run(iterator, 2)["steps"])
        checkpoints.after_step(steps)


@example("The order of a pass depends on how far tf.data had read")
def a_shuffle_below_repeat(told: Told) -> None:
    dataset = tf.data.Dataset.range(10)
    with told(tmg.CheckpointError, "data=lambda epoch: dataset"):
        tmg.Checkpoints("run", *small(), data=dataset.shuffle(9).repeat(2).batch(2))
    checkpoints = tmg.Checkpoints(
        "run", *small(), data=lambda epoch: dataset.shuffle(9, seed=epoch).batch(2)
    )
    counted(checkpoints, 2)


@example("The checkpointed data has an order that ends with this process")
def a_shuffle_without_a_seed(told: Told) -> None:
    dataset = tf.data.Dataset.range(10)
    with without_a_seed(), told(UserWarning, r"1 shuffle\(s\) without a seed"):
        tmg.Checkpoints("run", *small(), data=dataset.shuffle(9).batch(2))
    with without_a_seed(), told(UserWarning, r"2 shuffle\(s\) without a seed"):
        tmg.Checkpoints("run", *small(), data=lambda epoch: dataset.shuffle(9).shuffle(5).batch(2))
    tmg.Checkpoints("run", *small(), data=dataset.shuffle(9, seed=1).batch(2))
    keras.utils.set_random_seed(1)
    counted(tmg.Checkpoints("run", *small(), data=dataset.shuffle(9).batch(2)), 2)


@example("The data has fewer batches than when the checkpoint was saved")
def less_data(told: Told) -> None:
    numbers = tf.data.Dataset.range(10).batch(2)
    stopped_in_the_middle("run", numbers)
    with told():
        resumed("run", numbers.take(1))
    resumed("run", numbers)


@example("SIGTERM will not be heard, as Python handles signals in the main thread")
def training_in_a_thread(told: Told) -> None:
    model = compiled()

    def trained(name: str, **options: Any) -> Any:
        checkpoints = tmg.Checkpoints(name, model, model.optimizer)
        fit(batches(), model=model, callbacks=[checkpoints.callback(**options)])
        return checkpoints

    def in_a_thread(function: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(function).result()

    with told():
        in_a_thread(lambda: trained("thread"))
    trained("main")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SIGTERM will not be heard")
        in_a_thread(lambda: trained("often", every_steps=1))
    assert len([*Path("often").glob("*.npz")]) > 1
