"""``logical_replicas=V``: the same bits on any number of devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.pair import strategy_of

import tfmultigpu as tmg

L = keras.layers
RANDOM = np.random.default_rng(0)
ROWS = 22  # Batches of 8, 8 and 6 rows: not even for 4 or 6 logical replicas.
X, IDS = RANDOM.normal(size=(ROWS, 6)).astype("float32"), RANDOM.integers(0, 9000, (ROWS, 5))
IMAGES = RANDOM.normal(size=(ROWS, 8, 8, 3)).astype("float32")
Y, W = RANDOM.integers(0, 3, ROWS), RANDOM.uniform(0.1, 2.0, ROWS).astype("float32")
CROSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_of(*layers: Any, shape: tuple[int, ...] = (6,)) -> Any:
    return keras.Sequential([keras.Input(shape), *layers])


def plain() -> Any:
    """Rows meet in the normalization, and layers draw."""
    return model_of(
        L.Dense(8, kernel_regularizer="l2"), L.BatchNormalization(), L.ReLU(), L.Dropout(0.2),
        L.Dense(3),
    )  # fmt: skip


def images() -> Any:
    return model_of(
        L.RandomFlip(), L.RandomRotation(0.1), L.SpectralNormalization(L.Conv2D(4, 3)),
        L.BatchNormalization(), L.Flatten(), L.GaussianNoise(0.1), L.Dense(3),
        shape=(8, 8, 3),
    )  # fmt: skip


def attention() -> Any:
    ids = keras.Input((5,))
    x = L.Embedding(9000, 16)(ids)
    x = x + L.MultiHeadAttention(2, 8, dropout=0.1)(x, x)
    x = L.LSTM(8)(L.LayerNormalization()(x))
    return keras.Model(ids, L.Dense(3)(x))


NUMBERS = itertools.count()


def branches() -> Any:
    """A tensor with six readers, whose names do not sort as those of the model before."""
    inputs = keras.Input((6,))
    read, outputs = L.Dense(64)(inputs), []
    for _ in range(6):
        added = L.Add(name=f"sum_{next(NUMBERS)}")([read, L.Dense(64)(inputs)])
        outputs.append(L.Dense(3)(L.Activation("tanh")(added)))
    return keras.Model(inputs, L.Add()(outputs))


def tables() -> Any:
    """A table of which the rows of the batch alone are updated."""
    return model_of(L.Embedding(9000, 16), L.Flatten(), L.Dense(3), shape=(5,))


def deep() -> Any:
    """Has as many variables as one trace for the update of all replicas needs."""
    return model_of(*[L.Dense(4, "tanh") for _ in range(15)], L.Dense(3))


def two_outputs() -> Any:
    x = keras.Input((6,))
    h = L.ActivityRegularization(l2=0.01)(L.Dropout(0.3)(L.Dense(8, "relu")(x)))
    return keras.Model(x, {"a": L.Dense(3, name="a")(h), "b": L.Dense(1, name="b")(h)})


def apart(model: Any, batch: Any, training: bool) -> tmg.LossSum:
    """Compares the rows of a logical replica with each other."""
    outputs = model(batch[0], training=training)
    distances = tf.reduce_sum((outputs[:, None] - outputs[None]) ** 2, -1)
    return tmg.LossSum(tf.reduce_sum(tf.reduce_mean(tf.nn.relu(1.0 - distances), 1)),
                       tf.cast(tf.shape(outputs)[0], tf.float32))  # fmt: skip


class Halved(tmg.steps.Feature):
    """A feature of a user."""

    def on_gradient(self, gradient: Any) -> Any:
        return gradient._replace(tensors=tuple([0.5 * each for each in gradient.tensors]))


ADAM = functools.partial(keras.optimizers.AdamW, 1e-2)
# TensorFlow rewrites its schedule to other bits in a function that is called.
DECAY = functools.partial(keras.optimizers.AdamW, keras.optimizers.schedules.CosineDecay(1e-2, 5))
MOMENTUM = functools.partial(keras.optimizers.SGD, 0.1, 0.9, use_ema=True, ema_momentum=0.9)
METRICS: list[Callable[[], Any]] = [
    keras.metrics.SparseCategoricalAccuracy,
    functools.partial(keras.metrics.SparseCategoricalCrossentropy, from_logits=True),
]
TWO: Any = {"a": CROSS, "b": "mse"}
TWO_LABELS = X, {"a": Y, "b": X[:, :1]}, {"a": W, "b": W[::-1].copy()}


def bits(
    replicas: int,
    build: Callable[[], Any],
    data: Any = (X, Y),
    *,
    logical: int = 4,
    loss: Any = CROSS,
    optimizer: Callable[[], Any] = ADAM,
    size: int = 8,
    policy: str = "float32",
    run: bool = False,
    metrics: bool = True,
    built: bool = False,
    **options: Any,
) -> list[bytes]:
    """Returns the bits of all that a training leaves behind."""
    keras.utils.set_random_seed(1)
    strategy = strategy_of(replicas)
    keras.mixed_precision.set_global_policy(policy)
    try:
        with strategy.scope():
            model, trainer = build(), optimizer()
            if built:  # As load_model does.
                trainer.build(model.trainable_variables)
            measured = [make() for make in METRICS if metrics]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    given = {"metrics": measured, "logical_replicas": logical, **options}
    step = tmg.make_train_step(model, trainer, loss, strategy, **given)
    numbers: list[Any] = []
    batches = iter(tmg.distribute_dataset(data, strategy, batch_size=size))
    calls: Any = batches
    if run:
        calls = iter(lambda: step.run(batches, 2), None)
    for item in calls:
        logs = item if run else step(item)
        if run and not int(logs["steps"]):
            break
        numbers += [logs[name] for name in sorted(logs)]
    if replicas > 1 and options.get("verify", True):
        assert step.verification.outcome == "same", step.verification
    numbers += [metric.result() for metric in measured]
    numbers += [v.value for owner in (model, trainer) for v in owner.variables]
    return [np.asarray(tf.convert_to_tensor(number)).tobytes() for number in numbers]


CASES: dict[str, dict[str, Any]] = {
    "plain": {"build": plain},
    "micro-batches": {"build": plain, "micro_batches": 2},
    "rows known": {"build": attention, "data": (IDS[:16], Y[:16])},
    "step.run": {"build": plain, "run": True, "clip_norm": 0.1},
    "owned": {"build": plain, "shard_update": True, "optimizer": MOMENTUM, "clip_norm": 0.3},
    "replicated": {"build": plain, "shard_update": False, "features": [Halved()]},
    "float16": {"build": plain, "policy": "mixed_float16", "loss_scale": "dynamic"},
    "3 rows": {"build": plain, "size": 3},
    "1 row": {"build": plain, "size": 1, "data": (X[:3], Y[:3])},
    "images": {"build": images, "data": (IMAGES, Y)},
    "attention": {"build": attention, "data": (IDS, Y)},
    "branches": {"build": branches},
    "tables": {"build": tables, "data": (IDS % 7, Y), "clip_norm": 0.5,
               "optimizer": functools.partial(keras.optimizers.SGD, 0.1)},
    "outputs": {"build": two_outputs, "data": TWO_LABELS, "loss": TWO, "metrics": False,
                "optimizer": MOMENTUM},
    "built": {"build": deep, "optimizer": DECAY, "built": True, "size": 4},
    "coupled": {"build": plain, "loss": None, "forward": apart, "metrics": False},
}  # fmt: skip


FIRST = {"plain": (1, 4), "3 rows": (1, 4), "rows known": (1, 4), "branches": (1, 4),
         "built": (1, 2), "tables": (2, 4), "outputs": (2, 4)}  # fmt: skip


# Fails if the cut, the order of additions, the function of a logical replica or what becomes of its
# state depends on the number of devices.
@pytest.mark.parametrize("name", FIRST)
def test_the_bits_are_the_same_on_any_number_of_devices(name: str) -> None:
    hold_bits(name, FIRST[name])


# The same for what else a step may do, and for more numbers.
@pytest.mark.more
@pytest.mark.parametrize("name", CASES)
def test_so_with_each_option(name: str) -> None:
    hold_bits(name, (1, 2, 4), verify=CASES[name].get("verify", "first"))


def hold_bits(name: str, numbers: tuple[int, ...], **options: Any) -> None:
    options = {"verify": "first" if name == "plain" else False, **options}
    first, *others = (bits(replicas, **{**CASES[name], **options}) for replicas in numbers)
    assert others == [first] * len(others), numbers


# Fails if six logical replicas are not added as three pairs, or an odd one is added first.
def test_any_number_of_logical_replicas_that_fits() -> None:
    options: Any = {"verify": False, "optimizer": MOMENTUM, "logical": 6}
    assert bits(3, plain, **options) == bits(1, plain, **options)


# Fails if the loss or the gradient of rows that do not meet is not one device's.
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("size", [8, 3])
def test_rows_that_do_not_meet_give_what_one_device_gives(size: int) -> None:
    def weights(logical: int | None) -> list[Any]:
        keras.utils.set_random_seed(1)
        with strategy_of(2).scope():
            model, optimizer = model_of(L.Dense(8, "gelu"), L.Dense(3)), MOMENTUM()
        options: Any = {"logical_replicas": logical, "micro_batches": 1 + (logical is not None)}
        step = tmg.make_train_step(model, optimizer, CROSS, strategy_of(2), verify=False, **options)
        for batch in tmg.distribute_dataset((X, Y, W), strategy_of(2), batch_size=size):
            step(batch)
        return list(model.get_weights())

    for value, expected in zip(weights(4), weights(None), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-12)


def compiled(replicas: int) -> Any:
    keras.utils.set_random_seed(1)
    with strategy_of(replicas).scope():
        model = plain()
        model.compile(ADAM(), CROSS, metrics=["accuracy"])
    return model


def left_by(model: Any, *more: Any) -> list[bytes]:
    values = [*more, *(v.value for v in [*model.variables, *model.optimizer.variables])]
    return [np.asarray(tf.convert_to_tensor(value)).tobytes() for value in values]


# Fails if fit, its validation or evaluate cut a batch for the devices, or if a run that continues
# in the middle of an epoch, on other devices, goes on with other bits.
def test_fit_and_a_run_that_moves_to_other_devices(tmp_path: Path) -> None:
    ends = []
    for moves in ((1,), (2, 4)):
        for epochs, replicas in enumerate(moves, 3 - len(moves)):
            model = compiled(replicas)
            saving = tmg.Checkpoints(tmp_path / str(moves), model, model.optimizer)
            saving.restore()
            history = tmg.fit(
                model, X, Y, 8, epochs, 0, validation_data=(X[:9], Y[:9]), logical_replicas=4,
                callbacks=[saving.callback(every_steps=2)], verify=False,
            )  # fmt: skip
        losses = [history.history[name][-1] for name in sorted(history.history)]
        losses += tmg.evaluate(model, X, Y, 5, 0, logical_replicas=4, verify=False)
        ends.append(left_by(model, losses))
    assert ends[0] == ends[1]


def masked(replicas: int) -> Any:
    """A model whose losses are divided by what a mask leaves."""
    keras.utils.set_random_seed(1)
    with strategy_of(replicas).scope():
        model = model_of(L.Embedding(9, 8, mask_zero=True), L.Dense(9), shape=(5,))
        model.compile("sgd", CROSS, weighted_metrics=["accuracy"])
    return model


# Fails if the loss of an epoch is added call by call: how many batches a call has depends on time.
def test_the_loss_of_an_epoch_is_one_sum_whatever_a_call_computes() -> None:
    found = []
    for replicas, steps in ((1, 1), (1, 2), (4, 3)):
        model, rows = masked(replicas), np.resize(IDS % 9, (60, 5))
        options: Any = {"logical_replicas": 4, "verify": False, "steps_per_call": steps}
        history = tmg.fit(model, rows, np.roll(rows, -1, 1), 7, 5, 0, **options).history
        found.append((history, model.get_weights()[0].tobytes()))
    assert found[1:] == found[:1] * 2


# Fails if a logical replica is traced into the graph of its device, which TensorFlow rewrites by
# what is around it.
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_step_calls_one_function(replicas: int) -> None:
    class Counted(L.Layer):
        traces = 0

        def call(self, x: Any) -> Any:
            Counted.traces += 1
            return x

    with strategy_of(replicas).scope():
        model, optimizer = model_of(Counted(), L.Dense(3)), MOMENTUM()
        model.build((None, 6))
    before = Counted.traces
    options: Any = {"logical_replicas": 8, "verify": False}
    tmg.make_train_step(model, optimizer, CROSS, strategy_of(replicas), **options)((X, Y))
    assert Counted.traces == before + 1
