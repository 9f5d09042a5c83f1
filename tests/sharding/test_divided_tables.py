"""Which tables are divided, where their rows are, how they begin, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import graph_of, strategy_of, unused_strategy

import tfmultigpu as tmg
from tfmultigpu.addons.sharding import tables
from tfmultigpu.addons.sharding.initial_rows import made_in_parts, makes_rows_alone
from tfmultigpu.data.spread import rows_of_devices
from tfmultigpu.strategies.row_parts import RowParts

IDS, WIDTH = 8209, 16
BYTES = 4 * IDS * WIDTH
initializers, layers = keras.initializers, keras.layers


def divided(*memory: float, make: Any = None, **options: Any) -> Any:
    """Builds a layer with a table on devices of this memory, in parts of the table."""
    room = {f"CPU:{i}": part * BYTES for i, part in enumerate(memory)}
    with unused_strategy(len(memory)).scope(), tmg.sharded_variables(memory=room, at_least=2**14):
        layer = (make or layers.Embedding)(IDS, WIDTH, **options)
        layer.build((None,))
        return layer


def rows_of(layer: Any) -> list[int] | None:
    value = layer.variables[0].value
    return value.counts if isinstance(value, RowParts) else None


# Fails if rows are not where there is room, one device gets them all in spite of it, or a table
# that fits on one is divided.
def test_rows_are_divided_by_the_memory_that_is_free() -> None:
    assert rows_of(divided(0.6, 0.6)) == [4105, 4104]
    counts = rows_of(divided(0.8, 0.4))
    assert counts is not None
    assert sum(counts) == IDS
    np.testing.assert_allclose(counts, [IDS * 2 / 3, IDS / 3], atol=1)
    assert rows_of(divided(2.5, 1.0)) is None
    table = tables.Weight(initializers.Zeros(), (1000, 16), tf.float32, is_table=True)
    # The third is so full that it takes none; the others end alike.
    assert rows_of_devices(table, [0, 8_000, 90_000], [72_000.0, 72_000.0, 95_000.0]) == [
        563, 437, 0
    ]  # fmt: skip
    assert rows_of_devices(table, [0, 0], None) is None
    large = tables.Weight(initializers.Zeros(), (2**20, 20), tf.float32, is_table=True)
    assert rows_of_devices(large, [0, 0], None) == [2**19, 2**19]


class Weighted(layers.Embedding):  # type: ignore[misc]
    def call(self, ids: Any) -> Any:
        return super().call(ids) * 2.0


# Fails if a layer that needs all of its table gets it in parts, and reads them all in each step.
def test_only_what_is_looked_up_alone_is_divided() -> None:
    assert rows_of(divided(1.5, 1.5)) is not None
    for options in (
        {"make": layers.ReversibleEmbedding},
        {"make": Weighted},
        {"lora_rank": 2},
        {"embeddings_regularizer": keras.regularizers.OrthogonalRegularizer()},
    ):
        assert rows_of(divided(1.5, 1.5, **options)) is None


# Fails if a part begins with other rows than on one device, or each with the same.
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_first_value_is_that_of_one_device(dtype: str) -> None:
    shape, rows = (1003, 7), (300, 1, 702)
    for initializer in (
        initializers.RandomUniform(seed=3),
        initializers.TruncatedNormal(seed=3),
        initializers.HeNormal(seed=3),
        initializers.RandomNormal(seed=keras.random.SeedGenerator(3)),
        initializers.Constant(2.5),
        initializers.Zeros(),
    ):
        assert makes_rows_alone(initializer, tf.as_dtype(dtype))
        again = initializer.clone() if hasattr(initializer, "clone") else initializer
        if isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator):
            again = initializers.RandomNormal(seed=keras.random.SeedGenerator(3))
        parts = list(made_in_parts(lambda i=initializer: i(shape, dtype=dtype), shape, rows))
        assert [part.shape[0] for part in parts] == list(rows)
        whole = again(shape, dtype=dtype)
        np.testing.assert_array_equal(tf.concat(parts, 0), whole)
    assert not makes_rows_alone(initializers.Orthogonal(seed=1))


# Fails if rows of an initializer that needs all of them are made by themselves.
def test_other_initializers_make_the_whole_on_the_host() -> None:
    calls = itertools.count()

    def counted(shape: Any, dtype: Any = None) -> Any:
        assert next(calls) == 0
        return tf.reshape(tf.range(float(np.prod(shape))), shape)

    layer = divided(0.6, 0.6, embeddings_initializer=counted)
    assert rows_of(layer) == [4105, 4104]
    expected = np.arange(IDS * WIDTH, dtype="float32").reshape(IDS, WIDTH)
    np.testing.assert_array_equal(layer.embeddings.numpy(), expected)


def model_of(name: str, strategy: Any) -> tuple[Any, Any]:
    """A model with a table on both devices, and a step of it; the check of the first is on."""
    room = {f"CPU:{i}": 0.9 * BYTES for i in range(2)}
    with strategy.scope(), tmg.sharded_variables(memory=room):
        ids = keras.Input((3,), dtype="int32")
        rows = layers.Embedding(IDS, WIDTH, mask_zero=True)(ids)
        model = keras.Model(ids, layers.Dense(1)(layers.GlobalAveragePooling1D()(rows)))
        model.compile(getattr(keras.optimizers, name)(0.1), "mse")
    return model, tmg.make_train_step(model, model.optimizer, "mse", strategy)


# Fails if the table, or the rows of a replica, become one tensor in a step or in the check of it.
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_no_operation_of_a_step_has_all_rows(name: str) -> None:
    _, step = model_of(name, strategy_of(2))
    batch = np.array([[1, 2, 0], [8208, 2, 2], [7, 8, 9]], "int32"), np.ones((3, 1), "float32")
    graph = graph_of(step, batch)
    assert step.verification.outcome == "same"
    shapes = [t.shape for op in graph.get_operations() for t in op.outputs if t.shape.rank == 2]
    wholes = [shape for shape in shapes if shape[0] == IDS]
    assert not wholes
    parts = [shape for shape in shapes if shape[0] in (4104, 4105)]
    assert bool(parts) == (name == "Adam")  # Which updates all rows, each on its device.


# Fails if a tape that watches one part, or a file with some parts, is taken for the whole.
def test_what_would_see_one_part_is_refused(tmp_path: Path) -> None:
    layer = divided(0.6, 0.6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1, 2])))
    with pytest.raises(tmg.TfMultiGpuError, match=r"several devices[\s\S]*make_train_step"):
        tape.gradient(loss, layer.embeddings)
    model = keras.Sequential([keras.Input((1,), dtype="int32"), layer])
    with pytest.raises(tmg.TfMultiGpuError, match=r"SavedModel[\s\S]*load_weights"):
        model.export(str(tmp_path), verbose=False)
    # What TensorFlow saves is the table.
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "all"))
    (name,) = [name for name, shape in tf.train.list_variables(path) if shape == [IDS, WIDTH]]
    np.testing.assert_array_equal(tf.train.load_variable(path, name), layer.embeddings.numpy())


# Fails if a kernel that no device can hold is made before it is refused.
def test_a_kernel_larger_than_every_device_is_refused_before_it_is_made() -> None:
    def never(shape: Any, dtype: Any = None) -> Any:
        raise AssertionError(shape)

    room = {f"CPU:{i}": 1e6 for i in range(2)}
    with unused_strategy(2).scope(), tmg.sharded_variables(memory=room):
        dense = layers.Dense(1000, kernel_initializer=never, name="output")
        with pytest.raises(tmg.errors.DataError, match=r"'output/kernel' of 4,000,000 bytes"):
            dense.build((None, 1000))


# Fails if the part of a table that is refused reads as all of it.
def test_what_is_refused_of_a_table_is_a_part_of_it() -> None:
    with pytest.raises(tmg.errors.DataError) as caught:
        divided(0.4, 0.4, name="items")
    assert "Received: part 1 of 2 of the table 'items/embeddings' of " in str(caught.value)

    strategy = unused_strategy(2)
    room = {f"CPU:{i}": 0.6 * BYTES for i in range(2)}
    with strategy.scope(), tmg.sharded_variables(memory=room):
        layer = layers.Embedding(IDS, WIDTH, name="items")
        layer.build((None,))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(layer.trainable_variables)
    with pytest.raises(tmg.TfMultiGpuError, match="part 1 of 2 of the table 'items/embeddings'"):
        strategy.run(lambda: layer.embeddings.value.assign(tf.zeros([IDS, WIDTH])))
    zeros = [tf.zeros([IDS, WIDTH])]
    with pytest.raises(tmg.TfMultiGpuError, match="'embeddings:0' on 2 devices"):
        strategy.run(lambda: optimizer.apply(zeros, layer.trainable_variables))
