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
from tfmultigpu.data.passes import begin_unread

Dataset = tf.data.Dataset
range_of = Dataset.range
generator = tf.random.Generator.from_seed(3)


def files() -> Any:
    """Files in another order in each pass, their rows mixed, and all of it once more."""
    rows = range_of(4).shuffle(4, seed=1)
    return rows.interleave(lambda i: range_of(3 * i, 3 * i + 3).shuffle(3, seed=4), cycle_length=2)


def drawn(i: Any) -> Any:
    return tf.cast(i, tf.float32) + generator.normal([])


@tf.function
def called(i: Any) -> Any:
    tf.debugging.assert_less(i, tf.constant(99, tf.int64))  # Makes the call one with a state.
    return i + 1


def passed(i: Any) -> Any:
    return tf.numpy_function(lambda value: value, [i], tf.int64)


# Whether the order of a pass follows from the number of passes begun before it.
KINDS: dict[str, tuple[Callable[[], Any], bool]] = {
    "plain": (lambda: range_of(12).map(lambda i: i + 1).batch(3).prefetch(2), True),
    "shuffled": (lambda: range_of(12).shuffle(9, seed=1).batch(3), True),
    "files": (lambda: files().shuffle(9, seed=4).batch(3), False),
    "twice": (
        lambda: range_of(12).shuffle(9, seed=1).batch(3).shuffle(4, seed=2),
        False,
    ),
    "cached": (lambda: range_of(12).shuffle(9, seed=1).cache().batch(3), False),
    "repeated": (lambda: range_of(6).shuffle(6, seed=1).repeat(2).batch(3), False),
    "joined": (
        lambda: range_of(6).concatenate(range_of(6).shuffle(6, seed=1)).batch(3),
        False,
    ),
    "drawn": (lambda: range_of(12).map(drawn).batch(3), False),
    "fixed": (
        lambda: range_of(12).shuffle(9, 1, reshuffle_each_iteration=False).shuffle(9, 2).batch(3),
        True,
    ),
    "sampled": (
        lambda: Dataset.sample_from_datasets(
            [range_of(6).shuffle(6, seed=1), range_of(6)], seed=3, rerandomize_each_iteration=True
        ).batch(3),
        True,
    ),
    "chosen": (
        lambda: Dataset.choose_from_datasets(
            [range_of(6).shuffle(6, seed=1), range_of(6, 12).shuffle(6, seed=2)],
            range_of(2).shuffle(2, seed=1).repeat(6),
        ).batch(3),
        False,
    ),
    "called": (lambda: range_of(12).shuffle(9, seed=1).map(called).batch(3), True),
    "python": (lambda: range_of(12).map(passed).batch(3), True),
}


def small() -> tuple[Any, Any]:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    return model, keras.optimizers.get("sgd")


def seen(
    run: tmg.Checkpoints, epochs: int, stop: int | None = None, every: int = 99
) -> list[list[float]]:
    found = []
    for _ in run.epochs(epochs):
        for batch in run.data:
            found.append(batch.numpy().tolist())
            run.after_step()
            if run.step == stop or run.step % every == 0:
                run.save()
            if run.step == stop:
                return found
    return found


def test_passes_that_are_over_count_to_the_bit(tmp_path: Path) -> None:
    model = small()

    def run(kind: str, folder: str) -> tmg.Checkpoints:
        global generator
        generator = tf.random.Generator.from_seed(3)  # As in a new process.
        data = KINDS[kind][0]()
        found = tmg.Checkpoints(tmp_path / kind / folder, *model, data=data)
        found.restore()
        return found

    wrong = []
    for kind, (make, resumes) in KINDS.items():
        assert begin_unread(make()) is resumes, kind
        if not resumes:
            with pytest.raises(tmg.CheckpointError, match=r"Received: data with a shuffle below"):
                run(kind, "whole")
            continue
        whole = seen(run(kind, "whole"), 4)
        assert len(whole) == 16
        # At the end of the second epoch, and in the middle of the third.
        first = run(kind, "ended")
        ended = seen(first, 2)
        first.save()
        ended += seen(run(kind, "ended"), 4)
        middle = seen(run(kind, "middle"), 4, stop=10)
        middle += seen(run(kind, "middle"), 4)
        if not (ended == middle == whole):
            wrong.append(kind)
    assert not wrong


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
    "function": (lambda: rows, lambda: lambda epoch: rows(epoch + 5)),
    "distributed": (
        lambda: tmg.distribute_dataset(rows()),
        lambda: tmg.distribute_dataset(rows(seed=2)),
    ),
    "generator": (Mixed, Mixed),
}


def test_other_data_is_refused_at_the_end_of_an_epoch_before_it_is_trained_on(
    tmp_path: Path,
) -> None:
    model = small()
    for kind, (then, now) in OTHERS.items():
        folder = tmp_path / kind
        run = tmg.Checkpoints(folder, *model, data=then())
        assert len(seen(run, 2)) == 8
        run.save()
        run = tmg.Checkpoints(folder, *model, data=now())
        assert run.restore() == 8
        with pytest.raises(tmg.CheckpointError, match="at epoch 2 and step 0 of it") as caught:
            next(run.epochs(4))
        assert "data=lambda epoch: dataset.shuffle(n, seed=epoch)" in str(caught.value)


def test_an_epoch_saved_after_its_last_batch_counts_as_a_pass(tmp_path: Path) -> None:
    model = small()
    whole = seen(tmg.Checkpoints(tmp_path / "whole", *model, data=rows()), 3)
    first = seen(tmg.Checkpoints(tmp_path / "run", *model, data=rows()), 3, stop=4)
    run = tmg.Checkpoints(tmp_path / "run", *model, data=rows())
    assert (run.restore(), run.epoch, run.step_in_epoch) == (4, 0, 4)
    assert first + seen(run, 3) == whole
    # In a loop that does not read what is left of it, too.
    run = tmg.Checkpoints(tmp_path / "run", *model, data=rows())
    run.restore()
    run.end_epoch()
    assert first + seen(run, 3) == whole


def test_a_function_of_the_epoch_goes_back_within_a_process(tmp_path: Path) -> None:
    run = tmg.Checkpoints(tmp_path, *small(), data=lambda epoch: rows(seed=epoch))
    whole = seen(run, 3, every=6)
    assert run.restore() == 12
    (tmp_path / "step-00000012.npz").unlink()
    assert run.restore() == 6
    assert seen(run, 3) == whole[6:]


def test_an_iterator_is_of_one_epoch(tmp_path: Path) -> None:
    run = tmg.Checkpoints(tmp_path, *small(), data=range_of(12).repeat().batch(3))
    iterator = iter(run.data)
    epochs = run.epochs(3)
    next(epochs)
    next(iterator)
    run.after_step()
    assert next(epochs) == 1
    next(iterator)
    with pytest.raises(tmg.CheckpointError, match=r"did not read a new pass.*epoch=1") as caught:
        run.after_step()
    assert "iterator = iter(checkpoints.data)" in str(caught.value)
    epochs.close()
