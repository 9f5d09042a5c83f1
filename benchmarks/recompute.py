"""Peak memory of a train step whose blocks are rematerialized, as ratios to other ways.

``python benchmarks/recompute.py`` takes about two minutes on two idle cores. ``--source FOLDER``
measures another version of the library as well, of which ``FOLDER`` is the ``src``.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

BLOCKS, ROWS, WIDTH, HIDDEN = 8, 4096, 256, 1024
MIB = 1024  # ru_maxrss counts KiB.
CASES = ("without", "remat", "dropout", "remat dropout")


def peak_of_step(case: str) -> float:
    """Returns how many MiB of memory the first steps take, beyond what the model takes.

    Call it in a new process: what a process has taken once is never given back.

    Args:
        case: Whether blocks are rematerialized, and have dropout.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmultigpu as tmg

    wrap = keras.remat if "remat" in case else lambda function: function

    class Block(keras.layers.Layer):
        """Two dense layers beside a path around them."""

        def __init__(self) -> None:
            super().__init__()
            self.wide = keras.layers.Dense(HIDDEN, "gelu")
            self.narrow = keras.layers.Dense(WIDTH)
            self.dropout = keras.layers.Dropout(0.1 if "dropout" in case else 0.0, seed=1)

        def build(self, shape: Any) -> None:
            self.wide.build(shape)
            self.narrow.build((*shape[:-1], HIDDEN))
            self.built = True

        def call(self, x: Any, training: bool = False) -> Any:
            def inner(x: Any) -> Any:
                return self.narrow(self.dropout(self.wide(x), training=training))

            return x + wrap(inner)(x)

    strategy = tmg.create_strategy(prefer="one_device")
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), *[Block() for _ in range(BLOCKS)]])
        optimizer = keras.optimizers.SGD(1e-3)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    x = tf.constant(np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32"))
    small = x[:8]
    float(step((small, small))["loss"])  # What tracing and compiling take is not of the rows.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        float(step((x, x))["loss"])
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / MIB


def measure(case: str, source: Path | None = None) -> float:
    """Returns ``peak_of_step`` in a process of its own, with another version of the library."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if source is not None:
        environment["PYTHONPATH"] = str(source)
    command = [sys.executable, __file__, "--case", case]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(result.stdout.split()[-1])


def main() -> None:
    """Prints the peaks, and the ratios to the step without rematerialization."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--source", type=Path, action="append", default=[])
    arguments = parser.parse_args()
    if arguments.case:
        print(peak_of_step(arguments.case))
        return
    for source in (None, *arguments.source):
        print(source or "this version")
        peaks = {case: measure(case, source) for case in CASES}
        for case, peak in peaks.items():
            print(f"  {case:15} {peak:7.0f} MiB  {peak / peaks['without']:.2f} x without")


if __name__ == "__main__":
    main()
