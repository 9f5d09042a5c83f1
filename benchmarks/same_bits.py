"""What logical replicas cost: a step, a first step, and the bits of each number of devices.

``python benchmarks/same_bits.py`` prints a line for each network and number of replicas N: the time
of a step with ``logical_replicas=N`` as a share of the step without, with ``logical_replicas=4 N``
as a share of ``micro_batches=4``, the CPU time of first steps without and with the check, and a
hash of the weights that all numbers of replicas give. All contenders of a line train in one process
and take turns.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import time
from multiprocessing import get_context
from typing import Any

import numpy as np

BATCH, LOGICAL, BITS_AFTER = 64, 8, 6
NETWORKS = ("MLP", "CNN", "wide MLP", "transformer")


def main() -> int:
    """Returns 0, or 1 if bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=NETWORKS, nargs="+", default=list(NETWORKS))
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    asked = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    wrong = False
    for name in asked.only:
        hashes = set()
        for replicas in asked.replicas:
            with get_context("spawn").Pool(1) as pool:
                found = pool.apply(measure, (name, replicas, asked.rounds, asked.steps))
            hashes.add(found["bits"])
            print(json.dumps(found), flush=True)
        wrong |= len(hashes) > 1
    return int(wrong)


def measure(name: str, replicas: int, rounds: int, steps: int) -> dict[str, Any]:
    """Times the contenders; call it in a new process."""
    import tfmultigpu as tmg

    tmg.split_device("CPU:0", parts=max(2, replicas))
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "logical": {"logical_replicas": replicas},
        "parts": {"micro_batches": 4},
        "logical parts": {"logical_replicas": 4 * replicas},
        "bits": {"logical_replicas": LOGICAL},
        "checked": {"verify": "first"},
        "logical checked": {"verify": "first", "logical_replicas": replicas},
    }
    trained, first = {}, {}
    for who, given in options.items():
        began = time.process_time()
        trained[who] = new(name, replicas, given)
        trained[who][0](1)
        first[who] = time.process_time() - began
    del trained["checked"], trained["logical checked"]  # Of which the first step matters.
    train, model = trained.pop("bits")
    train(BITS_AFTER - 1)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    times: dict[str, list[float]] = {who: [] for who in trained}
    for number in range(rounds + 1):
        for who, (run, _) in trained.items():
            seconds = run(steps)
            if number:
                times[who].append(seconds)
    shares = {}
    for ours, theirs in (("logical", "plain"), ("logical parts", "parts")):
        ratios = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
        shares[f"{ours} / {theirs}"] = [round(q, 2) for q in statistics.quantiles(ratios, n=4)]
        shares[f"first: {ours} / {theirs}"] = round(first[ours] / first[theirs], 2)
    shares["first: checked"] = round(first["logical checked"] / first["checked"], 2)
    milliseconds = {who: round(1e3 * statistics.median(t), 1) for who, t in times.items()}
    bits = hashlib.sha256(weights).hexdigest()[:12]
    load = round(os.getloadavg()[0], 1)
    return {
        "network": name,
        "N": replicas,
        "bits": bits,
        **shares,
        "ms": milliseconds,
        "load": load,
    }


def new(name: str, replicas: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """Returns what trains a new model for so many steps, and returns seconds of one; the model."""
    import keras

    import tfmultigpu as tmg

    keras.utils.set_random_seed(1)
    strategy = tmg.create_strategy(devices=replicas)
    with strategy.scope():
        model, x = network(name)
        optimizer = keras.optimizers.AdamW(1e-3)
    y = np.random.default_rng(1).integers(0, 10, len(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(model, optimizer, loss, strategy, **{"verify": False, **options})
    batches = tmg.distribute_dataset((x, y), strategy, batch_size=BATCH)
    endless = itertools.chain.from_iterable(itertools.repeat(batches))

    def train(steps: int) -> float:
        taken = list(itertools.islice(endless, steps))
        began = time.perf_counter()
        for batch in taken:
            logs = step(batch)
        float(logs["loss"])
        return (time.perf_counter() - began) / steps

    return train, model


def network(name: str) -> tuple[Any, np.ndarray]:
    """Returns a new model, and the rows that it takes: the last batch of a pass is short."""
    import keras

    layers = keras.layers
    rng, rows = np.random.default_rng(0), 4 * BATCH - 6
    if name == "transformer":
        ids = keras.Input((32,))
        x = layers.Embedding(1000, 64)(ids)
        for _ in range(4):
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
            hidden = layers.Dense(256, "gelu")(x)
            x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.Dense(64)(hidden)))
        outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
        return keras.Model(ids, outputs), rng.integers(0, 1000, (rows, 32))
    if name == "CNN":
        shape: tuple[int, ...] = (32, 32, 3)
        inner = [layers.Conv2D(32, 3, activation="relu"), layers.BatchNormalization(),
                 layers.Conv2D(64, 3, strides=2, activation="relu"),
                 layers.GlobalAveragePooling2D()]  # fmt: skip
    else:
        width, shape = (2048, (256,)) if name == "wide MLP" else (256, (64,))
        inner = [layers.Dense(width, "relu"), layers.Dropout(0.2), layers.Dense(width, "relu")]
    model = keras.Sequential([keras.Input(shape), *inner, layers.Dense(10)])
    return model, rng.standard_normal((rows, *shape), dtype="float32")


if __name__ == "__main__":
    raise SystemExit(main())
