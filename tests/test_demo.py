"""The demo: what it trains on, what it compares, and when it says that something is wrong."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest

import tfmultigpu as tmg
from tfmultigpu import demo
from tfmultigpu.__main__ import main

OUTCOME = demo.Outcome(
    train_loss=0.5,
    test_loss=0.6,
    accuracy=0.9,
    steps=20,
    milliseconds=1.0,
    weights=[np.zeros((2, 3), "float32"), np.ones(4, "float32")],
)
TINY = demo.Images(
    np.zeros((40, 8, 8, 1), "float32"), np.zeros(40), np.zeros((4, 8, 8, 1)), np.zeros(4)
)


@pytest.mark.slow
def test_trains_and_agrees_as_the_readme_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tfmultigpu", "demo", "--replicas", "3", "--epochs", "2"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    text = done.stdout
    assert "as 3 virtual devices" in text or "3 GPUs" in text
    assert "mirrored: 3 replicas" in text
    assert "batches of 64, not divisible by 3, and a last one of 2" in text
    assert "[##############################] 48/48 steps" in text
    rows = {re.split(r"  +", line.strip())[0]: line.split() for line in text.splitlines() if line}
    one_device, replicas = map(float, rows["training loss"][-2:])
    assert abs(one_device - replicas) <= 1e-5
    assert rows["optimizer steps"][-2:] == ["48", "48"]
    assert float(rows["largest weight difference"][-1]) <= 1e-5
    assert "The answers agree: weights and losses to 1e-05, steps exactly." in text


def test_batches_never_divide_and_the_last_is_smaller_than_the_replicas() -> None:
    wrong = []
    for replicas, asked, available in itertools.product(
        [2, 3, 4, 7, 8, 16], [1, 2, 63, 64, 65, 100, 700], [1500, 1501, 1495, 1430]
    ):
        batch_size, rows = demo.uneven_batches(asked, replicas, available)
        if not (
            batch_size % replicas != 0
            and batch_size >= asked
            and batch_size > replicas
            and 0 < rows % batch_size < replicas
            and available - 2 * batch_size < rows <= available
        ):
            wrong.append((replicas, asked, available, batch_size, rows))
    assert wrong == []


def test_batches_that_are_too_large_are_refused() -> None:
    with pytest.raises(tmg.errors.DataError, match=r"Batches of 801 .* 1500 images.* at most 749"):
        demo.uneven_batches(800, 4, 1500)


def test_equal_outcomes_do_not_differ() -> None:
    assert demo.differences(OUTCOME, OUTCOME, 1e-7, 1e-5) == []


def test_every_difference_is_named() -> None:
    changes: list[tuple[dict[str, Any], float, str]] = [
        ({}, 2e-5, "weights by 2.0e-05, more than 1e-05"),
        ({}, float("nan"), "weights by nan"),
        ({"train_loss": 0.501}, 0.0, "train_loss by 1.0e-03"),
        ({"test_loss": float("nan")}, 0.0, "test_loss by nan"),
        ({"steps": 21}, 0.0, "20 optimizer steps against 21"),
    ]
    for change, apart, text in changes:
        (found,) = demo.differences(OUTCOME, dataclasses.replace(OUTCOME, **change), apart, 1e-5)
        assert text in found


@pytest.mark.parametrize(("shift", "status"), [(0.0, 0), (1e-3, 1)])
def test_exits_with_1_where_the_answers_differ(
    shift: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(devices: tuple[str, ...], *_: object) -> demo.Outcome:
        weights = [w + shift * (len(devices) > 1) for w in OUTCOME.weights]
        return dataclasses.replace(OUTCOME, weights=weights)

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "load_images", lambda _: TINY)
    monkeypatch.setattr(demo, "choose_devices", lambda _: (("CPU:0", "CPU:1"), "two of eight"))
    assert main(["demo", "--batch-size", "5"]) == status
    text = capsys.readouterr().out
    assert ("The answers DIFFER: weights by 1.0e-03" in text) is bool(status)
    assert ("The answers agree" in text) is not bool(status)


def test_takes_the_gpus_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up: list[Any] = []
    monkeypatch.setattr(tmg, "enable_memory_growth", lambda: set_up.append("growth"))
    monkeypatch.setattr(
        tmg, "split_device", lambda name, parts: tuple(f"CPU:{i}" for i in range(parts))
    )
    monkeypatch.setattr(
        demo.tf.config.experimental, "enable_tensor_float_32_execution", set_up.append
    )
    for gpus, replicas, count, kind in [
        (0, None, 4, "CPU"),
        (0, 3, 3, "CPU"),
        (1, None, 4, "CPU"),
        (2, None, 2, "GPU"),
        (2, 3, 3, "CPU"),
        (8, 3, 3, "GPU"),
    ]:
        fakes = tuple(tmg.devices.Device(f"GPU:{i}", "GPU", i) for i in range(gpus))
        monkeypatch.setattr(tmg, "list_devices", lambda _, fakes=fakes: fakes)
        set_up.clear()
        names, explanation = demo.choose_devices(replicas)
        assert names == tuple(f"{kind}:{i}" for i in range(count)), (gpus, replicas)
        assert set_up == (["growth", False] if kind == "GPU" else [])
        assert (f"{count} GPUs" if kind == "GPU" else f"{count} virtual") in explanation


def test_the_digits_are_real_and_in_a_fixed_order() -> None:
    images = demo.load_images("digits")
    assert images.x_train.shape == (1500, 8, 8, 1)
    assert images.x_test.shape == (297, 8, 8, 1)
    assert images.x_train.min() == 0
    assert images.x_train.max() == 1
    np.testing.assert_array_equal(images.y_train, demo.load_images("digits").y_train)


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 2
    assert 'Run: pip install "tfmultigpu[demo]"' in capsys.readouterr().err


def test_downloaded_images_get_rows_height_width_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dataset, shape in (("mnist", (6, 28, 28)), ("cifar10", (6, 32, 32, 3))):
        part = np.full(shape, 255, "uint8"), np.zeros((6, 1), "uint8")
        load = lambda part=part: (part, part)  # noqa: E731
        monkeypatch.setattr(getattr(keras.datasets, dataset), "load_data", load)
        images = demo.load_images(dataset)
        assert images.x_train.shape == images.x_test.shape == (*shape, 1)[:4]
        assert images.x_train.dtype == np.float32
        assert images.x_train.max() == 1
        assert images.y_train.shape == (6,)


def test_without_a_network_the_error_names_the_set_that_needs_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise Exception("URL fetch failure")  # What Keras raises.

    monkeypatch.setattr(keras.datasets.mnist, "load_data", fail)
    assert main(["demo", "--dataset", "mnist"]) == 2
    error = capsys.readouterr().err
    assert "mnist cannot be downloaded: URL fetch failure" in error
    assert "--dataset digits" in error


def test_a_wrong_command_line_says_what_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["--replicas", "1"], "at least 2 and at most 16. Received: '1'"),
        (["--epochs", "0"], "at least 1. Received: '0'"),
        (["--batch-size", "many"], "at least 1. Received: 'many'"),
        (["--dataset", "cats"], "invalid choice: 'cats'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["demo", *arguments])
        assert text in capsys.readouterr().err
