"""TensorFlow's lines about reductions do not interrupt a notebook; all others stay."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import tensorflow as tf

from tfmultigpu.strategies.tensorflow_log import leave_out_progress

# As in a notebook: TensorFlow takes a prompt for one, and shows messages of level INFO.
NOTEBOOK = """
import sys
sys.ps1 = ">>> "
import keras
import numpy as np
import tensorflow as tf
import tfmultigpu as tmg

tmg.split_device("CPU:0", parts=2)
strategy = tmg.create_strategy(devices=2)
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
x, y = np.ones((10, 3)), np.ones((10, 1))
tmg.fit(model, (x, y), batch_size=4, verbose=0)
for rows in range(2, 9):
    tmg.predict(model, x[:rows], verbose=0)
    tmg.evaluate(model, (x[:rows], y[:rows]), verbose=0)
step = tmg.make_train_step(model, model.optimizer, "mse", strategy)
for rows in range(2, 9):
    step((x[:rows], y[:rows]))
tf.get_logger().info("a line of the user")
"""


@pytest.mark.slow
def test_only_what_the_user_writes_is_shown_in_a_notebook() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "INFO:tensorflow:a line of the user\n"
    assert "retracing" not in done.stderr


def test_warnings_and_other_messages_stay() -> None:
    leave_out_progress()
    leave_out_progress()
    logger = tf.get_logger()
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        logger.info("Reduce to %s then broadcast to %r.", "CPU:0", ("CPU:0",))
        logger.info("Using MirroredStrategy with devices %r", ("CPU:0",))
        logger.info("other")
        logger.warning("Reduce to %s then broadcast to %r.", "CPU:0", ("CPU:0",))
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
    assert seen == ["other", "Reduce to CPU:0 then broadcast to ('CPU:0',)."]
    assert len(logger.filters) == len(set(logger.filters))
