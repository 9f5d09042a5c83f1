"""Peak memory and time of a step: mirrored variables, sharded update, sharded variables.

``python benchmarks/sharded_variables.py`` runs each in a process of its own, on four virtual CPUs,
and prints the peak of the process above what it had before the model. Virtual CPUs share their
memory, so a read of a variable of another device is no copy: on GPUs mirrored variables take the
parameters on each device, and what this shows is the part of gradients and optimizer state.

``--model transformer`` takes eight blocks of width 768 in place of dense layers. ``--rows`` is the
global batch: with many rows, activations take the memory, and ``remat`` computes them again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
# Whether variables and the update are sharded, and whether keras.remat is around each layer.
WAYS = {
    "mirrored variables": (False, False, False),
    "mirrored variables, sharded update": (False, True, False),
    "sharded variables": (True, True, False),
    "sharded variables, remat": (True, True, True),
}
TOKENS, WORDS = 8, 1000


def peak() -> float:
    """Returns the largest memory that this process has had, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def transformer(blocks: int, width: int, again: Any) -> Any:
    """Returns a transformer with one output for each word."""
    import keras

    class Block(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.attention = keras.layers.MultiHeadAttention(12, width // 12)
            self.attention.build(shape, shape)
            self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
            wide = (*shape[:-1], 4 * width)
            self.hidden = keras.layers.Dense(4 * width, "gelu")
            self.back = keras.layers.Dense(width)
            for layer, size in zip(
                (*self.norms, self.hidden, self.back), (shape, shape, shape, wide), strict=True
            ):
                layer.build(size)

        def call(self, x: Any) -> Any:
            normed = self.norms[0](x)
            x = x + self.attention(normed, normed, use_causal_mask=True)
            return x + self.back(self.hidden(self.norms[1](x)))

    ids = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Embedding(WORDS, width)(ids)
    for _ in range(blocks):
        x = again(Block())(x)
    return keras.Model(ids, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x)))


def measure(
    way: str, replicas: int, kind: str, layers: int, width: int, rows: int, micro: int
) -> dict[str, Any]:
    """Trains in this process; returns bytes, times and losses."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["KERAS_BACKEND"] = "tensorflow"
    sys.path.insert(0, str(SOURCE))
    import keras
    import numpy as np

    import tfmultigpu as tmg

    devices = tmg.split_device("CPU:0", parts=replicas)
    strategy = tmg.create_strategy(devices=list(devices))
    sharded, update, remat = WAYS[way]
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    targets = random.normal(size=(rows, 10)).astype("float32")
    if kind == "transformer":
        batch = random.integers(0, WORDS, (rows, TOKENS)).astype("int32"), targets
    else:
        batch = random.normal(size=(rows, width)).astype("float32"), targets
    before = peak()

    class Again(keras.layers.Layer):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def build(self, shape: Any) -> None:
            self.inner.build(shape)

        def call(self, x: Any) -> Any:
            return keras.remat(self.inner)(x)

    again: Any = Again if remat else lambda layer: layer

    def build() -> Any:
        if kind == "transformer":
            return transformer(layers, width, again)
        hidden = [again(keras.layers.Dense(width, "relu")) for _ in range(layers)]
        return keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(10)])

    with strategy.scope():
        if sharded:
            with tmg.sharded_variables():
                model = build()
        else:
            model = build()
        optimizer = keras.optimizers.Adam(1e-4)
    step = tmg.make_train_step(
        model,
        optimizer,
        "mse",
        strategy,
        micro_batches=micro,
        shard_update=update,
        verify=False,
    )
    losses = [float(step(batch)["loss"]) for _ in range(3)]
    begin, used = time.perf_counter(), time.process_time()
    losses += [float(step(batch)["loss"]) for _ in range(5)]
    return {
        "parameters": model.count_params() * 4 / 2**20,
        "peak": peak() - before,
        "seconds": (time.perf_counter() - begin) / 5,
        "processor": (time.process_time() - used) / 5,
        "losses": losses,
    }


def main() -> int:
    """Returns 1 if the ways do not train alike."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--model", choices=["dense", "transformer"], default="dense")
    parser.add_argument("--layers", type=int, help="24 dense layers, or 8 blocks")
    parser.add_argument("--width", type=int, help="1450 units, or 768")
    parser.add_argument("--rows", type=int, help="32, or 8")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--measure", choices=list(WAYS))
    asked = parser.parse_args()
    layers, width, rows = (8, 768, 8) if asked.model == "transformer" else (24, 1450, 32)
    size = asked.layers or layers, asked.width or width, asked.rows or rows
    if asked.measure:
        sizes = (*size, asked.micro_batches)
        print(json.dumps(measure(asked.measure, asked.replicas, asked.model, *sizes)))
        return 0
    found: dict[str, Any] = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--measure", way]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        found[way] = json.loads(ended.stdout.splitlines()[-1])
    first = next(iter(found.values()))
    print(
        f"{first['parameters']:.0f} MiB of parameters, {asked.replicas} replicas, Adam, "
        f"micro_batches={asked.micro_batches}"
    )
    for way, one in found.items():
        print(
            f"{way:36} peak {one['peak']:6.0f} MiB ({one['peak'] / first['peak']:.2f})   "
            f"step {one['seconds'] * 1e3:6.0f} ms ({one['seconds'] / first['seconds']:.2f})   "
            f"processor {one['processor'] * 1e3:6.0f} ms "
            f"({one['processor'] / first['processor']:.2f})"
        )
    apart = max(
        abs(a - b)
        for one in found.values()
        for a, b in zip(one["losses"], first["losses"], strict=True)
    )
    print(f"largest difference of a loss: {apart:.1e}")
    return int(apart > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
