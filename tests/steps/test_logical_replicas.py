"""Logical replicas: which numbers fit, which rows they have, and what is said on GPUs."""

from __future__ import annotations

import functools
import itertools
import threading
import time
import warnings
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.pair import strategy_of

import tfmultigpu as tmg
from tfmultigpu import _compat
from tfmultigpu.steps import agreement
from tfmultigpu.steps.features import logical_replicas
from tfmultigpu.steps.values import Pass, Rows

PARTS = (1e16, 1.0, -1e16, 1.0)  # Each order of addition gives another sum.
READERS = (1.0, 1e8, -1e8, 3.0)
X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")


def model_of(replicas: int) -> Any:
    with strategy_of(replicas).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        return model, keras.optimizers.SGD(0.1)


@pytest.mark.parametrize(
    ("count", "fits"),
    [(1, [1]), (6, [1, 3, 6]), (7, [1, 7]), (8, [1, 2, 4, 8]), (12, [1, 3, 6, 12])],
)
def test_a_number_of_replicas_fits_if_each_has_a_power_of_two(count: int, fits: list[int]) -> None:
    for replicas in range(1, count + 2):
        if replicas in fits:
            logical_replicas.check_fits(count, replicas)
            continue
        with pytest.raises(tmg.TfMultiGpuError, match=f"Take one of {', '.join(map(str, fits))} "):
            logical_replicas.check_fits(count, replicas)


@pytest.mark.parametrize("value", [0, -1, 2.5, "4", True])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="logical_replicas"):
        tmg.make_train_step(*model_of(2), "mse", strategy_of(2), logical_replicas=value)


# Fails if rows are lost, or counted twice, on any number of devices.
@pytest.mark.parametrize("total", [1, 3, 6, 8, 13])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_each_row_counts_once(total: int, replicas: int) -> None:
    count, counted = 8, np.zeros(total)
    for replica in range(replicas):
        first, stop = total * replica // replicas, total * (replica + 1) // replicas
        if total < replicas:
            first, stop = 0, total
        held = Rows(*(tf.constant(n, tf.int64) for n in (first, stop - first, total)))
        for number in range(replica * count // replicas, (replica + 1) * count // replicas):
            rows, (start, end) = held.of_logical(number, count)
            assert 0 <= int(start) < int(end) <= stop - first
            assert (int(rows.first), int(rows.count)) == (first + int(start), int(end - start))
            counted[int(rows.first) : int(rows.first + rows.count)] += float(rows.weight)
    np.testing.assert_array_equal(counted, 1)


def test_on_gpus_determinism_is_asked_for() -> None:
    model, optimizer = model_of(2)
    names = mock.patch.object(logical_replicas, "strategy_devices", return_value=("GPU:0", "GPU:1"))
    with names, pytest.warns(tmg.ReplicaDependenceWarning, match="enable_op_determinism"):
        tmg.make_train_step(model, optimizer, "mse", strategy_of(2), logical_replicas=2)
    on = mock.patch.object(_compat, "kernels_are_deterministic", return_value=True)
    with names, on, warnings.catch_warnings():
        warnings.simplefilter("error")
        tmg.make_train_step(model, optimizer, "mse", strategy_of(2), logical_replicas=2)


class Overhears(keras.layers.Layer):
    """Adds another number to the first rows if others are computed at the same time."""

    def call(self, x: Any) -> Any:
        def heard(row: Any) -> Any:
            number = int(row)
            if number == 2:
                self.others.set()
            elif number == 3:
                time.sleep(0.5)  # The first ones listen meanwhile.
            if number in (1, 3):
                self.others.clear()
            return np.float32(number == 0 and self.others.wait(0.3))

        added = tf.numpy_function(heard, [x[0, 0]], tf.float32, stateful=False)
        return x + tf.ensure_shape(added, ())


# Fails if the check compares to rounding, or another layer is named than the first that differs.
def test_the_check_names_the_first_layer_of_other_bits() -> None:
    with strategy_of(2).scope():
        layer = Overhears(name="overhears")
        layer.others = threading.Event()
        inner = [keras.layers.Rescaling(1.0), layer, keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((1,)), *inner])
        optimizer = keras.optimizers.SGD(1e-3)
    step = tmg.make_train_step(model, optimizer, "mse", strategy_of(2), logical_replicas=4)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="each bit is to be as on one device"):
        step((np.arange(8, dtype="float32")[:, None], Y))
    assert step.verification.culprit.startswith("Overhears '")


# Fails if a step that cannot call one function is taken for one that can.
def test_replicas_that_meet_are_compared_with_one_device_by_rounding() -> None:
    with strategy_of(2).scope():
        norm = keras.layers.BatchNormalization(synchronized=True)
        model = keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    step = tmg.make_train_step(model, optimizer, "mse", strategy_of(2), logical_replicas=2)
    step((x, Y))
    assert step.verification.outcome == "same"


# Fails if a batch that fails leaves a step that is traced for each replica, with other bits.
def test_a_batch_that_fails_leaves_one_function() -> None:
    class Small(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            small = tf.debugging.Assert(tf.reduce_max(x) < 100.0, ["too large"])
            with tf.control_dependencies([small]):
                return tf.identity(x)

    def weights(replicas: int) -> list[bytes]:
        keras.utils.set_random_seed(1)
        with strategy_of(replicas).scope():
            dropped = keras.layers.Dropout(0.3)
            model = keras.Sequential([keras.Input((4,)), Small(), dropped, keras.layers.Dense(2)])
            optimizer = keras.optimizers.Adam(0.1)
        options: Any = {"logical_replicas": 4, "verify": False}
        step = tmg.make_train_step(model, optimizer, "mse", strategy_of(replicas), **options)
        wrong = X.copy()
        wrong[5] = 1000.0
        for x in (X, wrong, X):
            if x is wrong:
                with pytest.raises(Exception, match="too large"):
                    step((x, Y))
            else:
                step((x, Y))
        return [value.tobytes() for value in model.get_weights()]

    assert weights(1) == weights(2) == weights(4)


# Fails if TensorFlow may make one AddN of additions on one device, of an order of its own.
def test_a_device_adds_in_pairs_whatever_memory_is_free() -> None:
    found = set()
    for fresh in itertools.product((False, True), repeat=4):

        @tf.function(autograph=False)
        def add(*given: tf.Tensor, fresh: tuple[bool, ...] = fresh) -> tf.Tensor:
            groups: list[Any] = []
            for part, is_fresh in zip(given, fresh, strict=True):
                part = part * 2.0 if is_fresh else tf.identity(part)
                groups.append(logical_replicas._Group(1, [Pass(((),), part, ())]))
            left, right = (logical_replicas._sum_of(*groups[n : n + 2]) for n in (0, 2))
            return logical_replicas._sum_of(left, right).passes[0].stats

        given = [p / 2 if is_fresh else p for p, is_fresh in zip(PARTS, fresh, strict=True)]
        found.add(float(add(*(tf.constant([part], tf.float64) for part in given))[0]))
    assert found == {(PARTS[0] + PARTS[1]) + (PARTS[2] + PARTS[3])}


class Fan(keras.layers.Layer):
    """Has one tensor read four times; some of its gradients are read again after their sum."""

    def __init__(self, kept: tuple[bool, ...]) -> None:
        super().__init__()
        self.kept, self.weight = kept, self.add_weight(shape=(1,), initializer="zeros")

    def call(self, x: Any) -> Any:
        later: list[Any] = []

        @tf.custom_gradient
        def whole(x: Any) -> Any:
            return x * 1.0, lambda total: total + sum(0.0 * g * total for g in later)

        def part(x: Any, kept: bool) -> Any:
            def gradient(upstream: Any) -> Any:
                upstream = upstream * 1.0
                later.extend([upstream] if kept else [])
                return upstream

            return tf.custom_gradient(lambda x: (x * 1.0, gradient))(x)

        read = whole(tf.ones_like(x[:, :1]) * self.weight)
        terms = [part(read, kept) * n for n, kept in zip(READERS, self.kept, strict=True)]
        return tf.concat(terms, 1)


# Fails if the gradients of a tensor are added in an order that depends on which memory is free.
def test_the_gradients_of_a_tensor_are_added_in_their_order() -> None:
    found = set()
    for kept in itertools.product((False, True), repeat=4):
        with strategy_of(2).scope():
            model = keras.Sequential([keras.Input((1,)), Fan(kept)])
            optimizer = keras.optimizers.SGD(1.0)

        def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
            return tmg.LossSum(tf.reduce_sum(model(batch)), tf.size(batch))

        options: Any = {"forward": forward, "logical_replicas": 2, "verify": False}
        tmg.make_train_step(model, optimizer, None, strategy_of(2), **options)(X[:2, :1])
        found.add(float(model.weights[0].numpy()[0]))
    assert len(found) == 1, found


class Chain(keras.layers.Layer):
    """Adds four tensors; some of them are read again after their sum."""

    def __init__(self, kept: tuple[bool, ...]) -> None:
        super().__init__()
        self.kept = kept
        self.own = [self.add_weight(shape=(4, 1), initializer="ones") for _ in READERS]

    def call(self, x: Any) -> Any:
        parts = [tf.reshape(own, (4,)) * n for own, n in zip(self.own, READERS, strict=True)]
        total = parts[0] + parts[1] + parts[2] + parts[3]
        for part, kept in zip(parts, self.kept, strict=True):
            if kept:
                self.add_loss(0.0 * tf.reduce_sum(part * total))
        return tf.ones_like(x[:, :1]) * tf.reduce_sum(total)


# Fails if TensorFlow adds in another order than the layer does.
def test_a_layer_adds_in_its_order() -> None:
    found = set()
    for kept in itertools.product((False, True), repeat=4):
        with strategy_of(2).scope():
            model = keras.Sequential([keras.Input((1,)), Chain(kept)])
            optimizer = keras.optimizers.SGD(0.0)
        options: Any = {"logical_replicas": 2, "verify": False}
        step = tmg.make_train_step(model, optimizer, "mae", strategy_of(2), **options)
        found.add(float(step((X[:2, :1], np.zeros((2, 1), "float32")))["loss"]))
    assert found == {12.0}


class Counts(keras.layers.Layer):
    """Counts calls in a weight of some dtype, or notes what its rows are."""

    def __init__(self, dtype: str, start: float = 0.0) -> None:
        super().__init__()
        self.counted = self.add_weight(
            shape=(), dtype=dtype, trainable=False, name="counted",
            initializer=keras.initializers.Constant(start),
        )  # fmt: skip

    def call(self, x: Any) -> Any:
        if self.counted.dtype == "bool":
            self.counted.assign(tf.reduce_sum(x) > -1e9)
        else:
            self.counted.assign(self.counted + 1)
        return x * 1.0


class AtOnce(keras.layers.Layer):
    """Assigns where the step cannot wait with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.own = kind, tf.Variable(0.0, trainable=False)
        if kind == "function":
            self.norm = keras.layers.BatchNormalization()

    def call(self, x: Any) -> Any:
        if self.kind == "variable":
            self.own.assign_add(tf.reduce_sum(x))
            return x * 1.0
        if self.kind == "python":
            drawn = tf.numpy_function(np.random.default_rng(0).normal, [], tf.float64)
            return x + tf.cast(tf.reshape(drawn, []), tf.float32)
        if self.kind == "counted":
            ids = tf.cast(tf.math.argmax(x, 1), tf.int32)
            counts = tf.math.bincount(ids, tf.stop_gradient(x[:, 0]), minlength=4)
            return x * tf.gather(counts, ids)[:, None]
        if self.kind == "cropped":
            boxes = tf.tile([[0.0, 0.0, 0.9, 0.9]], [tf.shape(x)[0], 1])
            image = tf.reshape(x * tf.reduce_sum(self.own) + x, [-1, 2, 2, 1])
            cropped = tf.image.crop_and_resize(image, boxes, tf.range(tf.shape(x)[0]), [2, 2])
            return tf.reshape(cropped, tf.shape(x))
        return tf.function(lambda x: self.norm(x, training=True))(x)


def bits(replicas: int, layer: Any, metrics: Any, rows: int = 8) -> list[bytes]:
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 4)).astype("float32")
    y = (random.normal(size=(rows, 1)) > 0).astype("float32")
    with strategy_of(replicas).scope():
        outputs = keras.layers.Dense(1, "sigmoid", kernel_regularizer="l2")
        hidden = keras.layers.Dense(5, kernel_regularizer="l1", bias_regularizer="l2")
        model = keras.Sequential([keras.Input((4,)), layer(), hidden, outputs])
        optimizer, measured = keras.optimizers.Adam(0.1), metrics()
    options: Any = {"logical_replicas": 4, "metrics": measured}
    loss = "binary_crossentropy"
    step = tmg.make_train_step(model, optimizer, loss, strategy_of(replicas), **options)
    logs = [step((x, y))["loss"] for _ in range(3)]
    values = [*logs, *(metric.result() for metric in measured), *(v.value for v in model.variables)]
    return [np.asarray(tf.convert_to_tensor(value)).tobytes() for value in values]


# Fails if what one device finds in a state depends on how many logical replicas it computes.
@pytest.mark.parametrize("rows", [8, 3])
@pytest.mark.parametrize("dtype", ["int32", "bool", "float16"])
def test_states_of_any_dtype(dtype: str, rows: int) -> None:
    layer = lambda: Counts(dtype, 20_000.0 if dtype == "float16" else 0.0)  # noqa: E731
    expected = bits(1, layer, list, rows)
    assert bits(4, layer, list, rows) == expected
    if dtype == "int32":
        assert np.int32(3).tobytes() in expected


# Fails if a metric of Keras, many of which assign a sum, is refused, or is counted otherwise.
def test_metrics_that_assign_a_sum() -> None:
    kinds = keras.metrics

    def metrics() -> list[Any]:
        return [kinds.AUC(num_thresholds=9), kinds.Precision(), kinds.R2Score()]

    layer = functools.partial(keras.layers.Dense, 4)
    assert bits(4, layer, metrics) == bits(1, layer, metrics)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("variable", "assigns a variable at once.*both in call itself"),
        ("function", "assigns a variable at once.*both in call itself"),
        ("python", "runs Python code in .*stateful=False"),
        ("counted", "add in any order in .*unsorted_segment_sum"),
        ("cropped", "add in any order in .*enable_op_determinism"),
    ],
)
def test_what_another_call_would_find_or_add_otherwise_is_refused(kind: str, line: str) -> None:
    def layers() -> Any:
        return keras.Sequential([keras.layers.Dense(4), AtOnce(kind)])

    with pytest.raises(tmg.TfMultiGpuError, match=line):
        bits(1, layers, list)


# Fails if workers of other kernels compute logical replicas, and nobody is told.
def test_workers_that_are_not_alike_are_told() -> None:
    exchange = mock.Mock(worker=1)
    exchange.find_difference.return_value = ("kernels", 0)
    several = mock.patch.object(agreement, "is_one_process", return_value=False)
    exchanged = mock.patch.object(agreement, "WorkerExchange", return_value=exchange)
    line = "CPU with .* threads on worker 1, and others on worker 0.*TF_NUM_INTRAOP_THREADS"
    with several, exchanged, pytest.warns(tmg.ReplicaDependenceWarning, match=line):
        agreement.warn_of_other_kernels(strategy_of(2))
    exchange.find_difference.return_value = None
    with several, exchanged:
        agreement.warn_of_other_kernels(strategy_of(2))
