"""The lines of explain and doctor are run: what they name is gone afterwards."""

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.processes import pool

import tfmultigpu as tmg

pytestmark = pytest.mark.slow
ROWS = tf.data.Dataset.from_tensor_slices  # A name, not yet a dataset: that would start devices.


def parts() -> tuple[Any, Any]:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def lines_of_explain() -> None:
    """Follows the lines of ``explain`` from a program on one device to one that uses two."""
    tmg.split_device("CPU:0", parts=2)
    model, optimizer = parts()
    report = tmg.explain(model, optimizer)
    assert "no-strategy" in report.codes
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    report = tmg.explain(model, optimizer, None, strategy)
    assert {"model-scope", "optimizer-scope"} <= {*report.codes} - {"no-strategy"}
    with strategy.scope():
        model = parts()[0]
    report = tmg.explain(model, optimizer, None, strategy)
    assert "optimizer-scope" in report.codes
    assert "model-scope" not in report.codes
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    examples = ROWS((np.ones((64, 3), "float32"), np.ones((64, 1), "float32")))
    for wrong in (examples, examples.batch(1), examples.take(0).batch(8)):
        assert "small-batch" in tmg.explain(model, optimizer, wrong, strategy).codes
    report = tmg.explain(model, optimizer, examples.batch(8), strategy)
    assert not {"small-batch", "optimizer-scope", "model-scope"} & {*report.codes}


def lines_of_doctor() -> None:
    """Follows the lines of ``doctor`` that a machine without GPUs can follow."""
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 5}}
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    before = tmg.doctor().codes
    for name, value, code in (
        ("TF_CONFIG", json.dumps(config), "cluster"),
        ("CUDA_VISIBLE_DEVICES", "-1", "gpus-hidden"),
    ):
        with mock.patch.dict(os.environ, {name: value}):
            report = tmg.doctor()
            assert code in report.codes
            assert f"unset {name}" in str(report)
        assert tmg.doctor().codes == before
    with mock.patch.object(keras.config, "backend", return_value="jax"):
        assert "keras-backend" in tmg.doctor().codes
    assert "keras-backend" not in tmg.doctor().codes


# Fails if a line of a report does not mend what it names.
@pytest.mark.parametrize("follow", [lines_of_explain, lines_of_doctor])
def test_the_lines_of_a_report_help(follow: Any) -> None:
    worker = pool().start()
    worker.call(follow)
    worker.end()
