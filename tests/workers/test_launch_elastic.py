"""Workers are lost, fewer start again, they come back, and the run ends with the same bits."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tfmultigpu.addons.workers.launcher import launch
from tfmultigpu.errors import ClusterError

SCRIPT = str(Path(__file__).with_name("worker_elastic.py"))

Run = Callable[[str, str, int], tuple[int, list[list[str]], list[str]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Launches what workers do; returns the code, the GPUs of each start, and all restarts."""

    def run(body: str, workers: str, restarts: int) -> tuple[int, list[list[str]], list[str]]:
        # Each waits for all of its start, so that each has printed before one ends.
        start = (
            "import json, os, pathlib, signal, sys, time\n"
            "config = json.loads(os.environ.get('TF_CONFIG', '{}'))\n"
            "me = config.get('task', {}).get('index', 0)\n"
            "count = len(config.get('cluster', {}).get('worker', [0]))\n"
            "joined, attempt = os.environ['TFMULTIGPU_JOINED'], os.environ['TFMULTIGPU_ATTEMPT']\n"
            "print('GPUS', attempt, me, os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
            "pathlib.Path(joined).touch()\n"
            "pathlib.Path(f'{joined}-ready-{me}').touch()\n"
            "ready = lambda i: os.path.exists(f'{joined}-ready-{i}')\n"
            "while not all(map(ready, range(count))): time.sleep(0.01)\n"
            "def lose():\n"
            "    pathlib.Path(f'{joined}-lost-{me}').touch()  # As WorkerLostError does.\n"
            "    sys.exit(1)\n"
            "def die(): os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        script = tmp_path / "train.py"
        script.write_text(f"{start}{body}\n")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d")
        code = launch(str(script), workers=workers, restarts=restarts, grace=1.0)
        out, err = capfd.readouterr()
        gpus: list[list[str]] = [[] for _ in range(restarts + 1)]
        for attempt, _, names in sorted(re.findall(r"GPUS (\d) (\d) (\S+)", out)):
            gpus[int(attempt)].append(names)
        said = re.findall(r"^\[launch\] (.*: restart .*)$", err, re.MULTILINE)
        return code, gpus, said

    return run


def test_a_killed_worker_is_left_out_once_with_its_gpus(run: Run) -> None:
    body = (
        "if attempt == '0': die() if me == 1 else lose()\n"
        "if attempt == '1': sys.exit(3)  # An error loses nobody: all are back."
    )
    code, gpus, said = run(body, "1,2,4", 2)
    assert code == 0
    assert gpus == [["a", "b", "c", "d"], ["a", "c"], ["a", "b", "c", "d"]]
    assert said == [
        "Lost: worker 1. Starting again with 2 of 4 workers: restart 1 of 2.",
        "Starting again with 4 of 4 workers: restart 2 of 2.",
    ]


def test_killed_twice_in_a_row_and_then_all(run: Run) -> None:
    """The second start has no slot 0: its worker 0 is in slot 1."""
    body = (
        "if attempt == '0': die() if me == 0 else lose()\n"
        "if attempt == '1': die() if me == 0 else lose()\n"
        "if attempt == '2': die()\n"
        "if attempt == '3': sys.exit(5)"
    )
    code, gpus, said = run(body, "2:4", 3)
    assert code == 5
    assert gpus == [["a", "b", "c", "d"], ["b", "c", "d"], ["a", "c", "d"], ["a", "b"]]
    assert said == [
        "Lost: worker 0. Starting again with 3 of 4 workers: restart 1 of 3.",
        "Lost: worker 0. Starting again with 3 of 4 workers: restart 2 of 3.",
        "Lost: worker 0, 1, 2. Starting again with 2 of 4 workers: restart 3 of 3.",
    ]


def test_one_that_does_not_answer_is_lost(run: Run) -> None:
    body = "if attempt == '0': time.sleep(600) if me == 0 else lose()"
    code, gpus, said = run(body, "1:2", 1)
    assert code == 0
    assert gpus == [["a,b", "c,d"], ["c,d"]]
    assert said == ["Lost: worker 0. Starting again with 1 of 2 workers: restart 1 of 1."]


@pytest.mark.parametrize("workers", ["4:1", "two", "1,", "1:2:4", ""])
def test_numbers_of_workers_that_make_no_sense(workers: str) -> None:
    with pytest.raises(ClusterError, match=f"Received: --workers {workers}. Write --workers 4, "):
        launch(SCRIPT, workers=workers)


@pytest.mark.slow
def test_from_four_workers_to_one_two_and_back_with_the_bits_of_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All but one are killed, and the one that is left; then one of two is asked to stop."""
    kill, stop = int(signal.SIGKILL), int(signal.SIGTERM)
    deaths = [f"1,2,3@5@{kill}", f"0@9@{kill}", f"1@11@{stop}"]
    arguments = [str(tmp_path / "elastic"), *deaths]
    code = launch(SCRIPT, arguments, workers="1,2,4", restarts=3, grace=40.0)
    out, err = capfd.readouterr()
    assert code == 0, f"{err}{out}"

    begun = re.findall(r"^\[launch\] .*(Starting again with .*)$", err, re.MULTILINE)
    assert begun == [
        "Starting again with 1 of 4 workers: restart 1 of 3.",
        "Starting again with 2 of 4 workers: restart 2 of 3.",
        "Starting again with 4 of 4 workers: restart 3 of 3.",
    ]
    assert "Lost: worker 1, 2, 3. " in err
    assert "Lost: worker 0. " in err
    assert re.search(r"Worker [01] of 2 ended with code 143", err)
    # The steps that they begin with: an epoch has six, and each second one is saved.
    restored = re.findall(r"\[0\] RESTORED (.*)", out)
    assert restored[:3] == ["None", "4", "8"]
    assert int(restored[3]) in (11, 12)

    assert launch(SCRIPT, [str(tmp_path / "whole")], workers=1) == 0
    alone, _ = capfd.readouterr()
    (expected,) = re.findall("RESULT (.*)", alone)
    assert re.findall("RESULT (.*)", out) == [expected] * 4
