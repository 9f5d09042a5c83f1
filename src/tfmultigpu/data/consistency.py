"""Checks that all workers read the same batches.

Every worker takes its examples of the same global batches. An unseeded shuffle, or files listed in
another order, makes the batches differ: examples would silently be used twice or never.
"""

from __future__ import annotations

import collections
import logging

import tensorflow as tf

from tfmultigpu.data.batch_format import digest
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.process_state import process_state
from tfmultigpu.strategies.topology import local_replicas
from tfmultigpu.types import Batches, Scalar, Shard

_log = logging.getLogger("tfmultigpu")
# To wait for the first worker at the first batch, longer than it usually lags behind; and later.
_SECONDS, _SECONDS_LATER = 20.0, 1.0
_datasets_made: collections.Counter[str] = collections.Counter()


def compared_over_workers(batches: Batches, strategy: tf.distribute.Strategy) -> Batches:
    """Returns the dataset with a check that all workers read the same batches.

    After 1, 2, 4, ... batches of a pass every worker compares a digest of all of them with the
    first worker's. The worker that differs raises, and the others learn that from its end. Where
    the first worker lags behind, the next comparison tells.

    One worker needs no check. A strategy that ``create_strategy`` did not make is not checked.
    """
    cluster = process_state.cluster
    if cluster is None or len(local_replicas(strategy)) == strategy.num_replicas_in_sync:
        return batches
    # Counted by type, so that a dataset that only some workers make does not shift all the others.
    kind = f"{batches.element_spec}"
    _datasets_made[kind] += 1
    name, length = f"data {kind} {_datasets_made[kind]}", int(batches.cardinality())
    current = 0

    def compare(number: Scalar, hashed: Scalar) -> bool:
        nonlocal current
        current += int(number == 1)
        own = f"{length} {hashed}"
        seconds = _SECONDS if number == 1 else _SECONDS_LATER
        first = cluster.compare(f"{name}, pass {current}, batch {number}", own, seconds)
        if first is None and number == 1:
            _log.warning(
                "The first worker did not begin to read this data within %g s, so the check that "
                "all workers read the same data was skipped.",
                _SECONDS,
            )
        elif first not in (None, own):
            here, there = (text.split()[0] for text in (own, first))
            lengths = f"{there} on worker 0 and {here} on worker {cluster.index}"
            received = f"batches in a pass: {lengths} (-2: unknown)"
            if here == there:
                received = f"other values or shapes on worker 0 than on worker {cluster.index}"
            raise DataError(
                f"The workers read different data: the first {number} batches of pass {current} "
                "differ, or the lengths of a pass. Each worker takes its rows of the same "
                "batches, so examples would be used twice or never.",
                received,
                "Leave out what splits the data by worker, such as dataset.shard(2, index) or "
                "skip: each worker reads all of it, and computes its rows. Give shuffle a seed: "
                "dataset.shuffle(size, seed=1); or call keras.utils.set_random_seed(1) on every "
                "worker before the dataset is made; for a torch DataLoader call "
                "torch.manual_seed(1). Sort lists of files, and give every worker the same.",
            )
        return True

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def check(state: tuple[Scalar, Scalar], batch: Shard) -> tuple[tuple[Scalar, Scalar], Shard]:
        number, hashed = state[0] + 1, digest(batch, state[1])
        compared = tf.cond(
            tf.bitwise.bitwise_and(number, number - 1) == 0,
            lambda: tf.numpy_function(compare, [number, hashed], tf.bool, stateful=True),
            lambda: True,
        )
        with tf.control_dependencies([compared]):
            number = tf.identity(number)
        return (number, hashed), batch

    zero = tf.constant(0, tf.int64)
    return batches.scan((zero, zero), check)
