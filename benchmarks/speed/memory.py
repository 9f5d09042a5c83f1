"""Memory of a training step: the peak resident size of a process that does nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from speed.measure import virtual_cpus
from speed.workloads import WORKLOADS, Workload, mlp

__all__ = ["ROWS", "TINY", "measure_peak", "memory_cases"]

ROWS, TINY = 8192, 16
_WIDE = Workload("MLP, 5.3 M parameters", (256,), mlp(2048))
_MODELS = {"cnn": WORKLOADS["cnn"], "wide_mlp": _WIDE}


def memory_cases() -> dict[str, dict[str, Any]]:
    """Returns the arguments of ``measure_peak`` for each process to start."""
    cnn = {"model": "cnn", "replicas": 2, "data_rows": ROWS}
    wide = {"model": "wide_mlp", "replicas": 4, "data_rows": TINY, "rows": TINY}
    return {
        **{
            f"micro_batches={count}, {rows} rows": {**cnn, "micro_batches": count, "rows": rows}
            for count in (1, 8)
            for rows in (ROWS, TINY)
        },
        **{
            f"shard_update={sharded}": {**wide, "shard_update": sharded}
            for sharded in (False, True)
        },
    }


def measure_peak(
    model: str,
    replicas: int,
    rows: int,
    data_rows: int,
    steps: int = 6,
    **options: Any,
) -> dict[str, Any]:
    """Trains, and returns how large this process has been; call it in a new one.

    Args:
        model: Which.
        replicas: Virtual CPUs.
        rows: Of the batch.
        data_rows: Rows kept in memory. With as many in each process that is compared, what the
            data takes cancels out.
        steps: How many; the peak hardly grows after the first few.
        options: For ``make_train_step``.

    Returns:
        ``"peak"`` and ``"optimizer"``, what the optimizer remembers on all replicas, in bytes;
        ``"loss"`` of the last step.
    """
    devices = virtual_cpus(replicas)
    import keras
    import tensorflow as tf

    import tfmultigpu as tmg
    from speed.ours import default_strategy

    strategy = default_strategy(devices)
    workload = dataclasses.replace(_MODELS[model], batch_size=rows)
    with strategy.scope():
        network = workload.model()
        optimizer = keras.optimizers.Adam(1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(network, optimizer, loss, strategy, **options)
    data = [tf.constant(array) for array in workload.arrays(data_rows)]
    batch = tuple(tensor[:rows] for tensor in data)
    for _ in range(steps):
        last = float(step(batch)["loss"])
    state = [variable.value for variable in optimizer.variables]
    copies = [getattr(value, "values", (value,)) for value in state]
    held = sum(4 * int(tf.size(one)) for values in copies for one in values)
    return {"peak": _peak(), "optimizer": held, "loss": last}


def _peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # Of this program alone; the other counts what started it, too.
        lines = status.read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource
    import sys

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
