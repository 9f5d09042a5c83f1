"""Training the same problem on one device, as most people write it on several, and with ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases.case import Case as Problem, differences, on_one_device, on_replicas
from guarantee import Difference
from law.model import Training
from one_device import SEED, difference, strategy_of
from problems import X, Y, crossentropy, mlp

Weights = list[list[np.ndarray]]  # Of the model, one list for each replica.


def rows(count: int) -> tuple[Any, ...]:
    """The first rows of the features and the labels."""
    return X[:count], Y[:count]


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def problem(
    arrays: Any,
    batch_size: int = 64,
    *,
    build: Callable[[], Any] = mlp,
    optimizer: Callable[[], Any] = sgd,
    loss: Any = None,
    whole: Any = None,
    replicas: int = 2,
) -> Problem:
    """Returns the training of a model on global batches of one size; the last has what is left."""
    starts = range(0, len(arrays[0]), batch_size)
    batches = [tuple(a[i : i + batch_size] for a in arrays) for i in starts]

    def make() -> Training:
        return Training(build(), optimizer(), loss or crossentropy(), whole=whole)

    return Problem("", make, batches, replicas=(replicas,))


def fresh(problem: Problem) -> Training:
    """The same model and optimizer every time."""
    keras.utils.set_random_seed(SEED)
    return problem.build()


def dataset_of(problem: Problem) -> tf.data.Dataset:
    arrays = tuple(np.concatenate(parts) for parts in zip(*problem.batches, strict=True))
    return tf.data.Dataset.from_tensor_slices(arrays).batch(len(problem.batches[0][0]))


def weights_of(model: Any, strategy: tf.distribute.Strategy) -> Weights:
    """The weights, as each replica holds them."""
    each = [
        [copy.numpy() for copy in strategy.experimental_local_results(variable.value)]
        for variable in model.variables
    ]
    return [list(copies) for copies in zip(*each, strict=True)]


# As most people write it --------------------------------------------------------------------------


@functools.cache
def mirrored(replicas: int) -> tf.distribute.Strategy:
    """TensorFlow's default strategy: one in a process, for a second one breaks both."""
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def compiled(problem: Problem, strategy: Any, **options: Any) -> Any:
    with strategy.scope():
        training = fresh(problem)
        training.model.compile(training.optimizer, training.loss, **options)
    return training.model


def by_fit(problem: Problem) -> Weights:
    """Keras ``fit`` under the default strategy."""
    (replicas,) = problem.replicas
    strategy = tf.distribute.get_strategy() if replicas == 1 else mirrored(replicas)
    model = compiled(problem, strategy)
    model.fit(dataset_of(problem), verbose=0, shuffle=False)
    return weights_of(model, strategy)


def by_loop(
    problem: Problem,
    replica_loss: Callable[..., Any],
    *,
    build_optimizer: bool = True,
) -> Weights:
    """The custom training loop of the tutorials; ``replica_loss(model, y, y_pred)``.

    Without ``build_optimizer``, as in the tutorials, an optimizer that has slots fails at once.
    """
    strategy = mirrored(*problem.replicas)
    with strategy.scope():
        training = fresh(problem)
        model, optimizer = training.model, training.optimizer
        if build_optimizer:
            optimizer.build(model.trainable_variables)

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = replica_loss(model, y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(lambda batch: strategy.run(train_step, args=batch))
    for batch in strategy.experimental_distribute_dataset(dataset_of(problem)):
        run(batch)
    return weights_of(model, strategy)


def per_example(y: Any, y_pred: Any) -> Any:
    return tf.keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)


def divided_by(global_batch_size: int) -> Callable[..., Any]:
    """The loss of the tutorials: a sum over the shard, divided by the global batch size."""

    def replica_loss(model: Any, y: Any, y_pred: Any) -> Any:
        values = per_example(y, y_pred)
        return tf.nn.compute_average_loss(values, global_batch_size=global_batch_size)

    return replica_loss


# Against one device -------------------------------------------------------------------------------


def plainly(train: Callable[[Problem], Weights], problem: Problem) -> Callable[[], Difference]:
    """Returns what measures plain code: the weights of every replica against one device's."""

    def measure() -> Difference:
        weights, truth = train(problem), [*on_one_device(problem).end.values()]
        return Difference(float(np.max([difference(w, truth[: len(w)]) for w in weights])))

    return measure


def by_step(problem: Problem) -> Difference:
    """Our step against one device."""
    result = on_replicas(problem, strategy_of(*problem.replicas))
    apart = differences(result, on_one_device(problem))
    return Difference(max(off for name, off in apart.items() if " of step " not in name))
