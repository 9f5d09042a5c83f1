"""Workers begin with the same values of all variables: weights loaded on one of them are no model.

TensorFlow copies what the first worker made a variable with, and never compares again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import ClusterError
from tfmultigpu.strategies.worker_exchange import WorkerExchange, digest_of

__all__ = ["check_values_alike"]


def check_values_alike(strategy: tf.distribute.Strategy, model: Any, optimizer: Any = None) -> None:
    """Checks that a model and its optimizer have the same values on all workers; all must call it.

    What layers count by themselves, such as the statistics of a normalization, may differ between
    replicas once a model was trained. It is compared before the first step of the optimizer.

    Args:
        strategy: Where they live.
        model: A Keras model.
        optimizer: Its optimizer, or None: then only what can be trained is compared.

    Raises:
        ClusterError: They have other values; the message names the first variable.
    """
    exchange = WorkerExchange(strategy)
    if exchange.workers == 1 or tf.inside_function():
        return
    begins = optimizer is not None and int(optimizer.iterations.numpy()) == 0
    variables = list(model.variables if begins else model.trainable_variables)
    variables += [] if optimizer is None else list(optimizer.variables)
    told = exchange([len(variables)])[:, 0].tolist()
    if len(set(told)) > 1:
        counts = {f"worker {worker}": count for worker, count in enumerate(told)}
        raise ClusterError(
            f"The workers have other numbers of variables. Received: {counts}. Every worker must "
            "build the same model and the same optimizer."
        )
    digests = {
        place: digest_of(np.asarray(one.numpy()).tobytes()) for place, one in enumerate(variables)
    }
    if (found := exchange.find_difference(digests)) is None:
        return
    (place, other), own = found, exchange.worker
    sums = exchange.floats([float(np.sum(np.asarray(variables[place].numpy(), "float64")))])
    raise ClusterError(
        f"The workers begin with different values of {variables[place].path}, and would go on with "
        f"two models. Received: elements that add up to {sums[own, 0]:.9g} on worker {own}, and to "
        f"{sums[other, 0]:.9g} on worker {other}. Load and set weights on every worker, not behind "
        "`if worker == 0:`; a callback that writes weights belongs on every worker too."
    )
