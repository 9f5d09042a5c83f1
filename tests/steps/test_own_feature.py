"""The features of docs/own-features.md, as they stand there, held to one device."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from forced_addition import forcing_addition
from one_device import SEED, strategy_of

import tfmultigpu as tmg

PAGE = Path(__file__).parents[2] / "docs" / "own-features.md"
X = np.random.default_rng(3).normal(size=(23, 3)).astype("float32")
SIZES = (7, 1, 6, 2, 7)


def of_page(name: str) -> Any:
    """Returns a class of the page."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    body = [n for n in ast.parse(code).body if isinstance(n, ast.ClassDef) and n.name == name]
    found: dict[str, Any] = {"keras": keras, "tf": tf, "tmg": tmg}
    exec(compile(ast.Module(body, []), str(PAGE), "exec"), found)
    return found[name]


def trained(replicas: int, features: list[Any], **options: Any) -> tuple[list[np.ndarray], Any]:
    strategy = strategy_of(replicas)
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, features=features, **options)
    for rows in np.split(X, np.cumsum(SIZES)[:-1]):
        step((rows, rows[:, :1]))
    return [variable.numpy() for variable in model.variables], step


WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "owned": {"shard_update": True},
    "clipped micro-batches": {"micro_batches": 2, "clip_norm": 0.5},
}


@pytest.mark.parametrize(("replicas", "way"), [*zip((1, 2, 3), WAYS, strict=True)])
def test_noise_is_that_of_one_device(replicas: int, way: str) -> None:
    make, options = of_page("GradientNoise"), WAYS[way]
    truth, _ = trained(1, [make(0.2, seed=5)], **{**options, "micro_batches": 1})
    without, _ = trained(1, [], **{**options, "micro_batches": 1})
    assert max(np.abs(a - b).max() for a, b in zip(truth, without, strict=True)) > 0.01
    weights, _ = trained(replicas, [make(0.2, seed=5)], **options)
    for one, other in zip(truth, weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


def test_noise_is_alike_where_each_replica_adds_it() -> None:
    truth, _ = trained(1, [of_page("GradientNoise")(0.2)])
    with forcing_addition("collective"):
        weights, step = trained(3, [of_page("GradientNoise")(0.2)])
    for one, other in zip(truth, weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)
    for variable in step.model.variables:  # All copies, not the first alone.
        first, *others = step.strategy.experimental_local_results(variable.value)
        for copy in others:
            np.testing.assert_array_equal(copy.numpy(), first.numpy())


@pytest.mark.filterwarnings("error::tfmultigpu.errors.ReplicaDependenceWarning")
def test_verification_knows_the_noise() -> None:
    _, step = trained(2, [of_page("GradientNoise")(0.2)], verify="gradients")
    assert step.verification.outcome == "same"


def test_largest_gradients_are_those_of_the_global_batch() -> None:
    largest, reference = of_page("LargestGradients")(), of_page("LargestGradients")()
    trained(3, [largest])
    trained(1, [reference])
    values = [value.numpy() for value in largest.values.values()]
    expected = [value.numpy() for value in reference.values.values()]
    assert min(expected) > 0
    np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_a_method_that_is_nearly_a_hook_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Mine\.on_gradients is never called\. Name it on_grad"):
        type("Mine", (tmg.steps.Feature,), {"on_gradients": lambda self, gradient: gradient})
