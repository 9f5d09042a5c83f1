"""Peak memory of training on two replicas, for each way to save some; see contributing/measured.md.

``python benchmarks/memory.py`` takes about six minutes on two idle cores. Each case runs in a
process of its own: what a process has taken once is never given back.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from typing import Any

BLOCKS, WIDTH = 8, 256
# Rows of a batch, and units of a block: activations take the memory, or parameters.
SIZES = {"many rows": (4096, 2048), "many parameters": (64, 8192)}
MIB = 1024  # ru_maxrss counts KiB.
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "remat": {"remat": True},
    "micro_batches": {"micro_batches": 8},
    "shard_update": {"shard_update": True},
    "sharded": {"sharded": True},
    "bfloat16": {"policy": "mixed_bfloat16"},
    "remat sharded": {"remat": True, "sharded": True},
}


def measure(
    rows: int,
    units: int,
    *,
    remat: bool = False,
    sharded: bool = False,
    policy: str = "float32",
    **options: Any,
) -> tuple[float, float]:
    """Returns the MiB that model, optimizer and three steps take at most, and seconds a step."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmultigpu as tmg

    class Block(keras.layers.Layer):
        """Two dense layers beside a path around them."""

        def __init__(self) -> None:
            super().__init__()
            self.wide = keras.layers.Dense(units, "gelu")
            self.narrow = keras.layers.Dense(WIDTH)

        def build(self, shape: Any) -> None:
            self.wide.build(shape)
            self.narrow.build((*shape[:-1], units))

        def call(self, x: Any) -> Any:
            inner = lambda x: self.narrow(self.wide(x))  # noqa: E731
            return x + (keras.remat(inner) if remat else inner)(x)

    tmg.split_device("CPU:0", parts=2)
    strategy = tmg.create_strategy(devices=2)
    keras.config.set_dtype_policy(policy)
    x = tf.constant(np.random.default_rng(0).normal(size=(rows, WIDTH)).astype("float32"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shards = tmg.sharded_variables() if sharded else contextlib.nullcontext()
    with strategy.scope(), shards:
        model = keras.Sequential([keras.Input((WIDTH,)), *[Block() for _ in range(BLOCKS)]])
        optimizer = keras.optimizers.Adam(1e-4)
    if not sharded:  # "auto" shards the update on CPUs, and a sharded variable has one place.
        options = {"shard_update": False, **options}
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False, **options)
    float(step((x, x))["loss"])
    began = time.perf_counter()
    for _ in range(2):
        float(step((x, x))["loss"])
    seconds = (time.perf_counter() - began) / 2
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / MIB, seconds


def main() -> None:
    """Prints a line for each case."""
    if len(sys.argv) > 1:
        print(*measure(*SIZES[sys.argv[1]], **CASES[sys.argv[2]]))
        return
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    for size in SIZES:
        whole = 0.0
        for case in CASES:
            command = [sys.executable, __file__, size, case]
            done = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            )
            peak, seconds = map(float, done.stdout.split()[-2:])
            whole = whole or peak
            ratio = peak / whole
            print(f"{size:16} {case:14} {peak:7.0f} MiB {ratio:6.2f} {seconds:7.1f} s", flush=True)


if __name__ == "__main__":
    main()
