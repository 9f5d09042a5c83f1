"""Checkpoints on the disk: whole or not there, and damage is seen."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
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


def write(directory: Path, *steps: int, keep: int = 9, **run: Any) -> list[Path]:
    run = {"epoch": 7, **run}
    return [files.write(directory, step, arrays_of(step), run, keep) for step in steps]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def newest(directory: Path) -> Any:
    return files.Directory(directory, WorkerExchange(tf.distribute.get_strategy())).newest()


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
    "the first": lambda path: flip(path, 0.1),
    "the middle": lambda path: flip(path, 0.5),
    "shape": shape,
    "short": lambda path: os.truncate(path, 500),
    "empty": lambda path: os.truncate(path, 0),
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
    monkeypatch.setattr(files, "_FORMAT", 9)
    write(tmp_path, 1)
    monkeypatch.undo()
    with (
        pytest.warns(UserWarning, match=r"format 9 .*this version reads format 3"),
        pytest.raises(CheckpointError, match=r"are damaged\. Received: \[.step-00000001"),
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
    assert names(tmp_path) == [".half-written.npz", "step-00000001.npz"]
    assert (tmp_path / "step-00000001.npz").read_bytes() == before


def test_what_a_process_left_half_written_is_replaced_by_the_next_save(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / ".half-written.npz").write_bytes(b"half")
    assert found(tmp_path) == 1
    write(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001.npz", "step-00000003.npz"]
