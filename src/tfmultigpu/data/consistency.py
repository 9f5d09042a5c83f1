"""Checks that all workers read the same batches.

Every worker takes its examples of the same global batches. An unseeded shuffle, or files listed in
another order, makes the batches differ: examples would silently be used twice or never.
"""

from __future__ import annotations

import collections
import logging
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import DataError
from tfmultigpu.strategies.process_state import JoinedCluster, process_state
from tfmultigpu.strategies.topology import local_replicas

_log = logging.getLogger("tfmultigpu")
# Longer than a worker usually lags behind; a later one goes unchecked.
_SECONDS = 20.0
_SECONDS_LATER = 0.02
_HASHES = 2**62
_ELEMENTS = 2**16
_datasets_made: collections.Counter[str] = collections.Counter()


def compared_over_workers(
    batches: tf.data.Dataset[Any], strategy: tf.distribute.Strategy
) -> tf.data.Dataset[Any]:
    """Returns the dataset with a check that all workers read the same batches.

    After 1, 2, 4, ... batches of a pass every worker compares a digest of all of them with that of
    the first worker. At the first batch it waits for it; later it looks once more at the next
    comparison. The worker that differs raises, and the others learn that from its end.

    One worker needs no check. A strategy that ``create_strategy`` did not make is not checked.
    """
    cluster = cluster_to_compare(strategy)
    if cluster is None:
        return batches
    # Counted by type, so that a dataset that only some workers make does not shift all the others.
    kind = f"{batches.element_spec}"
    _datasets_made[kind] += 1
    compare = _Comparison(cluster, f"{kind} {_datasets_made[kind]}", int(batches.cardinality()))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def check(state: Any, batch: Any) -> Any:
        number, digest = state[0] + 1, _digest(batch, state[1])
        compared = tf.cond(
            tf.bitwise.bitwise_and(number, number - 1) == 0,
            lambda: tf.numpy_function(compare, [number, digest], tf.bool, stateful=True),
            lambda: True,
        )
        with tf.control_dependencies([compared]):
            number = tf.identity(number)
        return (number, digest), batch

    zero = tf.constant(0, tf.int64)
    return batches.scan((zero, zero), check)


def cluster_to_compare(strategy: tf.distribute.Strategy) -> JoinedCluster | None:
    """Returns the cluster whose workers compare what they read; None if they do not."""
    several = len(local_replicas(strategy)) < strategy.num_replicas_in_sync
    return process_state.cluster if several else None


class _Comparison:
    """Comparison of this worker's batches with those of the first; ``tf.data`` calls it."""

    def __init__(self, cluster: JoinedCluster, name: str, batches: int) -> None:
        self._cluster, self._name, self._batches = cluster, name, batches
        self._passes = 0
        self._pending: dict[tuple[int, int], str] = {}

    def __call__(self, number: Any, digest: Any) -> bool:
        """Compares the first ``number`` batches of a pass."""
        self._passes += number == 1
        # A pass may end at any batch, and the first worker then never tells the rest of it.
        self._pending = {k: v for k, v in self._pending.items() if k[0] >= self._passes - 1}
        self._pending[self._passes, int(number)] = f"{self._batches} {digest}"
        for (passes, count), own in list(self._pending.items()):
            is_first = count == 1
            name = f"data {self._name}, pass {passes}, batch {count}"
            seconds = _SECONDS if is_first else _SECONDS_LATER
            first = self._cluster.compare(name, own, seconds)
            if first is None and not is_first:
                continue
            del self._pending[passes, count]
            if first is None:
                _log.warning(
                    "The first worker did not begin to read this data within %g s, so the check "
                    "that all workers read the same data was skipped.",
                    _SECONDS,
                )
            elif first != own:
                raise self._difference(first, own, passes, count)
        return True

    def _difference(self, first: str, own: str, passes: int, count: int) -> DataError:
        worker = self._cluster.index
        counts = [int(value.split()[0]) for value in (first, own)]
        if counts[0] != counts[1]:
            return DataError(
                "The workers read different data: their numbers of batches differ. Received: "
                f"{counts[0]} on worker 0 and {counts[1]} on worker {worker}. At the end some "
                "would wait for the others forever. Give every worker the same files."
            )
        place = "the first batch" if count == 1 else f"one of the first {count} batches"
        return DataError(
            f"The workers read different data: in pass {passes} {place} of worker {worker} "
            "differs from that of worker 0. Each worker takes its examples of the same batches, so "
            "examples would be used twice or never. Give shuffle a seed: dataset.shuffle(size, "
            "seed=1); or call keras.utils.set_random_seed(1) on every worker before the dataset is "
            "made; for a torch DataLoader call torch.manual_seed(1). Sort lists of files, and give "
            "every worker the same."
        )


def _digest(batch: Any, previous: Any) -> Any:
    """Returns a hash of a batch and of the hash of the batches before it."""
    leaves = tf.nest.flatten(batch, expand_composites=True)
    parts = [tf.strings.as_string(previous)]
    for leaf in leaves:
        if leaf is not None:
            flat = tf.reshape(leaf, [-1])
            # A sample of a large tensor is enough; hashing all of it would take long.
            flat = flat[:: 1 + tf.size(flat) // _ELEMENTS]
            parts += [tf.io.serialize_tensor(flat), tf.io.serialize_tensor(tf.shape(leaf))]
    return tf.strings.to_hash_bucket_fast(tf.strings.join(parts, "|"), _HASHES)
