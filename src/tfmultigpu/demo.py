"""The demo: one training on one device, by Keras on several, and by ``tmg.fit`` on the same."""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import textwrap
import time
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.arguments import check_count
from tfmultigpu.steps.compare import furthest
from tfmultigpu.steps.features.logical_replicas import numbers_that_fit
from tfmultigpu.types import Array, Batches

# Another order of addition changes the last bit of a float32. A mistake in scaling a loss changes
# the third digit.
TOLERANCE = {"CPU": 1e-5, "GPU": 1e-4}
_RATE, _MOMENTUM = 0.05, 0.9
_SECONDS = (
    "seconds: Keras calls TensorFlow for each batch and adds each gradient by itself; tmg.fit "
    "computes many batches in a call and adds all gradients together. "
    "compile(steps_per_execution=20) makes Keras faster, too. In the first epoch TensorFlow makes "
    "a graph of the step, and tmg.fit checks it against one device."
)
_VIRTUAL = (
    "Virtual CPUs share the cores of this machine: they show that a program is right, not its "
    "speed on GPUs."
)


class Trained(NamedTuple):
    """What one training gave."""

    first_epoch: float
    later_epochs: float
    training_loss: float
    test_loss: float
    test_accuracy: float
    optimizer_steps: int
    weights: np.ndarray


@dataclasses.dataclass(frozen=True)
class Data:
    """Global batches to train on and to test with."""

    train: Batches
    test: Batches
    rows: int
    batch_size: int


def run_demo(replicas: int | None = None, epochs: int = 10) -> bool:
    """Trains on one device and on several, prints all, and returns whether one and ours agree.

    Args:
        replicas: Number of replicas; None: one per GPU, or 4 virtual CPUs.
        epochs: Number of epochs.
    """
    epochs = check_count("epochs", epochs, error=tmg.TfMultiGpuError)
    x, y = load_digits()
    devices = choose_devices(replicas)
    data = batches_of(x, y, len(devices))
    print(
        f"Handwritten digits, {epochs} epochs of {data.rows} images: batches of {data.batch_size}, "
        f"and a last one of {data.rows % data.batch_size}. On {', '.join(devices)}.\n"
        f"A hidden layer of 64 units, L2, SGD({_RATE}, momentum={_MOMENTUM}). Each training\n"
        "begins with the same weights and reads the same global batches in the same order."
    )
    one = train("one device", devices[:1], data, epochs)
    usual = train("Keras", devices, data, epochs)
    many = train("tmg.fit", devices, data, epochs)

    tolerance = TOLERANCE[devices[0][:3]]
    print("\n" + "\n".join(table(one, usual, many, len(devices))))
    print()
    for text in explanations(one, usual, many, len(devices), tolerance):
        print(textwrap.fill(text, 100, subsequent_indent="    "))
    if devices[0].startswith("CPU"):
        print(_VIRTUAL)
    agree = apart(one, many) <= tolerance
    print(f"\ntmg.fit {'agrees with' if agree else 'DIFFERS from'} one device to {tolerance:.0e}.")
    logical = len(devices)
    hashes: dict[int, str] = {}
    for count in numbers_that_fit(logical):
        hashes[count] = hash_of_training(devices[:count], data, logical)
    same = len(set(hashes.values())) == 1
    print(
        f"With logical_replicas={logical} and BatchNormalization an epoch gives weights of "
        f"{'the same' if same else 'OTHER'} bits on {', '.join(map(str, hashes))} devices: their "
        f"SHA-256 begins with {', '.join(dict.fromkeys(hashes.values()))}."
    )
    return agree and same


def hash_of_training(devices: tuple[str, ...], data: Data, logical: int) -> str:
    """Trains one epoch, and returns a hash of the bits of all weights.

    Rows meet in its batch normalization, which no other training on several devices repeats.
    """
    keras.utils.set_random_seed(1)
    with tmg.create_strategy(devices=devices).scope():
        layers = keras.layers
        hidden = [layers.Dense(64), layers.BatchNormalization(), layers.Activation("tanh")]
        model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(_RATE, momentum=_MOMENTUM), loss)
    tmg.fit(model, data.train, epochs=1, verbose=0, logical_replicas=logical)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return hashlib.sha256(weights).hexdigest()[:12]


def load_digits() -> tuple[Array, Array]:
    """Returns images of shape [1797, 64] and their digits, in a fixed random order."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("The digits need scikit-learn: pip install scikit-learn") from error
    x, y = datasets.load_digits(return_X_y=True)
    # The last images of the file are by other writers than the first.
    order = np.random.default_rng(1).permutation(len(x))
    return x[order].astype("float32") / 16, y[order]


def choose_devices(replicas: int | None) -> tuple[str, ...]:
    """Returns the devices to train on: GPUs if there are enough, else virtual CPUs."""
    gpus = tmg.list_devices("GPU")
    if len(gpus) < max(2, replicas or 0):
        return tmg.split_device("CPU:0", parts=replicas or 4)
    tmg.enable_memory_growth()
    # Rounding to TF32 depends on the shape of a shard, which differs here.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.experimental.enable_op_determinism()  # For the comparison of bits.
    return tuple(gpu.name for gpu in gpus[:replicas])


def batches_of(x: np.ndarray, y: np.ndarray, replicas: int) -> Data:
    """Returns batches that the replicas divide, and a last one that has fewer rows than they are.

    Keras' own fit raises an error if the first batch of a new optimizer does not divide.
    """
    size = 64 // replicas * replicas
    rows = 1500 // size * size + replicas - 1
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return Data(dataset.take(rows).batch(size), dataset.skip(1500).batch(size), rows, size)


def train(how: str, devices: tuple[str, ...], data: Data, epochs: int) -> Trained:
    """Trains without ReLU, whose gradient jumps at a last bit.

    Args:
        how: ``"one device"``, ``"Keras"`` on several, or ``"tmg.fit"``.
        devices: The devices.
        data: The data.
        epochs: Number of epochs.
    """
    keras.utils.set_random_seed(1)
    with tmg.create_strategy(devices=devices).scope():
        dense = keras.layers.Dense(10, kernel_regularizer="l2")
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "tanh"), dense])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(_RATE, momentum=_MOMENTUM), loss, metrics=["accuracy"])

    ends = [time.perf_counter()]
    note_end = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: ends.append(time.perf_counter())
    )
    options: dict[str, Any] = {"epochs": epochs, "verbose": 0, "callbacks": [note_end]}
    if how == "tmg.fit":
        history = tmg.fit(model, data.train, **options)
        logs = tmg.evaluate(model, data.test, verbose=0, return_dict=True)
    else:
        history = model.fit(data.train, shuffle=False, **options)
        logs = model.evaluate(data.test, return_dict=True, verbose=0)
    return Trained(
        ends[1] - ends[0],
        ends[-1] - ends[1],
        history.history["loss"][-1],
        logs["loss"],
        logs["accuracy"],
        int(model.optimizer.iterations.numpy()),
        np.concatenate([weight.ravel() for weight in model.get_weights()]),
    )


def apart(one: Trained, other: Trained) -> float:
    """Returns how far two trainings lie apart, in what they report and in every weight."""
    pairs = zip(one[2:], other[2:], strict=True)
    return max(furthest(a, b, relative=True).distance for a, b in pairs)


def table(one: Trained, usual: Trained, many: Trained, replicas: int) -> list[str]:
    """Returns the lines of the table: a row for each number, a column for each training."""
    columns = one, usual, many
    where = f"{replicas} replicas"
    lines = [row("", ["Keras", "Keras", "tmg.fit"]), row("", ["one device", where, where])]
    for name in ("training loss", "test loss", "test accuracy"):
        numbers = map(operator.attrgetter(name.replace(" ", "_")), columns)
        lines.append(row(name, [f"{number:.6f}" for number in numbers]))
    lines.append(row("optimizer steps", [str(each.optimizer_steps) for each in columns]))
    weights = [f"{weights_apart(one, each):.0e}" for each in (usual, many)]
    lines.append(row("largest weight difference", ["", *weights]))
    lines.append(row("seconds, first epoch", [f"{each.first_epoch:.1f}" for each in columns]))
    return [*lines, row("seconds, later epochs", [f"{each.later_epochs:.1f}" for each in columns])]


def weights_apart(one: Trained, other: Trained) -> float:
    """Returns the largest difference of a weight, which of a weight above 1 is relative."""
    return furthest(one.weights, other.weights, relative=True).distance


def explanations(
    one: Trained, usual: Trained, many: Trained, replicas: int, tolerance: float
) -> list[str]:
    """Returns what the numbers of the table mean."""
    difference = f"largest weight difference: from one device. {weights_apart(one, many):.0e} "
    if weights_apart(one, many) <= tolerance:
        difference += "is rounding: replicas add in another order."
    else:
        difference += "is more than rounding."
    if weights_apart(one, usual) > tolerance:
        difference += (
            f" {weights_apart(one, usual):.0e} is another training: the last batch has fewer rows "
            f"than there are replicas, and Keras takes the mean of all {replicas} replicas' means, "
            "of those without rows as well."
        )
    return [difference, _SECONDS]


def row(name: str, cells: list[str]) -> str:
    """Returns a line of the table."""
    return f"{name:27}" + "".join(f"{cell:>13}" for cell in cells)
