"""Measures preprocessing that waits: ``python benchmarks/preprocessing.py``.

Prints a table: the milliseconds of a batch of 64 examples, whose preprocessing sleeps 1 ms each,
for 1, 2 and 4 workers and for 1, 2 and 4 replicas in one process; and the ratio to one worker.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

BATCH = 64
BATCHES = 30
WARM = 8  # Until tf.data has found how many calls to make at once.


def main() -> None:
    from tfmultigpu.addons.testing import run_workers

    seconds = {}
    for workers in (1, 2, 4):
        runs = run_workers(__file__, workers, args=["--measure"], timeout=900)
        lines = [line for run in runs for line in run.output.splitlines() if "MEASURED" in line]
        seconds[f"{workers} worker(s)"] = max(float(line.split()[1]) for line in lines)
    for replicas in (1, 2, 4):
        (run,) = run_workers(__file__, 1, args=["--measure", str(replicas)], timeout=900)
        (line,) = [line for line in run.output.splitlines() if "MEASURED" in line]
        seconds[f"{replicas} replica(s) in one process"] = float(line.split()[1])
    first = seconds["1 worker(s)"]
    print(f"| {BATCH} rows, 1 ms each | ms a batch | to one worker |\n|---|---|---|")
    for name, one in seconds.items():
        print(f"| {name} | {1e3 * one:.1f} | {one / first:.2f} |")


def measure(replicas: int | None) -> float:
    """Returns the median seconds of a batch on this worker."""
    import tensorflow as tf

    import tfmultigpu as tmg

    if replicas is None:
        strategy = tmg.create_strategy()
    else:
        strategy = tmg.create_strategy(devices=list(tmg.split_device("CPU:0", parts=replicas)))

    def slow(number: tf.Tensor) -> tf.Tensor:
        def sleep(value: int) -> int:
            time.sleep(1e-3)
            return value

        return tf.ensure_shape(tf.numpy_function(sleep, [number], tf.int64), [])

    source = tf.data.Dataset.range(BATCH * BATCHES)
    data = tmg.distribute_dataset(source, strategy, batch_size=BATCH, preprocess=slow)
    times = []
    iterator = iter(data)
    for _ in range(BATCHES):
        began = time.perf_counter()
        next(iterator)
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM:])


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if sys.argv[1:2] == ["--measure"]:
        print("MEASURED", measure(int(sys.argv[2]) if len(sys.argv) > 2 else None))
    else:
        main()
