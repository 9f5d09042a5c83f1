"""The demo: what it trains on, what it compares, and when it says that something is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import tfmultigpu as tmg
from tfmultigpu import demo
from tfmultigpu.__main__ import main

RESULT = demo.Trained(1.0, 2.0, 0.5, 0.6, 0.9, 24, np.ones(3, "float32"))


@pytest.mark.slow
def test_trains_and_agrees_as_the_readme_says() -> None:
    environment = dict(os.environ)
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    done = subprocess.run(
        [sys.executable, "-m", "tfmultigpu", "demo", "--replicas", "3", "--epochs", "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    assert "batches of 63, and a last one of 2. On CPU:0, CPU:1, CPU:2." in done.stdout
    assert "A hidden layer of 64 units, L2, SGD(0.05, momentum=0.9)." in done.stdout
    rows = {re.split(r"  +", line)[0]: line.split() for line in done.stdout.splitlines()}
    one, usual, ours = map(float, rows["training loss"][2:])
    assert abs(one - ours) <= 1e-5
    assert abs(one - usual) > 1e-5
    assert rows["optimizer steps"][2:] == ["48", "48", "48"]
    usual, ours = map(float, rows["largest weight difference"][3:])
    assert ours <= 1e-5
    assert usual > 1e-3
    said = " ".join(done.stdout.split())  # Lines break anywhere.
    assert f"{ours:.0e} is rounding: replicas add in another order. {usual:.0e} is" in said
    assert "Virtual CPUs share the cores of this machine" in done.stdout
    assert re.search(
        "the same bits on 1, 3 devices: their SHA-256 begins with [0-9a-f]{12}\\.", done.stdout
    )
    assert "tmg.fit agrees with one device to 1e-05." in done.stdout


@pytest.mark.parametrize(("shift", "status"), [(0.0, 0), (1e-3, 1), (np.nan, 1)])
def test_exits_with_1_if_the_answers_differ(
    shift: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(how: str, *_: object) -> demo.Trained:
        moved = shift if how == "tmg.fit" else 0.0
        return RESULT._replace(test_loss=RESULT.test_loss + moved)

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "choose_devices", lambda _: ("CPU:0", "CPU:1"))
    assert main(["demo"]) == status
    assert ("DIFFERS from one device to 1e-05" in capsys.readouterr().out) is bool(status)


def test_the_difference_is_the_largest_of_all(subtests: pytest.Subtests) -> None:
    assert demo.apart(RESULT, RESULT) == 0
    for field in ("training_loss", "test_loss", "test_accuracy", "weights"):
        with subtests.test(field=field):
            moved = RESULT._replace(**{field: getattr(RESULT, field) - 0.25})
            assert demo.apart(RESULT, moved) == 0.25, field
    assert demo.apart(RESULT, RESULT._replace(optimizer_steps=25)) > 0.01
    assert demo.apart(RESULT, RESULT._replace(first_epoch=9.0, later_epochs=0.0)) == 0


# Fails if what Keras does is blamed where it agrees, or ours is called rounding where it differs.
def test_the_numbers_are_explained_as_they_are() -> None:
    other = RESULT._replace(weights=RESULT.weights + np.float32(0.25))
    said, _ = demo.explanations(RESULT, other, RESULT, 3, 1e-5)
    assert "0e+00 is rounding" in said
    assert "2e-01 is another training: the last batch has fewer rows" in said
    said, _ = demo.explanations(RESULT, RESULT, other, 3, 1e-5)
    assert said.endswith("2e-01 is more than rounding.")


@pytest.mark.parametrize(("replicas", "size", "last"), [(2, 64, 1), (3, 63, 2), (16, 64, 15)])
def test_batches_divide_and_the_last_is_smaller_than_the_replicas(
    replicas: int, size: int, last: int
) -> None:
    data = demo.batches_of(np.arange(1797), np.arange(1797), replicas)
    sizes = [len(x) for x, _ in data.train]
    assert set(sizes[:-1]) == {size}
    assert sizes[-1] == last
    assert data.rows == sum(sizes)
    assert min(min(x.numpy()) for x, _ in data.test) == 1500  # No image is in both.


def test_takes_the_gpus_if_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(tmg, "enable_memory_growth", lambda: calls.append("growth"))
    monkeypatch.setattr(tmg, "split_device", lambda name, parts: ("CPU",) * parts)
    monkeypatch.setattr(
        demo.tf.config.experimental, "enable_tensor_float_32_execution", calls.append
    )
    for gpus, replicas, count, kind in [
        (0, None, 4, "CPU"),
        (1, None, 4, "CPU"),
        (2, None, 2, "GPU"),
        (2, 3, 3, "CPU"),
        (8, 3, 3, "GPU"),
    ]:
        with subtests.test(gpus=gpus):
            devices = tuple(tmg.devices.Device("GPU", "GPU", i) for i in range(gpus))
            monkeypatch.setattr(tmg, "list_devices", lambda _, devices=devices: devices)
            calls.clear()
            assert demo.choose_devices(replicas) == (kind,) * count, (gpus, replicas)
            assert calls == (["growth", False] if kind == "GPU" else [])


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["demo"]) == 2
    assert "pip install scikit-learn" in capsys.readouterr().err


def test_a_wrong_command_line_says_what_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--replicas", "1"])
    assert "--replicas: invalid choice: 1 (choose from " in capsys.readouterr().err
    assert main(["demo", "--epochs", "0"]) == 2
    assert "at least 1. Received: epochs=0" in capsys.readouterr().err
