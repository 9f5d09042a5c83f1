"""Data of two workers: each row of a file on one of them, or an error."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import this_worker
from problems import network

import tfmultigpu as tmg
from tfmultigpu import _compat

pytestmark = pytest.mark.slow
ROWS, BATCH, EPOCHS = 1001, 48, 2


def write_files(folder: Path, count: int) -> None:
    """Writes the same rows into so many files of different lengths."""
    stops = np.linspace(0, ROWS, count + 1).astype(int) ** 2 // ROWS
    for number, (start, stop) in enumerate(itertools.pairwise(stops)):
        lines = "".join(f"{row}\n" for row in range(start, stop))
        (folder / f"{count}-{number}.csv").write_text(lines)


def files_in(folder: str, count: int) -> list[str]:
    return sorted(str(path) for path in Path(folder).glob(f"{count}-*"))


def rows_of(files: list[str], **shuffle: Any) -> tf.data.Dataset:
    numbers = tf.data.TextLineDataset(files).map(lambda line: tf.strings.to_number(line, tf.int64))
    examples = numbers.map(lambda n: (n, tf.math.floormod(tf.cast(n, tf.float32) * 0.37, 1.0)))
    return examples.shuffle(200, **shuffle).batch(BATCH)


def train_on_files(folder: str, count: int) -> tuple[np.ndarray, list[float]]:
    """Returns how often this worker has trained on each row, and the losses."""
    strategy = this_worker.strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = network(1, keras.layers.Dense(1))
        optimizer = keras.optimizers.SGD(0.1)
    trained_on, losses = np.zeros(ROWS, int), []

    def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
        x = tf.cast(batch[0], tf.float32)[:, None] / ROWS
        return tmg.loss_sum(keras.losses.mean_squared_error, batch[1][:, None], model(x))

    step = tmg.make_train_step(model, optimizer, None, strategy, forward=forward)
    data = tmg.distribute_dataset(rows_of(files_in(folder, count), seed=5), strategy)
    for _ in range(EPOCHS):
        for batch in data:
            for shard in strategy.experimental_local_results(batch[0]):
                assert len(shard) > 0
                trained_on += np.bincount(shard.numpy(), minlength=ROWS)
            losses.append(float(step(batch)["loss"]))
    return trained_on, losses


@pytest.mark.parametrize("count", [1, 5])
def test_files_are_read_once_an_epoch_and_train_as_on_one_device(
    both: Any, tmp_path: Path, count: int
) -> None:
    write_files(tmp_path, count)
    _, expected = train_on_files(str(tmp_path), count)
    (first, losses), (second, same) = both(train_on_files, str(tmp_path), count)
    np.testing.assert_array_equal(first + second, EPOCHS)
    assert losses == same
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def refused(dataset: Any, batches: int = 1, **options: Any) -> str:
    try:
        data = tmg.distribute_dataset(dataset, this_worker.strategy(), **options)
        for _ in itertools.islice(data, batches):
            time.sleep(0.01)
    except tmg.errors.DataError as error:
        return str(error)
    return ""


def read_different_data(folder: str) -> dict[str, str]:
    """Returns what this worker is told of data that are not those of the first one, and a seed."""
    worker, files = this_worker.index(), files_in(folder, 2)
    batches = tf.data.Dataset.range(10).batch(2)
    # Nobody knows how many batches there are: found after 1, 2, 4, ... of them, or at the end.
    later = batches.repeat(9).map(lambda n: n + (n // 8) * worker).filter(lambda n: True)
    tf.random.set_seed(worker)
    by_number = {"batch_size": 5, "preprocess": lambda n: n}
    seeded = {"batch_size": 4, "preprocess": lambda number, seed: seed[0]}
    (seeds,) = tmg.distribute_dataset(np.arange(4), this_worker.strategy(), **seeded)
    found = {
        "seed": str(this_worker.strategy().experimental_local_results(seeds)[0][0].numpy()),
        "without a seed": refused(rows_of(files)),
        "other order": refused(rows_of(files[:: -1 if worker else 1], seed=1)),
        "other length": refused(batches.take(5 - worker)),
        "later batch": refused(later, 45),
        "by number": refused(np.arange(40) + 100 * worker, **by_number),
        "by worker": refused(tf.data.Dataset.range(20).shard(2, worker).batch(5)),
        "alike by number": refused(np.arange(40), **by_number),
        "alike in a dict": refused(batches.map(lambda n: {"n": n, "text": ["a", "b"]})),
    }
    tf.random.set_seed(7)
    return found | {"alike by seed": refused(rows_of(files))}


def test_workers_that_read_different_data_are_told(
    both: Any, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    write_files(tmp_path, 2)
    first, second = both(read_different_data, str(tmp_path))
    for case in ("without a seed", "other order", "other length", "by number"):
        with subtests.test(case=case):
            said = (
                "The workers read different data: the first 1 batches of pass 1 differ, or the len"
            )
            assert second[case].startswith(said), case
    assert "5 on worker 0 and 4 on worker 1" in second["other length"]
    # A busy machine hears of the eighth batch at a later comparison.
    assert any(f"first {n} batches of pass 1 differ" in second["later batch"] for n in (8, 16, 32))
    assert "dataset.shuffle(size, seed=1)" in second["without a seed"]
    assert "Leave out what splits the data by worker" in second["by worker"]
    assert "other values or shapes on worker 0" in second["by worker"]
    for case in ("alike by number", "alike in a dict", "alike by seed"):
        with subtests.test(case=case):
            assert first[case] == second[case] == "", case
    assert first["seed"] == second["seed"]  # That of the data is one for all.


def late_value() -> list[str | None]:
    """Returns a value that the first worker never tells, and one that it does."""
    if this_worker.index() == 0:
        _compat.set_cluster_value("told", "yes")
        return [None, "yes"]
    return [_compat.cluster_value("never told", 0.2), _compat.cluster_value("told", 60.0)]


# Every other error says that the first worker is gone, and then nobody waits for its data.
def test_a_value_that_comes_too_late_is_no_error(both: Any) -> None:
    assert both(late_value) == [[None, "yes"]] * 2
