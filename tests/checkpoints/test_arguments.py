"""What checkpoints are given: mistakes are told before anything is trained, or overwritten."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from problems import network

import tfmultigpu as tmg


@pytest.fixture(scope="module")
def model() -> Any:
    return network(3, keras.layers.Dense(2))


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.range(10).batch(2)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"keep": 2.5}, TypeError, "keep must be a whole number, at least 1. Received: keep=2.5."),
    ({"directory": None}, TypeError, "NoneType"),
    ({"directory": ""}, ValueError, "Received: directory=''."),
    ({"extra": {"a": [tf.Variable("text")]}}, TypeError, "Received: extra={'a': [<tf.Variable"),
    ({"train_step": 5}, TypeError, "Write tmg.Checkpoints(directory, train_step=step)."),
    ({"model": None}, TypeError, "Received: model=None and train_step=None."),
]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: "-".join(case[0]))
def test_arguments_that_make_no_sense(case: Any, model: Any, tmp_path: Path) -> None:
    arguments, error, text = case
    with pytest.raises(error) as caught:
        tmg.Checkpoints(**{"directory": tmp_path / "run", "model": model, **arguments})
    assert text in str(caught.value)
    assert names(tmp_path) == []


def test_calls_that_make_no_sense(model: Any, tmp_path: Path) -> None:
    run = tmg.Checkpoints(tmp_path, model)
    with pytest.raises(ValueError, match=r"at least 1. Received: every_steps=0"):
        run.callback(every_steps=0)
    with pytest.raises(ValueError, match=r"steps must be a .*, at least 0. Received: steps=-1"):
        run.after_step(-1)
    with pytest.raises(TypeError, match=r"epochs must be a .*, at least 0. Received: epochs=None"):
        next(run.epochs(None))
    run.after_step(tf.constant(2))
    run.after_step(np.int64(1))
    assert run.step == 3


def test_a_loop_that_does_not_count_is_told(model: Any, tmp_path: Path) -> None:
    optimizer = keras.optimizers.SGD()
    with pytest.raises(tmg.CheckpointError, match="Received: epoch=0, step_in_epoch=0, step=0"):
        list(tmg.Checkpoints(tmp_path, model, optimizer, batches()).epochs(1))
    with pytest.raises(tmg.CheckpointError, match=r"for batch in checkpoints\.data"):
        tmg.Checkpoints(tmp_path, model, optimizer, batches()).after_step()
    unknown = tmg.Checkpoints(tmp_path, model, optimizer, batches())
    optimizer.iterations.assign(5)
    with pytest.raises(tmg.CheckpointError, match=r"Call checkpoints.after_step\(\) after each"):
        unknown.save()


def test_a_model_without_variables_is_built_from_the_data_or_told(tmp_path: Path) -> None:
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(tmg.errors.ScopeError, match=r"no variables yet.*model\(x\[:1\]\)"):
        tmg.Checkpoints(tmp_path, unbuilt).save()
    data = tf.data.Dataset.from_tensor_slices(np.ones((6, 3), "float32")).batch(2)
    assert tmg.Checkpoints(tmp_path, unbuilt, data=data).save().exists()
    assert [tuple(variable.shape) for variable in unbuilt.variables] == [(3, 1), (1,)]


def test_where_the_directory_is(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmg.Checkpoints("~/run", model).save() == tmp_path / "run" / "step-00000000.npz"
    assert tmg.Checkpoints(os.fsencode(tmp_path / "run"), model).restore() == 0
    # One that cannot be written to is told before anything is trained.
    (tmp_path / "file").write_text("")
    run = tmg.Checkpoints(tmp_path / "file" / "run", model, data=batches())
    with pytest.raises(tmg.CheckpointError, match=r"cannot save step 0 to .*Not a directory"):
        next(run.epochs(1))
    assert run.data.passes == 0


def test_a_run_that_was_not_restored_does_not_lose_what_it_saves(
    model: Any, tmp_path: Path
) -> None:
    """The newest are kept: those of a run that begins anew would be deleted at once."""
    first = tmg.Checkpoints(tmp_path, model)
    first.after_step(10)
    first.save()
    text = (
        r"cannot save step {} .* Received: .*it has step 10.* call checkpoints\.restore\(\) first"
    )
    again = tmg.Checkpoints(tmp_path, model)
    with pytest.raises(tmg.CheckpointError, match=text.format(0)):
        next(again.epochs(1))
    again.after_step(9)
    with pytest.raises(tmg.CheckpointError, match=text.format(9)):
        again.save()
    assert names(tmp_path) == ["step-00000010.npz"]
    # Nor does one that passed over a damaged later one.
    last = tmg.Checkpoints(tmp_path, model)
    assert last.restore() == 10
    last.after_step()
    last.save().write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        assert last.restore() == 10
    next(last.epochs(1))
    last.keep = 1
    last.save()
    assert names(tmp_path) == ["damaged-step-00000011.npz", "step-00000010.npz"]
