"""Every optimizer of Keras with what can be set on it: weights, its state and counters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from case import Case, cut, integers, normal
from keras.optimizers import schedules
from one_device import ByHand, Replicated, assert_same, difference, strategy_of

import tfmultigpu as tmg
from tfmultigpu.addons.testing import Training

BATCHES = cut(normal(24, 6), integers(4, 24))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizers = keras.optimizers


def mlp(**options: Any) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh", **options),
            keras.layers.Dense(4),
        ]
    )


def train(make: Callable[[], Any], build: Callable[[], Any] = mlp) -> Training:
    return Training(build(), make(), LOSS)


def sgd(learning_rate: Any = 0.1, **options: Any) -> Any:
    return optimizers.SGD(learning_rate, momentum=0.9, **options)


def scaled(**options: Any) -> Any:
    """The scale doubles every second step."""
    inner = optimizers.Adam(0.01, **options)
    return optimizers.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=2)


def several(**options: Any) -> Any:
    """One optimizer for kernels and another for biases."""
    kernels, biases = optimizers.Adam(0.01, **options), sgd(**options)
    return optimizers.MultiOptimizer(lambda v: kernels if v.name == "kernel" else biases)


OPTIMIZERS = {
    "Adadelta": functools.partial(optimizers.Adadelta, 0.5),
    "Adafactor": functools.partial(optimizers.Adafactor, 0.01),
    "Adagrad": functools.partial(optimizers.Adagrad, 0.05),
    "Adam": functools.partial(optimizers.Adam, 0.01),
    "AdamW": functools.partial(optimizers.AdamW, 0.01),
    "Adamax": functools.partial(optimizers.Adamax, 0.01),
    "Ftrl": functools.partial(optimizers.Ftrl, 0.05),
    "Lamb": functools.partial(optimizers.Lamb, 0.01),
    "Lion": functools.partial(optimizers.Lion, 0.003),
    "LossScaleOptimizer": scaled,
    "MultiOptimizer": several,
    "Muon": functools.partial(optimizers.Muon, 0.01),
    "Nadam": functools.partial(optimizers.Nadam, 0.01),
    "RMSprop": functools.partial(optimizers.RMSprop, 0.01),
    "SGD": functools.partial(optimizers.SGD, 0.1),
    "ScheduleFreeAdamW": functools.partial(optimizers.ScheduleFreeAdamW, 0.01),
}
# Clipping, decay, averages and their overwriting all act in these five steps.
EVERYTHING = {
    "global_clipnorm": 0.3,
    "weight_decay": 0.1,
    "use_ema": True,
    "ema_momentum": 0.8,
    "ema_overwrite_frequency": 2,
}


def without_decay_of_biases() -> Any:
    optimizer = optimizers.AdamW(0.01, weight_decay=2.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


# Each is tried against the same optimizer without it, so that it is known to act.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "clipvalue": (lambda: sgd(clipvalue=0.01), sgd),
    "clipnorm": (lambda: sgd(clipnorm=0.05), sgd),
    "global_clipnorm": (lambda: sgd(global_clipnorm=0.05), sgd),
    "weight_decay": (lambda: sgd(weight_decay=0.5), sgd),
    "exclude_from_weight_decay": (
        without_decay_of_biases,
        lambda: optimizers.AdamW(0.01, weight_decay=2.0),
    ),
    "ema_overwrite_frequency": (
        lambda: sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
        lambda: sgd(use_ema=True, ema_momentum=0.5),
    ),
    "nesterov": (lambda: sgd(nesterov=True), sgd),
    "amsgrad": (
        lambda: optimizers.Adam(0.01, beta_2=0.5, amsgrad=True),
        lambda: optimizers.Adam(0.01, beta_2=0.5),
    ),
    "centered, with momentum": (
        lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
        lambda: optimizers.RMSprop(0.01, momentum=0.5),
    ),
    "Ftrl with l1 and l2": (
        lambda: optimizers.Ftrl(
            0.05, l1_regularization_strength=0.01, l2_regularization_strength=0.1
        ),
        lambda: optimizers.Ftrl(0.05),
    ),
    "Muon without nesterov": (
        lambda: optimizers.Muon(0.01, nesterov=False),
        lambda: optimizers.Muon(0.01),
    ),
    "ScheduleFreeAdamW with warmup": (
        lambda: optimizers.ScheduleFreeAdamW(0.01, warmup_steps=3),
        lambda: optimizers.ScheduleFreeAdamW(0.01),
    ),
}
SCALED = (lambda: sgd(0.2, loss_scale_factor=64.0), sgd)
SCHEDULES = {
    "CosineDecay": lambda: schedules.CosineDecay(0.05, 4, warmup_target=0.1, warmup_steps=2),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.1, 2),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.1, 1, 0.5),
    "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.1, 1, 0.5),
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.03, 0.2]),
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.1, 4, power=2.0),
}
SETTINGS |= {
    name: (lambda make=make: optimizers.SGD(make()), lambda: optimizers.SGD(0.1))
    for name, make in SCHEDULES.items()
}
CONSTRAINTS = {
    "MaxNorm": lambda: keras.constraints.MaxNorm(0.5),
    "MinMaxNorm": lambda: keras.constraints.MinMaxNorm(0.4, 0.6, rate=0.7),
    "NonNeg": keras.constraints.NonNeg,
    "UnitNorm": keras.constraints.UnitNorm,
}


def constrained(name: str) -> keras.Model:
    return mlp(kernel_constraint=CONSTRAINTS[name]())


# What a trace may change: scaled losses, the averages and clipping of micro-batches.
CASES = [
    *[
        Case(
            f"{name} with clipping, decay and averages",
            functools.partial(train, functools.partial(OPTIMIZERS[name], **EVERYTHING)),
            BATCHES,
            replicas=(2,),
            options={"micro_batches": 2},
        )
        for name in ("LossScaleOptimizer", "MultiOptimizer", "Muon")
    ],
    Case("loss_scale_factor", functools.partial(train, SCALED[0]), BATCHES),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_give_what_one_device_gives(case: Case) -> None:
    case.hold()


def test_the_setting_that_a_trace_has_changes_the_weights() -> None:
    """Else its case could not fail."""
    one, other = (ByHand(mlp, make, LOSS).train(BATCHES).weights for make in SCALED)
    assert difference(one, other) > 1e-3


# What must not be forgotten -----------------------------------------------------------------------


def classes(module: Any, base: type) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }


def test_every_optimizer_of_keras_is_here() -> None:
    assert classes(optimizers, optimizers.Optimizer) == set(OPTIMIZERS)
    assert classes(schedules, schedules.LearningRateSchedule) == set(SCHEDULES)
    constraints = classes(keras.constraints, keras.constraints.Constraint)
    assert {name for name in constraints if name[0].isupper()} == set(CONSTRAINTS)


# Optimizers of several optimizers -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:No gradient reaches some trainable variables")
def test_several_optimizers_where_an_output_is_not_trained() -> None:
    """Keras by itself refuses gradients for some of the variables of a MultiOptimizer."""

    def heads() -> keras.Model:
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(5, "tanh")(inputs)
        return keras.Model(inputs, [keras.layers.Dense(4)(hidden), keras.layers.Dense(2)(hidden)])

    def alike() -> Any:
        return optimizers.MultiOptimizer(optimizers.OptimizerMap(sgd(), {".*bias": sgd()}))

    batches = [(x, (y, y)) for x, y in BATCHES]
    expected = ByHand(heads, sgd, lambda y, p, sample_weight: LOSS(y[0], p[0])).train(batches)
    assert_same(Replicated(3, heads, alike, [LOSS, None]).train(batches), expected)


def test_accumulation_inside_an_optimizer_is_refused() -> None:
    for make in (
        lambda: optimizers.SGD(0.1, gradient_accumulation_steps=4),
        lambda: optimizers.LossScaleOptimizer(sgd(gradient_accumulation_steps=4)),
        lambda: several(gradient_accumulation_steps=4),
    ):
        with pytest.raises(tmg.TfMultiGpuError, match="pass micro_batches=4 to make_train_step"):
            Replicated(2, mlp, make, LOSS)


# In a loop written by hand ------------------------------------------------------------------------


def updated(
    strategy: Any,
    make: Callable[[], Any],
    apply: Callable[[Any, Any, Any], None],
    build: Callable[[], Any] = mlp,
) -> list[np.ndarray]:
    """The weights after five updates by the same gradients, which change from step to step."""
    with strategy.scope():
        keras.utils.set_random_seed(7)
        variables, optimizer = build().trainable_variables, make()
        optimizer.build(variables)

    @tf.function(autograph=False)
    def update(size: tf.Tensor) -> None:
        shapes = [tuple(variable.shape) for variable in variables]
        gradients = [
            size * normal(*one, seed=3) + (1.0 - size) * normal(*one, seed=4) for one in shapes
        ]
        apply(optimizer, gradients, variables)

    for size in (1.0, 0.2, -0.5, 0.1, 2.0):
        update(tf.constant(size))
    return [variable.numpy() for variable in variables]


def by_keras(optimizer: Any, gradients: Any, variables: Any) -> None:
    optimizer.apply(gradients, variables)


def apart(make: Callable[[], Any], build: Callable[[], Any] = mlp) -> float:
    """How far two replicas are from Keras on one device."""
    expected = updated(tf.distribute.get_strategy(), make, by_keras, build)
    return difference(updated(strategy_of(2), make, tmg.apply_reduced_gradients, build), expected)


def test_every_optimizer_with_everything_set() -> None:
    """A replica asks for averages while another is in the middle of an update."""
    made = {name: functools.partial(make, **EVERYTHING) for name, make in OPTIMIZERS.items()}
    del made["LossScaleOptimizer"]  # Below: Keras divides by its scale what was never scaled.
    found = {name: apart(make) for name, make in made.items()}
    assert {name: one for name, one in found.items() if not one <= 1e-6} == {}


def test_every_setting_and_schedule_is_that_of_one_device_and_acts() -> None:
    wrong, one_device = {}, tf.distribute.get_strategy()
    of_sgd = updated(one_device, sgd, by_keras)
    for name, (make, without) in SETTINGS.items():
        expected = updated(one_device, make, by_keras)
        other = of_sgd if without is sgd else updated(one_device, without, by_keras)
        ours = updated(strategy_of(2), make, tmg.apply_reduced_gradients)
        if not difference(ours, expected) <= 1e-6 or not difference(expected, other) > 1e-3:
            wrong[name] = difference(ours, expected), difference(expected, other)
    assert wrong == {}


def test_every_constraint_is_that_of_one_device_and_acts() -> None:
    free = updated(tf.distribute.get_strategy(), sgd, by_keras)
    for name in CONSTRAINTS:
        build = functools.partial(constrained, name)
        expected = updated(tf.distribute.get_strategy(), sgd, by_keras, build)
        assert apart(sgd, build) <= 1e-6, name
        assert difference(expected, free) > 1e-3, name


def test_apply_reduced_gradients_that_are_not_scaled() -> None:
    """The scale of a LossScaleOptimizer is for gradients of a scaled loss."""
    plain, around = OPTIMIZERS["Adam"], OPTIMIZERS["LossScaleOptimizer"]
    apply = tmg.apply_reduced_gradients
    expected = updated(tf.distribute.get_strategy(), plain, apply)
    assert difference(updated(strategy_of(2), around, apply), expected) <= 1e-6
