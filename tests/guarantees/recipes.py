"""Training the same problem on one device, as most people write it on several, and with ours."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from guarantee import Difference
from one_device import SEED, ByHand, strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(3)
X = _random.normal(size=(260, 6)).astype("float32")
Y = _random.integers(0, 4, 260).astype("int64")
W = _random.uniform(0.2, 2.0, 260).astype("float32")


def mlp() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
    )


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def crossentropy(reduction: str = "sum_over_batch_size") -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def rows(count: int, *further: Any) -> tuple[Any, ...]:
    """The first rows of the features, the labels, and more."""
    return tuple(array[:count] for array in (X, Y, *further))


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained on which global batches.

    Attributes:
        arrays: Features, labels and perhaps sample weights, any structure.
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
    epochs: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def batches(self) -> list[Any]:
        count = len(tf.nest.flatten(self.arrays)[0])
        starts = range(0, count, self.batch_size)
        cut = [
            tf.nest.map_structure(lambda a, i=i: a[i : i + self.batch_size], self.arrays)
            for i in starts
        ]
        return cut * self.epochs

    def dataset(self) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(self.arrays).batch(self.batch_size)

    def replace(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training left behind.

    Attributes:
        weights: The weights of the model, one list for each replica.
        losses: What was reported: of each step, or of each epoch by ``fit``.
        iterations: What the optimizer counted.
    """

    weights: list[list[np.ndarray]]
    losses: list[float]
    iterations: int = 0
    logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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


def largest(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """The largest difference; NaN where anything is NaN."""
    each = [np.asarray(a, "float64") - b for a, b in zip(one, other, strict=True)]
    return float(np.max([np.max(np.abs(values), initial=0.0) for values in each], initial=0.0))


def weights(found: Trained, truth: Trained) -> Difference:
    """The weights of every replica against those of one device."""
    (right,) = truth.weights
    return Difference(float(np.max([largest(each, right) for each in found.weights])))


def losses(found: Trained, truth: Trained, of: str = "reported loss") -> Difference:
    return Difference(largest(found.losses, truth.losses), of)


# One device ---------------------------------------------------------------------------------------


def one_device(problem: Problem, **options: Any) -> Trained:
    """The truth: a loop for one device, without any code of ours."""
    loss = problem.loss if problem.true_loss is None else problem.true_loss
    hand = ByHand(problem.build, problem.optimizer, loss, **options)
    result = hand.train(problem.batches())
    return Trained([[w.numpy() for w in hand.model.weights]], result.losses, result.iterations)


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


def by_fit(problem: Problem, fit: Mapping[str, Any] | None = None, **options: Any) -> Trained:
    """Keras ``fit`` under the default strategy; ``options`` go to ``compile``."""
    single = problem.replicas == 1
    strategy = tf.distribute.get_strategy() if single else mirrored(problem.replicas)
    model = compiled(problem, strategy, **options)
    history = model.fit(
        problem.dataset(), epochs=problem.epochs, verbose=0, shuffle=False, **(fit or {})
    ).history
    iterations = int(model.optimizer.iterations.numpy())
    return Trained(weights_of(model, strategy), history.get("loss", []), iterations, history)


def by_loop(
    problem: Problem,
    replica_loss: Callable[..., Any],
    *,
    build_optimizer: bool = True,
    dataset: Any = None,
) -> Trained:
    """The custom training loop of the tutorials; ``replica_loss(model, y, y_pred, *more)``.

    Without ``build_optimizer``, as in the tutorials, an optimizer that has slots fails at once.
    """
    strategy = mirrored(problem.replicas)
    with strategy.scope():
        model, optimizer = fresh(problem)
        if build_optimizer:
            optimizer.build(model.trainable_variables)

    def train_step(x: Any, y: Any, *more: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = replica_loss(model, y, model(x, training=True), *more)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(batch: Any) -> Any:
        each = strategy.run(train_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, each, axis=None)

    data = problem.dataset() if dataset is None else dataset
    reported = []
    for _ in range(problem.epochs):
        for batch in strategy.experimental_distribute_dataset(data):
            reported.append(float(distributed_train_step(batch)))
    iterations = int(optimizer.iterations.numpy())
    return Trained(weights_of(model, strategy), reported, iterations)


def per_example(y: Any, y_pred: Any) -> Any:
    return tf.keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)


def divided_by(global_batch_size: int) -> Callable[..., Any]:
    """The loss of the tutorials: a sum over the shard, divided by the global batch size."""

    def replica_loss(model: Any, y: Any, y_pred: Any) -> Any:
        values = per_example(y, y_pred)
        return tf.nn.compute_average_loss(values, global_batch_size=global_batch_size)

    return replica_loss


# With this library --------------------------------------------------------------------------------


def by_step(problem: Problem, replicas: int | None = None, data: Any = None) -> Trained:
    """Our step over our distributed dataset."""
    strategy = strategy_of(problem.replicas if replicas is None else replicas)
    with strategy.scope():
        model, optimizer = fresh(problem)
    step = tmg.make_train_step(model, optimizer, problem.loss, strategy, **problem.options)
    data = problem.dataset() if data is None else data
    reported: list[Any] = []
    for _ in range(problem.epochs):
        reported += [step(batch) for batch in tmg.distribute_dataset(data, strategy)]
    values = [float(logs["loss"]) for logs in reported]
    iterations = int(optimizer.iterations.numpy())
    return Trained(weights_of(model, strategy), values, iterations, reported[-1])


def epoch_loss(trained: Trained, problem: Problem) -> Trained:
    """The mean over all rows, as ``fit`` reports it, from the losses of the steps."""
    sizes = [len(tf.nest.flatten(batch)[0]) for batch in problem.batches()]
    mean = float(np.average(trained.losses, weights=sizes))
    return dataclasses.replace(trained, losses=[mean])
