"""Losses over the whole batch: every replica sees the rows of all, and trains as one device does.

The losses are the ones of docs/coupled-losses.md, taken from the page, so that the page is held to
the loops written by hand here, which contain no code of ours.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import SEED, Replicated, difference

import tfmultigpu as tmg

PAGE = Path(__file__).parent.parent / "docs" / "coupled-losses.md"
SIZES = (8, 1, 3, 2, 5, 8)

_random = np.random.default_rng(5)
FIRST = _random.normal(size=(27, 6)).astype("float32")
SECOND = (FIRST + _random.normal(scale=0.3, size=FIRST.shape)).astype("float32")
NUMBERS = _random.integers(0, 5, 27)
IMAGES = _random.normal(size=(27, 4, 4, 1)).astype("float32")
MASKS = (IMAGES + _random.normal(scale=0.5, size=IMAGES.shape) > 0.3).astype("float32")


@functools.cache
def of_the_page(function: str) -> Callable[..., Any]:
    """A function that the page defines."""
    source = PAGE.read_text()
    blocks = [block.split("```")[0] for block in source.split("```python\n")[1:]]
    for block in blocks:
        for node in ast.parse(block).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                names = {"tf": tf, "tmg": tmg, "keras": keras}
                exec(compile(ast.Module([node], []), str(PAGE), "exec"), names)
                return names[function]
    raise AssertionError(f"{PAGE.name} defines no {function}")


def encoder() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(4)]
    )


def two_towers() -> keras.Model:
    query, item = keras.Input((6,)), keras.Input((6,))
    towers = [keras.layers.Dense(4)(query), keras.layers.Dense(4)(item)]
    return keras.Model([query, item], keras.ops.stack(towers, axis=1))


def segmenter() -> keras.Model:
    return keras.Sequential(
        [keras.Input((4, 4, 1)), keras.layers.Conv2D(1, 3, padding="same", activation="sigmoid")]
    )


# The losses of one device, each written in its textbook form -------------------------------------


def simclr(model: Any, batch: Any) -> Any:
    views = tf.concat([model(view, training=True) for view in batch], 0)
    views /= tf.norm(views, axis=-1, keepdims=True)
    similar = tf.exp(tf.matmul(views, views, transpose_b=True) / 0.5)
    others = tf.reduce_sum(similar, axis=1) - tf.linalg.diag_part(similar)
    rows = views.shape[0] // 2
    partners = tf.concat([tf.range(rows) + rows, tf.range(rows)], 0)
    found = tf.gather(similar, partners, batch_dims=1)
    return tf.reduce_mean(-tf.math.log(found / others))


def retrieval(model: Any, batch: Any) -> Any:
    inputs, numbers = batch
    towers = model(inputs, training=True)
    losses = []
    for row in range(towers.shape[0]):
        chosen = [i for i in range(towers.shape[0]) if i == row or numbers[i] != numbers[row]]
        logits = tf.stack([tf.reduce_sum(towers[row, 0] * towers[i, 1]) for i in chosen])
        losses.append(-tf.nn.log_softmax(logits)[chosen.index(row)])
    return tf.add_n(losses) / len(losses)


def barlow(model: Any, batch: Any) -> Any:
    first, second = (model(view, training=True) for view in batch)
    first, second = (
        (z - tf.reduce_mean(z, 0)) / tf.sqrt(tf.math.reduce_variance(z, 0) + 1e-3)
        for z in (first, second)
    )
    correlation = tf.einsum("ni,nj->ij", first, second) / first.shape[0]
    factors = tf.eye(4) + 0.01 * (1 - tf.eye(4))
    return tf.reduce_sum(factors * (correlation - tf.eye(4)) ** 2)


def dice(model: Any, batch: Any) -> Any:
    images, masks = batch
    predicted = model(images, training=True)
    both = tf.reduce_sum(predicted * masks)
    return 1 - 2 * both / (tf.reduce_sum(predicted) + tf.reduce_sum(masks) + 1e-6)


def views_to(loss: str) -> Callable[..., Any]:
    """The forward function that the page uses with two views."""

    def forward(model: Any, batch: Any, training: bool) -> Any:
        views = [model(view, training=training) for view in batch]
        return tmg.loss_sum(of_the_page(loss), *views)

    return forward


# For each: the model, the arrays of the data, the loss of one device, and loss or forward of ours.
CASES: dict[str, tuple[Any, Any, Any, Callable[[], dict[str, Any]]]] = {
    "simclr": (encoder, (FIRST, SECOND), simclr, lambda: {"forward": views_to("nt_xent")}),
    "retrieval": (
        two_towers,
        ((FIRST, SECOND), NUMBERS),
        retrieval,
        lambda: {"loss": of_the_page("in_batch_softmax")},
    ),
    "barlow": (encoder, (FIRST, SECOND), barlow, lambda: {"forward": views_to("barlow_twins")}),
    "dice": (segmenter, (IMAGES, MASKS), dice, lambda: {"loss": of_the_page("batch_dice")}),
}


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.02, momentum=0.9)


def batches_of(arrays: Any) -> list[Any]:
    starts = np.cumsum((0, *SIZES))
    return [
        tf.nest.map_structure(lambda a, i=i: a[starts[i] : starts[i + 1]], arrays)
        for i in range(len(SIZES))
    ]


@functools.cache
def by_hand(case: str) -> tuple[list[np.ndarray], list[float]]:
    """Weights and losses of one device, by a loop without any code of ours."""
    build, arrays, objective, _ = CASES[case]
    keras.utils.set_random_seed(SEED)
    model, optimizer = build(), sgd()
    losses = []
    for batch in batches_of(arrays):
        with tf.GradientTape() as tape:
            loss = objective(model, tf.nest.map_structure(tf.constant, batch))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        losses.append(float(loss))
    return [weight.numpy() for weight in model.weights], losses


def held(case: str, result: Any, what: object) -> None:
    weights, losses = by_hand(case)
    assert difference(result.weights, weights) <= 2e-6, what
    np.testing.assert_allclose(result.losses, losses, rtol=5e-6, atol=2e-6, err_msg=str(what))


def ours(replicas: int, case: str) -> Replicated:
    build, _, _, options = CASES[case]
    return Replicated(replicas, build, sgd, **{"loss": None, **options()})


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_loss_over_the_whole_batch_is_that_of_one_device(case: str, replicas: int) -> None:
    held(case, ours(replicas, case).train(batches_of(CASES[case][1])), "whole batches")


@pytest.mark.parametrize(("replicas", "shares"), [(2, (3, 1)), (3, (1, 4, 2))])
@pytest.mark.parametrize("case", CASES)
def test_shards_of_different_sizes(case: str, replicas: int, shares: tuple[int, ...]) -> None:
    run = ours(replicas, case)
    arrays = CASES[case][1]
    spec = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), arrays)
    data = tf.data.Dataset.from_generator(lambda: iter(batches_of(arrays)), output_signature=spec)
    shards = tmg.distribute_dataset(data, run.strategy, shares=shares)
    held(case, run.train(shards), shares)
