"""Times the first step, and those after it, by the number of replicas.

``python benchmarks/first_step.py --network transformer --replicas 1 8`` prints a line for each
contender, each in a process of its own: the loop by hand, Keras' ``fit``, ours with a trace for
each replica, ours as it is without the check of the first step, and with it. ``--built`` gives an
optimizer that was built before, as by an earlier ``fit``, and ``--dropout`` a transformer that
draws. CPU seconds are compared, because programs beside it slow the clock more than the processor.
The peaks are those of the process in the first step and in those after it, above what it had
before; ask for ``--network activations parameters``, in which these dominate, in its own run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

BATCH, LAYERS = 16, 12
CONTENDERS = ("by hand", "Keras", "for each", "ours", "checked")
OF_MEMORY = ("activations", "parameters")  # Networks whose peaks are wanted: these dominate.


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", nargs="+", default=["transformer", "resnet50", "mlp"])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--built", action="store_true", help="the optimizer was built before")
    parser.add_argument("--dropout", type=float, default=0.0, help="of each block")
    asked = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if set(asked.network) <= set(OF_MEMORY):
        # oneDNN's allocator and that of the C library keep what was freed, which hides the rest.
        os.environ.update(TF_ENABLE_ONEDNN_OPTS="0", MALLOC_MMAP_THRESHOLD_=str(2**18))
    for case in itertools.product(asked.network, asked.replicas, asked.only):
        with get_context("spawn").Pool(1) as pool:
            found = pool.apply(measure, (*case, asked.built, asked.dropout))
            print(json.dumps(found), flush=True)


def measure(
    network: str, replicas: int, who: str, built: bool = False, dropout: float = 0.0
) -> dict[str, Any]:
    """Returns seconds and CPU seconds of the first step, milliseconds of others, and the peak."""
    import keras

    import tfmultigpu as tmg

    if replicas > 1:
        tmg.split_device("CPU:0", parts=replicas)
    strategy = tmg.create_strategy(devices=replicas)
    with strategy.scope():
        model, optimizer = build(network, dropout), keras.optimizers.Adam()
        if built or who in OF_USERS:
            optimizer.build(model.trainable_variables)
    make = OF_USERS.get(who) or functools.partial(_ours, who=who)
    step = make(model, optimizer, strategy)
    batch = _batch(network) if who != "by hand" else _distributed(network, strategy)
    before = _peak_mib()
    began, processor = time.perf_counter(), time.process_time()
    step(batch)
    first, processor = time.perf_counter() - began, time.process_time() - processor
    peak = _peak_mib() - before
    times = []
    for _ in range(8):
        began = time.perf_counter()
        step(batch)
        times.append(1e3 * (time.perf_counter() - began))
    return {
        "network": network,
        "replicas": replicas,
        "who": who,
        "first_s": round(first, 1),
        "first_cpu_s": round(processor, 1),
        "step_ms": round(statistics.median(times), 1),
        "peaks_mib": [peak, _peak_mib() - before],
    }


def _peak_mib() -> int:
    """Returns the largest resident memory since the last call, in MiB."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")  # Which resets it.
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def build(network: str, dropout: float = 0.0) -> Any:
    """Returns one of the models."""
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(0)
    if network == "resnet50":
        return keras.applications.ResNet50(
            weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None
        )
    if network == "mobilenet_v2":
        return keras.applications.MobileNetV2(
            weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None
        )
    if network == "mlp":
        hidden = [layers.Dense(64, "relu"), layers.Dense(64, "relu")]
        return keras.Sequential([keras.Input((32,)), *hidden, layers.Dense(10)])
    if network == "activations":
        hidden = [layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(6)]
        pooled = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
        return keras.Sequential([keras.Input((128, 128, 3)), *hidden, *pooled])
    if network == "parameters":
        hidden = [layers.Dense(1536, "relu") for _ in range(13)]
        return keras.Sequential([keras.Input((32,)), *hidden, layers.Dense(10)])
    ids = keras.Input((16,), dtype="int32")
    x = layers.Embedding(100, 64)(ids)
    for _ in range(LAYERS):
        attended = layers.Dropout(dropout)(layers.MultiHeadAttention(4, 16, dropout=dropout)(x, x))
        x = layers.LayerNormalization()(x + attended)
        transformed = layers.Dense(64)(layers.Dense(128, "gelu")(x))
        x = layers.LayerNormalization()(x + layers.Dropout(dropout)(transformed))
    return keras.Model(ids, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def _batch(network: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = (np.arange(BATCH) % 2).astype("int32")
    if network == "transformer":
        return random.integers(0, 100, (BATCH, 16)).astype("int32"), labels
    images = {"resnet50": (32, 32, 3), "mobilenet_v2": (64, 64, 3), "activations": (128, 128, 3)}
    shape = BATCH, *images.get(network, (32,))
    return random.normal(size=shape).astype("float32"), labels


def _ours(model: Any, optimizer: Any, strategy: Any, who: str) -> Any:
    import keras

    import tfmultigpu as tmg

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    class ForEach(tmg.steps.Feature):
        """Changes nothing, but what it does to a replica is its own affair."""

        def around_replica(self, replica: Any) -> Any:
            return replica

    features = [ForEach()] if who == "for each" else []
    verify = "first" if who == "checked" else False
    step = tmg.make_train_step(model, optimizer, loss, strategy, verify=verify, features=features)
    return lambda batch: float(step(batch)["loss"])


def _by_hand(model: Any, optimizer: Any, strategy: Any) -> Any:
    import tensorflow as tf

    def replica(batch: Any) -> Any:
        x, labels = batch
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_sum(losses) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply([tf.convert_to_tensor(gradient) for gradient in gradients])
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        losses = strategy.run(replica, args=(batch,))
        return strategy.reduce("SUM", losses, axis=None)

    return lambda batch: float(step(batch))


def _keras(model: Any, optimizer: Any, strategy: Any) -> Any:
    import keras

    with strategy.scope():
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return lambda batch: model.fit(*batch, batch_size=BATCH, verbose=0)


OF_USERS = {"by hand": _by_hand, "Keras": _keras}  # Who build their optimizer before.


def _distributed(network: str, strategy: Any) -> Any:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensors(_batch(network)).repeat()
    return next(iter(strategy.experimental_distribute_dataset(dataset)))


if __name__ == "__main__":
    main()
