"""Demo: trains on one device and on several, and compares the results.

Run it with ``python -m tfmultigpu demo``.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.errors import DataError
from tfmultigpu.types import Prefer

__all__ = ["DemoOptions", "run_demo"]
# Another order of addition changes the last bit of a float32. A mistake in scaling a loss changes
# the third digit.
TOLERANCE = {"CPU": 1e-5, "GPU": 1e-4}
STEPS_PER_CALL = 4
VIRTUAL_REPLICAS = 4


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """Options of the demo.

    Attributes:
        dataset: ``"digits"`` comes with scikit-learn; Keras downloads ``"mnist"`` and
            ``"cifar10"``.
        replicas: Number of replicas to compare with one; None: one per GPU, or 4 virtual CPUs.
        epochs: Number of epochs; None: 10 for digits, 1 for the larger sets.
        batch_size: Least number of examples in a global batch, plus one if the replicas divide it.
    """

    dataset: str = "digits"
    replicas: int | None = None
    epochs: int | None = None
    batch_size: int = 64


@dataclasses.dataclass(frozen=True)
class Images:
    """Images in [0, 1] of shape ``[examples, height, width, channels]`` and labels 0 to 9."""

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of one training run."""

    train_loss: float
    test_loss: float
    accuracy: float
    steps: int
    milliseconds: float
    weights: list[Any]


def run_demo(options: DemoOptions) -> int:
    """Trains on one device and on several, and prints a comparison.

    Args:
        options: The options.

    Returns:
        The exit status: 0 if the answers agree, 1 if they do not.

    Raises:
        ImportError: scikit-learn is missing.
        DataError: The batches are too large for the data.
        ConnectionError: The images cannot be downloaded.
        DevicesInitializedError: TensorFlow has started its devices.

    Example:
        >>> run_demo(DemoOptions(replicas=3, epochs=2))  # doctest: +SKIP
        0
    """
    started = time.perf_counter()
    images = load_images(options.dataset)
    devices, explanation = choose_devices(options.replicas)
    plan = tmg.plan_strategy(prefer="mirrored", devices=devices)
    print("Found:")
    for device in tmg.list_devices():
        print(f"  {device.name}  {device.description}".rstrip())
    print(f"{explanation}\n\n{plan}\n")

    batch_size, rows = uneven_batches(options.batch_size, len(devices), len(images.x_train))
    images = dataclasses.replace(
        images, x_train=images.x_train[:rows], y_train=images.y_train[:rows]
    )
    tail = rows % batch_size
    print(
        f"{options.dataset}: {rows} images to train on, {len(images.x_test)} to test on. Every "
        f"epoch has {rows // batch_size} batches of {batch_size}, not divisible by {len(devices)}, "
        f"and a last one of {tail}, fewer than replicas."
    )
    epochs = options.epochs or (10 if options.dataset == "digits" else 1)
    one = train(devices[:1], images, batch_size, epochs)
    many = train(devices, images, batch_size, epochs)
    agree = report(one, many, devices)
    print(f"\n{time.perf_counter() - started:.0f} seconds, without TensorFlow's start.")
    return 0 if agree else 1


def load_images(dataset: str) -> Images:
    """Loads a set of images; digits from scikit-learn, the others through Keras."""
    if dataset == "digits":
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError(
                "The handwritten digits need scikit-learn, which is not installed. Run: "
                'pip install "tfmultigpu[demo]"'
            ) from error
        x, y = load_digits(return_X_y=True)
        # The last images of the file are by other writers than the first.
        order = np.random.default_rng(1).permutation(len(x))
        x, y = x[order].reshape(-1, 8, 8, 1).astype("float32") / 16, y[order]
        return Images(x[:1500], y[:1500], x[1500:], y[1500:])
    import keras

    try:
        (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, dataset).load_data()
    except Exception as error:  # Keras raises a plain Exception if a download fails.
        raise ConnectionError(
            f"{dataset} cannot be downloaded: {error} Use the digits, which need no network: "
            "python -m tfmultigpu demo --dataset digits"
        ) from error
    shape = (*x_train.shape[1:3], x_train.shape[3] if x_train.ndim == 4 else 1)

    def prepare(x: Any) -> Any:
        return x.reshape(-1, *shape).astype("float32") / 255

    return Images(prepare(x_train), y_train.reshape(-1), prepare(x_test), y_test.reshape(-1))


def choose_devices(replicas: int | None) -> tuple[tuple[str, ...], str]:
    """Returns the devices to train on and the reason: GPUs if there are enough, else the CPU."""
    gpus = tmg.list_devices("GPU")
    if len(gpus) >= max(2, replicas or 0):
        tmg.enable_memory_growth()
        # Rounding to TF32 depends on the shape of a shard, which differs here.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        names = tuple(gpu.name for gpu in gpus[:replicas])
        return names, f"Training on {len(names)} GPUs, in float32 (TF32 off)."
    parts = replicas or VIRTUAL_REPLICAS
    found = {0: "No GPU", 1: "1 GPU"}.get(len(gpus), f"{len(gpus)} GPUs")
    return tmg.split_device("CPU:0", parts=parts), (
        f"{found}: training on the CPU, as {parts} virtual devices. They share its cores, so this "
        "compares results, not speed."
    )


def uneven_batches(batch_size: int, replicas: int, rows: int) -> tuple[int, int]:
    """Returns a batch size that the replicas do not divide, and rows that leave a tiny last batch.

    Example:
        >>> uneven_batches(64, replicas=4, rows=1500)
        (65, 1498)
    """
    batch_size = max(batch_size, replicas + 1)
    batch_size += batch_size % replicas == 0
    if batch_size > rows // 2:
        raise DataError(
            f"Batches of {batch_size} leave fewer than two of {rows} images. Received: "
            f"batch_size={batch_size}, replicas={replicas}. Choose a --batch-size of at most "
            f"{rows // 2 - 1}, and fewer replicas than that."
        )
    # The last batch has between one and replicas - 1 rows.
    tail = rows % batch_size
    if tail == 0:
        return batch_size, rows - batch_size + replicas - 1
    return batch_size, rows - tail + min(tail, replicas - 1)


def make_model(shape: tuple[int, ...]) -> Any:
    """Builds a small convolutional network for ten classes, without ReLU and max pooling.

    Their gradients jump. If the last bit of an activation decides the side of a jump, two correct
    runs diverge.
    """
    import keras

    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Conv2D(16, 3, activation="tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Conv2D(32, 3, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, kernel_regularizer=keras.regularizers.L2(1e-4)),
        ]
    )


def train(devices: tuple[str, ...], images: Images, batch_size: int, epochs: int) -> Outcome:
    """Trains on devices; the code is the same for one and for several."""
    import keras

    prefer: Prefer = "mirrored" if len(devices) > 1 else "one_device"
    strategy = tmg.create_strategy(prefer=prefer, devices=devices)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make_model(images.x_train.shape[1:])
        # Small batches need small steps, because training close to divergence amplifies rounding.
        rate = 0.05 * min(1.0, batch_size / 64)
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(model, optimizer, loss, strategy)
    evaluate = tmg.make_eval_step(model, loss, strategy, metrics=[accuracy])

    rows = len(images.x_train)
    train_set = tf.data.Dataset.from_tensor_slices((images.x_train, images.y_train))
    # The seed gives both runs the same batches, in another order every epoch.
    shuffled = train_set.shuffle(rows, seed=1).batch(batch_size)
    data = tmg.distribute_dataset(shuffled, strategy)
    batches = -(-rows // batch_size)
    progress = Progress(f"{len(devices)} replica{'s' * (len(devices) > 1)}", batches * epochs)
    seconds = []
    for epoch in range(epochs):
        iterator = iter(data)
        for _ in range(0, batches, STEPS_PER_CALL):
            start = time.perf_counter()
            logs = step.run(iterator, STEPS_PER_CALL)
            value, steps = float(logs["loss"]), int(logs["steps"])
            seconds.append((time.perf_counter() - start) / steps)
            progress.advance(steps, f"epoch {epoch + 1}/{epochs}  loss {value:.4f}")
    progress.finish()
    train_loss = float(evaluate.run(iter(data), batches)["loss"])
    accuracy.reset_state()
    test = tmg.distribute_dataset((images.x_test, images.y_test), strategy, batch_size=batch_size)
    test_loss = float(evaluate.run(iter(test), len(images.x_test))["loss"])
    return Outcome(
        train_loss=train_loss,
        test_loss=test_loss,
        accuracy=float(accuracy.result()),
        steps=int(optimizer.iterations.numpy()),
        # The first call traces the step.
        milliseconds=1000 * statistics.median(seconds[1:] or seconds),
        weights=[np.asarray(weight) for weight in model.get_weights()],
    )


class Progress:
    """Text progress bar: one line that grows on a terminal, a few lines in a log."""

    def __init__(self, title: str, total: int, width: int = 30) -> None:
        """Starts at 0 of ``total`` steps."""
        self.title, self.total, self.width = title, total, width
        self.done = 0
        self.shown = -1

    def advance(self, steps: int, note: str) -> None:
        """Counts steps and prints the bar if it has grown."""
        self.done += steps
        filled = self.width * self.done // self.total
        terminal = sys.stdout.isatty()
        if terminal or filled // 10 > self.shown // 10 or self.shown < 0:
            bar = "#" * filled + "." * (self.width - filled)
            line = f"{self.title:>10}  [{bar}] {self.done}/{self.total} steps  {note}"
            print(f"\r{line}" if terminal else line, end="" if terminal else "\n", flush=True)
            self.shown = filled

    def finish(self) -> None:
        """Ends the line."""
        if sys.stdout.isatty():
            print()


def report(one: Outcome, many: Outcome, devices: tuple[str, ...]) -> bool:
    """Prints the comparison, and returns whether the two runs agree."""
    weight_gap = max(
        float(np.max(np.abs(a - b))) for a, b in zip(one.weights, many.weights, strict=True)
    )
    rows = [
        ("training loss", f"{one.train_loss:.6f}", f"{many.train_loss:.6f}"),
        ("test loss", f"{one.test_loss:.6f}", f"{many.test_loss:.6f}"),
        ("test accuracy", f"{one.accuracy:.2%}", f"{many.accuracy:.2%}"),
        ("optimizer steps", str(one.steps), str(many.steps)),
        ("time per step", f"{one.milliseconds:.2f} ms", f"{many.milliseconds:.2f} ms"),
        ("largest weight difference", "", f"{weight_gap:.1e}"),
    ]
    print(f"\n{'':26}{'one device':>14}{f'{len(devices)} replicas':>14}")
    for name, left, right in rows:
        print(f"{name:26}{left:>14}{right:>14}")
    tolerance = TOLERANCE[devices[0].split(":")[0]]
    wrong = differences(one, many, weight_gap, tolerance)
    if wrong:
        print(f"\nThe answers DIFFER: {'; '.join(wrong)}. Please report this with the text above.")
    else:
        print(f"\nThe answers agree: weights and losses to {tolerance:g}, steps exactly.")
    return not wrong


def differences(one: Outcome, many: Outcome, weight_gap: float, tolerance: float) -> list[str]:
    """Describes the differences that are larger than rounding."""
    wrong = []
    # "not <=", so that NaN counts as a difference.
    if not weight_gap <= tolerance:
        wrong.append(f"weights by {weight_gap:.1e}, more than {tolerance:g}")
    for name in ("train_loss", "test_loss"):
        gap = abs(getattr(one, name) - getattr(many, name))
        if not gap <= tolerance:
            wrong.append(f"{name} by {gap:.1e}, more than {tolerance:g}")
    if one.steps != many.steps:
        wrong.append(f"{one.steps} optimizer steps against {many.steps}")
    return wrong
