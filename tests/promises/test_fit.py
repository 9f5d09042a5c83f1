"""``tmg.fit`` gives the weights, History and calls of callbacks of Keras' fit on one device."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import FLOAT, Training, cut, regression, small
from law.pair import LOGS, assert_logs as assert_same_logs, known, strategy_of
from law.plain import PlainLoop, assert_values

import tfmultigpu as tmg

# Of NumPy 2, for the arrays that Keras' LearningRateScheduler makes.
pytestmark = [
    pytest.mark.usefixtures("float64"),
    # Of a callback of Keras under NumPy 2.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
layers = keras.layers
_random = np.random.default_rng(11)
# Rows that no number of replicas divides, fewer rows than replicas, a last batch of one row.
SIZES, VALIDATION, NEXT = (7, 2, 5, 1), (4, 1), (1, 6)
# A learning rate too large for this model in epoch 3: the validation gets worse, training stops.
RATES = (0.05, 0.05, 0.02, 0.7, 0.7, 0.7)
ROWS = 32
X = _random.normal(size=(ROWS, 4))
SIZE = X @ _random.normal(size=(4, 2))
KIND = np.argmax(X[:, :3], -1)
WEIGHTS = _random.choice([0.0, 0.5, 1.0, 3.0], (2, ROWS))


keras_fit = functools.partial(keras.Model.fit, shuffle=False)  # Else it warns of a dataset.


class Recorder(keras.callbacks.Callback):
    """Notes every hook that is called, with its number and its logs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, dict[str, float]]] = []


def _noting(name: str) -> Callable[..., None]:
    def note(self: Recorder, *arguments: Any, logs: Any = None) -> None:
        *number, logs = (*arguments, logs) if len(arguments) < 2 else arguments
        self.calls.append((name, number, {n: float(v) for n, v in (logs or {}).items()}))

    return note


for _part in ("epoch", "train_batch", "test_batch"):
    for _end in ("begin", "end"):
        setattr(Recorder, f"on_{_part}_{_end}", _noting(f"on_{_part}_{_end}"))


def by_rows(calls: Any, train: Sequence[int], test: Sequence[int]) -> list[Any]:
    """Returns what Keras recorded, with the losses of single outputs as means over rows.

    Keras averages these over batches, whatever their sizes (but ``loss`` by rows). From 3.16 on it
    counts rows where its trace knows their number, as in the first one, and else 1.
    """
    knows_rows = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)
    result, seen = [], {}
    for name, number, logs in calls:
        logs = dict(logs)
        if name.endswith("batch_end"):
            sizes = test if "test" in name else train
            n = number[0]
            counts = [size if knows_rows and size == sizes[0] else 1 for size in sizes[: n + 1]]
            for key in [key for key in logs if key.endswith("_loss")]:
                before, total = seen.get((name, key), (0.0, 0.0)) if n else (0.0, 0.0)
                sum_of_batch = logs[key] * sum(counts) - before * sum(counts[:-1])
                total += sum_of_batch / counts[-1] * sizes[n]
                seen[name, key] = logs[key], total
                logs[key] = total / sum(sizes[: n + 1])
        elif name == "on_epoch_end":
            for key in [key for key in logs if key.endswith("_loss") and key != "val_loss"]:
                hook = "on_test_batch_end" if key.startswith("val_") else "on_train_batch_end"
                sizes = test if key.startswith("val_") else train
                logs[key] = seen[hook, key.removeprefix("val_")][1] / sum(sizes)
        result.append((name, number, logs))
    return result


def assert_logs(actual: Any, expected: Any, what: Any) -> None:
    assert list(actual) == list(expected), what
    for name, value in expected.items():
        # That of one output was taken from means in float32, each times its number.
        tolerance = {"rtol": 5e-6} if name.endswith("_loss") and name != "val_loss" else LOGS
        np.testing.assert_allclose(actual[name], value, **tolerance, err_msg=f"{what}: {name}")


# One rich training --------------------------------------------------------------------------------


def two_outputs() -> Any:
    x = keras.Input((4,), dtype="float64")
    hidden = layers.Dense(5, "tanh", kernel_regularizer="l2", **FLOAT)(x)
    hidden = layers.BatchNormalization(synchronized=True, epsilon=0.1, **FLOAT)(hidden)
    hidden = layers.Dropout(0.3, seed=1, **FLOAT)(hidden)
    size = layers.Dense(2, name="size", **FLOAT)(hidden)
    kind = layers.Dense(3, "softmax", name="kind", **FLOAT)(hidden)
    model = keras.Model(x, {"size": size, "kind": kind})
    mean = keras.metrics.SparseCategoricalAccuracy
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.5),
        {"size": keras.losses.MeanSquaredError(**FLOAT),
         "kind": keras.losses.SparseCategoricalCrossentropy(**FLOAT)},
        loss_weights={"size": 0.5, "kind": 2.0},
        metrics={"size": [keras.metrics.RootMeanSquaredError(name="rms", **FLOAT)],
                 "kind": [mean(name="right", **FLOAT)]},
        weighted_metrics={"kind": [mean(name="weighted", **FLOAT)],
                          "size": [keras.metrics.MeanAbsoluteError(name="error", **FLOAT)]},
        jit_compile=False,  # By XLA, Keras' choice on a GPU, it would draw other random numbers.
    )  # fmt: skip
    return model


def weighted(sizes: Sequence[int]) -> list[Any]:
    weights = dict(zip(("size", "kind"), WEIGHTS, strict=True))
    return cut((X, {"size": SIZE, "kind": KIND}, weights), sizes)


def train_richly(fit: Any, model: Any) -> tuple[list[Any], list[Any], list[list[np.ndarray]]]:
    """Returns two histories, what was recorded, and all variables after each of two fits."""
    recorder, values, histories = Recorder(), [], []
    rate = keras.callbacks.LearningRateScheduler(lambda epoch: RATES[epoch])
    stop = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
    plans = (
        {"x": known(weighted(SIZES)), "epochs": 6, "callbacks": [rate, stop, recorder],
         "validation_data": known(weighted(VALIDATION))},
        {"x": known(weighted(NEXT)), "epochs": 3, "initial_epoch": 1, "callbacks": [rate]},
    )  # fmt: skip
    for plan in plans:
        histories.append(fit(model, plan.pop("x"), verbose=0, **plan))
        values.append([v.numpy() for v in [*model.variables, *model.optimizer.variables]])
    return histories, recorder.calls, values


@functools.cache
def keras_rich_training() -> Any:
    keras.utils.set_random_seed(5)
    return train_richly(keras_fit, two_outputs())


# Fails if a batch, a row, an output or a validation weighs otherwise than on one device, if an
# epoch of History is a mean of means, if validation comes before the last step, if a hook is
# called once too often or with other logs, or if a second fit begins anew.
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.more), 3])
def test_a_rich_training_with_callbacks_is_that_of_keras(replicas: int) -> None:
    expected, calls, values = keras_rich_training()
    keras.utils.set_random_seed(5)
    with strategy_of(replicas).scope():
        model = two_outputs()
    histories, our_calls, our_values = train_richly(tmg.fit, model)
    assert expected[0].epoch == [0, 1, 2, 3]  # Stopped by a worse validation; best is epoch 2.
    names = [v.path for v in [*model.variables, *model.optimizer.variables]]
    for ours, theirs in zip(our_values, values, strict=True):
        assert_values(ours, theirs, names)
    recorded = by_rows(calls, SIZES, VALIDATION)
    assert [call[:2] for call in our_calls] == [call[:2] for call in recorded]
    for (hook, number, logs), (_, _, truth) in zip(our_calls, recorded, strict=True):
        assert_logs(logs, truth, (hook, number))
    ends = [logs for hook, _, logs in recorded if hook == "on_epoch_end"]
    truth = {name: [logs[name] for logs in ends] for name in ends[0]}
    truth["learning_rate"] = expected[0].history["learning_rate"]
    assert set(histories[0].history) == set(expected[0].history) == set(truth)
    assert [history.epoch for history in histories] == [[0, 1, 2, 3], [1, 2]]
    for name, value in histories[0].history.items():
        assert_logs({name: value}, {name: truth[name]}, "History")
    for name in ("loss", "kind_right", "size_rms", "kind_weighted", "size_error", "learning_rate"):
        second = [history.history[name] for history in (histories[1], expected[1])]
        np.testing.assert_allclose(*second, **LOGS, err_msg=name)


# Class weights, epochs that are no passes, several steps a call -----------------------------------


def classifier(optimizer: Any = None, **more: Any) -> Any:
    model = keras.Sequential(
        [keras.Input((4,), dtype="float64"), layers.Dense(5, "tanh", **FLOAT),
         layers.Dense(3, "softmax", **FLOAT)]
    )  # fmt: skip
    model.compile(
        optimizer or keras.optimizers.SGD(0.2),
        keras.losses.SparseCategoricalCrossentropy(**FLOAT),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="right", **FLOAT)],
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted", **FLOAT)],
        **more,
    )
    return model


def classes(sizes: Sequence[int]) -> tf.data.Dataset:
    return known(cut((X, KIND), sizes))


CLASS_WEIGHT = {0: 1.0, 1: 5.0, 2: 0.0}


# Fails if a class weight is lost, if an epoch of three batches begins a new pass, or if steps of
# one call are left out, run twice or are missing in the logs.
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.more), 3])
def test_class_weights_epochs_across_passes_and_several_steps_a_call(replicas: int) -> None:
    models = []
    for strategy in (tf.distribute.get_strategy(), strategy_of(replicas)):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            models.append(classifier(steps_per_execution=2))
    truth, model = models
    recorders = Recorder(), Recorder()
    options = {"class_weight": CLASS_WEIGHT, "verbose": 0, "epochs": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of the shorter end of odd data.
        expected = keras_fit(
            truth, classes((7, 1, 2, 5, 4, 1)), callbacks=[recorders[0]], **options
        )
    history = tmg.fit(model, classes((7, 1, 2, 5, 4, 1)), callbacks=[recorders[1]], **options)
    assert_same_fit(model, truth, history, expected)
    assert [call[:2] for call in recorders[1].calls] == [call[:2] for call in recorders[0].calls]
    for ours, theirs in zip(recorders[1].calls, recorders[0].calls, strict=True):
        assert_logs(ours[2], theirs[2], theirs[:2])

    truth.steps_per_execution = model.steps_per_execution = 1
    options |= {"steps_per_epoch": 3, "class_weight": None}
    passes = [classes((7, 1, 2, 5)).repeat() for _ in models]
    truth.train_function = None
    expected = keras_fit(truth, passes[0], **options)
    history = tmg.fit(model, passes[1], steps_per_call=2, **options)
    assert_same_fit(model, truth, history, expected)


def assert_same_fit(model: Any, truth: Any, history: Any, expected: Any) -> None:
    assert history.epoch == expected.epoch
    assert_same_logs(history.history, expected.history)
    names = [v.path for v in truth.variables]
    assert_values([v.numpy() for v in model.variables], [v.numpy() for v in truth.variables], names)
    assert model.optimizer.iterations.numpy() == truth.optimizer.iterations.numpy()


# Arrays -------------------------------------------------------------------------------------------


# Fails if arrays are cut, split, weighed or ordered otherwise than by Keras, if a validation comes
# in another epoch, is longer or is weighed by classes, if weights of an earlier fit are kept, or if
# the averages of the optimizer are not the weights at the end.
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.more), 3])
def test_arrays_weights_and_validations_are_those_of_keras(replicas: int) -> None:
    models, histories = [], []
    plans: list[dict[str, Any]] = [
        {"sample_weight": WEIGHTS[0], "batch_size": 7, "validation_split": 0.3, "epochs": 4,
         "validation_freq": [2, 3]},
        {"class_weight": {1: 5.0}, "batch_size": 7, "epochs": 1},  # Class 0 and 2 weigh 1.
        {"class_weight": {0: 3.0, 2: 0.0}, "batch_size": 7, "epochs": 2,
         "validation_data": (X[:9], KIND[:9], WEIGHTS[1, :9]), "validation_batch_size": 4},
        {"steps_per_epoch": 3, "epochs": 2, "validation_data": classes((2, 1, 5)),
         "validation_steps": 2, "validation_freq": 2},
    ]  # fmt: skip
    # Not TensorFlow's strategy of one device: with its iterators Keras' fit crashes now and then.
    alone = tf.distribute.get_strategy()
    for strategy, fit in ((alone, keras_fit), (strategy_of(replicas), tmg.fit)):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            models.append(classifier(optimizer=keras.optimizers.SGD(0.2, use_ema=True)))
        found = [
            fit(
                models[-1],
                X,
                KIND,
                verbose=0,
                **({"shuffle": False} if fit is tmg.fit else {}),
                **p,
            )
            for p in plans
        ]
        histories.append([one.history for one in found])
    truth, model = models
    for expected, history in zip(*histories, strict=True):
        assert_same_logs(history, expected)
    pairs = [[v.numpy() for v in [*m.variables, *m.optimizer.variables]] for m in (model, truth)]
    assert_values(*pairs, [v.path for v in [*truth.variables, *truth.optimizer.variables]])


# What Keras' fit has not: plain loops on one device are the truth ---------------------------------

CLIP = 0.2


def plain_epochs(training: Training, sizes: Sequence[int], epochs: int) -> list[float]:
    """Trains on one device; returns the mean loss over the rows of each epoch."""
    loop = PlainLoop(training, regression(sizes)[0])
    losses = []
    for _ in range(epochs):
        logs = loop.train(regression(sizes))
        assert training.clip_norm is None or max(log["gradient_norm"] for log in logs) > CLIP
        losses.append(np.average([log["loss"] for log in logs], weights=sizes))
    return losses


def trained_plainly(**options: Any) -> tuple[Training, list[float]]:
    keras.utils.set_random_seed(5)
    truth = small(**options)
    return truth, plain_epochs(truth, SIZES, 3)


# Fails if an argument does not reach the step, if each replica or part is clipped by itself, if a
# micro-batch is a step, or if an argument or a loss of an earlier fit is kept.
@pytest.mark.parametrize(
    ("replicas", "shares"),
    [pytest.param(2, (1, 3), marks=pytest.mark.more), (3, (1, 5, 2))],
)
def test_micro_batches_clip_norm_and_shares_are_arguments(replicas: int, shares: Any) -> None:
    truth, losses = trained_plainly(clip_norm=CLIP)
    keras.utils.set_random_seed(5)
    with strategy_of(replicas).scope():
        ours = small()
        ours.model.compile(ours.optimizer, ours.loss)
    history = tmg.fit(
        ours.model, known(regression(SIZES)), epochs=3, micro_batches=2, clip_norm=CLIP,
        shares=shares, verbose=0,
    )  # fmt: skip
    assert_values(ours.values(), truth.values(), truth.variables())
    np.testing.assert_allclose(history.history["loss"], losses, **LOGS)
    assert ours.optimizer.iterations.numpy() == 3 * len(SIZES)
    with pytest.raises(tmg.errors.TfMultiGpuError):  # A share of zero leaves a replica idle.
        tmg.fit(ours.model, known(regression(SIZES)), shares=[0, *shares[1:]], verbose=0)
    assert ours.optimizer.iterations.numpy() == 3 * len(SIZES)
    for loss in (truth.loss, keras.losses.MeanAbsoluteError(**FLOAT)):
        if loss is not truth.loss:
            with strategy_of(replicas).scope():
                ours.model.compile(ours.optimizer, loss)
        losses = plain_epochs(dataclasses.replace(truth, clip_norm=None, loss=loss), NEXT, 1)
        history = tmg.fit(ours.model, known(regression(NEXT)), verbose=0)
        assert_values(ours.values(), truth.values(), truth.variables())
        np.testing.assert_allclose(history.history["loss"], losses, **LOGS)


# Fails if fit trains with another loss than that of forward or of the step, or averages its logs
# over batches.
@pytest.mark.parametrize(("replicas", "own"), [(2, "step"), (3, "forward")])
def test_a_step_or_a_forward_of_ones_own(replicas: int, own: str) -> None:
    truth, losses = trained_plainly()
    keras.utils.set_random_seed(5)
    strategy = strategy_of(replicas)
    with strategy.scope():
        ours = small()
        ours.model.compile(ours.optimizer)

    def forward(model: Any, batch: Any, training: bool) -> Any:
        return tmg.loss_sum(ours.loss, batch[1], model(batch[0], training=training))

    if own == "step":
        given = tmg.make_train_step(ours.model, ours.optimizer, None, strategy, forward=forward)
    else:
        given = forward
    recorder = Recorder()
    history = tmg.fit(
        ours.model, known(regression(SIZES)), epochs=3, callbacks=[recorder], verbose=0,
        **{own: given},
    )  # fmt: skip
    assert_values(ours.values(), truth.values(), truth.variables())
    np.testing.assert_allclose(history.history["loss"], losses, **LOGS)
    batches = [number[0] for hook, number, _ in recorder.calls if hook == "on_train_batch_end"]
    assert batches == [0, 1, 2, 3] * 3
