"""Every optimizer of Keras, with owners and without; some on repeated rows of a table."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from law.model import Training, regression, small
from problems import integers, network

from cases.case import Case, cut
from tfmultigpu.strategies.collectives import forcing_addition

optimizers = keras.optimizers
EMA = {"use_ema": True, "ema_momentum": 0.8}
# Clipping, decay, averages and their overwriting all act in three steps.
EVERYTHING = {"global_clipnorm": 0.3, "weight_decay": 0.1, "ema_overwrite_frequency": 2, **EMA}


class Centered(optimizers.SGD):
    """An optimizer of a user: state of its own, no "if built", and tensors in ``apply``."""

    def build(self, variables: Any) -> None:
        self.built = False
        super().build(variables)
        self.calls = self.add_variable((), name="calls")

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.calls.assign_add(1.0)
        super().apply([grad - tf.reduce_mean(grad) for grad in grads], trainable_variables)


class Lookahead(optimizers.Optimizer):
    """An optimizer of a user around another one, of whose every second step it takes half."""

    def __init__(self, inner_optimizer: Any) -> None:
        super().__init__(learning_rate=0.0)
        self.inner_optimizer = inner_optimizer

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.inner_optimizer.build(variables)
        self.slow = [self.add_variable_from_reference(v, name="slow") for v in variables]
        for slow, variable in zip(self.slow, variables, strict=True):
            slow.assign(variable)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            with tf.init_scope():
                self.build(trainable_variables)
        self.inner_optimizer.apply(grads, trainable_variables)
        self.iterations.assign_add(1)
        for slow, variable in zip(self.slow, trainable_variables, strict=True):
            half = slow + 0.5 * (variable - slow)
            is_second = self.iterations % 2 == 0
            slow.assign(tf.where(is_second, half, slow))
            variable.assign(tf.where(is_second, half, variable))


def sgd(**options: Any) -> Any:
    return optimizers.SGD(0.1, momentum=0.9, **options)


def several(**options: Any) -> Any:
    """One optimizer for kernels and another for biases."""
    kernels, biases = optimizers.Adam(0.01, **options), sgd(**options)
    return optimizers.MultiOptimizer(lambda v: biases if v.name == "bias" else kernels)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    name: functools.partial(make, 0.05, **EVERYTHING)
    for name, make in vars(optimizers).items()
    if inspect.isclass(make) and issubclass(make, optimizers.Optimizer)
    # Muon computes in float32 alone: it is below.
    if name not in {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "Muon"}
} | {
    "a schedule": lambda: optimizers.AdamW(optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)),
    "clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Lamb(0.05)),
    "MultiOptimizer": lambda: several(clipnorm=0.3),
}
OF_USERS: dict[str, Callable[[], Any]] = {
    "own class": lambda: Centered(0.05, momentum=0.9),
    "own class around another": lambda: Lookahead(optimizers.Adam(0.05)),
}
# How gradients are added, and where the update is.
WAYS = ((2, "owned"), (3, "collective"), (3, "owned"), (2, "in memory"))
BOTH = WAYS[:2]  # With owners, and without.
ROWS = regression((7, 1, 5))


def updating(name: str, way: tuple[int, str]) -> Case:
    """An optimizer in float64. An owner that misses an update is seen, and who repeats it."""
    replicas, how = way
    return Case(
        f"{name}, {how}",
        lambda: small((OPTIMIZERS | OF_USERS)[name]()),
        ROWS,
        {"shard_update": how == "owned", "verify": False},
        replicas=(replicas,),
        bound=1e-9,
        within=functools.partial(forcing_addition, in_memory=how != "collective"),
    )


# Embeddings ---------------------------------------------------------------------------------------

# Five of eight tokens are the same one, and some of the others repeat too; id 5 never comes.
TOKENS = integers(4, 24, 8, seed=3)
TOKENS[:, :5] = 1
BATCHES = cut(TOKENS, integers(4, 24, seed=4))


def scaled() -> Any:
    """The scale doubles every second step."""
    inner = optimizers.Adam(0.01, **EVERYTHING)
    return optimizers.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=2)


OF_TABLES: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optimizers.SGD(0.1),
    "SGD, clipnorm": lambda: sgd(clipnorm=0.05),
    "SGD, global_clipnorm": lambda: sgd(global_clipnorm=0.05),
    "SGD, clipvalue": lambda: sgd(clipvalue=0.005),
    "Adam": lambda: optimizers.Adam(0.01),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "RMSprop": lambda: optimizers.RMSprop(0.01),
    # Keras by itself fails here: indices[0] = 118 is not in [0, 57).
    "RMSprop, centered": lambda: optimizers.RMSprop(0.01, centered=True),
    "Ftrl": lambda: optimizers.Ftrl(0.05),
    "LossScaleOptimizer": scaled,
    "MultiOptimizer": lambda: several(**EVERYTHING),
    "Muon": lambda: optimizers.Muon(0.01, **EVERYTHING),
}


def bag(lookup: type = keras.layers.Embedding) -> keras.Model:
    layers = [lookup(6, 3), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(4)]
    return network(8, *layers, dtype="int32")


def embedding(name: str, replicas: tuple[int, ...] = (2,), **options: Any) -> Case:
    build = functools.partial(bag_under, name)
    return Case(f"embedding, {name}", build, BATCHES, options, replicas=replicas)


def bag_under(name: str, lookup: type = keras.layers.Embedding) -> Training:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Training(bag(lookup), OF_TABLES[name](), loss)


CASES = [
    *map(updating, OPTIMIZERS, itertools.cycle(WAYS)),
    *itertools.starmap(updating, itertools.product(OF_USERS, BOTH)),
    embedding("SGD", (1, 3)),
    embedding("RMSprop, centered", micro_batches=3),
    # What a trace may change: scaled losses, the averages and clipping of micro-batches.
    embedding("LossScaleOptimizer", micro_batches=2),
    embedding("MultiOptimizer", micro_batches=2),
    embedding("Muon", micro_batches=2),
]
