"""The features of docs/own-features.md, as they stand there, held to one device."""

from __future__ import annotations

import ast
import contextlib
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from forced_addition import forcing_addition
from one_device import Replicated, Result, cut, difference

import tfmultigpu as tmg

PAGE = Path(__file__).parents[2] / "docs" / "own-features.md"
X = np.random.default_rng(3).normal(size=(23, 3)).astype("float32")
BATCHES = cut((X, X[:, :1]), (7, 1, 6, 2, 7))


def of_page(name: str) -> Any:
    """Returns a class of the page."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    body = [n for n in ast.parse(code).body if isinstance(n, ast.ClassDef) and n.name == name]
    found: dict[str, Any] = {"keras": keras, "tf": tf, "tmg": tmg}
    exec(compile(ast.Module(body, []), str(PAGE), "exec"), found)
    return found[name]


def trained(replicas: int, *features: Any, **options: Any) -> tuple[Result, Any]:
    def build() -> keras.Model:
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,)), *layers])

    sgd = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    run = Replicated(replicas, build, sgd, "mse", features=features, **options)
    return run.train(BATCHES), run.step


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicated": (1, {}),
    "owned": (2, {"shard_update": True}),
    "clipped micro-batches": (3, {"micro_batches": 2, "clip_norm": 0.5}),
    "each replica adds it": (3, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_noise_is_that_of_one_device(way: str) -> None:
    make, (replicas, options) = of_page("GradientNoise"), WAYS[way]
    whole = {**options, "micro_batches": 1}
    truth, without = (trained(1, *f, **whole)[0] for f in ([make(0.2, seed=5)], []))
    assert difference(truth.weights, without.weights) > 0.01
    forced = way == "each replica adds it"
    with forcing_addition("collective") if forced else contextlib.nullcontext():
        result, _ = trained(replicas, make(0.2, seed=5), **options)
    assert difference(result.weights, truth.weights) <= 1e-6


def test_largest_gradients_are_those_of_the_global_batch() -> None:
    largest, reference = of_page("LargestGradients")(), of_page("LargestGradients")()
    trained(3, largest)
    trained(1, reference)
    values = [value.numpy() for value in largest.values.values()]
    expected = [value.numpy() for value in reference.values.values()]
    assert min(expected) > 0
    np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_a_method_that_is_nearly_a_hook_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Mine\.on_gradients is never called\. Name it on_grad"):
        type("Mine", (tmg.steps.Feature,), {"on_gradients": lambda self, gradient: gradient})
