"""Functions that tests of equal bits call in worker processes, and in one process alone."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfmultigpu as tmg

_random = np.random.default_rng(8)
ROWS = 15
IDS = _random.integers(0, 4100, (ROWS, 3)).astype("int32")
IDS[::2, 1] = 7  # Repeated within and across workers.
Y = _random.integers(0, 3, ROWS)
WEIGHTS = _random.uniform(0.1, 2.0, ROWS).astype("float32")
# Of fewer rows than workers, than logical replicas, odd, and even.
CUTS = [slice(0, 1), slice(1, 4), slice(4, 11), slice(11, 15)]
joined: dict[str, Any] = {}


def join(workers: int) -> int:
    """Joins the cluster, or takes one device; returns the number of replicas."""
    if workers == 1:
        joined["strategy"] = tmg.create_strategy(devices=1)
    else:
        joined["strategy"] = tmg.create_strategy("multi_worker", fallback=False)
    return int(joined["strategy"].num_replicas_in_sync)


def _compiled() -> Any:
    """A table of which rows are sent, and a normalization of the rows of a logical replica."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    with joined["strategy"].scope():
        stack = [
            layers.Embedding(4100, 16),
            layers.Flatten(),
            layers.Dense(8, kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *stack])
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]
        optimizer = keras.optimizers.Adagrad(0.1, use_ema=True, ema_momentum=0.9)
        model.compile(optimizer, cross_entropy, weighted_metrics=metrics)
    return model


def _values(model: Any) -> list[np.ndarray]:
    return [np.asarray(v.numpy()) for v in [*model.variables, *model.optimizer.variables]]


def stepped(count: int, folder: str) -> dict[str, list[np.ndarray]]:
    """Trains by ``step(batch)`` and ``step.run``, or continues what others have saved."""
    model = _compiled()
    strategy = joined["strategy"]
    with strategy.scope():
        metrics = [keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]
    step = tmg.make_train_step(
        model, model.optimizer, model.loss, strategy, metrics=metrics, clip_norm=0.5,
        logical_replicas=count,
    )  # fmt: skip
    checkpoints = tmg.Checkpoints(folder, model=model, optimizer=model.optimizer)
    was_saved = checkpoints.restore() is not None
    logs: list[Any] = []
    for cut in CUTS:
        (shards,) = tmg.distribute_dataset(
            (IDS[cut], Y[cut], WEIGHTS[cut]), strategy, batch_size=ROWS
        )
        logs.append(step(shards))
    data = tmg.distribute_dataset((IDS, Y, WEIGHTS), strategy, batch_size=4)
    logs.append(step.run(iter(data), 4))
    if strategy.num_replicas_in_sync > 1:
        assert step.verification.outcome == "same", str(step.verification)
    if not was_saved:
        checkpoints.save()
    numbers = [np.asarray([float(log[name]) for name in sorted(log)]) for log in logs]
    results = [np.asarray(metric.result()) for metric in metrics]
    return {"values": _values(model), "logs": numbers, "metrics": results}


def fitted(count: int) -> dict[str, list[np.ndarray]]:
    """Fits and evaluates; the last batch is short."""
    model = _compiled()
    data = IDS, Y
    options: Any = {"batch_size": 4, "verbose": 0, "logical_replicas": count}
    history = tmg.fit(
        model, *data, epochs=2, sample_weight=WEIGHTS, validation_data=(IDS[:6], Y[:6]), **options
    ).history
    evaluated = tmg.evaluate(model, *data, **options)
    return {
        "values": _values(model),
        "history": [np.asarray(history[name]) for name in sorted(history)],
        "evaluated": [np.asarray(evaluated)],
    }
