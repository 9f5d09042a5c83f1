"""Data that a run resumes with: passes that are over count, and other data is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.data_passes import Replay, replay_of

Dataset = tf.data.Dataset
range_of = Dataset.range
generator = tf.random.Generator.from_seed(3)


def files() -> Any:
    """Files in another order in each pass, their rows mixed, and all of it once more."""
    rows = range_of(4).shuffle(4, seed=1)
    return rows.interleave(lambda i: range_of(3 * i, 3 * i + 3).shuffle(3, seed=4), cycle_length=2)


def drawn(i: Any) -> Any:
    return tf.cast(i, tf.float32) + generator.normal([])


def passed(i: Any) -> Any:
    return tf.numpy_function(lambda value: value, [i], tf.int64)


KINDS: dict[str, tuple[Callable[[], Any], Replay]] = {
    "plain": (lambda: range_of(12).map(lambda i: i + 1).batch(3).prefetch(2), Replay()),
    "shuffled": (lambda: range_of(12).shuffle(9, seed=1).batch(3), Replay()),
    "files": (lambda: files().shuffle(9, seed=4).batch(3), Replay(first=True)),
    "twice": (
        lambda: range_of(12).shuffle(9, seed=1).batch(3).shuffle(4, seed=2),
        Replay(first=True),
    ),
    "cached": (lambda: range_of(12).shuffle(9, seed=1).cache().batch(3), Replay(whole=True)),
    "repeated": (lambda: range_of(6).shuffle(6, seed=1).repeat(2).batch(3), Replay(whole=True)),
    "joined": (
        lambda: range_of(6).concatenate(range_of(6).shuffle(6, seed=1)).batch(3),
        Replay(whole=True),
    ),
    "drawn": (lambda: range_of(12).map(drawn).batch(3), Replay(whole=True)),
    "fixed": (
        lambda: range_of(12).shuffle(9, 1, reshuffle_each_iteration=False).shuffle(9, 2).batch(3),
        Replay(),
    ),
    "sampled": (
        lambda: Dataset.sample_from_datasets(
            [range_of(6).shuffle(6, seed=1), range_of(6)], seed=3, rerandomize_each_iteration=True
        ).batch(3),
        Replay(),
    ),
    "python": (lambda: range_of(12).map(passed).batch(3), Replay(python=True)),
}


def small() -> tuple[Any, Any]:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    return model, keras.optimizers.get("sgd")


def seen(run: tmg.Checkpoints, epochs: int, stop: int | None = None) -> list[list[float]]:
    found = []
    for _ in run.epochs(epochs):
        for batch in run.data:
            found.append(batch.numpy().tolist())
            run.after_step()
            if run.step == stop:
                run.save()
                return found
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_passes_that_are_over_count_to_the_bit(kind: str, tmp_path: Path) -> None:
    global generator
    make, replay = KINDS[kind]
    model = small()

    def run(folder: str, **saves: int) -> tmg.Checkpoints:
        global generator
        generator = tf.random.Generator.from_seed(3)  # As in a new process.
        found = tmg.Checkpoints(tmp_path / folder, *model, data=make(), **saves)
        found.restore()
        return found

    assert replay_of(make()) == replay
    whole = seen(run("whole"), 4)
    assert len(whole) == 16
    # At the end of the second epoch, and in the middle of the third.
    ended = seen(run("ended", every_epochs=1), 2)
    assert ended + seen(run("ended"), 4) == whole
    middle = seen(run("middle"), 4, stop=10)
    assert middle + seen(run("middle"), 4) == whole


def rows(seed: int = 1, size: int = 3, add: int = 0) -> Any:
    return range_of(12).map(lambda i: i + add).shuffle(12, seed=seed).batch(size)


class Mixed:
    """Batches from a generator of random numbers that lives as long as the process."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(2)

    def __call__(self) -> Any:
        for _ in range(4):
            yield self.random.permutation(12)[:3]


OTHERS: dict[str, tuple[Any, Any]] = {
    "seed": (rows, lambda: rows(seed=2)),
    "batch size": (rows, lambda: rows(size=4)),
    "content": (rows, lambda: rows(add=1)),
    "shorter": (lambda: range_of(12).batch(3), lambda: range_of(9).batch(3)),
    "function": (lambda: rows, lambda: lambda epoch: rows(epoch + 5)),
    "distributed": (
        lambda: tmg.distribute_dataset(rows()),
        lambda: tmg.distribute_dataset(rows(seed=2)),
    ),
    "generator": (Mixed, Mixed),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_data_is_refused_at_the_end_of_an_epoch_before_it_is_trained_on(
    kind: str, tmp_path: Path
) -> None:
    then, now = OTHERS[kind]
    model = small()
    assert len(seen(tmg.Checkpoints(tmp_path, *model, data=then(), every_epochs=1), 2)) == 8
    run = tmg.Checkpoints(tmp_path, *model, data=now(), every_steps=1)
    assert run.restore() == 8
    with pytest.raises(tmg.RestoreMismatchError, match="epoch 1, in which") as caught:
        next(run.epochs(4))
    assert "data=lambda epoch: dataset.shuffle(n, seed=epoch)" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000008"]


def test_a_generator_with_a_state_resumes_after_its_first_pass(tmp_path: Path) -> None:
    model = small()
    whole = seen(tmg.Checkpoints(tmp_path / "whole", *model, data=Mixed()), 3)
    first = seen(tmg.Checkpoints(tmp_path / "run", *model, data=Mixed(), every_epochs=1), 1)
    run = tmg.Checkpoints(tmp_path / "run", *model, data=Mixed())
    assert run.restore() == 4
    assert first + seen(run, 3) == whole
