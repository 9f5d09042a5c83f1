"""Trains with the other worker until something ends one of them, and ends as a program does."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
import time


def train(event: str, end_seconds: float = 45.0) -> None:
    """Runs in a process of the pool; worker 1 is the one to which something happens."""
    code = 1
    try:
        _train(event, end_seconds)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def join() -> None:
    """Joins; worker 1 stops between the meeting and TensorFlow's part, so worker 0 waits there."""
    import tfmultigpu as tmg
    from tfmultigpu.addons.workers import _private

    configure = _private.configure_coordination

    def announce(*arguments: float) -> None:
        print("JOINING", flush=True)
        if tmg.workers.cluster_from_environment().index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        configure(*arguments)

    _private.configure_coordination = announce
    tmg.create_strategy()


def _train(event: str, end_seconds: float) -> None:
    import keras
    import numpy as np

    import tfmultigpu as tmg
    from tfmultigpu.addons.workers import lost

    lost._END_SECONDS = end_seconds
    strategy = tmg.create_strategy()
    me = tmg.workers.cluster_from_environment().index
    x = np.ones((8, 2), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    data = tmg.distribute_dataset((x, x[:, :1]), strategy, batch_size=8)
    batch = next(iter(data))
    for number in itertools.count():
        step(batch)
        if number == 3:
            print("READY", flush=True)
        if number == 20 and event == "slow" and me == 0:
            print("SLOW", flush=True)
            time.sleep(300.0)  # As Python that makes data does.
        if number == 20 and event == "finish":
            if me == 0:
                time.sleep(5.0)  # As a chief that still writes files does.
                print("SAVED", flush=True)
            return
        if number == 20 and me == 1 and event == "raise":
            raise ValueError("my own")
        if number == 20 and me == 1 and event == "exit":
            sys.exit(0)
        time.sleep(0.02)
