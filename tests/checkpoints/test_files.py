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


ALONE = WorkerExchange(tf.distribute.get_strategy())


def newest(directory: Path) -> Any:
    return files.newest(directory, ALONE)


def write(directory: Path, *steps: int, keep: int = 9, **run: Any) -> list[Path]:
    return [files.save(directory, ALONE, step, keep, (run, arrays_of(step))) for step in steps]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_step_that_is_saved_again_replaces_the_file(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    assert newest(directory) is None
    (path,) = write(directory, 120, epoch=7)
    write(directory, 120, epoch=8)
    assert list(directory.iterdir()) == [directory / "step-00000120.npz"] == [path]
    assert newest(directory).run["epoch"] == 8


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
            stored = newest(tmp_path)
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


def test_a_format_of_another_version_is_not_guessed_at(tmp_path: Path) -> None:
    write(tmp_path, 1, format=9)
    with (
        pytest.warns(UserWarning, match=r"format 9 .*this version reads format 6"),
        pytest.raises(CheckpointError, match=r"are damaged\. Received: \[.step-00000001"),
    ):
        newest(tmp_path)


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
    assert newest(tmp_path).run["step"] == 1
    write(tmp_path, 3)
    assert names(tmp_path) == [path.name, "step-00000003.npz"]
