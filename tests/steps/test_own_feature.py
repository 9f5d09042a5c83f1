"""The features of docs/contributing/own-features.md, as they stand there, held to one device."""

from __future__ import annotations

import ast
import contextlib
import re
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from one_device import cut, difference, step_on
from problems import networks, normal_rows

import tfmultigpu as tmg
from tfmultigpu.strategies.collectives import forcing_addition

PAGE = Path(__file__).parents[2] / "docs" / "contributing" / "own-features.md"
(X,) = normal_rows(23, 3, seed=3)
BATCHES = cut((X, X[:, :1]), (7, 1, 6, 2, 7))


def of_page(name: str) -> Any:
    """Returns a class of the page."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    body = [n for n in ast.parse(code).body if isinstance(n, ast.ClassDef) and n.name == name]
    found: dict[str, Any] = {"keras": keras, "tf": tf, "tmg": tmg}
    exec(compile(ast.Module(body, []), str(PAGE), "exec"), found)
    return found[name]


def trained(replicas: int, *features: Any, **options: Any) -> list[Any]:
    """Returns the weights after all batches."""
    build = networks(3, lambda: keras.layers.Dense(4, "tanh"), lambda: keras.layers.Dense(1))
    sgd = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    step = step_on(replicas, build, sgd, "mse", features=features, **options)
    for batch in BATCHES:
        step(batch)
    weights: list[Any] = step.model.get_weights()
    return weights


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
    truth, without = (trained(1, *f, **whole) for f in ([make(0.2, seed=5)], []))
    assert difference(truth, without) > 0.01
    forced = way == "each replica adds it"
    with forcing_addition(in_memory=False) if forced else contextlib.nullcontext():
        result = trained(replicas, make(0.2, seed=5), **options)
    assert difference(result, truth) <= 1e-6


class Forbids(tmg.steps.Feature):
    """Forbids each second update."""

    def on_one_device(self) -> tmg.steps.Feature:
        return self

    def bind(self, step: Any) -> None:
        self._turn = tf.Variable(0, dtype=tf.int64)

    def on_gradient(self, gradient: tmg.steps.Gradient) -> tmg.steps.Gradient:
        return gradient._replace(valid=self._turn % 2 == 0)

    def after_update(self, gradient: tmg.steps.Gradient) -> None:
        self._turn.assign_add(1)


# Fails if what one feature forbids another allows, or the loss scale takes it for an overflow.
def test_each_of_several_features_can_forbid_an_update() -> None:
    strategy = tmg.create_strategy(devices=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(
        model, optimizer, "mse", strategy, loss_scale="dynamic", verify=False, features=[Forbids()]
    )
    bad = X[:4].copy()
    bad[0, 0] = float("inf")
    skipped, scales = [], []
    for rows in (X[:4], X[:4], bad, X[:4]):
        logs = step((rows, X[:4, 1:2]))
        skipped.append(float(logs["skipped"]))
        scales.append(float(logs["loss_scale"]))
    assert skipped == [0, 1, 1, 1]
    assert scales[0] == scales[1] == scales[2] == 2 * scales[3]
    assert optimizer.iterations.numpy() == 1
