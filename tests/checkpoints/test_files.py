"""Checkpoints on the disk: whole or not there, and damage is seen."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfmultigpu.addons.checkpoints import files
from tfmultigpu.errors import CheckpointError

KILLS = 10
# Loads the module alone, without TensorFlow, so that a process is there in no time.
SAVES = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
import numpy as np
spec = spec_from_file_location("files", sys.argv[2])
files = module_from_spec(spec)
spec.loader.exec_module(files)
directory = Path(sys.argv[1])
step = max(files.steps_in(directory), default=0)
print("ready", flush=True)
while True:
    step += 1
    arrays = {str(i): np.full([50_000], step) for i in range(5)}
    files.write(directory, step, arrays, {"variables": dict.fromkeys(arrays)}, 2)
"""


def arrays_of(step: int) -> dict[str, np.ndarray]:
    return {"model/0000/dense/kernel": np.full([3, 2], step, "float32"), "steps": np.array(step)}


def write(directory: Path, *steps: int, keep: int = 9, **run: Any) -> list[Path]:
    run = {"epoch": 7, "variables": dict.fromkeys(arrays_of(0)), **run}
    return [files.write(directory, step, arrays_of(step), run, keep) for step in steps]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def newest(directory: Path) -> Any:
    return files.Directory(directory, np.atleast_2d).newest()


def found(directory: Path) -> int | None:
    stored = newest(directory)
    return None if stored is None else stored.run["step"]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    assert newest(directory) is None
    (path,) = write(directory, 120)
    assert path == directory / "step-00000120.npz"
    stored = newest(directory)
    assert stored is not None
    assert (stored.path, stored.run["step"], stored.run["epoch"]) == (path, 120, 7)
    assert stored.arrays.keys() == arrays_of(120).keys()
    for name, value in arrays_of(120).items():
        assert stored.arrays[name].dtype == value.dtype
        np.testing.assert_array_equal(stored.arrays[name], value)
    # A step that is saved again replaces the file.
    write(directory, 120, epoch=8)
    assert names(directory) == [path.name]
    assert files.read(path).run["epoch"] == 8


def test_the_newest_are_kept_and_damaged_later_ones_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 9, 10, 100_000_000)
    (tmp_path / "step-x.npz").touch()
    (tmp_path / "step-00000012").mkdir()
    assert list(files.steps_in(tmp_path)) == [9, 10, 100_000_000]
    write(tmp_path, 11, keep=1)
    assert list(files.steps_in(tmp_path)) == [11, 100_000_000]


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 4
    path.write_bytes(bytes(data))


def shape(path: Path) -> None:
    """A bit of a header: an array of other shape, which is read before its end."""
    data = path.read_bytes()
    assert data.count(b"(3, 2)") == 1
    path.write_bytes(data.replace(b"(3, 2)", b"(3, 0)"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "the first": lambda path: flip(path, 0.3),
    "the middle": lambda path: flip(path, 0.5),
    "shape": shape,
    "short": lambda path: os.truncate(path, 500),
    "empty": lambda path: os.truncate(path, 0),
    "other step": lambda path: write(path.parent, 3)[0].replace(path),
    "other arrays": lambda path: write(path.parent, 2, variables={"gone": None}),
    "a directory in it": lambda path: path.write_bytes(b"PK" * 300),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_seen_and_the_one_before_is_taken(damage: str, tmp_path: Path) -> None:
    _, newer = write(tmp_path, 1, 2)
    DAMAGES[damage](newer)
    with pytest.warns(UserWarning, match=r"damaged and was skipped.*step-00000002\.npz: ") as told:
        assert found(tmp_path) == 1
    assert len(told) == 1


def test_every_changed_byte_is_seen_or_means_nothing(tmp_path: Path) -> None:
    _, newer = write(tmp_path, 1, 2)
    whole = newer.read_bytes()
    unseen = 0
    for place in range(0, len(whole), 3):
        newer.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            stored = newest(tmp_path)
        assert stored is not None
        step = stored.run["step"]
        assert (step, len(told)) in ((1, 1), (2, 0))
        unseen += step == 2
        for name, value in arrays_of(step).items():
            np.testing.assert_array_equal(stored.arrays[name], value)
    assert unseen < len(whole) / 12  # Times and other fields of zip that nobody reads.


def test_a_format_of_another_version_is_not_guessed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_FORMAT", 3)
    write(tmp_path, 1)
    monkeypatch.undo()
    with (
        pytest.warns(UserWarning, match=r"format 3 \(this version reads 2\)"),
        pytest.raises(CheckpointError, match=r"are damaged\. Received: those of steps \[1\]"),
    ):
        newest(tmp_path)


def test_a_failed_write_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    before = (tmp_path / "step-00000001.npz").read_bytes()

    def no_space(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", no_space)
    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, step)
    assert names(tmp_path) == ["step-00000001.npz"]
    assert (tmp_path / "step-00000001.npz").read_bytes() == before


def test_what_processes_left_half_written_is_deleted_by_the_next_save(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / ".step-00000002.npz").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert found(tmp_path) == 1
    write(tmp_path, 3)
    assert names(tmp_path) == ["notes.txt", "step-00000001.npz", "step-00000003.npz"]


def test_links_that_lead_nowhere_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-00000003.npz").symlink_to(tmp_path / "not there")
    assert found(tmp_path) == 1


@pytest.mark.slow
def test_killed_while_saving_10_times_there_is_always_a_whole_checkpoint(tmp_path: Path) -> None:
    randomness = random.Random(0)
    command = [sys.executable, "-c", SAVES, str(tmp_path), files.__file__]
    steps, half_written = [0], 0
    for turn in range(KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                before = names(tmp_path)
                # A busy machine may be too slow for any to become whole; some are waited for.
                prefix = ".step-" if turn % 5 else "step-"
                while process.poll() is None:
                    if any(name.startswith(prefix) for name in {*names(tmp_path)} - {*before}):
                        break
                    time.sleep(0.001)
                time.sleep(randomness.uniform(0, 0.05))
            finally:
                process.send_signal(signal.SIGKILL)
        half_written += any(name.startswith(".") for name in names(tmp_path))
        stored = newest(tmp_path)  # Without a warning: none is damaged.
        if stored is None and len(steps) == 1:
            continue  # Killed before the very first.
        assert stored is not None
        assert stored.run["step"] >= steps[-1]
        steps.append(stored.run["step"])
        for array in stored.arrays.values():
            np.testing.assert_array_equal(array, np.full([50_000], steps[-1]))
    # Many kills came in the middle of one; otherwise this would show nothing.
    assert half_written >= KILLS // 4, (half_written, steps)
    assert steps[-1] >= KILLS // 5, json.dumps(steps)
