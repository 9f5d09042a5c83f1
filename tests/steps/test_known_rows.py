"""Steps whose number of rows TensorFlow knows, as on a GPU: results of one device, few traces."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf
from law.model import FLOAT, Batch, Training, batches_of, everything, regression
from law.pair import Pair

import tfmultigpu as tmg
from tfmultigpu.steps import batches
from tfmultigpu.steps.train import TrainStep

ROWS = 6
SIZES = (ROWS, 5, ROWS, 1, 4)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_forced", True)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Returns the rows of the first shard, as each trace of a step knows them."""
    known: list[int | None] = []
    compute = TrainStep.compute

    def noting(self: TrainStep, shards: Any, trace: Any) -> Any:
        known.append(tf.nest.flatten(shards.local[0])[0].shape[0])
        return compute(self, shards, trace)

    monkeypatch.setattr(TrainStep, "compute", noting)
    return known


class Noise(keras.layers.Layer):
    """Draws by row, and a factor of as many numbers as a replica has rows, of which all have one.

    The shapes of both are alike, so only a shape that is open can tell them apart.
    """

    def __init__(self, count: int) -> None:
        super().__init__(**FLOAT)
        self._count = count
        self._seeds = keras.random.SeedGenerator(1), keras.random.SeedGenerator(2)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        of_rows = keras.random.uniform(keras.ops.shape(x), dtype=x.dtype, seed=self._seeds[0])
        shape = (self._count, 4)
        factor = keras.random.uniform(shape, dtype=x.dtype, seed=self._seeds[1])
        return x * of_rows + keras.ops.sum(factor, axis=0)


def noisy(count: int) -> Training:
    layers = [Noise(count), keras.layers.Dropout(0.3, seed=3, **FLOAT)]
    model = keras.Sequential(
        [keras.Input((4,), dtype="float64"), *layers, keras.layers.Dense(2, **FLOAT)]
    )
    return Training(model, keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(**FLOAT))


class OfOneSize(Pair):
    """A pair whose data says that all batches have ``ROWS`` rows."""

    def shards(self, batches: Sequence[Batch]) -> Iterator[Any]:
        specs = tf.nest.map_structure(lambda a: tf.TensorSpec(a.shape, a.dtype), batches[0])
        source = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs)
        return iter(tmg.distribute_dataset(source, self.strategy))


# Fails if a draw of a shape that happens to be that of the rows is cut, or one by row is not.
@pytest.mark.parametrize("replicas", [2, 3])
def test_draws_are_told_apart_where_rows_are_known(replicas: int) -> None:
    build = functools.partial(noisy, ROWS // replicas)
    OfOneSize(build, regression([ROWS])[0], replicas).hold(regression([ROWS] * 3), steps=2)


# Fails if what is known of the first size is used for another, or if each size costs a trace.
@pytest.mark.parametrize("replicas", [1, 2])
def test_other_sizes_share_one_trace(replicas: int, traces: list[int | None]) -> None:
    pair = Pair(functools.partial(noisy, 2), regression([ROWS])[0], replicas, verify=False)
    pair.hold(regression(SIZES))
    assert traces == ([ROWS, None] if replicas == 1 else [None])


# Fails if the number of rows that a step knows is wrong for one of the features.
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2, "loss_scale": 8.0}])
def test_all_features_at_once(options: dict[str, Any]) -> None:
    like, *_ = data = batches_of([ROWS] * 3)
    build = functools.partial(everything, norm=not options)
    OfOneSize(build, like, 2, **options).hold(data, steps=2)


# Fails if a step reads how many copies there are off the shapes of its shards, which are alike.
def test_a_partition_and_copies_of_the_same_shapes() -> None:
    pair = OfOneSize(functools.partial(noisy, 2), regression([ROWS])[0], 3, verify=False)
    pair.hold(regression([6] * 2))
    pair.hold(regression([2] * 2))
    pair.hold(regression([6] * 2))


# Fails if a loop over data without end, which looks for none, does not see that it was closed.
def test_a_loop_over_data_without_end_ends_where_that_is_closed() -> None:
    strategy = tmg.create_strategy(devices=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.0)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    rows = tf.data.Dataset.from_tensors((tf.ones([4, 3]), tf.ones([4, 1]))).repeat()
    batches = iter(tmg.distribute_dataset(rows, strategy))
    assert [int(step.run(batches, steps)["steps"]) for steps in (5, 1)] == [5, 1]
    batches.close()
    assert int(step.run(batches, 2)["steps"]) == 0
