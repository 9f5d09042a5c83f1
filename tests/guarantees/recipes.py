"""Training the same problem on one device, as most people write it on several, and with ours."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from guarantee import Difference
from one_device import SEED, ByHand, difference, strategy_of
from problems import X, Y, crossentropy, mlp

import tfmultigpu as tmg


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def rows(count: int) -> tuple[Any, ...]:
    """The first rows of the features and the labels."""
    return X[:count], Y[:count]


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained on which global batches.

    Attributes:
        arrays: Features and labels.
        batch_size: Rows of a global batch; the last one is what is left.
        loss: For Keras and for us; ``true_loss`` for one device, where it must be another.
        options: For ``make_train_step``.
    """

    arrays: tuple[Any, ...]
    batch_size: int = 64
    build: Callable[[], Any] = mlp
    optimizer: Callable[[], Any] = sgd
    loss: Any = dataclasses.field(default_factory=crossentropy)
    true_loss: Any = None
    replicas: int = 2
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def batches(self) -> list[Any]:
        starts = range(0, len(self.arrays[0]), self.batch_size)
        return [tuple(a[i : i + self.batch_size] for a in self.arrays) for i in starts]

    def dataset(self) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(self.arrays).batch(self.batch_size)

    def replace(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training left behind.

    Attributes:
        weights: The weights of the model, one list for each replica.
        iterations: What the optimizer counted.
    """

    weights: list[list[np.ndarray]]
    iterations: int = 0


def fresh(problem: Problem) -> tuple[Any, Any]:
    """A model and an optimizer, the same ones every time."""
    keras.utils.set_random_seed(SEED)
    return problem.build(), problem.optimizer()


def weights_of(model: Any, strategy: Any = None) -> list[list[np.ndarray]]:
    """The weights, as each replica holds them."""
    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    each = [
        [copy.numpy() for copy in strategy.experimental_local_results(weight.value)]
        for weight in model.weights
    ]
    return [list(copies) for copies in zip(*each, strict=True)]


def weights(found: Trained, truth: Trained) -> Difference:
    """The weights of every replica against those of one device."""
    (right,) = truth.weights
    return Difference(float(np.max([difference(each, right) for each in found.weights])))


# One device ---------------------------------------------------------------------------------------


def one_device(problem: Problem) -> Trained:
    """The truth: a loop for one device, without any code of ours."""
    loss = problem.loss if problem.true_loss is None else problem.true_loss
    hand = ByHand(problem.build, problem.optimizer, loss)
    result = hand.train(problem.batches())
    return Trained([[w.numpy() for w in hand.model.weights]], result.iterations)


# As most people write it --------------------------------------------------------------------------


@functools.cache
def mirrored(replicas: int) -> tf.distribute.Strategy:
    """TensorFlow's default strategy: one in a process, for a second one breaks both."""
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def compiled(problem: Problem, strategy: Any, **options: Any) -> Any:
    with strategy.scope():
        model, optimizer = fresh(problem)
        model.compile(optimizer, problem.loss, **options)
    return model


def by_fit(problem: Problem) -> Trained:
    """Keras ``fit`` under the default strategy."""
    single = problem.replicas == 1
    strategy = tf.distribute.get_strategy() if single else mirrored(problem.replicas)
    model = compiled(problem, strategy)
    model.fit(problem.dataset(), verbose=0, shuffle=False)
    return Trained(weights_of(model, strategy), int(model.optimizer.iterations.numpy()))


def by_loop(
    problem: Problem,
    replica_loss: Callable[..., Any],
    *,
    build_optimizer: bool = True,
) -> Trained:
    """The custom training loop of the tutorials; ``replica_loss(model, y, y_pred)``.

    Without ``build_optimizer``, as in the tutorials, an optimizer that has slots fails at once.
    """
    strategy = mirrored(problem.replicas)
    with strategy.scope():
        model, optimizer = fresh(problem)
        if build_optimizer:
            optimizer.build(model.trainable_variables)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = replica_loss(model, y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(lambda batch: strategy.run(train_step, args=batch))
    for batch in strategy.experimental_distribute_dataset(problem.dataset()):
        run(batch)
    return Trained(weights_of(model, strategy), int(optimizer.iterations.numpy()))


def per_example(y: Any, y_pred: Any) -> Any:
    return tf.keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)


def divided_by(global_batch_size: int) -> Callable[..., Any]:
    """The loss of the tutorials: a sum over the shard, divided by the global batch size."""

    def replica_loss(model: Any, y: Any, y_pred: Any) -> Any:
        values = per_example(y, y_pred)
        return tf.nn.compute_average_loss(values, global_batch_size=global_batch_size)

    return replica_loss


# With this library --------------------------------------------------------------------------------


def by_step(problem: Problem) -> Trained:
    """Our step over our distributed dataset."""
    strategy = strategy_of(problem.replicas)
    with strategy.scope():
        model, optimizer = fresh(problem)
    step = tmg.make_train_step(model, optimizer, problem.loss, strategy, **problem.options)
    for batch in tmg.distribute_dataset(problem.dataset(), strategy):
        step(batch)
    return Trained(weights_of(model, strategy), int(optimizer.iterations.numpy()))


def against_one_device(
    train: Callable[[Problem], Trained], problem: Problem
) -> Callable[[], Difference]:
    return lambda: weights(train(problem), one_device(problem))
