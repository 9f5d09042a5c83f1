"""Checkpoints on the disk: whole or not there, and damage is seen."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tfmultigpu.checkpoints import storage as files

KILLS = 10
# Needs no TensorFlow, so that a process is there in no time.
SAVES = """
import sys
from pathlib import Path
import numpy as np
from tfmultigpu.checkpoints import storage as files
directory = Path(sys.argv[1])
found, _ = files.newest(directory)
files.clean(directory)
step = 0 if found is None else found.step
print("ready", flush=True)
while True:
    step += 1
    arrays = {str(i): np.full([50_000], step) for i in range(5)}
    files.write(directory, step, arrays, {"again": step})
    files.prune(directory, 2)
"""


def arrays_of(step: int) -> dict[str, np.ndarray]:
    return {"model/0000/dense/kernel": np.full([3, 2], step, "float32"), "steps": np.array(step)}


def write(directory: Path, *steps: int) -> list[files.Stored]:
    return [files.write(directory, step, arrays_of(step), {"epoch": step}) for step in steps]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (stored,) = write(tmp_path / "a" / "b", 120)
    assert stored.path == tmp_path / "a" / "b" / "step-00000120"
    assert names(stored.path) == ["arrays.npz", "manifest.json"]
    found, damaged = files.newest(tmp_path / "a" / "b")
    assert found == stored
    assert damaged == []
    assert found.metadata["epoch"] == 120
    read = files.read_arrays(found)
    assert read.keys() == arrays_of(120).keys()
    for name, value in arrays_of(120).items():
        assert read[name].dtype == value.dtype
        np.testing.assert_array_equal(read[name], value)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    assert files.newest(tmp_path / "not there") == (None, [])
    write(tmp_path, 9, 10, 100_000_000, 11)
    assert files.stored_steps(tmp_path) == [9, 10, 11, 100_000_000]
    files.prune(tmp_path, 2)
    assert names(tmp_path) == ["step-00000011", "step-100000000"]


def test_a_step_saved_twice_never_loses_the_first_before_the_second_is_there(
    tmp_path: Path,
) -> None:
    first, second = write(tmp_path, 5, 5)
    assert names(tmp_path) == ["step-00000005", "step-00000005-1"]
    assert files.newest(tmp_path)[0] == second
    assert second.digest == first.digest
    files.prune(tmp_path, 1)
    assert names(tmp_path) == ["step-00000005-1"]
    assert write(tmp_path, 5)[0].path.name == "step-00000005-2"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def claim(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def forge(**changes: object) -> Callable[[Path], None]:
    """Says something else, with the digest of that."""

    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = {**json.loads(path.read_text()), **changes}
        manifest.pop(files._DIGEST)
        digest = files._digest(manifest)
        path.write_text(json.dumps({**manifest, files._DIGEST: digest}))

    return change


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (lambda f: flip(f / "arrays.npz"), "arrays.npz does not match its checksum"),
    "short": (lambda f: os.truncate(f / "arrays.npz", 100), "arrays.npz has 100 bytes instead of "),
    "gone": (lambda f: (f / "arrays.npz").unlink(), "arrays.npz cannot be read: No such file"),
    "empty": (lambda f: [p.unlink() for p in f.iterdir()], "manifest.json cannot be read"),
    "text": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is not JSON"),
    "bytes": (lambda f: (f / "manifest.json").write_bytes(b"\xff"), "manifest.json is not JSON"),
    "list": (lambda f: (f / "manifest.json").write_text("[]"), "has changed since it was written"),
    "claims": (claim(step=7), "manifest.json has changed since it was written"),
    "deep": (
        lambda f: (f / "manifest.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
        "manifest.json is not JSON",
    ),
    "forged": (forge(variables=[{}]), "was not written by this library: variables is [{}]"),
    "other step": (forge(step=1), "manifest.json is of step 1"),
    "no format": (forge(format=None), "its format is None, and this version reads 1"),
    "other names": (
        forge(variables=[{"name": "a", "dtype": "float32", "shape": []}]),
        "arrays.npz lacks ['a']",
    ),
}


def test_damage_is_seen_and_the_one_before_is_taken(tmp_path: Path) -> None:
    for damage, (do, reason) in DAMAGES.items():
        folder = tmp_path / damage
        older, newer = write(folder, 1, 2)
        do(newer.path)
        found, damaged = files.newest(folder)
        assert found == older, damage
        assert [one.path for one in damaged] == [newer.path]
        assert reason in damaged[0].reason
        # Set aside it no longer counts, also not among those that are kept.
        assert files.set_aside(damaged[0]).name == "damaged-step-00000002"
        write(folder, 2)
        files.prune(folder, 1)
        assert names(folder) == ["damaged-step-00000002", "step-00000002"]
        again = files.Damaged(folder / "step-00000002", "")
        assert names(files.set_aside(again)) == ["arrays.npz", "manifest.json"]
        assert names(folder) == ["damaged-step-00000002"]


def test_a_format_of_another_version_is_not_guessed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_FORMAT", 2)
    write(tmp_path, 1)
    monkeypatch.undo()
    found, (damaged,) = files.newest(tmp_path)
    assert found is None
    assert damaged.reason == "its format is 2, and this version reads 1"


def test_a_failed_write_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (older,) = write(tmp_path, 1)

    def no_space(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]
    assert files.newest(tmp_path) == (older, [])


def test_only_what_processes_left_behind_is_cleaned(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / ".writing-ab").mkdir()
    (tmp_path / ".writing-ab" / "arrays.npz").write_bytes(b"half")
    (tmp_path / ".deleting-cd").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    files.clean(tmp_path)
    assert names(tmp_path) == ["notes.txt", "step-00000001"]
    files.clean(tmp_path / "not there")


def test_who_looks_while_another_run_saves_takes_the_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an evaluator: the one it was about to read is deleted."""
    write(tmp_path, 1)
    read = files.read_manifest

    def slowly(path: Path) -> files.Stored | files.Damaged:
        if path.name == "step-00000001":
            write(tmp_path, 2)
            files.prune(tmp_path, 1)
        return read(path)

    monkeypatch.setattr(files, "read_manifest", slowly)
    found, damaged = files.newest(tmp_path)
    assert found is not None
    assert (found.step, damaged) == (2, [])


def test_links_that_lead_nowhere_are_damaged_checkpoints(tmp_path: Path) -> None:
    (older,) = write(tmp_path, 1)
    loop, nowhere = tmp_path / "step-00000002", tmp_path / "step-00000003"
    loop.symlink_to(loop)
    nowhere.symlink_to(tmp_path / "not there")
    found, damaged = files.newest(tmp_path)
    assert found == older
    assert [one.path for one in damaged] == [nowhere, loop]
    files.prune(tmp_path, 1)
    assert names(tmp_path) == ["step-00000003"]
    files.set_aside(damaged[0])
    assert names(tmp_path) == ["damaged-step-00000003"]


@pytest.mark.slow
def test_killed_while_saving_10_times_there_is_always_a_whole_checkpoint(tmp_path: Path) -> None:
    randomness = random.Random(0)
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    steps, half_written = [0], 0
    for turn in range(KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                before = names(tmp_path)
                # A busy machine may be too slow for any to become whole; some are waited for.
                prefix = ".writing-" if turn % 5 else "step-"
                while process.poll() is None:
                    if any(one.startswith(prefix) for one in {*names(tmp_path)} - {*before}):
                        break
                    time.sleep(0.001)
                time.sleep(randomness.uniform(0, 0.05))
            finally:
                process.send_signal(signal.SIGKILL)
        half_written += any(name.startswith(".") for name in names(tmp_path))
        found, damaged = files.newest(tmp_path)
        assert damaged == []
        if found is None and len(steps) == 1:
            continue  # Killed before the very first.
        assert found is not None
        assert found.step >= steps[-1]
        steps.append(found.step)
        for array in files.read_arrays(found).values():
            np.testing.assert_array_equal(array, np.full([50_000], found.step))
    # Many kills came in the middle of one; otherwise this would show nothing.
    assert half_written >= KILLS // 4, (half_written, steps)
    assert steps[-1] >= KILLS // 5, steps
