"""Checks that all workers read the same batches.

Every worker takes its examples of the same global batches. An unseeded shuffle, or files listed in
another order, makes the batches differ: examples would silently be used twice or never.
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

__all__ = ["compared_over_workers", "link_to_compare"]

_log = logging.getLogger("tfmultigpu")
# Longer than a worker usually lags behind; a later one goes unchecked.
_SECONDS = 20.0
_SECONDS_AT_THE_END = 2.0
_HASHES = 2**62
_ELEMENTS = 2**16
_datasets_made: collections.Counter[str] = collections.Counter()


def compared_over_workers(
    batches: tf.data.Dataset[Any], strategy: tf.distribute.Strategy
) -> tf.data.Dataset[Any]:
    """Returns the dataset with a check that all workers read the same batches.

    At the first batch of a pass a worker waits for the others. Later it sends them a digest of all
    batches so far, each time their number has doubled, and does not wait. A difference is then an
    error at the next such batch or at the start of the next pass. At the end of the data it waits
    for a moment.

    One worker needs no check. A strategy that ``create_strategy`` did not make is not checked,
    because the check uses the connections between the workers that it opens.

    Args:
        batches: The global batches, as this worker reads them.
        strategy: The strategy that trains on them.
    """
    link = link_to_compare(strategy)
    if link is None:
        return batches
    # Counted by type, so that a dataset that only some workers make does not shift all the others.
    kind = f"{batches.element_spec}"
    _datasets_made[kind] += 1
    compare = _Comparison(link, f"{kind} {_datasets_made[kind]}", int(batches.cardinality()))
    is_tuple = isinstance(batches.element_spec, tuple)
    optional: Any = tf.experimental.Optional

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def mark(*batch: Any) -> Any:
        return optional.from_value(batch if is_tuple else batch[0])

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def check(state: Any, marked: Any) -> Any:
        number, compared, digest = state
        is_batch = marked.has_value()
        digest = tf.cond(is_batch, lambda: _digest(marked.get_value(), digest), lambda: digest)
        number += tf.cast(is_batch, tf.int64)
        power = tf.bitwise.bitwise_and(number, number - 1) == 0

        def compare_batches() -> Any:
            given = [number, compared, digest, ~is_batch]
            return tf.numpy_function(compare, given, tf.int64, stateful=True)

        due = ~is_batch | power
        compared = tf.ensure_shape(tf.cond(due, compare_batches, lambda: compared), [])
        with tf.control_dependencies([compared]):
            is_batch = tf.identity(is_batch)
        return (number, compared, digest), (marked, is_batch)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def is_a_batch(marked: Any, is_batch: Any) -> Any:
        return is_batch

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def batch_of(marked: Any, is_batch: Any) -> Any:
        return marked.get_value()

    # An element after the last batch, because nobody else hears of the end of data.
    end = tf.data.Dataset.from_tensors(0).map(lambda _: optional.empty(batches.element_spec))
    zero = tf.constant(0, tf.int64)
    marked = batches.map(mark).concatenate(end).scan((zero, zero, zero), check)
    return marked.filter(is_a_batch).map(batch_of)


def link_to_compare(strategy: tf.distribute.Strategy) -> WorkerLink | None:
    """Returns the connections by which workers compare what they read; None if they do not.

    That takes several workers, which ``create_strategy`` has joined.
    """
    several = len(local_replicas(strategy)) < strategy.num_replicas_in_sync
    return link_of_workers() if several else None


class _Comparison:
    """Comparison of this worker's batches with those of the others; ``tf.data`` calls it."""

    def __init__(self, link: WorkerLink, name: str, batches: int) -> None:
        self._link = link
        self._name = name
        self._batches = batches
        self._passes = 0
        self._pending: dict[str, tuple[int, int]] = {}
        self._error: DataError | None = None

    def __call__(self, number: Any, current: Any, digest: Any, is_end: Any) -> Any:
        """Compares the first ``number`` batches of a pass; returns the number of the pass."""
        if self._error is not None:  # tf.data asks again after an error, while it reads ahead.
            raise self._error
        is_first = number == 1 and not is_end
        if is_first:
            self._passes += 1
            current = np.int64(self._passes)
            self._forget_passes_before(self._passes - 1)
        key = f"data {self._name} pass {current} {'end' if is_end else f'batch {number}'}"
        value = [int(number) if is_end else self._batches, int(digest)]
        self._pending[key] = int(current), int(number)
        timeout = _SECONDS if is_first else _SECONDS_AT_THE_END if is_end else 0.0
        found = {key: self._link.compare(key, value, timeout)}
        if is_first and found[key] is None:
            del self._pending[key]
            _log.warning(
                "Not all workers began to read this data within %g s, so the check that they read "
                "the same data was skipped.",
                _SECONDS,
            )
        found |= {one: self._link.answer(one) for one in self._pending.keys() - {key}}
        for one, answers in found.items():
            if answers is not None:
                self._error = self._error or self._difference(answers, *self._pending.pop(one))
        if self._error is not None:
            raise self._error
        return current

    def _forget_passes_before(self, first: int) -> None:
        """Forgets what the others have not answered: a pass may be broken off at any batch."""
        for key in [key for key, (number, _) in self._pending.items() if number < first]:
            del self._pending[key]
            self._link.forget(key)

    def _difference(
        self, answers: Mapping[int, Any], current: int, number: int
    ) -> DataError | None:
        """Returns the error if the workers gave different answers."""
        counts = {worker: value[0] for worker, value in sorted(answers.items())}
        if len(set(counts.values())) > 1:
            return DataError(
                "The workers read different data: their numbers of batches differ. Received: "
                f"{counts}, by worker. At the end some would wait for the others forever. Give "
                "every worker the same files."
            )
        own = answers[self._link.index]
        others = [worker for worker, value in sorted(answers.items()) if value != own]
        if not others:
            return None
        place = "the first batch" if number == 1 else f"one of the first {number} batches"
        return DataError(
            f"The workers read different data: in pass {current} {place} of worker "
            f"{self._link.index} differs from that of worker {others[0]}. Each worker takes "
            "its examples of the same batches, so examples would be used twice or never. Give "
            "shuffle a seed: dataset.shuffle(size, seed=1); or call "
            "keras.utils.set_random_seed(1) on every worker before the dataset is made; for a "
            "torch DataLoader call torch.manual_seed(1). Sort lists of files, and give every "
            "worker the same."
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
