"""Preprocessing of own rows: the same rows on any number of replicas, each with its seed."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of
from problems import network

import tfmultigpu as tmg
from tfmultigpu.data.preprocessing import takes_seed

ROWS = 11
X = np.arange(2.0 * ROWS, dtype="float32").reshape(ROWS, 2)
Y = np.arange(ROWS)
BATCH = 4  # 4, 4 and 3 rows: on four replicas each gets the last batch whole.
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "seed": 7}


def noisy(example: Any, seed: Any) -> Any:
    x, y = example
    if y > 5:  # AutoGraph makes this a branch, as in map of tf.data.
        x = x + 100.0
    return {"x": x + tf.random.stateless_uniform([2], seed), "y": y}


class Numbers:
    """Examples by number; remembers which were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def augment(self, number: Any, seed: Any) -> Any:
        def item(number: Any) -> Any:
            self.read.append(int(number))
            return X[number]

        x = tf.ensure_shape(tf.numpy_function(item, [number], tf.float32), [2])
        return noisy((x, number), seed)


SOURCES: dict[str, Any] = {
    "arrays": lambda: ((X, Y), noisy),
    "dataset": lambda: (tf.data.Dataset.from_tensor_slices((X, Y)), noisy),
    "by number": lambda: (np.arange(ROWS), Numbers().augment),
}


def by_hand(passes: int = 2) -> list[Any]:
    """Returns the batches of some passes, made without the library but with its seeds."""
    batches = []
    for number in range(passes):
        mixed = tf.random.stateless_uniform(
            [], tf.constant([7, number], tf.int64), None, None, tf.int64
        )
        rows = [noisy((tf.constant(X[i]), Y[i]), tf.stack([mixed, i]))["x"] for i in range(ROWS)]
        batches += [np.stack(rows[i : i + BATCH]) for i in range(0, ROWS, BATCH)]
    return batches


def whole(batch: Any, strategy: Any) -> np.ndarray:
    """Returns the rows of a global batch."""
    parts = [np.asarray(one) for one in strategy.experimental_local_results(batch["x"])]
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("replicas", "source"),
    [*((3, source) for source in SOURCES), *((n, "arrays") for n in (1, 2, 4))],
)
def test_rows_and_seeds_are_those_of_one_device(replicas: int, source: str) -> None:
    strategy = strategy_of(replicas)
    examples, function = SOURCES[source]()
    data = tmg.distribute_dataset(examples, strategy, preprocess=function, **OPTIONS)
    assert data.cut.element_spec["x"].shape == [None, 2]
    found = [whole(batch, strategy) for _ in range(2) for batch in data]
    for one, expected in zip(found, by_hand(), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6)


def test_shares_and_a_start_in_the_middle_of_a_pass() -> None:
    strategy, source = strategy_of(2), Numbers()
    data = tmg.distribute_dataset(
        np.arange(ROWS), strategy, shares=(3, 1), preprocess=source.augment, **OPTIONS
    )
    sizes = [[len(p) for p in strategy.experimental_local_results(b["y"])] for b in data]
    assert sizes == [[3, 1], [3, 1], [2, 1]]
    source.read.clear()
    iterator, passed = data.iterate_from(2)
    rest = [whole(batch, strategy) for batch in iterator]
    assert passed == 2
    assert sorted(source.read) == [8, 9, 10]  # What is passed over is not read.
    np.testing.assert_allclose(rest, [by_hand()[5]], rtol=1e-6)


def test_passes_of_a_loop_in_a_function_count_too() -> None:
    strategy = strategy_of(2)
    data = tmg.distribute_dataset((X, Y), strategy, preprocess=noisy, **OPTIONS)

    @tf.function
    def total() -> Any:
        found = tf.zeros([])
        for batch in data:
            found += strategy.reduce("SUM", strategy.run(tf.reduce_sum, (batch["x"],)), axis=None)
        return found

    expected = by_hand(passes=3)
    totals = [float(total()), float(total()), sum(whole(batch, strategy).sum() for batch in data)]
    sums = [sum(one.sum() for one in expected[i : i + 3]) for i in (0, 3, 6)]
    np.testing.assert_allclose(totals, sums, rtol=1e-6)


def test_what_a_function_may_take() -> None:
    assert takes_seed(noisy)
    assert takes_seed(lambda example, seed=None: example)
    assert not takes_seed(lambda example: example)
    assert not takes_seed(lambda example, size=3: example)
    assert not takes_seed(keras.layers.Rescaling(2.0))
    assert not takes_seed(np.sin)


def test_what_cannot_be_preprocessed(subtests: pytest.Subtests) -> None:
    strategy, examples = strategy_of(2), "np.arange(len(source))"
    sharded = tmg.distribute_dataset(X, strategy, batch_size=2)
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (lambda: iter([X]), {}, tmg.errors.DataError, examples),
        (keras.utils.PyDataset(), {}, tmg.errors.DataError, examples),
        (sharded, {}, tmg.errors.DataError, "already distributed"),
        ((X, Y[:3]), {}, tmg.errors.DataError, "Arrays are paired by rows"),
        ((X, Y), {"preprocess": lambda image, label: (image, label)}, TypeError, ""),
        ((X, Y), {"preprocess": lambda: 1}, TypeError, ""),
        ((X, Y), {"preprocess": 3}, TypeError, ""),
    ]
    for source, options, error, said in refused:
        with subtests.test(said):
            options = {"batch_size": BATCH, "preprocess": lambda example: example, **options}
            with pytest.raises(error) as caught:
                tmg.distribute_dataset(source, strategy, **options)
            assert said in str(caught.value)


def test_an_error_of_the_function_reaches_the_user() -> None:
    def broken(x: Any) -> Any:
        tf.debugging.Assert(x[0] < 9.0, ["too large"])
        return x

    data = tmg.distribute_dataset(X, strategy_of(2), batch_size=BATCH, preprocess=broken)
    iterator = iter(data)
    next(iterator)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        list(iterator)


def losses_of(replicas: int, directory: Any, stop: int | None = None) -> list[Any]:
    """Returns losses and weights of three epochs; a step after which the run ends, if any."""
    strategy = strategy_of(replicas)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = network(2, keras.layers.Dense(1))
        model.compile(keras.optimizers.SGD(0.001), "mse")

    def shaken(example: Any, seed: Any) -> Any:
        return noisy(example, seed)["x"] / 10.0, tf.cast(example[1], tf.float32)[None]

    def end(batch: int, logs: Any) -> None:
        if int(model.optimizer.iterations.numpy()) == stop:
            raise KeyboardInterrupt

    source = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, seed=1)
    data, valid = (
        tmg.distribute_dataset(examples, strategy, preprocess=shaken, **OPTIONS)
        for examples in (source, (X, Y))
    )
    checkpoints = tmg.Checkpoints(directory, model, model.optimizer)
    checkpoints.restore()
    callbacks = [checkpoints.callback(every_steps=2)]
    callbacks += [keras.callbacks.LambdaCallback(on_train_batch_end=end)]
    history = tmg.fit(model, data, epochs=3, validation_data=valid, callbacks=callbacks, verbose=0)
    last = [history.history[name][-1] for name in ("loss", "val_loss")]
    return [last, *model.get_weights()]


def test_fit_trains_on_preprocessed_data_as_one_device_also_if_interrupted(tmp_path: Any) -> None:
    expected = losses_of(1, tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        losses_of(2, tmp_path / "two", stop=5)
    for ours, truth in zip(losses_of(3, tmp_path / "two"), expected, strict=True):
        np.testing.assert_allclose(ours, truth, rtol=1e-5)
