"""What a loop reads its data with ends with it: the generator of a user, and then the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf
from law.endings import BATCH, FIT, SPEC, Stop, assert_ends, compiled, raising, stop
from law.pair import strategy_of

import tfmultigpu as tmg


# Fails if a loop keeps its iterator when it is over or raises, as its hooks once did, or if a
# generator is asked for a batch that no epoch wants.
@pytest.mark.parametrize(
    "replicas",
    [pytest.param(1, marks=pytest.mark.more), 2, pytest.param(3, marks=pytest.mark.more)],
)
def test_a_generator_ends_with_the_loop_that_reads_it(replicas: int) -> None:
    strategy = strategy_of(replicas)
    model = compiled(strategy).model
    asked: list[int] = []
    ended: list[int] = []
    interrupted_at = [-1]

    def batches() -> Iterator[Any]:
        number = len(asked)
        asked.append(0)
        try:
            while True:
                asked[number] += 1
                if asked[number] == interrupted_at[0]:
                    os.kill(os.getpid(), signal.SIGINT)
                yield BATCH
        finally:
            ended.append(len(ended))

    def dataset() -> tf.data.Dataset:
        made = tf.data.Dataset.from_generator(batches, output_signature=SPEC)
        return made.prefetch(tf.data.AUTOTUNE)

    tmg.fit(model, batches, **FIT)
    assert (asked, ended) == ([6], [0])
    history = tmg.fit(model, batches, validation_data=batches, validation_steps=2, **FIT)
    assert len(history.epoch) == 2
    # What is looked at is the first pass, so no batch is lost and none is made twice.
    assert (asked[1:], ended) == ([6, 2, 2], [0, 1, 2, 3])
    tmg.evaluate(model, batches, steps=3, verbose=0)
    tmg.predict(model, batches, steps=3, verbose=0)
    assert (asked[4:], ended[4:]) == ([3, 3], [4, 5])

    tmg.fit(model, dataset(), **FIT)
    assert len(ended) == 7
    # Whose traceback holds all that ran; Ctrl-C comes in the middle of a step.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(Stop) as raised:
        tmg.fit(model, dataset(), callbacks=[raising(stop)], **FIT)
    interrupted_at[0] = 4
    with pytest.raises(KeyboardInterrupt) as interrupted:
        tmg.fit(model, dataset(), **{**FIT, "steps_per_epoch": 100_000})
    signal.signal(signal.SIGINT, before)
    assert len(ended) == len(asked) == 9, (raised.value, interrupted.value)
    iterator = iter(tmg.distribute_dataset(batches, strategy))
    next(iterator)
    iterator.close()
    assert len(ended) == len(asked) == 10


# Fails if a loop, a step or a checkpoint holds an iterator of tf.data at the end of Python, where
# its threads would wait forever; also if a user holds it, or an error.
def test_a_process_ends_after_loops_of_every_kind() -> None:
    assert_ends(2)
