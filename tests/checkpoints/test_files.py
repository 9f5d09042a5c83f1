"""Checkpoints on the disk: whole or not there, and damage is seen."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmultigpu.addons.checkpoints import files
from tfmultigpu.errors import CheckpointError
from tfmultigpu.strategies.worker_exchange import WorkerExchange


def arrays_of(step: int) -> dict[str, np.ndarray]:
    return {"model/0000/dense/kernel": np.full([3, 2], step, "float32"), "steps": np.array(step)}


def open_(directory: Path) -> files.Directory:
    return files.Directory(directory, WorkerExchange(tf.distribute.get_strategy()))


def write(directory: Path, *steps: int, keep: int = 9, **run: Any) -> list[Path]:
    return [open_(directory).write(step, arrays_of(step), run, keep) for step in steps]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    assert open_(directory).newest() is None
    (path,) = write(directory, 120, epoch=7)
    assert path == directory / "step-00000120.npz"
    stored = open_(directory).newest()
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


def test_every_changed_byte_is_seen_or_means_nothing(tmp_path: Path) -> None:
    """Also in the header of an array, which is read before its end."""
    older, newer = write(tmp_path, 1, 2)
    whole = newer.read_bytes()
    damages = [whole[:place] for place in (0, len(whole) // 2)] + [b"PK" * 300]
    for place in range(0, len(whole), 3):
        damages.append(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    unseen = 0
    for content in damages:
        newer.write_bytes(content)
        (tmp_path / "damaged-step-00000002.npz").unlink(missing_ok=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            stored = open_(tmp_path).newest()
        assert stored is not None
        step = stored.run["step"]
        assert (step, len(told)) in ((1, 1), (2, 0))
        assert all("damaged and was skipped. Received: " in str(each.message) for each in told)
        assert newer.exists() == (step == 2)  # Else it would count as later.
        unseen += step == 2
        for name, value in arrays_of(step).items():
            np.testing.assert_array_equal(stored.arrays[name], value)
    assert unseen < len(whole) / 12  # Times and other fields of zip that nobody reads.
    assert files.read(older).run["step"] == 1


def test_a_format_of_another_version_is_not_guessed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_FORMAT", 9)
    write(tmp_path, 1)
    monkeypatch.undo()
    with (
        pytest.warns(UserWarning, match=r"format 9 .*this version reads format 4"),
        pytest.raises(CheckpointError, match=r"are damaged\. Received: \[.step-00000001"),
    ):
        open_(tmp_path).newest()


def test_a_failed_or_killed_write_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = write(tmp_path, 1)
    before = path.read_bytes()

    def no_space(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    for step in (1, 2):
        with pytest.raises(CheckpointError, match=r"cannot save step .*No space left on device"):
            write(tmp_path, step)
    monkeypatch.undo()
    # What a process left half written is replaced by the next save.
    assert names(tmp_path) == [".half-written.npz", path.name]
    assert path.read_bytes() == before
    assert open_(tmp_path).newest().run["step"] == 1
    write(tmp_path, 3)
    assert names(tmp_path) == [path.name, "step-00000003.npz"]
