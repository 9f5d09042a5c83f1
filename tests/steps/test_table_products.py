"""Tables of embeddings with what else a training may have: chains, fit, mixed precision, files.

Sparse ids are in tests/cases/models.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import Training
from law.plain import train_once
from one_device import graph_of, strategy_of

import tfmultigpu as tmg

IDS, WIDTH = 8209, 16  # Lists of rows; of two parts, of each part as well.
layers = keras.layers
_random = np.random.default_rng(5)
X = _random.integers(0, IDS, (22, 3)).astype("int32")
X[:, 1] = X[::-1, 0]
Y = _random.normal(size=(22, 1)).astype("float32")
MEMORY = {f"CPU:{i}": 4.0 * IDS * WIDTH for i in range(2)}


def build(dtype: str = "float32") -> Any:
    keras.utils.set_random_seed(2)
    ids = keras.Input((3,), dtype="int32")
    rows = layers.Embedding(IDS, WIDTH, dtype=dtype)(ids)
    hidden = layers.Dense(4, "tanh", dtype=dtype)(layers.Flatten()(rows))
    model = keras.Model(ids, layers.Dense(1, dtype="float32")(hidden))
    model.compile(keras.optimizers.Adagrad(0.5), "mse")
    return model


def on_two(divided: bool, **options: Any) -> Any:
    strategy = strategy_of(2)
    if not divided:
        with strategy.scope():
            return build(**options)
    with strategy.scope(), tmg.sharded_variables(memory=MEMORY):
        return build(**options)


def train_alone(model: Any, *batches: Any) -> None:
    """Trains on one device from dense gradients: Keras squares a repeated row before it adds."""
    training = Training(model, model.optimizer, keras.losses.MeanSquaredError())
    for batch in batches:
        train_once(training, batch)


def assert_same(model: Any, expected: Any, atol: float = 1e-6) -> None:
    for variable, other in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_allclose(variable.numpy(), other.numpy(), atol=atol, err_msg=other.path)


# Fails if fit loses rows of the last batch, or a run that is resumed differs from one that is not.
@pytest.mark.parametrize("divided", [False, True])
def test_fit_and_a_resumed_fit(divided: bool, tmp_path: Path) -> None:
    expected = build()
    train_alone(expected, *2 * [(X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16)])
    model = on_two(divided)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    tmg.fit(model, data, verbose=0)
    tmg.Checkpoints(tmp_path, model=model, optimizer=model.optimizer).save()
    tmg.fit(model, data, verbose=0)
    assert_same(model, expected)

    again = on_two(divided)
    tmg.Checkpoints(tmp_path, model=again, optimizer=again.optimizer).restore()
    tmg.fit(again, data, verbose=0)
    for variable, other in zip(again.variables, model.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy(), other.path)


# Fails if the second step of a chain reads rows as they were before the first.
@pytest.mark.parametrize("divided", [False, True])
def test_steps_of_a_chain(divided: bool) -> None:
    expected, model, strategy = build(), on_two(divided), strategy_of(2)
    train_alone(expected, *2 * [(X[:7], Y[:7])])
    step = tmg.make_train_step(model, model.optimizer, "mse", strategy, verify=False)
    tmg.chain_steps(step, step)((X[:7], Y[:7]))
    assert_same(model, expected)


# Fails if the table is cast as a whole to look up rows, or rows are added in half precision.
@pytest.mark.parametrize("divided", [False, True])
def test_mixed_precision_casts_rows(divided: bool) -> None:
    expected, model = build("mixed_bfloat16"), on_two(divided, dtype="mixed_bfloat16")
    step = tmg.make_train_step(model, model.optimizer, "mse", strategy_of(2), verify=False)
    graph = graph_of(step, (X[:7], Y[:7]))  # It trains twice.
    casts = [
        op for op in graph.get_operations() if op.type == "Cast" and op.outputs[0].shape.rank == 2
    ]
    assert not [op for op in casts if op.outputs[0].shape[0] in (IDS, 4104, 4105)]
    train_alone(expected, *2 * [(X[:7], Y[:7])])
    assert_same(model, expected, atol=2e-2)  # What bfloat16 rounds.
