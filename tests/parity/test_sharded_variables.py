"""Variables on one device each: what one device gives, and each variable and slot once."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of, unused_strategy

import tfmultigpu as tmg
from tfmultigpu import _compat
from tfmultigpu.strategies.variable_sharding import is_sharded

layers = keras.layers
_random = np.random.default_rng(3)
# Partial batches, one row, fewer rows than replicas.
SIZES = (12, 7, 1, 2, 12)


def cut(*arrays: np.ndarray, sizes: tuple[int, ...] = SIZES) -> list[tuple[np.ndarray, ...]]:
    ends = np.cumsum(sizes)
    return [
        tuple(a[end - size : end] for a in arrays) for end, size in zip(ends, sizes, strict=True)
    ]


@contextlib.contextmanager
def sharding(at_least: int = 0) -> Any:
    """Shards on replicas; the side of one device is built outside of scopes."""
    with contextlib.ExitStack() as stack:
        if tf.distribute.has_strategy():
            stack.enter_context(tmg.sharded_variables(at_least=at_least))
        yield


def crossentropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp() -> Any:
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, "tanh", kernel_regularizer="l2"),
            layers.Dropout(0.3, seed=1),
            layers.Dense(16, "tanh", kernel_constraint=keras.constraints.MaxNorm(1.0)),
            layers.Dense(3),
        ]
    )


def cnn() -> Any:
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.Activation("relu"),
            layers.Conv2D(4, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )


def transformer() -> Any:
    ids = keras.Input((5,), dtype="int32")
    x = layers.Embedding(11, 8)(ids)
    x = x + layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x)
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, "gelu")(x)))
    return keras.Model(ids, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def lstm() -> Any:
    ids = keras.Input((5,), dtype="int32")
    x = layers.Embedding(11, 4, mask_zero=True)(ids)
    x = layers.LSTM(6, return_sequences=True)(x)
    return keras.Model(ids, layers.Dense(3)(layers.LSTM(5)(x)))


ROWS = sum(SIZES)
LABELS = _random.integers(0, 3, ROWS)
NUMBERS = _random.normal(size=(ROWS, 6)).astype("float32")
IMAGES = _random.normal(size=(ROWS, 6, 6, 2)).astype("float32")
IDS = _random.integers(1, 11, (ROWS, 5)).astype("int32")
IDS[:, 3:] *= _random.integers(0, 2, (ROWS, 2)).astype("int32")
MODELS: dict[str, tuple[Callable[[], Any], np.ndarray]] = {
    "MLP": (mlp, NUMBERS),
    "CNN": (cnn, IMAGES),
    "transformer": (transformer, IDS),
    "LSTM": (lstm, IDS),
}


def adam(**options: Any) -> Any:
    return keras.optimizers.Adam(0.01, **options)


def training(
    make: Callable[[], Any], optimizer: Callable[[], Any] = adam, **options: Any
) -> Callable[[], Any]:
    def build() -> Any:
        with sharding():
            model = make()
        metrics = [keras.metrics.SparseCategoricalAccuracy()]
        return tmg.testing.Training(model, optimizer(), crossentropy(), metrics=metrics, **options)

    return build


# Their true gradient is zero, or nearly, and Adam divides it by its own size.
ZERO = {"conv2d/kernel": 1e-5, "key/bias": 1e-3}


def hold(name: str, replicas: int, build: Any = None, **options: Any) -> None:
    make, x = MODELS[name]
    options = {"predict": False, **options}
    tmg.testing.assert_replica_invariant(
        build or training(make), cut(x, LABELS), strategy=strategy_of(replicas), **options
    )


@pytest.mark.parametrize(
    ("name", "replicas", "options"),
    [
        ("MLP", 4, {"predict": True}),
        ("CNN", 2, {}),
        ("transformer", 3, {"micro_batches": 3}),
        ("LSTM", 2, {}),
    ],
)
def test_models_train_as_on_one_device(name: str, replicas: int, options: dict[str, Any]) -> None:
    hold(name, replicas, tolerances=ZERO, **options)


def test_settings_of_the_optimizer() -> None:
    averages = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}
    hold(
        "MLP",
        3,
        training(mlp, functools.partial(adam, clipnorm=0.1, weight_decay=0.1, **averages)),
        steps_per_call=2,
    )


def test_loss_scaling_of_float16() -> None:
    def build() -> Any:
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_float16")
        try:
            with sharding():
                model = mlp()
        finally:
            keras.config.set_dtype_policy(policy)
        sgd = keras.optimizers.SGD(0.1)
        return tmg.testing.Training(model, sgd, crossentropy())

    # The rounding of float16; that the steps are those of one device shows in the loss scale.
    hold("MLP", 3, build, tolerance=3e-3, loss_scale="dynamic")


def big(width: int = 32) -> Any:
    return keras.Sequential(
        [
            keras.Input((6,)),
            *[layers.Dense(width, "tanh") for _ in range(6)],
            layers.BatchNormalization(synchronized=True),
            layers.Dense(3),
        ]
    )


def bytes_by_device(variables: Any, strategy: Any) -> dict[str, int]:
    found = dict.fromkeys((f"CPU:{i}" for i in range(strategy.num_replicas_in_sync)), 0)
    for variable in variables:
        for copy in strategy.experimental_local_results(variable.value):
            name = tmg.devices.names.parse_device_name(copy.device)
            found[name] += copy.shape.num_elements() * copy.dtype.size
    return found


def test_each_large_variable_and_its_slots_are_on_one_device() -> None:
    replicas = 4
    strategy = strategy_of(replicas)
    with strategy.scope(), tmg.sharded_variables(at_least=4 * 32 * 32):
        model, optimizer = big(), adam()
    step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
    logs = step((NUMBERS[:8], LABELS[:8]))
    assert step.verification.outcome == "same"
    assert np.isfinite(float(logs["loss"]))
    alone = [variable for variable in model.variables if is_sharded(variable)]
    assert [one.path.split("/")[-1] for one in alone] == ["kernel"] * 5
    kernel = 4 * 32 * 32
    on_each = bytes_by_device(alone, strategy)
    assert sum(on_each.values()) == 5 * kernel
    assert max(on_each.values()) <= -(-5 // replicas) * kernel
    others = [variable for variable in model.variables if not is_sharded(variable)]
    small = bytes_by_device(others, strategy)
    assert len(set(small.values())) == 1
    places = {one.path.replace("/", "_"): one.value.device for one in alone}
    slots = [
        v
        for v in optimizer.variables
        if v.path.split("/")[-1] not in ("iteration", "learning_rate")
    ]
    of_alone = [v for v in slots for path in places if v.path.split("/")[-1].startswith(path)]
    assert len(of_alone) == 10
    for slot in of_alone:
        path = next(path for path in places if slot.path.split("/")[-1].startswith(path))
        assert slot.value.device == places[path]
    assert sum(bytes_by_device(slots, strategy).values()) == 2 * sum(
        4 * v.shape.num_elements() for v in model.trainable_variables
    )


def test_unequal_devices_get_unequal_parts() -> None:
    strategy = unused_strategy(2)
    with strategy.scope(), tmg.sharded_variables(at_least=0, memory=[3e6, 1e6]):
        model = keras.Sequential([keras.Input((32,)), *[layers.Dense(32) for _ in range(12)]])
    on_each = bytes_by_device(model.variables, strategy)
    assert 2.5 < on_each["CPU:0"] / on_each["CPU:1"] < 3.5


def test_what_does_not_fit_is_said_with_numbers() -> None:
    strategy = unused_strategy(2)
    memory = {"CPU:0": 5000, "CPU:1": 5000}
    with (
        pytest.raises(tmg.errors.DataError, match=r"4,096 bytes, after CPU:0: .* of 5,000 bytes"),
        strategy.scope(),
        tmg.sharded_variables(memory=memory, at_least=0),
    ):
        keras.Sequential([keras.Input((32,)), *[layers.Dense(32) for _ in range(4)]])


def test_initial_values_are_those_of_one_device() -> None:
    def values(scope: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(4)
        with scope:
            model = transformer()
            # A generator of its own and the global one draw in the same order too.
            weight = keras.Variable(keras.random.normal((3, 3)), trainable=True)
            drawn = keras.Variable(
                lambda shape, dtype: keras.random.normal(shape, dtype=dtype), shape=(4, 4)
            )
        return [v.numpy() for v in [*model.variables, weight, drawn]]

    strategy = strategy_of(3)
    expected = values(contextlib.nullcontext())
    with contextlib.ExitStack() as stack:
        stack.enter_context(strategy.scope())
        found = values(tmg.sharded_variables(at_least=0))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_resumes_on_mirrored_variables(tmp_path: Any) -> None:
    batches = cut(NUMBERS, LABELS)

    def run(replicas: int, shards: bool, save: int | None = None) -> Any:
        keras.utils.set_random_seed(9)
        strategy = strategy_of(replicas)
        with contextlib.ExitStack() as stack:
            if replicas > 1:
                stack.enter_context(strategy.scope())
            if shards:
                stack.enter_context(tmg.sharded_variables(at_least=0))
            model, optimizer = mlp(), adam()
        step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
        checkpoints = tmg.Checkpoints(tmp_path, model, optimizer)
        begin = checkpoints.restore() or 0
        for i, batch in enumerate(batches[begin:], begin):
            if i == save:
                checkpoints.save()
                break
            step(batch)
        return [v.numpy() for v in [*model.variables, *optimizer.variables]]

    whole = run(4, True)
    run(4, True, save=2)
    resumed = run(2, False)
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_fit_evaluate_and_predict() -> None:
    def run(replicas: int) -> tuple[Any, ...]:
        keras.utils.set_random_seed(9)
        strategy = strategy_of(replicas)
        with contextlib.ExitStack() as stack:
            if replicas > 1:
                stack.enter_context(strategy.scope())
            with sharding():
                # Built from the first batch, by fit, and sharded all the same.
                model = keras.Sequential([layers.Dense(16, "tanh"), layers.Dense(3)])
            model.compile(adam(), crossentropy(), metrics=["accuracy"])
        data = tf.data.Dataset.from_tensor_slices((NUMBERS, LABELS)).batch(7)
        history = tmg.fit(model, data, epochs=2, validation_data=data, verbose=0)
        if replicas > 1:
            assert all(is_sharded(v) for v in model.trainable_variables)
        return history.history, tmg.evaluate(model, data), tmg.predict(model, data)

    expected, found = run(1), run(3)
    for one, other in zip(expected[:2], found[:2], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(one[name], other[name], atol=2e-6, err_msg=name)
    np.testing.assert_allclose(expected[2], found[2], atol=2e-6)


def sharded_step(**options: Any) -> Any:
    strategy = strategy_of(2)
    optimizer = options.pop("optimizer", adam)
    with strategy.scope(), tmg.sharded_variables(at_least=0):
        model, made = mlp(), optimizer()
    return tmg.make_train_step(model, made, crossentropy(), strategy, **options)


def test_what_a_step_refuses() -> None:
    for options, says in (
        ({"shard_update": False}, "Leave shard_update out"),
        ({"jit_compile": True}, "XLA cannot read"),
        ({"optimizer": lambda: keras.optimizers.Nadam(0.1)}, "Nadam keeps state"),
    ):
        with pytest.raises(tmg.TfMultiGpuError, match=says):
            sharded_step(**options)


def test_only_a_step_updates() -> None:
    step = sharded_step(optimizer=functools.partial(adam, weight_decay=0.1))
    variables, optimizer = step.model.trainable_variables, step.optimizer
    before = [one.numpy() for one in variables]
    zeros = [tf.zeros(one.shape) for one in variables]
    for apply in (tmg.apply_reduced_gradients, type(optimizer).apply):
        with pytest.raises(tmg.TfMultiGpuError, match=r"updated once[\s\S]*make_train_step"):
            step.strategy.run(apply, args=(optimizer, zeros, variables))
    step.model.compile("sgd", crossentropy())
    with pytest.raises(tmg.TfMultiGpuError, match=r"updated once[\s\S]*tmg\.fit\(model, data\)"):
        step.model.fit(NUMBERS[:8], LABELS[:8], verbose=0)
    for one, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(one, variable.numpy())


def test_what_sharded_variables_refuses() -> None:
    with pytest.raises(tmg.ScopeError, match=r"with strategy.scope\(\), tmg.sharded"):
        tmg.sharded_variables().__enter__()
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    with central.scope(), pytest.raises(tmg.TfMultiGpuError, match="a mirrored strategy only"):
        tmg.sharded_variables().__enter__()
    three = {f"CPU:{i}": 1e9 for i in (0, 1, 2)}
    with unused_strategy(2).scope():
        for memory in ([1.0], 1e9, [1e9, 0], ["1", "2"], {"CPU:0": 1e9}, three):
            with pytest.raises(tmg.errors.DataError, match="for each device"):
                tmg.sharded_variables(memory=memory).__enter__()
        for at_least, error in (("64k", TypeError), (-1, ValueError)):
            with pytest.raises(error, match=r"at_least must be a whole number"):
                tmg.sharded_variables(at_least=at_least).__enter__()
            with pytest.raises(error, match=r"at_least must be a whole number"):
                tmg.tuning.plan_memory(mlp, at_least=at_least)


def test_on_one_device_nothing_changes() -> None:
    with tf.distribute.OneDeviceStrategy("CPU:1").scope(), tmg.sharded_variables(at_least=0):
        model = mlp()
    assert not any(is_sharded(variable) for variable in model.variables)


def test_other_strategies_are_refused() -> None:
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    with (
        pytest.raises(tmg.TfMultiGpuError, match="devices of a mirrored strategy only"),
        strategy.scope(),
        tmg.sharded_variables(),
    ):
        pass


def test_the_memory_of_an_earlier_model_is_free_again() -> None:
    strategy = unused_strategy(2)
    for _ in range(3):
        model = None
        gc.disable()  # As if it had not come to it yet.
        try:
            with strategy.scope(), tmg.sharded_variables(at_least=0, memory=[1e4, 1e4]):
                model = keras.Sequential([keras.Input((64,)), layers.Dense(32), layers.Dense(64)])
                model.compile("sgd", "mse")
            tmg.fit(model, np.ones((4, 64)), np.ones((4, 64)), verbose=0)
        finally:
            gc.enable()


def test_averages_written_by_hand_at_the_end() -> None:
    def run(replicas: int) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        with strategy_of(replicas).scope(), sharding():
            model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(3)])
            sgd = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        step = tmg.make_train_step(model, sgd, crossentropy(), strategy_of(replicas))
        for _ in range(3):
            step((NUMBERS[:7], LABELS[:7]))
        before = model.get_weights()
        sgd.finalize_variable_values(model.trainable_variables)
        assert not np.array_equal(before[0], model.get_weights()[0])
        return model.get_weights()

    for one, other in zip(run(1), run(3), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def devices_of_values(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes the device of each value that a sharded variable begins with."""
    devices: list[str] = []
    create = _compat.variable_on_device

    def note(strategy: Any, device: str, value: Any, *args: Any, **options: Any) -> Any:
        devices.append(value.device)
        assert value.device == device
        return create(strategy, device, value, *args, **options)

    monkeypatch.setattr(_compat, "variable_on_device", note)
    return devices


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saving.
def test_models_are_made_and_loaded_device_by_device(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = strategy_of(3)
    step = sharded_step()
    step((NUMBERS[:8], LABELS[:8]))
    expected = [variable.numpy() for variable in step.model.weights]
    step.model.save(tmp_path / "whole.keras")
    step.model.save_weights(tmp_path / "only.weights.h5")

    alone = keras.models.load_model(tmp_path / "whole.keras")  # On one device, without a strategy.
    assert [one.shape for one in alone.weights] == [one.shape for one in step.model.weights]
    for variable, value in zip(alone.weights, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)

    devices = devices_of_values(monkeypatch)
    with strategy.scope(), tmg.sharded_variables(at_least=0):
        loaded = keras.models.load_model(tmp_path / "whole.keras", compile=False)
        weights = mlp()
    weights.load_weights(tmp_path / "only.weights.h5")
    assert set(devices) == set(strategy.extended.worker_devices)
    for model in (loaded, weights):
        assert all(is_sharded(variable) for variable in model.trainable_variables)
        for variable, value in zip(model.weights, expected, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saving.
def test_a_saved_optimizer_trains_on(tmp_path: Any) -> None:
    """A ``.keras`` file has the state of the optimizer, which Keras builds when it loads it."""

    def make() -> Any:
        rate = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.9)
        return keras.optimizers.Adam(rate, use_ema=True, clipnorm=0.5)

    def train(model: Any, strategy: Any) -> list[np.ndarray]:
        loss = crossentropy()
        step = tmg.make_train_step(model, model.optimizer, loss, strategy, verify=False)
        for rows in (8, 5, 1):
            step((NUMBERS[:rows], LABELS[:rows]))
        return [np.asarray(one.numpy()) for one in (*model.weights, *model.optimizer.variables)]

    one = strategy_of(1)
    with one.scope():
        alone = mlp()
        alone.compile(make(), crossentropy())
    train(alone, one)
    alone.save(tmp_path / "one.keras")
    # Keras does not save what a Dropout has drawn.
    expected = train(keras.models.load_model(tmp_path / "one.keras"), one)
    for file in ("one.keras", "three.keras"):
        strategy = strategy_of(3)
        with strategy.scope(), tmg.sharded_variables(at_least=1000):
            loaded = keras.models.load_model(tmp_path / file)
        assert {is_sharded(one) for one in loaded.trainable_variables} == {True, False}
        if file == "one.keras":
            loaded.save(tmp_path / "three.keras")
        for actual, value in zip(train(loaded, strategy), expected, strict=True):
            np.testing.assert_allclose(actual, value, rtol=2e-5, atol=2e-6)


def test_an_optimizer_built_before_the_step() -> None:
    def train(replicas: int) -> list[np.ndarray]:
        strategy = strategy_of(replicas)
        keras.utils.set_random_seed(3)
        with strategy.scope(), sharding():
            model = mlp()
            optimizer = keras.optimizers.RMSprop(0.01, momentum=0.9)
            optimizer.build(model.trainable_variables)
        model.layers[-1].trainable = False
        step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
        step((NUMBERS[:7], LABELS[:7]))
        model.layers[-1].trainable = True
        step((NUMBERS[:7], LABELS[:7]))
        return [np.asarray(one.numpy()) for one in (*model.weights, *optimizer.variables)]

    for actual, value in zip(train(3), train(1), strict=True):
        np.testing.assert_allclose(actual, value, rtol=2e-5, atol=2e-6)


class Halving(layers.Layer):
    """Assigns its own weight in each call, after it has read it."""

    def __init__(self, how: str = "keras") -> None:
        super().__init__()
        self.how = how

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        result = x * self.w
        if self.how == "keras":
            self.w.assign(self.w * 0.5)
        else:
            self.w.value.assign_sub(self.w * 0.5)
        return result


@pytest.mark.parametrize(("how", "rows"), [("keras", 1), ("tensorflow", 6)])
def test_layers_that_assign_weights_when_they_predict(how: str, rows: int) -> None:
    def run(replicas: int) -> list[Any]:
        strategy = strategy_of(replicas)
        with strategy.scope(), sharding():
            model = keras.Sequential([keras.Input((6,)), Halving(how)])
            model.compile(loss="mse")
        x = NUMBERS[:rows]
        results = [tmg.predict(model, x, batch_size=rows, verify=False)]
        results += [tmg.evaluate(model, x, x, batch_size=rows, verify=False)["loss"]]
        return [*results, model.layers[0].w.numpy()]

    for actual, value in zip(run(3), run(1), strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-6)


class Decaying(layers.Layer):
    """Writes to its kernel by TensorFlow's own assign: between two reads, or going back."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        variable = self.kernel.value

        @tf.custom_gradient
        def product(x: tf.Tensor, kernel: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> Any:
                before = tf.matmul(upstream, kernel, transpose_b=True)
                if self.when == "in_gradient":
                    variable.assign(variable * 0.5)
                return before, tf.matmul(x, upstream, transpose_a=True)

            return tf.matmul(x, kernel), gradient

        result = tf.tanh(product(x, tf.convert_to_tensor(self.kernel)))
        if training and self.when != "in_gradient":
            variable.assign(variable * 0.5)
        return tf.matmul(result, self.kernel)


@pytest.mark.parametrize("when", ["between_reads", "in_gradient"])
def test_layers_that_assign_weights_when_they_train(when: str) -> None:
    """The backward pass takes the value that the forward pass took, not one written since."""

    def train(replicas: int) -> list[np.ndarray]:
        strategy = strategy_of(replicas)
        keras.utils.set_random_seed(4)
        with strategy.scope(), sharding():
            before = layers.Dense(5, activation="tanh")
            model = keras.Sequential([keras.Input((6,)), before, Decaying(when), layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.3), crossentropy())
        x, y = NUMBERS[:11], LABELS[:11]
        history = tmg.fit(model, x, y, batch_size=5, epochs=2, shuffle=False, verify=False)
        return [*(one.numpy() for one in model.weights), np.asarray(history.history["loss"])]

    for actual, value in zip(train(3), train(1), strict=True):
        np.testing.assert_allclose(actual, value, rtol=2e-5, atol=2e-6)


def test_loops_by_hand_assign_once() -> None:
    """As for a mirrored variable: not once for each replica."""

    def run(sharded: bool, aggregation: str) -> np.ndarray:
        strategy = strategy_of(3)
        with strategy.scope(), sharding() if sharded else contextlib.nullcontext():
            kernel = keras.Variable(np.ones((2, 2), "float32"), aggregation=aggregation)
        assert is_sharded(kernel) == sharded

        @tf.function
        def step() -> None:
            def replica() -> None:
                kernel.assign_sub(tf.fill((2, 2), 0.1))
                kernel.assign(kernel * 0.5)
                if aggregation != "sum":
                    kernel.value.assign_add(tf.ones((2, 2)))

            strategy.run(replica)

        step()
        return np.asarray(kernel.numpy())

    for aggregation in ("none", "mean", "only_first_replica", "sum"):
        np.testing.assert_allclose(
            run(True, aggregation), run(False, aggregation), rtol=1e-6, err_msg=aggregation
        )


def test_what_replicas_may_not_write() -> None:
    """A part, or where they cannot agree; once, outside of replicas, a part can be written."""
    strategy = strategy_of(3)
    with strategy.scope(), sharding():
        kernel = keras.Variable(np.ones((2, 2), "float32"))
    for write, written in (
        (lambda v: v.scatter_add(tf.IndexedSlices(tf.ones((1, 2)), [0])), [[2, 2], [1, 1]]),
        (lambda v: v.scatter_nd_update([[0, 0]], [3.0]), [[3, 2], [1, 1]]),
        (lambda v: v[0].assign([5.0, 6.0]), [[5, 6], [1, 1]]),
    ):
        with pytest.raises(tmg.TfMultiGpuError, match=r"part of a sharded [\s\S]*whole value"):
            strategy.run(write, args=(kernel.value,))
        write(kernel.value)
        np.testing.assert_array_equal(kernel.numpy(), written)

    def add_one() -> Any:
        kernel.assign_add(tf.ones((2, 2)))
        return tf.zeros((2, 2))

    for control in (
        lambda: tf.cond(tf.random.uniform(()) < 2.0, add_one, lambda: tf.zeros((2, 2))),
        lambda: tf.while_loop(lambda i: i < 2, lambda i: (add_one(), i + 1)[1:], [0]),
        lambda: tf.function(add_one)(),
    ):
        step = tf.function(lambda control=control: strategy.run(control))
        with pytest.raises(tmg.TfMultiGpuError, match=r"inside tf\.cond, a\s+loop[\s\S]*tf\.where"):
            step()


def test_a_second_strategy_aggregates_too() -> None:
    for shape in ((4, 4), (4,)):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope(), sharding():
            kernel = keras.Variable(np.ones(shape, "float32"), aggregation="mean")
        strategy.run(lambda kernel=kernel: kernel.assign_add(tf.ones_like(kernel.value)))
        np.testing.assert_array_equal(kernel.numpy(), np.full(shape, 2.0))


def test_a_small_first_device_gets_what_it_holds() -> None:
    strategy = unused_strategy(2)
    memory = [16, 1000]
    with strategy.scope(), tmg.sharded_variables(at_least=0, memory=memory):
        variables = [keras.Variable(np.ones(size, "float32")) for size in (8, 2)]
    assert [tmg.devices.names.parse_device_name(one.value.device) for one in variables] == [
        "CPU:1",
        "CPU:1",
    ]


def test_restore_before_the_optimizer_is_built(tmp_path: Any) -> None:
    """The order of a program with ``fit``: compile, restore, fit."""

    def model_on(replicas: int) -> Any:
        keras.utils.set_random_seed(1)
        with strategy_of(replicas).scope(), sharding():
            model = keras.Sequential([keras.Input((6,)), layers.Dense(16, "tanh"), layers.Dense(3)])
            model.compile(keras.optimizers.Adam(0.01, use_ema=True), crossentropy())
        return model

    def fit(model: Any, epochs: int, folder: str) -> list[np.ndarray]:
        checkpoints = tmg.Checkpoints(tmp_path / folder, model, model.optimizer)
        checkpoints.restore()
        data = NUMBERS[:12], LABELS[:12]
        callbacks = [checkpoints.callback()]
        tmg.fit(model, data, batch_size=5, epochs=epochs, verbose=0, callbacks=callbacks)
        return [np.asarray(one.numpy()) for one in (*model.weights, *model.optimizer.variables)]

    fit(model_on(3), 2, "resumed")
    resumed = fit(model_on(2), 4, "resumed")
    straight = fit(model_on(1), 4, "straight")
    for actual, value in zip(resumed, straight, strict=True):
        np.testing.assert_allclose(actual, value, rtol=2e-5, atol=2e-6)


class TwoInOne(layers.Layer):
    """Operations whose gradients read two weights."""

    def build(self, shape: Any) -> None:
        self.a, self.b = self.add_weight(shape=(6, 6)), self.add_weight(shape=(6, 6))

    def call(self, x: Any) -> Any:
        apart = tf.reduce_sum(tf.math.squared_difference(self.a, self.b))
        return x @ tf.maximum(self.a, self.b) + apart


class Rematerialized(layers.Layer):
    """Computes its activations again in the backward pass."""

    def build(self, shape: Any) -> None:
        self.inner = layers.Dense(6, "tanh")
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        return keras.remat(self.inner)(x)


@pytest.mark.parametrize("kind", [TwoInOne, Rematerialized])
def test_layers_that_read_weights_together_or_again(kind: Any) -> None:
    found = {}
    for replicas in (1, 4):
        with strategy_of(replicas).scope(), sharding():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((6,)), kind(), layers.Dense(1)])
            model.compile(adam(use_ema=True, ema_overwrite_frequency=2), "mse")
        history = tmg.fit(
            model, NUMBERS, NUMBERS[:, :1], batch_size=7, epochs=2, verbose=0, shuffle=False
        )
        found[replicas] = [*model.get_weights(), np.asarray(history.history["loss"])]
    for one, alone in zip(found[4], found[1], strict=True):
        np.testing.assert_allclose(one, alone, rtol=1e-5, atol=1e-6)


def test_an_inner_limit_ends_with_its_context() -> None:
    def kernel() -> bool:
        dense = layers.Dense(4)
        dense.build((None, 4))
        return is_sharded(dense.kernel)

    with strategy_of(2).scope(), tmg.sharded_variables(at_least=0):
        before = kernel()
        with tmg.sharded_variables(at_least=10**6):
            within = kernel()
        assert (before, within, kernel()) == (True, False, True)
