"""Whether all workers read the same data: they compare the first batch of each pass.

Every worker takes its rows of the same global batches. A shuffle without a seed, or files listed in
another order, gives each worker batches of its own: rows would be used twice or never, silently.
"""

from __future__ import annotations

import collections
import logging
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import rows as rows_lib
from tfmultigpu.errors import DataError
from tfmultigpu.lost_workers import link_of_workers
from tfmultigpu.worker_link import WorkerLink

__all__ = ["compared_over_workers"]

_log = logging.getLogger("tfmultigpu")
# Longer than one worker usually lags behind; who is later only goes unchecked.
_SECONDS = 20.0
_HASHES = 2**62
_made: collections.Counter[str] = collections.Counter()


def compared_over_workers(
    batches: tf.data.Dataset[Any], strategy: tf.distribute.Strategy
) -> tf.data.Dataset[Any]:
    """Returns the dataset, with the first batch of each pass compared over the workers.

    Nothing is added where there is one worker, or where the strategy was not made by
    ``create_strategy``, whose connections between the workers serve for it.

    Args:
        batches: The global batches, as this worker reads them.
        strategy: The strategy they are for.
    """
    link = link_of_workers()
    if link is None or len(rows_lib.local_replicas(strategy)) == strategy.num_replicas_in_sync:
        return batches
    # Workers make datasets in the same order; one that only some have should not shift the rest.
    kind = f"{batches.element_spec}"
    _made[kind] += 1
    compare = _Comparison(link, f"{kind} {_made[kind]}", int(batches.cardinality()))
    is_tuple = type(batches.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def check(number: Any, batch: Any) -> Any:
        def first() -> Any:
            return tf.numpy_function(compare, [_digest(batch)], tf.bool, stateful=True)

        agreed = tf.cond(number == 0, first, lambda: tf.constant(True))
        with tf.control_dependencies([agreed]):
            same = tf.nest.map_structure(_identity, batch, expand_composites=True)
        return tuple(same) if is_tuple else same

    return batches.enumerate().map(check)


class _Comparison:
    """Tells the other workers what this one reads, once a pass; called by ``tf.data``."""

    def __init__(self, link: WorkerLink, name: str, batches: int) -> None:
        self._link = link
        self._name = name
        self._batches = batches
        self._passes = 0

    def __call__(self, digest: Any) -> Any:
        self._passes += 1
        key = f"data {self._name} pass {self._passes}"
        said = self._link.compare(key, [self._batches, int(digest)], _SECONDS)
        if said is None:
            _log.warning(
                "Not all workers began to read this data within %g s, so whether they read the "
                "same could not be checked.",
                _SECONDS,
            )
            return np.True_
        counts = {worker: value[0] for worker, value in sorted(said.items())}
        if len(set(counts.values())) > 1:
            raise DataError(
                "The workers read different data: their numbers of batches differ. Received: "
                f"{counts}, by worker. Some would wait for the others for ever at the end. Give "
                "every worker the same files."
            )
        own = said[self._link.index]
        others = [worker for worker, value in sorted(said.items()) if value != own]
        if others:
            raise DataError(
                f"The workers read different data: in pass {self._passes} the first batch of "
                f"worker {self._link.index} is not that of worker {others[0]}. Each takes its rows "
                "of the same batches, so rows would be used twice or never. Give shuffle a seed: "
                "dataset.shuffle(size, seed=1); or call keras.utils.set_random_seed(1) on every "
                "worker before the dataset is made. Sort lists of files, and give every worker the "
                "same."
            )
        return np.True_


def _digest(batch: Any) -> Any:
    """A number that equal batches share."""
    leaves = tf.nest.flatten(batch, expand_composites=True)
    texts = [tf.io.serialize_tensor(leaf) for leaf in leaves if leaf is not None]
    return tf.strings.to_hash_bucket_fast(tf.strings.join(texts), _HASHES)


def _identity(tensor: Any) -> Any:
    return None if tensor is None else tf.identity(tensor)
