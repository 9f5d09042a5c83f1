"""The same training: a plain step for one GPU or a loop by hand for several, ours, and ``fit``."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

import tfmultigpu as tmg
from gpu.networks import Network

__all__ = ["CONTENDERS", "Contender", "by_hand", "fit", "loss_of", "ours", "plain"]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A training loop that goes on where it stopped.

    Attributes:
        model: What it trains.
        train: Trains for so many steps, waits for them, and returns the seconds of one step.
    """

    model: Any
    train: Callable[[int], float]


def _looped(
    model: Any, step: Callable[[Any, Any], Any], batches: Iterable[Any]
) -> tuple[Contender, float]:
    """Returns a loop of Python over a step, and the loss of its first batch."""
    iterator = iter(batches)

    def loop(steps: int) -> Any:
        for x, y in itertools.islice(iterator, steps):
            loss = step(x, y)
        return loss

    first = float(loop(1))
    return _timed(model, loop), first


def _timed(model: Any, loop: Callable[[int], Any]) -> Contender:
    def train(steps: int) -> float:
        began = time.perf_counter()
        float(loop(steps))  # Reading the loss waits for the step, and so for all before it.
        return (time.perf_counter() - began) / steps

    return Contender(model, train)


def plain(network: Network, precision: str, rows: int, xla: bool) -> tuple[Contender, float]:
    """A ``tf.function`` of tape and ``optimizer.apply``, without a strategy.

    Returns:
        The contender, and the loss of its first step.
    """
    model, optimizer = network.model(precision), _optimizer(network, precision)
    optimizer.build(model.trainable_variables)
    loss_of_batch = loss_of()

    @tf.function(jit_compile=xla)
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of_batch(y, model(x, training=True))
            target = optimizer.scale_loss(loss)
        gradients = tape.gradient(target, model.trainable_variables)
        # Dense, as in every loop here: Adam would square the rows of a repeated token one by one.
        if network.dense:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply(gradients)
        return loss

    return _looped(model, step, _dataset(network, rows))


def ours(
    network: Network,
    precision: str,
    rows: int,
    xla: bool,
    strategy: tf.distribute.Strategy | None = None,
    shares: Sequence[float] | None = None,
    **options: Any,
) -> tuple[Contender, float]:
    """``make_train_step`` on the strategy of one GPU, or on the one given."""
    strategy = tmg.create_strategy("one_device") if strategy is None else strategy
    with strategy.scope():
        model, optimizer = network.model(precision), _optimizer(network, precision)
    step = tmg.make_train_step(model, optimizer, loss_of(), strategy, jit_compile=xla, **options)
    iterator = iter(tmg.distribute_dataset(_dataset(network, rows), strategy, shares=shares))

    def loop(steps: int) -> Any:
        for batch in itertools.islice(iterator, steps):
            logs = step(batch)
        return logs["loss"]

    first = float(loop(1))
    return _timed(model, loop), first


def fit(network: Network, precision: str, rows: int, xla: bool) -> tuple[Contender, None]:
    """Keras ``fit``, without metrics; unless XLA is asked for, it decides about that itself."""
    import keras

    model = network.model(precision)
    # Keras itself wraps the optimizer where the policy is float16.
    model.compile(_optimizer(network, "float32"), loss_of(), jit_compile=xla or "auto")
    data = _dataset(network, rows)

    class Clock(keras.callbacks.Callback):
        """Notes the end of each epoch."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    def train(steps: int) -> float:
        # The second epoch is timed: what a call sets up is in the first.
        clock = Clock()
        model.fit(
            data, epochs=2, steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=[clock]
        )
        return (clock.ends[1] - clock.ends[0]) / steps

    return Contender(model, train), None


def by_hand(
    network: Network, precision: str, rows: int, strategy: tf.distribute.MirroredStrategy
) -> tuple[Contender, float]:
    """A loop by hand for the replicas of a strategy: TensorFlow cuts the batch and adds."""
    with strategy.scope():
        model, optimizer = network.model(precision), _optimizer(network, precision)
        optimizer.build(model.trainable_variables)

    def replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_sum(losses) / rows
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply([tf.convert_to_tensor(gradient) for gradient in gradients])
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica, args=(x, y)), axis=None)

    batches = strategy.experimental_distribute_dataset(_dataset(network, rows))
    return _looped(model, step, batches)


CONTENDERS: dict[str, Callable[..., tuple[Contender, float | None]]] = {
    "plain": plain,
    "ours": ours,
    "fit": fit,
}


def loss_of() -> Any:
    """Returns the loss of integer labels."""
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _optimizer(network: Network, precision: str) -> Any:
    import keras

    optimizer = getattr(keras.optimizers, network.optimizer)(1e-4)
    if precision == "float16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def _dataset(network: Network, rows: int) -> Any:
    """The same batch again and again: the input costs a copy to the GPU and nothing else."""
    data = tf.data.Dataset.from_tensors(network.batch(rows)).repeat()
    options = tf.data.Options()
    options.autotune.enabled = False
    return data.prefetch(4).with_options(options)
