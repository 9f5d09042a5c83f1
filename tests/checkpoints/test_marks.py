"""Data that a run resumes with: passes that are over count, and other data is refused."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.data.passes import Replay, replay_of
from tfmultigpu.loops.epoch_iterator import EpochIterator
from tfmultigpu.loops.evaluation_passes import EvaluationPasses
from tfmultigpu.loops.program import Program
from tfmultigpu.loops.validation import Validation

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
    "chosen": (
        lambda: Dataset.choose_from_datasets(
            [range_of(6).shuffle(6, seed=1), range_of(6, 12).shuffle(6, seed=2)],
            range_of(2).shuffle(2, seed=1).repeat(6),
        ).batch(3),
        Replay(whole=True),
    ),
    "called": (lambda: range_of(12).shuffle(9, seed=1).map(called).batch(3), Replay()),
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


def test_passes_that_are_over_count_to_the_bit(tmp_path: Path) -> None:
    model = small()

    def run(kind: str, folder: str, **saves: int) -> tmg.Checkpoints:
        global generator
        generator = tf.random.Generator.from_seed(3)  # As in a new process.
        data = KINDS[kind][0]()
        found = tmg.Checkpoints(tmp_path / kind / folder, *model, data=data, **saves)
        found.restore()
        return found

    wrong = []
    for kind, (make, replay) in KINDS.items():
        whole = seen(run(kind, "whole"), 4)
        assert len(whole) == 16
        # At the end of the second epoch, and in the middle of the third.
        ended = seen(run(kind, "ended", every_epochs=1), 2)
        ended += seen(run(kind, "ended"), 4)
        middle = seen(run(kind, "middle"), 4, stop=10)
        middle += seen(run(kind, "middle"), 4)
        if not (replay_of(make()) == replay and ended == middle == whole):
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
    "shorter": (lambda: range_of(12).batch(3), lambda: range_of(9).batch(3)),
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
        assert len(seen(tmg.Checkpoints(folder, *model, data=then(), every_epochs=1), 2)) == 8
        run = tmg.Checkpoints(folder, *model, data=now(), every_steps=1)
        assert run.restore() == 8
        with pytest.raises(tmg.CheckpointError, match="epoch 1, in which") as caught:
            next(run.epochs(4))
        assert "data=lambda epoch: dataset.shuffle(n, seed=epoch)" in str(caught.value)
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000008"]


def test_a_generator_with_a_state_resumes_after_its_first_pass(tmp_path: Path) -> None:
    model = small()
    whole = seen(tmg.Checkpoints(tmp_path / "whole", *model, data=Mixed()), 3)
    first = seen(tmg.Checkpoints(tmp_path / "run", *model, data=Mixed(), every_epochs=1), 1)
    run = tmg.Checkpoints(tmp_path / "run", *model, data=Mixed())
    assert run.restore() == 4
    assert first + seen(run, 3) == whole


def test_no_pass_follows_one_that_was_broken_off_where_that_decides_its_order(
    tmp_path: Path,
) -> None:
    def make() -> Any:
        return rows().repeat()

    received = "3 batches of data without end"

    def three(run: tmg.Checkpoints, epochs: int, most: int = 3) -> list[list[int]]:
        found = []
        for _ in run.epochs(epochs):
            for batch in itertools.islice(iter(run.data), most - run.step_in_epoch):
                found.append(batch.numpy().tolist())
                run.after_step()
        return found

    model = small()
    run = tmg.Checkpoints(tmp_path, *model, data=make(), every_steps=2)
    with pytest.raises(tmg.CheckpointError, match=f"Received: {received}, with a shuffle") as told:
        three(run, 2)
    assert "data=lambda epoch: dataset.shuffle(n, seed=epoch)" in str(told.value)
    assert run.step == 3
    # The epoch itself is resumed.
    again = tmg.Checkpoints(tmp_path, *model, data=make(), every_epochs=1)
    assert again.restore() == 2
    whole = [batch.numpy().tolist() for batch in make().take(3)]
    assert three(again, 1) == whole[2:]
    # Its end is not.
    ended = tmg.Checkpoints(tmp_path, *model, data=make())
    assert ended.restore() == 3
    with pytest.raises(tmg.CheckpointError, match=r"Received: .*, with a shuffle"):
        three(ended, 2)


def test_an_iterator_is_of_one_epoch(tmp_path: Path) -> None:
    run = tmg.Checkpoints(tmp_path, *small(), data=range_of(12).repeat().batch(3))
    iterator = iter(run.data)
    epochs = run.epochs(3)
    next(epochs)
    next(iterator)
    run.after_step()
    assert next(epochs) == 1
    next(iterator)
    with pytest.raises(tmg.CheckpointError, match="in epoch 1 without a new pass") as caught:
        run.after_step()
    assert "iterator = iter(checkpoints.data)" in str(caught.value)
    epochs.close()


# datasets that fit alone gets -------------------------------------------------------------------


def lists(batches: Any) -> list[list[float]]:
    return [batch.numpy().tolist() for batch in batches]


def test_fit_passes_over_its_own_datasets_likewise(caplog: pytest.LogCaptureFixture) -> None:
    def fresh(kind: str) -> Any:
        global generator
        generator = tf.random.Generator.from_seed(3)
        return KINDS[kind][0]()

    for kind, (_, replay) in KINDS.items():
        data = fresh(kind)
        third = [lists(data) for _ in range(3)][2]
        feed = EpochIterator(tmg.distribute_dataset(fresh(kind)), 4, None)
        feed.begin_epoch()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tfmultigpu"):
            assert feed.skip(2, 1) == 1, kind
        assert lists(feed.iterator) == third[1:], kind
        assert ("Python makes the data" in caplog.text) == replay.python, kind


def test_a_generator_of_fit_with_a_state_resumes_after_its_first_pass() -> None:
    mixed = Mixed()
    passes = [[batch.tolist() for batch in mixed()] for _ in range(2)]
    feed = EpochIterator(tmg.distribute_dataset(Mixed()), None, None)
    feed.begin_epoch()
    assert feed.skip(1, 2) == 2
    assert lists(feed.iterator) == passes[1][2:]


@pytest.mark.parametrize("given", ["fit", "steps"])
def test_validation_goes_on_where_it_was_with_the_data_of_which_it_is_made(
    given: str, tmp_path: Path
) -> None:
    x, y = np.random.default_rng(0).normal(size=(12, 3)), np.eye(2)[np.arange(12) % 2]

    class Stop(keras.callbacks.Callback):
        every_batches = 1

        def __init__(self, after: int = 0) -> None:
            super().__init__()
            self._left = after

        def state(self) -> int:
            return 0

        def set_state(self, state: int) -> None:
            """The next one counts from its beginning."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt

    def fit(folder: str, stop: Any) -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        model, optimizer = small()
        model.compile(optimizer, "mse")
        examples = Dataset.from_tensor_slices((x, y)).shuffle(12, seed=1)
        data = examples.shuffle(12, seed=2).batch(3)
        run = tmg.Checkpoints(tmp_path / folder, model, optimizer, every_steps=2)
        run.restore()
        history = tmg.fit(
            model,
            data,
            steps_per_epoch=2 if given == "steps" else None,
            epochs=4,
            validation_data=examples.shuffle(12, seed=4).batch(3),
            validation_steps=2,
            callbacks=[stop, run.callback()],
            verbose=0,
        )
        return history.history, model.get_weights()

    whole, expected = fit("whole", Stop())
    with pytest.raises(KeyboardInterrupt):
        fit("run", Stop(6 if given == "steps" else 11))
    history, found = fit("run", Stop())
    assert history == whole
    assert len(history["val_loss"]) == 4
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_validation_passes_over_the_passes_that_were_due() -> None:
    def validation(frequency: Any) -> Any:
        batches = tmg.distribute_dataset(KINDS["twice"][0]())
        passes = EvaluationPasses(batches)
        return Validation(None, passes, None, frequency, Program(None, batches.strategy), False)

    batches = validation(1).passes.batches
    passes = [lists(batches) for _ in range(3)]
    for frequency, epochs, expected in ((1, 2, 2), (2, 5, 2), ([1, 9], 8, 1), (3, 2, 0)):
        resumed = validation(frequency)
        for epoch in range(epochs):
            resumed.skip(epoch)
        assert lists(resumed.passes.batches) == passes[expected], (frequency, epochs)
