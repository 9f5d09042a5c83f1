"""``measure_scaling``: the speed of a step over the number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.addons.tuning.step_profile import StepProfile, profile_step
from tfmultigpu.arguments import check_count
from tfmultigpu.strategies import create_strategy

__all__ = ["ScalingRow", "measure_scaling"]


class ScalingRow(NamedTuple):
    """The speed of a number of replicas.

    Attributes:
        replicas: Number of replicas.
        throughput: Examples per second of whole steps.
        efficiency: The throughput of a replica, divided by that of a replica of the first row.
        profile: The profile of the step, whose parts tell what the rest is lost to.
    """

    replicas: int
    throughput: float
    efficiency: float
    profile: StepProfile


def measure_scaling(
    build_step: Callable[[tf.distribute.Strategy], tuple[Any, Iterable[Any]]],
    replicas: Sequence[int] = (1, 2, 4),
    *,
    steps: int = 20,
) -> list[ScalingRow]:
    """Measures the speed of a step for several numbers of replicas.

    Creates a strategy over the first devices for each number, and profiles its step. Let the global
    batch grow with ``strategy.num_replicas_in_sync``, or keep it, to see whether the same training
    ends sooner. Logical devices on one physical device show the cost of a step, no speedup.

    Args:
        build_step: ``build_step(strategy) -> (step, data)``: makes model and optimizer in the
            scope, the train step and the distributed dataset.
        replicas: Numbers of replicas; the first is the baseline.
        steps: Timed steps for each number.

    Returns:
        A row for each number.

    Raises:
        DeviceNotFoundError: There are fewer devices than replicas.
        ValueError: A number of replicas is less than 1.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> def build_step(strategy):
        ...     with strategy.scope():
        ...         model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...         optimizer = keras.optimizers.SGD(0.1)
        ...     step = tmg.make_train_step(model, optimizer, "mse", strategy)
        ...     arrays = np.ones((16, 3)), np.ones((16, 1))
        ...     return step, tmg.distribute_dataset(arrays, strategy, batch_size=8)
        >>> rows = tmg.tuning.measure_scaling(build_step, replicas=(1,), steps=2)
        >>> rows[0].efficiency
        1.0
    """
    rows: list[ScalingRow] = []
    for count in replicas:
        strategy = create_strategy(devices=check_count("replicas", count), fallback=False)
        profile = profile_step(*build_step(strategy), steps)
        throughput = profile.rows / profile.seconds
        first = rows[0].throughput / rows[0].replicas if rows else throughput / count
        rows.append(ScalingRow(count, throughput, throughput / count / first, profile))
    return rows
