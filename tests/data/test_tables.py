"""Tables of pandas are the arrays that Keras makes of them."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from one_device import strategy_of
from problems import network

import tfmultigpu as tmg
from tfmultigpu.data.sources import tensors_of_arrays

pandas: Any = pytest.importorskip("pandas")
FRAME = pandas.DataFrame(
    {"a": [0.1, 0.2, 0.3, 0.4], "n": [1, 2, 3, 4], "yes": [True, False, True, True]}
).assign(text=["u", "v", "u", "w"])


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        (["a", "yes"], "float32"),
        (["n", "yes"], "float32"),
        (["a", "n"], "float64"),
        (["n"], "int64"),
        (["yes"], "bool"),
    ],
)
def test_columns_are_one_array(columns: list[str], dtype: str) -> None:
    tensor = tensors_of_arrays(FRAME[columns])
    assert (tensor.dtype.name, tensor.shape.as_list()) == (dtype, [4, len(columns)])
    np.testing.assert_array_equal(tensor, np.array(FRAME[columns], "float64").astype(dtype))


def test_a_series_is_a_column_as_in_keras() -> None:
    arrays = tensors_of_arrays({name: FRAME[name] for name in FRAME})
    assert {name: array.shape.as_list() for name, array in arrays.items()} == {
        name: [4, 1] for name in FRAME
    }
    assert arrays["text"].numpy().ravel().tolist() == [b"u", b"v", b"u", b"w"]


# Fails if a table is not the data that Keras' fit makes of it.
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_table_trains_as_in_keras(replicas: int) -> None:
    frame, weights = pandas.get_dummies(FRAME), []
    scopes = contextlib.nullcontext(), strategy_of(replicas).scope()
    for scope, fit in zip(scopes, (keras.Model.fit, tmg.fit), strict=True):
        keras.utils.set_random_seed(1)
        with scope:
            model = network(6, keras.layers.Dense(1))
            model.compile("sgd", "mse")
        fit(model, frame, FRAME.a, sample_weight=FRAME.n, batch_size=3, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
