"""This library replaced by what its users would have without it: plain Keras, MirroredStrategy.

``python tests/mutations/run.py --plain`` runs the promises against it. A promise that passes here
proves nothing of the library, unless plain TensorFlow really keeps it.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import types
from typing import Any, NamedTuple

import keras
import tensorflow as tf

_ERRORS = [
    "CheckpointError",
    "ClusterError",
    "DataError",
    "DeviceNotFoundError",
    "DevicesInitializedError",
    "LossError",
    "OutOfMemoryError",
    "ScopeError",
    "StrategyUnavailableError",
    "TfMultiGpuError",
    "WorkerLostError",
]
_WARNINGS = [
    "ReplicaDependenceWarning",
    "StrategyFallbackWarning",
]
FIT_OPTIONS = {"batch_size", "epochs", "steps_per_epoch", "validation_data", "class_weight",
               "sample_weight", "callbacks", "verbose", "shuffle", "initial_epoch"}  # fmt: skip
errors = types.SimpleNamespace(
    **{name: type(name, (Exception,), {}) for name in _ERRORS},
    **{name: type(name, (UserWarning,), {}) for name in _WARNINGS},
)
globals().update(vars(errors))
sys.modules[f"{__name__}.errors"] = errors  # type: ignore[assignment]


def list_devices(kind: str | None = None) -> tuple[Any, ...]:
    return tuple(tf.config.list_physical_devices(kind))


def enable_memory_growth(devices: Any = None) -> tuple[Any, ...]:
    for device in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(device, True)
    return ()


def split_device(device: str, parts: int, memory: Any = None) -> tuple[str, ...]:
    (cpu,) = tf.config.list_physical_devices("CPU")
    configurations = [tf.config.LogicalDeviceConfiguration() for _ in range(parts)]
    tf.config.set_logical_device_configuration(cpu, configurations)
    return tuple(f"CPU:{i}" for i in range(parts))


def limit_memory(limits: Any) -> None:
    pass


def plan_strategy(*_: Any, **__: Any) -> Any:
    return types.SimpleNamespace(
        kind="mirrored", devices=(), num_replicas=1, reason="", rejected={}
    )


def create_strategy(prefer: str = "auto", devices: Any = None, **_: Any) -> Any:
    if prefer == "multi_worker":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if isinstance(devices, int):
        devices = [f"CPU:{i}" for i in range(devices)]
    return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())


def plan_shares(global_batch_size: int, capacities: Any) -> tuple[int, ...]:
    return tuple(int(global_batch_size * c / sum(capacities)) for c in capacities)


def memory_capacities(strategy: Any = None) -> tuple[float, ...]:
    return (1.0,) * (strategy or tf.distribute.get_strategy()).num_replicas_in_sync


def distribute_dataset(
    data: Any, strategy: Any = None, *, batch_size: Any = None, preprocess: Any = None, **_: Any
) -> Any:
    if not isinstance(data, tf.data.Dataset):
        data = tf.data.Dataset.from_tensor_slices(data)
    if preprocess is not None:
        data = data.map(preprocess)
    if batch_size is not None:
        data = data.batch(batch_size)
    return (strategy or tf.distribute.get_strategy()).experimental_distribute_dataset(data)


@contextlib.contextmanager
def sharded_variables(**_: Any) -> Any:
    yield


class LossSum(NamedTuple):
    sum: Any
    weight: Any


def loss_sum(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> LossSum:
    rows = tf.cast(tf.shape(y_true)[0], tf.float32)
    mean = keras.losses.get(loss)(y_true, y_pred, sample_weight=sample_weight)
    return LossSum(tf.cast(mean, tf.float32) * rows, rows)


def global_mean(pair: LossSum) -> Any:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return pair.sum / pair.weight / replicas


class GradientAccumulator:
    def __init__(self, variables: Any) -> None:
        self._sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
        self.count = 0

    def add(self, gradients: Any, weight: Any) -> None:
        self.count += 1
        for total, gradient in zip(self._sums, gradients, strict=True):
            total.assign_add(tf.cast(gradient / tf.cast(weight, gradient.dtype), total.dtype))

    def reduce(self) -> Any:
        means = [total / max(self.count, 1) for total in self._sums]
        for total in self._sums:
            total.assign(tf.zeros_like(total))
        self.count = 0
        return means, tf.constant(1.0)


class LossScale:
    def __init__(self, initial: float = 2.0**15, growth_steps: Any = 2000) -> None:
        self.initial = initial

    def value(self) -> Any:
        return tf.constant(self.initial)

    def scale_loss(self, loss: Any) -> Any:
        return loss * tf.cast(self.initial, loss.dtype)

    def unscale(self, gradients: Any) -> Any:
        return [gradient / self.initial for gradient in gradients], tf.constant(True)

    def update(self, finite: Any) -> None:
        pass


def clip_gradients(gradients: Any, limit: float) -> Any:
    return tf.clip_by_global_norm(gradients, limit)


def apply_reduced_gradients(optimizer: Any, gradients: Any, variables: Any, **_: Any) -> None:
    optimizer.apply(gradients, variables)


class _Step:
    """The step of TensorFlow's tutorial: each replica divides by its own rows."""

    verification = None

    def __init__(
        self, model: Any, optimizer: Any, loss: Any, strategy: Any, metrics: Any, forward: Any,
        clip_norm: Any, training: bool,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.forward, self.training = (
            model,
            optimizer,
            forward,
            training,
        )
        self.strategy = strategy or tf.distribute.get_strategy()
        self.loss = loss if forward or not loss else self._losses(loss)
        self.metrics = metrics if isinstance(metrics, dict) else {None: list(metrics)}
        self.clip_norm = clip_norm
        if optimizer is not None:
            with self.strategy.scope():
                optimizer.build(model.trainable_variables)
        self._compiled = tf.function(self._all, autograph=False, reduce_retracing=True)

    @staticmethod
    def _losses(loss: Any) -> Any:
        if isinstance(loss, dict):
            return {name: keras.losses.get(one) for name, one in loss.items()}
        return keras.losses.get(loss)

    def __call__(self, batch: Any) -> dict[str, Any]:
        return self._compiled(batch)

    def run(self, iterator: Any, steps: int) -> dict[str, Any]:
        logs: dict[str, Any] = {"loss": tf.constant(float("nan"))}
        ran = 0
        for batch in iterator:
            logs = self(batch)
            ran += 1
            if ran == steps:
                break
        return {**logs, "steps": tf.constant(ran)}

    def _all(self, batch: Any) -> dict[str, Any]:
        logs = self.strategy.run(self._replica, args=(batch,))
        return {n: self.strategy.reduce("MEAN", v, axis=None) for n, v in logs.items()}

    def _replica(self, batch: Any) -> dict[str, Any]:
        x, y, weight = (*batch, None, None)[:3] if isinstance(batch, tuple) else (batch, None, None)
        with tf.GradientTape() as tape:
            if self.forward is not None:
                pair = self.forward(self.model, batch, self.training)
                pair = pair[0] if isinstance(pair[0], tuple) else pair
                loss = pair[0] / pair[1]
            else:
                outputs = self.model(x, training=self.training)
                if isinstance(self.loss, dict):
                    weights = weight or {}
                    loss = sum(
                        one(y[name], outputs[name], sample_weight=weights.get(name))
                        for name, one in self.loss.items()
                    )
                else:
                    loss = self.loss(y, outputs, sample_weight=weight)
                for name, metrics in self.metrics.items():
                    for metric in metrics:
                        metric.update_state(*((y, outputs) if name is None else
                                              (y[name], outputs[name])))  # fmt: skip
            loss += sum(tf.cast(one, loss.dtype) for one in self.model.losses)
            scaled = loss / self.strategy.num_replicas_in_sync
        logs = {"loss": tf.cast(loss, tf.float32), "weight": tf.constant(1.0)}
        if self.training:
            variables = self.model.trainable_variables
            gradients = [tf.convert_to_tensor(g) for g in tape.gradient(scaled, variables)]
            logs["gradient_norm"] = tf.cast(tf.linalg.global_norm(gradients), tf.float32)
            if self.clip_norm is not None:
                gradients, _ = tf.clip_by_global_norm(gradients, self.clip_norm)
            self.optimizer.apply(gradients, variables)
        return logs


def make_train_step(
    model: Any, optimizer: Any, loss: Any, strategy: Any = None, *, metrics: Any = (),
    forward: Any = None, clip_norm: Any = None, **_: Any,
) -> Any:  # fmt: skip
    return _Step(model, optimizer, loss, strategy, metrics, forward, clip_norm, True)


def make_eval_step(model: Any, loss: Any, strategy: Any = None, *, metrics: Any = ()) -> Any:
    return _Step(model, None, loss, strategy, metrics, None, None, False)


def make_predict_step(model: Any, strategy: Any = None) -> Any:
    strategy = strategy or tf.distribute.get_strategy()

    def predict(batch: Any) -> Any:
        x = batch[0] if isinstance(batch, tuple) else batch
        parts = strategy.experimental_local_results(strategy.run(model, args=(x,)))
        return tf.concat(parts, 0)

    return predict


def chain_steps(*steps: Any, **_: Any) -> Any:
    def step(batch: Any) -> Any:
        return [one(batch) for one in steps][-1]

    return step


def gather_rows(tensor: Any, **_: Any) -> Any:
    return tensor


def synchronize_batch_norm(model: Any) -> Any:
    return model


def fit(model: Any, *data: Any, micro_batches: Any = 1, **options: Any) -> Any:
    keras_options = {name: value for name, value in options.items() if name in FIT_OPTIONS}
    return model.fit(*data, **keras_options)


def evaluate(model: Any, *data: Any, **options: Any) -> Any:
    return model.evaluate(*data, return_dict=True, **options)


def predict(model: Any, *data: Any, **options: Any) -> Any:
    return model.predict(*data, **options)


def prepare(model: Any, **_: Any) -> Any:
    return model


class Checkpoints:
    def __init__(self, directory: Any, model: Any = None, optimizer: Any = None, data: Any = None,
                 keep: int = 3, **_: Any) -> None:  # fmt: skip
        self.directory, self.data = pathlib.Path(directory), data
        objects = {n: o for n, o in (("model", model), ("optimizer", optimizer)) if o is not None}
        self._checkpoint = tf.train.Checkpoint(**objects)
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(directory), keep)

    def save(self) -> Any:
        return self._manager.save()

    def restore(self) -> Any:
        return self._manager.restore_or_initialize() and 1


def find_batch_size(try_batch: Any, *, start: int = 32, limit: int | None = None) -> int:
    return start


def doctor() -> Any:
    return types.SimpleNamespace(findings=())


explain = rows = doctor
testing = types.SimpleNamespace(
    virtual_devices=lambda n: split_device("CPU:0", n),
    assert_replica_invariant=lambda *_, **__: None,
)
sys.modules[f"{__name__}.testing"] = testing  # type: ignore[assignment]
