"""Data that a run resumes with: passes that are over count, and other data is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from problems import network

import tfmultigpu as tmg
from tfmultigpu.data.passes import begin_unread, graph_of

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


def of_epoch(epoch: int) -> Any:
    return range_of(12).shuffle(12, seed=epoch).batch(3)


# Data of four batches, and whether the order of a pass follows from the number of passes before it.
KINDS: dict[str, tuple[Callable[[], Any], bool]] = {
    "shuffled": (lambda: range_of(12).shuffle(9, seed=1).batch(3), True),
    "files": (lambda: files().shuffle(9, seed=4).batch(3), False),
    "twice": (lambda: range_of(12).shuffle(9, seed=1).batch(3).shuffle(4, seed=2), False),
    "cached": (lambda: range_of(12).shuffle(9, seed=1).cache().batch(3), False),
    "repeated": (lambda: range_of(6).shuffle(6, seed=1).repeat(2).batch(3), False),
    "joined": (lambda: range_of(6).concatenate(range_of(6).shuffle(6, seed=1)).batch(3), False),
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
            [range_of(6), range_of(6, 12)], range_of(2).shuffle(2, seed=1).repeat(6)
        ).batch(3),
        False,
    ),
    "called": (lambda: range_of(12).shuffle(9, seed=1).map(called).batch(3), True),
    "python": (lambda: range_of(12).map(passed).batch(3), True),
    "text": (
        lambda: of_epoch(4).map(lambda i: {"a": tf.strings.as_string(i), "b": (i, None)}),
        True,
    ),
    "ragged": (lambda: of_epoch(5).map(lambda i: tf.ragged.range(i)), True),
    "epoch": (lambda: of_epoch, True),
    "partial": (lambda: functools.partial(lambda size, epoch: of_epoch(epoch), 3), True),
    "distributed": (lambda: tmg.distribute_dataset(of_epoch(2)), True),
    "arrays": (lambda: tmg.distribute_dataset(np.arange(12), batch_size=3), True),
    "generator": (lambda: lambda: ([i, i + 1] for i in range(4)), True),
}


def small() -> tuple[Any, Any]:
    model = network(3, keras.layers.Dense(2))
    return model, keras.optimizers.get("sgd")


def seen(run: tmg.Checkpoints, epochs: int, stop: int | None = None, every: int = 99) -> list[str]:
    batches = []
    for epoch in run.epochs(epochs):
        for batch in run.data:
            leaves = tf.nest.flatten(batch, expand_composites=True)
            arrays = [leaf.numpy().tolist() for leaf in leaves if leaf is not None]
            batches.append(f"{epoch}: {arrays}")
            run.after_step()
            if run.step == stop or run.step % every == 0:
                run.save()
            if run.step == stop:
                return batches
    return batches


@pytest.mark.parametrize("kind", KINDS)
def test_each_batch_is_seen_once_and_in_its_order(kind: str, tmp_path: Path) -> None:
    make, resumes = KINDS[kind]
    model = small()

    def run(folder: str) -> tmg.Checkpoints:
        global generator
        generator = tf.random.Generator.from_seed(3)  # As in a new process.
        made = tmg.Checkpoints(tmp_path / folder, *model, data=make())
        made.restore()
        return made

    assert not isinstance(make(), Dataset) or begin_unread(graph_of(make())) is resumes
    if not resumes:
        with pytest.raises(tmg.CheckpointError, match=r"Received: data with a shuffle below"):
            run("whole")
        return
    whole = seen(run("whole"), 4)
    assert len(whole) == 16
    assert (whole[0][3:] != whole[4][3:]) or kind not in ("shuffled", "epoch", "partial")
    # At the end of the second epoch, and in the middle of the third.
    first = run("ended")
    ended = seen(first, 2)
    first.save()
    assert ended + seen(run("ended"), 4) == whole
    middle = seen(run("middle"), 4, stop=10)
    resumed = run("middle")
    assert (resumed.step, resumed.epoch, resumed.step_in_epoch) == (10, 2, 2)
    assert middle + seen(resumed, 4) == whole
    assert (resumed.step, resumed.epoch, resumed.step_in_epoch) == (16, 4, 0)


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
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    model = small()
    for kind, (then, now) in OTHERS.items():
        with subtests.test(kind=kind):
            folder = tmp_path / kind
            run = tmg.Checkpoints(folder, *model, data=then())
            assert len(seen(run, 2)) == 8
            run.save()
            run = tmg.Checkpoints(folder, *model, data=now())
            assert run.restore() == 8
            with pytest.raises(tmg.CheckpointError, match="at epoch 2 and step 0 of it") as caught:
                next(run.epochs(4))
            assert "data=lambda epoch: dataset.shuffle(n, seed=epoch)" in str(caught.value)


def test_other_data_is_refused_in_an_epoch_before_it_is_trained_on(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    model = small()
    for kind, (then, now) in OTHERS.items():
        with subtests.test(kind=kind):
            folder = tmp_path / kind
            assert len(seen(tmg.Checkpoints(folder, *model, data=then()), 2, stop=6)) == 6
            run = tmg.Checkpoints(folder, *model, data=now())
            assert run.restore() == 6
            with pytest.raises(tmg.CheckpointError, match="at epoch 1 and step 2 of it"):
                iter(run.data)


def test_an_epoch_saved_after_its_last_batch_counts_as_a_pass(tmp_path: Path) -> None:
    model = small()
    whole = seen(tmg.Checkpoints(tmp_path / "whole", *model, data=rows()), 3)
    first = seen(tmg.Checkpoints(tmp_path / "run", *model, data=rows()), 3, stop=4)
    run = tmg.Checkpoints(tmp_path / "run", *model, data=rows())
    assert (run.restore(), run.epoch, run.step_in_epoch) == (4, 0, 4)
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
