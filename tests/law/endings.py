"""A program of loops of every kind over data of every kind, which has to end."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from law.model import Training, regression, small
from law.processes import pool

BATCH = regression([5])[0]
SPEC = tf.nest.map_structure(
    lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), BATCH
)
FIT: dict[str, Any] = {"steps_per_epoch": 3, "epochs": 2, "verbose": 0, "verify": False}


class Stop(Exception):
    """Of a callback, a generator or a step."""


def compiled(strategy: Any) -> Training:
    with strategy.scope():
        training = small()
        training.model.compile(training.optimizer, training.loss)
    return training


def raising(error: Callable[[], Any]) -> keras.callbacks.Callback:
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: error())


def stop() -> None:
    raise Stop


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60.0)


Numbers = tuple[np.ndarray, np.ndarray]


class Endless(keras.utils.PyDataset):
    """Batches without end."""

    num_batches = None

    def __getitem__(self, index: int) -> Numbers:
        time.sleep(0.005)
        return BATCH


def endless() -> Iterator[Numbers]:
    for index in itertools.count():
        yield Endless()[index]


def failing() -> Iterator[Numbers]:
    yield from itertools.islice(endless(), 4)
    raise Stop


def repeated() -> tf.data.Dataset:
    """Batches of ``tf.numpy_function``, repeated without end."""

    def read(index: Any) -> Any:
        arrays = tf.numpy_function(lambda i: Endless()[i], [index], [s.dtype for s in SPEC])
        return tuple(tf.ensure_shape(a, s.shape) for a, s in zip(arrays, SPEC, strict=True))

    return tf.data.Dataset.range(3).repeat().map(read, num_parallel_calls=2).prefetch(4)


def be_a_program(replicas: int) -> None:
    """Runs loops of all kinds over all kinds of data, and ends as Python does."""
    multiprocessing.set_start_method("fork", force=True)  # As in a program on Linux.
    if replicas > 1:
        tmg.split_device("CPU:0", parts=replicas)
    strategy = tmg.create_strategy(devices=replicas)
    training = compiled(strategy)
    model = training.model
    generated = tf.data.Dataset.from_generator(endless, output_signature=SPEC).prefetch(4)
    step = tmg.make_train_step(model, training.optimizer, training.loss, strategy, verify=False)
    workers = Endless(workers=2), Endless(workers=2, use_multiprocessing=True)
    held = []

    for data in (endless, generated, repeated(), *workers):
        tmg.fit(model, data, validation_data=endless, validation_steps=1, **FIT)
    tmg.fit(model, endless, step=step, **{**FIT, "verify": "first"})
    with tmg.prepare(model):
        model.fit(endless, steps_per_epoch=2, verbose=0)
    for data in (endless, repeated(), workers[0]):
        tmg.evaluate(model, data, steps=2, verbose=0, verify=False)
        tmg.predict(model, data, steps=2, verbose=0, verify=False)

    # A program that ends by an error keeps the last one, and with it what ran.
    for data in (generated, repeated(), workers[1]):
        for error in (stop, interrupt):
            try:
                tmg.fit(model, data, callbacks=[raising(error)], **FIT)
            except (Stop, KeyboardInterrupt) as raised:
                held.append(raised)
    for read in (failing, lambda: failing()):
        try:
            tmg.fit(model, read, epochs=1, verbose=0, verify=False)
        except tf.errors.OpError as raised:
            held.append(raised)

    # A user may hold an iterator to the end.
    for data in (endless, repeated(), workers[0]):
        held.append(iter(tmg.distribute_dataset(data, strategy)))
        step.run(held[-1], 2)
    checkpoints = tmg.Checkpoints(
        tempfile.mkdtemp(), model=model, optimizer=training.optimizer, data=generated
    )
    checkpoints.restore()
    held.append(iter(checkpoints.data))
    step(next(held[-1]))
    assert len(held) == 12
    print("last line", flush=True)
    sys.stdout.flush()
    ctypes.pythonapi.Py_Exit(0)  # As a program ends; what is on the stack stays referenced.


def assert_ends(replicas: int) -> None:
    """Holds that a process that runs the program ends."""
    process = pool().start()
    process.begin(be_a_program, replicas)
    try:
        assert process.wait() == 0, process.printed()
        assert "last line" in process.printed()
    finally:
        process.send_signal(signal.SIGKILL)
