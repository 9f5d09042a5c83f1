"""The demo: what it trains on, what it compares, and when it says that something is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import tfmultigpu as tmg
from tfmultigpu import demo
from tfmultigpu.__main__ import main

RESULT = {"training loss": 0.5, "weights": np.ones(3, "float32")}


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
    assert "batches of 64, and a last one of 2;" in done.stdout
    rows = {re.split(r"  +", line)[0]: line.split() for line in done.stdout.splitlines()}
    assert abs(float(rows["training loss"][2]) - float(rows["training loss"][3])) <= 1e-5
    assert rows["optimizer steps"][2:4] == ["48.000000", "48.000000"]
    assert "The answers agree to 1e-05." in done.stdout


@pytest.mark.parametrize(("apart", "status"), [(0.0, 0), (1e-3, 1), (np.nan, 1)])
def test_exits_with_1_if_the_answers_differ(
    apart: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(devices: tuple[str, ...], *_: object) -> dict[str, Any]:
        shift = apart if len(devices) > 1 else 0.0
        return {name: value + shift for name, value in RESULT.items()}

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "choose_devices", lambda _: ("CPU:0", "CPU:1"))
    assert main(["demo"]) == status
    assert ("DIFFER by more than 1e-05" in capsys.readouterr().out) is bool(status)


@pytest.mark.parametrize(("replicas", "size", "last"), [(2, 65, 1), (3, 64, 2), (16, 65, 5)])
def test_batches_never_divide_and_the_last_is_smaller_than_the_replicas(
    replicas: int,
    size: int,
    last: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "train", lambda *_: RESULT)
    monkeypatch.setattr(demo, "choose_devices", lambda count: ("CPU:0",) * count)
    assert demo.run_demo(replicas)
    assert f"batches of {size}, and a last one of {last};" in capsys.readouterr().out


def test_takes_the_gpus_if_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert 'pip install "tfmultigpu[demo]"' in capsys.readouterr().err


def test_a_wrong_command_line_says_what_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--replicas", "1"])
    assert "--replicas: invalid choice: 1 (choose from " in capsys.readouterr().err
    assert main(["demo", "--epochs", "0"]) == 2
    assert "at least 1. Received: epochs=0" in capsys.readouterr().err
