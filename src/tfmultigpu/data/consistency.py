"""Compares what the workers read: the first batch of each pass at once, later ones in passing.

Every worker takes its rows of the same global batches. A shuffle without a seed, or files listed in
another order, gives each worker batches of its own: rows would be used twice or never, silently.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.clusters.connection import WorkerLink
from tfmultigpu.clusters.failures import link_of_workers
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.topology import local_replicas

__all__ = ["compared_over_workers"]

_log = logging.getLogger("tfmultigpu")
# Longer than one worker usually lags behind; who is later only goes unchecked.
_SECONDS = 20.0
_SECONDS_AT_THE_END = 2.0
_HASHES = 2**62
_ELEMENTS = 2**16
_made: collections.Counter[str] = collections.Counter()


def compared_over_workers(
    batches: tf.data.Dataset[Any], strategy: tf.distribute.Strategy
) -> tf.data.Dataset[Any]:
    """Returns the dataset, with its batches compared over the workers.

    A worker waits for the others at the first batch of a pass. Later it tells them a digest of all
    batches so far, each time their number has doubled, and does not wait: a difference is an error
    at the next such batch, or when the next pass begins. At the last batch, if the dataset knows
    which that is, it waits for a moment.

    Nothing is added if there is one worker, or if the strategy was not made by ``create_strategy``,
    whose connections between the workers serve for it.

    Args:
        batches: The global batches, as this worker reads them.
        strategy: The strategy they are for.
    """
    link = link_of_workers()
    if link is None or len(local_replicas(strategy)) == strategy.num_replicas_in_sync:
        return batches
    # Workers make datasets in the same order; one that only some have should not shift the rest.
    kind = f"{batches.element_spec}"
    _made[kind] += 1
    count = int(batches.cardinality())
    compare = _Comparison(link, f"{kind} {_made[kind]}", count)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def check(state: Any, batch: Any) -> Any:
        number, compared, digest = state
        digest = _digest(batch, digest)
        number += 1
        power = tf.bitwise.bitwise_and(number, number - 1) == 0

        def tell() -> Any:
            given = [number, compared, digest]
            return tf.numpy_function(compare, given, tf.int64, stateful=True)

        due = power | (number == count)
        compared = tf.ensure_shape(tf.cond(due, tell, lambda: compared), [])
        with tf.control_dependencies([compared]):
            same = tf.nest.map_structure(_identity, batch, expand_composites=True)
        return (number, compared, digest), same

    zero = tf.constant(0, tf.int64)
    # An element that is a tuple would be taken for several arguments.
    return batches.map(lambda *batch: (batch,)).scan((zero, zero, zero), check)


class _Comparison:
    """Tells the other workers what this one reads; called by ``tf.data``."""

    def __init__(self, link: WorkerLink, name: str, batches: int) -> None:
        self._link = link
        self._name = name
        self._batches = batches
        self._passes = 0
        self._told: dict[str, tuple[int, int]] = {}

    def __call__(self, number: Any, current: Any, digest: Any) -> Any:
        """Compares the batches of a pass up to one; returns the number of the pass."""
        if number == 1:
            self._passes += 1
            current = np.int64(self._passes)
        key = f"data {self._name} pass {current} batch {number}"
        value = [self._batches, int(digest)]
        self._told[key] = int(current), int(number)
        last = _SECONDS_AT_THE_END if number == self._batches else 0.0
        waits = _SECONDS if number == 1 else last
        said = self._link.compare(key, value, waits)
        if said is not None:
            self._check(said, *self._told.pop(key))
        elif number == 1:
            del self._told[key]
            _log.warning(
                "Not all workers began to read this data within %g s, so whether they read the "
                "same could not be checked.",
                _SECONDS,
            )
        for told, place in list(self._told.items()):
            if (said := self._link.answer(told)) is not None:
                del self._told[told]
                self._check(said, *place)
        return current

    def _check(self, said: Mapping[int, Any], current: int, number: int) -> None:
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
            place = "the first batch" if number == 1 else f"one of the first {number} batches"
            raise DataError(
                f"The workers read different data: in pass {current} {place} of "
                f"worker {self._link.index} is not that of worker {others[0]}. Each takes its rows "
                "of the same batches, so rows would be used twice or never. Give shuffle a seed: "
                "dataset.shuffle(size, seed=1); or call keras.utils.set_random_seed(1) on every "
                "worker before the dataset is made. Sort lists of files, and give every worker the "
                "same."
            )


def _digest(batch: Any, previous: Any) -> Any:
    """Returns a number that equal batches after equal ones share."""
    leaves = tf.nest.flatten(batch, expand_composites=True)
    parts = [tf.strings.as_string(previous)]
    for leaf in leaves:
        if leaf is not None:
            flat = tf.reshape(leaf, [-1])
            # Of much data some of each row is enough: all of it would be read once more.
            flat = flat[:: 1 + tf.size(flat) // _ELEMENTS]
            parts += [tf.io.serialize_tensor(flat), tf.io.serialize_tensor(tf.shape(leaf))]
    return tf.strings.to_hash_bucket_fast(tf.strings.join(parts, "|"), _HASHES)


def _identity(tensor: Any) -> Any:
    return None if tensor is None else tf.identity(tensor)
