"""The tools for users' tests: they pass what is right, and name what is wrong."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from problems import network, normal_rows
from worker_functions import fail_second, greet, kill_itself, leave_early

import tfmultigpu as tmg
from tfmultigpu.addons.testing import (
    Training,
    assert_replica_invariant,
    run_workers,
)
from tfmultigpu.addons.testing.differences import difference

X, Y = normal_rows(17, 3, 2)
BATCHES = [(X[:5], Y[:5]), (X[5:6], Y[5:6]), (X[6:], Y[6:])]


def build() -> Training:
    model = network(3, keras.layers.Dense(2, name="dense"))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    error = keras.metrics.MeanAbsoluteError(name="error")
    return Training(model, optimizer, "mse", metrics=[error])


# The assertion: what is right -----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": (2, 4)},
        {"micro_batches": 2, "shares": (3, 1), "predict": False},
        {"loss_scale": "dynamic"},
    ],
    ids=str,
)
def test_what_is_right_passes(options: dict) -> None:
    assert assert_replica_invariant(build, BATCHES, **options).amount <= 1e-6


def test_a_dataset_is_read_once_so_that_both_sides_get_the_same() -> None:
    shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(17).batch(4)
    assert_replica_invariant(build, shuffled)


def test_several_outputs_and_a_model_that_is_built_by_its_first_batch() -> None:
    class TwoHeads(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.left = keras.layers.Dense(2)
            self.right = keras.layers.Dense(1, kernel_regularizer="l2")

        def call(self, x):
            return {"left": self.left(x), "right": self.right(x)}

    def build() -> Training:
        return Training(
            TwoHeads(),
            keras.optimizers.SGD(0.1),
            {"left": "mse", "right": keras.losses.Huber(reduction="sum")},
            loss_weights={"left": 0.5, "right": 2.0},
            metrics={"left": [keras.metrics.MeanSquaredError()]},
            weighted_metrics={"right": [keras.metrics.MeanAbsoluteError()]},
            clip_norm=0.5,
        )

    weight = {"left": X[:, 0] ** 2, "right": X[:, 1] ** 2}
    whole = (X, {"left": Y, "right": Y[:, :1]}, weight)
    batches = [
        tf.nest.map_structure(lambda array, a=a, b=b: array[a:b], whole)
        for a, b in ((0, 9), (9, 10))
    ]
    assert_replica_invariant(build, batches, replicas=(2, 3))


def test_forward_in_place_of_a_loss() -> None:
    def forward(model, batch, training):
        x, y = batch
        values = tf.reduce_sum(tf.square(model(x, training=training) - y), axis=-1)
        importance = 1.0 + x[:, 0] ** 2
        return tmg.LossSum(tf.reduce_sum(values * importance), tf.reduce_sum(importance))

    def with_forward() -> Training:
        return dataclasses.replace(build(), loss=None, metrics=(), forward=forward)

    assert_replica_invariant(with_forward, BATCHES)


# The assertion: what is wrong ---------------------------------------------------------------------


def failure(*args: object, **options: object) -> str:
    with pytest.raises(tmg.testing.ReplicaInvarianceError) as caught:
        assert_replica_invariant(*args, **options)
    assert isinstance(caught.value, AssertionError)
    return str(caught.value)


def test_what_differs_first_is_named_with_its_step_and_size() -> None:
    class Drifting(keras.optimizers.SGD):
        """From its third step on, replicas that are not the first go a way of their own."""

        def update_step(self, gradient, variable, learning_rate):
            copy = getattr(variable, "device", "").endswith(":1")
            error = tf.cast(self.iterations >= 2, tf.float32) if copy else 0.0
            super().update_step(gradient + error, variable, learning_rate)

    def drifting() -> Training:
        return dataclasses.replace(build(), optimizer=Drifting(0.1))

    text = failure(drifting, BATCHES, strategy=tmg.create_strategy(devices=3))
    assert "differs from one device: MirroredStrategy with 3 replica(s).\n" in text
    assert "First differences, after step 3:" in text
    assert re.search(r"dense/bias\[\d\]: \S+ instead of \S+, off by", text)


def test_a_build_that_is_not_the_same_twice() -> None:
    rates = iter([0.1, 0.2])

    def other() -> Training:
        return dataclasses.replace(build(), optimizer=keras.optimizers.SGD(next(rates)))

    text = failure(other, BATCHES)
    assert "First differences, after step 0:" in text
    assert "learning_rate: 0.2 instead of 0.1, off by 1.0e-01" in text


def test_tolerances_are_by_name() -> None:
    rates = [0.1, 0.1001] * 2

    def other() -> Training:
        return dataclasses.replace(build(), optimizer=keras.optimizers.SGD(rates.pop()))

    assert "learning_rate" in failure(other, BATCHES, tolerance=1e-5)
    loose = {"learning_rate": 1e-3, "kernel": 1e-3, "bias": 1e-3, "loss": 1e-3}
    loose |= {"norm": 1e-3, "error": 1e-3, "prediction": 1e-3, "SGD": 1e-3}
    assert_replica_invariant(other, BATCHES, tolerances=loose)


@pytest.mark.parametrize("nothing", [[], tf.data.Dataset.range(0).batch(2)])
def test_no_data(nothing: object) -> None:
    with pytest.raises(tmg.TfMultiGpuError, match="dataset must yield global batches"):
        assert_replica_invariant(build, nothing)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"replicas": 0}, ValueError, "at least 1"),
        ({"replicas": 9}, tmg.DeviceNotFoundError, "9"),
        ({"tolerance": float("nan")}, ValueError, "tolerance=nan"),
    ],
)
def test_arguments_that_make_no_sense(options: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        assert_replica_invariant(build, BATCHES[:1], **options)


# Comparing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "actual", "amount", "place"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, (0,)),
        ([0.5, 0.5], [0.5, 0.75], 0.25, (1,)),
        ([4.0], [5.0], 0.25, (0,)),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0, (0,)),
        ([np.nan], [1.0], np.inf, (0,)),
        ([np.inf], [np.inf], 0.0, (0,)),
        ([np.inf], [-np.inf], np.inf, (0,)),
        ([1.0], [np.inf], np.inf, (0,)),
        ([b"a", b"b"], [b"a", b"c"], np.inf, (1,)),
        ([True], [True], 0.0, (0,)),
        ([1, 2], [1, 4], 1.0, (1,)),
        ([1.0, 2.0], [[1.0, 2.0]], np.inf, ()),
        ([], [], 0.0, ()),
        (3.0, 3.0, 0.0, ()),
    ],
    ids=str,
)
def test_difference(expected: object, actual: object, amount: float, place: tuple) -> None:
    found = difference(np.array(expected), np.array(actual), "it", 1)
    assert found.amount == amount
    assert found.place == place


# Workers ------------------------------------------------------------------------------------------


def test_a_function_in_workers() -> None:
    first, second = run_workers(greet, 2, args=["hello"], timeout=900)
    assert (first.index, second.index) == (0, 1)
    assert first.output.endswith("working\n")
    assert first.value.startswith('hello {"cluster": {"worker": ["127.0.0.1:')
    assert '"index": 1' in second.value


def test_one_worker_has_no_cluster() -> None:
    assert run_workers(greet, 1, args=["hello"])[0].value == "hello alone"


def test_a_script_in_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys; print(sys.argv[1], os.environ['FLAVOUR'])")
    results = run_workers(script, 2, args=[3], timeout=900, environment={"FLAVOUR": "sweet"})
    assert [result.output for result in results] == ["3 sweet\n"] * 2
    assert [result.value for result in results] == [None, None]


def test_the_first_worker_to_fail_is_named_and_the_others_are_stopped() -> None:
    with pytest.raises(tmg.testing.WorkerFailedError) as caught:
        run_workers(fail_second, 2, timeout=900)
    text = str(caught.value)
    assert text.startswith("Worker 1 of 2 ended with code 1.")
    assert "about to fail" in text
    assert "ValueError: the second worker's own error" in text


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (leave_early, "Worker 0 of 1 ended before its function"),
        (kill_itself, "Worker 0 of 1 was ended by SIGKILL"),
    ],
)
def test_a_worker_that_returns_nothing(function: Callable[[], None], says: str) -> None:
    with pytest.raises(tmg.testing.WorkerFailedError, match=says):
        run_workers(function, 1)


def test_a_worker_that_does_not_end(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    with pytest.raises(tmg.testing.WorkerFailedError) as caught:
        run_workers(script, 1, timeout=2.0)
    text = str(caught.value)
    assert "Worker 0 of 1 did not end within 2 seconds and was stopped." in text
    with pytest.raises(ProcessLookupError):
        os.kill(int(text.splitlines()[-1]), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: a process tied to its parent")
def test_no_worker_outlives_a_test_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    pids = tmp_path / "pids"
    script.write_text(
        f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    )
    call = f"from tfmultigpu.addons.testing import run_workers; run_workers({str(script)!r}, 2)"
    parent = subprocess.Popen([sys.executable, "-c", call])
    deadline = time.monotonic() + 300
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    workers = [int(pid) for pid in pids.read_text().split()]
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_cannot_be_run_in_workers() -> None:
    with pytest.raises(ValueError, match=r"at least 1. Received: workers=0"):
        run_workers(greet, 0)


# Fails if what a person prints of a test that passed is an error.
def test_no_difference_is_printed() -> None:
    found = tmg.testing.assert_replica_invariant(lambda strategy: [np.ones(3)], replicas=(2,))
    assert "no difference" in str(found) or "off by 0" in str(found)
    nothing = tmg.testing.assert_replica_invariant(lambda strategy: [np.ones(0)], replicas=(2,))
    assert str(nothing) == "no difference"
