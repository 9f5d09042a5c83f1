"""Batches of parts with rows of their own: N replicas against a loop for one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import Replicated, Result, assert_same

import tfmultigpu as tmg
from tfmultigpu.data import Parts, Whole

# Rows with labels and without. In the last two a part has fewer rows than four replicas.
SIZES = ((5, 12), (8, 9), (7, 4), (2, 11), (6, 1))
# Of a part with one row the variance is rounding, which normalization makes larger.
WEIGHTS = 4e-6
TEMPERATURE = 2.0

_random = np.random.default_rng(4)
BATCHES = [
    (
        _random.normal(size=(labeled, 6)).astype("float32"),
        _random.integers(0, 4, labeled),
        _random.normal(size=(unlabeled, 6)).astype("float32"),
    )
    for labeled, unlabeled in SIZES
]
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def parts(x: Any, y: Any, u: Any) -> Parts:
    temperature = Whole(tf.constant(TEMPERATURE))
    return Parts(labeled=(x, y), unlabeled=u, temperature=temperature)


def dataset() -> tf.data.Dataset:
    spec = (
        tf.TensorSpec((None, 6)),
        tf.TensorSpec((None,), tf.int64),
        tf.TensorSpec((None, 6)),
    )
    read = tf.data.Dataset.from_generator(lambda: iter(BATCHES), output_signature=spec)
    return read.map(parts)


def mlp(*, norm: bool = True, draws: bool = True) -> keras.Model:
    layers = keras.layers
    between = [layers.BatchNormalization(synchronized=True)] if norm else []
    if draws:
        between += [layers.Dropout(0.3, seed=5), layers.GaussianNoise(0.1, seed=6)]
        between += [layers.Dropout(0.2, seed=7)]
    first = layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
    return keras.Sequential([keras.Input((6,)), first, *between, layers.Dense(4)])


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def by_part(model: Any, x: Any, u: Any) -> tuple[Any, Any]:
    return model(x, training=True), model(u, training=True)


def together(model: Any, x: Any, u: Any) -> tuple[Any, Any]:
    h = model(tf.concat([x, u], 0), training=True)
    return h[: tf.shape(x)[0]], h[tf.shape(x)[0] :]


CALLS = {"by part": by_part, "together": together}


def spread(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_sum(tf.square(y_pred - y_true), -1)


def forward_of(call: Callable[..., Any]) -> Callable[..., Any]:
    """The mean over labeled rows, and a tenth of the mean over unlabeled ones."""

    def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
        (x, y), u = batch["labeled"], batch["unlabeled"]
        p, q = call(model, x, u)
        known = tmg.loss_sum(crossentropy, y, p / batch["temperature"].value)
        open_ = tmg.loss_sum(spread, tf.zeros_like(q), q)
        rows = tmg.steps.global_rows(x, part="labeled")
        ratio = rows / tmg.steps.global_rows(u, part="unlabeled")
        return tmg.LossSum(known.sum + 0.1 * tf.cast(ratio, tf.float32) * open_.sum, known.weight)

    return forward


@functools.cache
def by_hand(call: str, norm: bool, draws: bool) -> Result:
    """The loop for one device, without any code of ours."""
    keras.utils.set_random_seed(7)
    model, optimizer = mlp(norm=norm, draws=draws), sgd()
    optimizer.build(model.trainable_variables)
    losses = []
    for x, y, u in BATCHES:
        with tf.GradientTape() as tape:
            p, q = CALLS[call](model, x, u)
            known = tf.nn.sparse_softmax_cross_entropy_with_logits(y, p / TEMPERATURE)
            loss = tf.reduce_mean(known) + 0.1 * tf.reduce_mean(tf.reduce_sum(q * q, -1))
            loss += tf.add_n(model.losses)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        losses.append(float(loss))
    weights = [variable.numpy() for variable in model.variables]
    return Result(weights, losses, int(optimizer.iterations.numpy()))


def ours(replicas: int, call: str = "by part", **options: Any) -> Replicated:
    norm, draws = options.pop("norm", True), options.pop("draws", True)
    build = functools.partial(mlp, norm=norm, draws=draws)
    forward = options.pop("forward", forward_of(CALLS[call]))
    return Replicated(replicas, build, sgd, None, forward=forward, **options)


@pytest.mark.parametrize(("call", "replicas"), [("by part", 4), ("together", 3)])
def test_whole_batches(call: str, replicas: int) -> None:
    """Draws, synchronized normalization and small parts are those of one device."""
    trained = ours(replicas, call)
    assert_same(
        trained.train([parts(*one) for one in BATCHES]), by_hand(call, True, True), weights=WEIGHTS
    )
    assert trained.step.verification.outcome == "same"


def test_distributed_batches() -> None:
    trained = ours(3)
    data = tmg.distribute_dataset(
        dataset(), trained.strategy, shares=(3, 1, 2), prefetch_to_device=True
    )
    assert_same(trained.train(data), by_hand("by part", True, True), weights=WEIGHTS)


@pytest.mark.parametrize(("call", "micro"), [("by part", (2, 1)), ("together", 3)])
def test_micro_batches_cut_each_part_by_its_own_rows(call: str, micro: Any) -> None:
    trained = ours(2, call, norm=False, micro_batches=micro)
    assert_same(trained.train([parts(*one) for one in BATCHES]), by_hand(call, False, True))
    assert trained.step.verification.outcome == "same"


def test_all_rows_of_one_part() -> None:
    """A loss that compares each labeled row with all unlabeled ones."""

    def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
        (x, _), u = batch["labeled"], batch["unlabeled"]
        others = tmg.gather_rows(model(u), part="unlabeled")
        near = tf.reduce_logsumexp(tf.matmul(model(x), others, transpose_b=True), -1)
        return tmg.LossSum(tf.reduce_sum(near), tf.size(near))

    trained = ours(3, forward=forward, norm=False, draws=False)
    result = trained.train([parts(*one) for one in BATCHES])

    keras.utils.set_random_seed(7)
    model, optimizer = mlp(norm=False, draws=False), sgd()
    losses = []
    for x, _, u in BATCHES:
        with tf.GradientTape() as tape:
            similar = tf.matmul(model(x), model(u), transpose_b=True)
            loss = tf.reduce_mean(tf.reduce_logsumexp(similar, -1)) + tf.add_n(model.losses)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        losses.append(float(loss))
    weights = [variable.numpy() for variable in model.variables]
    assert_same(result, Result(weights, losses, len(BATCHES)))


def test_a_graph_goes_whole_to_every_replica() -> None:
    """Nodes are not cut, and draws for them are alike; the nodes to train on are rows."""
    nodes = _nodes()
    edges = np.array([[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 0], [1, 5]])
    chosen = np.array([0, 2, 3, 5, 6])
    labels = np.array([1, 0, 3, 2, 1])

    def logits_of(model: Any, nodes: Any, edges: Any, chosen: Any) -> Any:
        noisy = nodes + tf.random.stateless_normal(tf.shape(nodes), [1, 2], stddev=0.1)
        sums = tf.math.unsorted_segment_sum(
            tf.gather(noisy, edges[:, 0]), edges[:, 1], tf.shape(nodes)[0]
        )
        return model(tf.gather(noisy + sums, chosen), training=True)

    def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
        logits = logits_of(model, batch["nodes"].value, batch["edges"].value, batch["chosen"])
        return tmg.loss_sum(crossentropy, batch["labels"], logits)

    batch = {"nodes": Whole(nodes), "edges": Whole(edges), "chosen": chosen, "labels": labels}
    trained = ours(3, forward=forward)
    result = trained.train([batch] * 4)

    keras.utils.set_random_seed(7)
    model, optimizer = mlp(), sgd()
    losses = []
    for _ in range(4):
        with tf.GradientTape() as tape:
            logits = logits_of(model, nodes, edges, chosen)
            loss = crossentropy(labels, logits) + tf.add_n(model.losses)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        losses.append(float(loss))
    weights = [variable.numpy() for variable in model.variables]
    assert_same(result, Result(weights, losses, 4))
    assert trained.step.verification.outcome == "same"


def test_draws_for_parts_that_follow_each_other() -> None:
    """Several views of each row, in the order in which one device has them."""

    def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
        x, u = batch["labeled"][0], batch["unlabeled"]
        rows = tf.concat([tf.tile(x, [2, 1]), u, tf.repeat(tf.concat([u, x], 0), 2, axis=0)], 0)
        outputs = model(rows, training=training)
        return tmg.loss_sum(spread, tf.zeros_like(outputs), outputs)

    one, three = (ours(replicas, forward=forward, norm=False) for replicas in (1, 3))
    batches = [parts(*BATCHES[0]), parts(*BATCHES[2])]
    truth = one.train(batches)
    assert_same(three.train(batches), truth, weights=WEIGHTS, loss=2e-6)
    assert three.step.verification.outcome == "same"


def _nodes() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(7, 6)).astype("float32")


# What is told ------------------------------------------------------------------------------------


def train_once(forward: Callable[..., Any], replicas: int = 2, **options: Any) -> Any:
    trained = ours(replicas, forward=forward, **{"norm": False, **options})
    trained.train([parts(*BATCHES[0])])
    return trained


def test_a_sum_over_what_is_whole_is_noticed() -> None:
    def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
        (x, y), nodes = batch["labeled"], batch["nodes"].value
        known = tmg.loss_sum(crossentropy, y, model(x))
        return tmg.LossSum(known.sum + tf.reduce_sum(tf.square(model(nodes))), known.weight)

    trained = ours(2, forward=forward, norm=False)
    x, y, _ = BATCHES[0]
    with pytest.warns(tmg.ReplicaDependenceWarning):
        trained.train([Parts(labeled=(x, y), nodes=Whole(_nodes()))])
    assert trained.step.verification.outcome == "different"


def split_then_draw(model: Any, batch: Any, training: bool) -> tmg.LossSum:
    (x, y), u = batch["labeled"], batch["unlabeled"]
    h, _ = tf.split(tf.concat([x, u], 0), [tf.shape(x)[0], tf.shape(u)[0]])
    return tmg.loss_sum(crossentropy, y, model(h, training=training))


def test_a_draw_for_unknown_rows_is_refused() -> None:
    with pytest.raises(tmg.LossError, match="unknown which part of the batch a random draw is for"):
        train_once(split_then_draw)


def added_loss(model: Any, batch: Any, training: bool) -> tmg.LossSum:
    p, _ = by_part(model, batch["labeled"][0], batch["unlabeled"])
    return tmg.loss_sum(crossentropy, batch["labeled"][1], p)


def test_a_loss_that_a_layer_adds_is_refused() -> None:
    def build() -> keras.Model:
        layers = keras.layers
        first = layers.Dense(8, activity_regularizer=keras.regularizers.L2(0.1))
        return keras.Sequential([keras.Input((6,)), first, layers.Dense(4)])

    trained = Replicated(2, build, sgd, None, forward=added_loss, verify=False)
    with pytest.raises(tmg.LossError, match="unknown of which part of the batch these are"):
        trained.train([parts(*BATCHES[0])])


@pytest.mark.parametrize(("part", "replicas"), [(None, 2), ("temperature", 1)])
def test_gathering_needs_the_name_of_a_part(part: str | None, replicas: int) -> None:
    def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
        rows = tmg.gather_rows(model(batch["unlabeled"]), part=part)
        return tmg.LossSum(tf.reduce_sum(rows), 1.0)

    with pytest.raises(tmg.LossError, match=r"parts \['labeled', 'unlabeled'\].*part='labeled'"):
        train_once(forward, replicas)


def test_a_loss_without_forward_is_refused() -> None:
    for batch in (parts(*BATCHES[0]), {"x": BATCHES[0][0], "t": Whole(1.0)}):
        with pytest.raises(tmg.DataError, match=r"forward=f\)"):
            Replicated(2, mlp, sgd, "mse").train([batch])
