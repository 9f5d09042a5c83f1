"""A strategy is planned with reasons before it is created; what is missing is told."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.by_hand import build, hold, on_one_device
from law.model import regression

import tfmultigpu as tmg

KINDS = {"tpu", "multi_worker", "mirrored", "one_device"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, TPU or cluster is described in the environment."""
    for name in ("TF_CONFIG", "TPU_NAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


# Fails if planning creates what it plans, or leaves a kind without a reason.
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "kind", "replicas"),
    [
        ({"devices": ["CPU:1"]}, "one_device", 1),
        ({"devices": 3}, "mirrored", 3),
        ({"devices": ["CPU:2", "CPU:5"]}, "mirrored", 2),
        ({"prefer": "mirrored"}, "mirrored", 8),
        ({"prefer": "one_device"}, "one_device", 1),
        ({"prefer": "multi_worker"}, "one_device", 1),
        ({"devices": ["CPU:0", "CPU:1"], "communication": "hierarchical_copy"}, "mirrored", 2),
    ],
)
@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="plans for CPUs alone")
def test_a_plan_has_reasons_and_no_side_effect(
    options: dict[str, Any], kind: str, replicas: int
) -> None:
    plan = tmg.plan_strategy(**options)
    assert plan == tmg.plan_strategy(**options)
    assert not tf.distribute.has_strategy()
    assert (plan.kind, plan.num_replicas, len(plan.devices)) == (kind, replicas, replicas)
    if isinstance(options.get("devices"), list):
        assert plan.devices == tuple(options["devices"])
    assert set(plan.rejected) == KINDS - {kind}
    for text in (plan.reason, *plan.rejected.values()):
        assert text
        assert text in str(plan)


# Fails if a strategy is made on other devices than planned.
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("devices", [["CPU:3"], ["CPU:1", "CPU:4"], 3])
def test_what_is_created_is_what_was_planned(devices: Any) -> None:
    plan = tmg.plan_strategy(devices=devices)
    strategy = tmg.create_strategy(devices=devices)
    assert strategy.num_replicas_in_sync == plan.num_replicas
    with strategy.scope():
        variable = tf.Variable(1.0)
    places = [one.device[-5:] for one in strategy.experimental_local_results(variable)]
    assert tuple(places) == plan.devices


# Fails if a request that this machine cannot meet is replaced in silence, or with fallback=False is
# replaced at all.
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "said", "replicas"),
    [
        ({"prefer": "tpu"}, "TPU", 1),
        ({"prefer": "multi_worker"}, "cluster", 1),
        ({"devices": 2, "communication": "nccl"}, "NCCL", 2),
        ({"devices": 3, "communication": "hierarchical_copy"}, "odd", 3),
    ],
)
def test_fallback_warns_or_raises(options: dict[str, Any], said: str, replicas: int) -> None:
    with pytest.warns(UserWarning, match=said) as caught:
        strategy = tmg.create_strategy(fallback=True, **options)
    assert len(caught) == 1
    assert strategy.num_replicas_in_sync == replicas
    with pytest.raises(tmg.errors.TfMultiGpuError, match=said):
        tmg.create_strategy(fallback=False, **options)


# Fails if CUDA_VISIBLE_DEVICES hides the GPUs and the plan does not say so.
@pytest.mark.usefixtures("alone")
def test_hidden_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES" in str(tmg.plan_strategy())


def trained(strategy: tf.distribute.Strategy) -> Any:
    """Makes a step; returns a function that trains on two batches and holds the result."""
    training = build(strategy, lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    step = tmg.make_train_step(
        training.model, training.optimizer, training.loss, strategy, verify=False
    )
    batches = regression([5, 1])
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    data = iter(tmg.distribute_dataset((x, y), strategy, batch_size=5))

    def train() -> None:
        step(next(data))

    def check() -> None:
        hold(training, on_one_device(batches, lambda: keras.optimizers.SGD(0.1, momentum=0.9)))

    return train, check


# Fails if two strategies of one process share state: which devices, whose scope, what they add.
# The third is one of the parts of a split CPU, in another order.
@pytest.mark.usefixtures("alone")
def test_several_strategies_of_one_process_train_in_turn() -> None:
    strategies = [
        tmg.create_strategy(devices=["CPU:0", "CPU:1"]),
        tmg.create_strategy(devices=["CPU:1", "CPU:2", "CPU:3"], communication="one_device"),
        tmg.create_strategy(devices=["CPU:5", "CPU:4"], communication="hierarchical_copy"),
    ]
    runs = [trained(strategy) for strategy in strategies]
    for _ in range(2):
        for train, _ in runs:
            train()
    for _, check in runs:
        check()
