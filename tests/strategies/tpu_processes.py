"""What two processes call: a server of TensorFlow without a TPU, and a program that meets it."""

from __future__ import annotations

import os

import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.devices.configure import devices_started

_served = []


def serve(address: str) -> None:
    cluster = tf.train.ClusterSpec({"worker": [address]})
    _served.append(tf.distribute.Server(cluster, job_name="worker", task_index=0))


def error_of_a_tpu_at(address: str) -> str:
    """Plans, which must start nothing, and returns what creating a strategy raises."""
    before = dict(os.environ)
    for prefer in ("auto", "tpu", "multi_worker", "mirrored", "one_device"):
        tmg.plan_strategy(prefer)
    assert not devices_started()
    assert dict(os.environ) == before
    os.environ["TPU_NAME"] = f"grpc://{address}"
    assert tmg.plan_strategy().kind == "tpu"
    try:
        tmg.create_strategy()
    except tmg.errors.StrategyUnavailableError as error:
        return str(error)
    raise AssertionError("no TPU is there")
