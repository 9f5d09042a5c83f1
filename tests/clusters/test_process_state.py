"""What this process has joined, created and measured is in one object, which tests renew."""

from __future__ import annotations

import gc
import threading

import tensorflow as tf

from tfmultigpu.clusters.process_state import ProcessState
from tfmultigpu.clusters.spec import Cluster


def test_a_new_process_has_joined_and_made_nothing() -> None:
    state = ProcessState()
    assert (state.cluster, state.link, state.ring_over) == (None, None, None)
    assert state.living_strategies() == ()
    cluster = Cluster(["a:1", "b:1"], 1)
    state.join(cluster, None)
    assert state.cluster is cluster
    state.keep("key", lambda: 1)
    state.forget()
    assert state.cluster is None
    assert not state.keeps("key")


def test_something_is_made_once_for_a_key_by_whichever_thread_is_first() -> None:
    state = ProcessState()
    found: list[object] = []
    start = threading.Barrier(4)

    def ask() -> None:
        start.wait()
        found.append(state.keep("key", object))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert state.keep("other", object) is not found[0]


def test_the_ring_is_made_once_and_outlives_what_tests_forget() -> None:
    state = ProcessState()
    ring = state.ring(("CPU:0", "CPU:1"), object)
    assert state.ring(("CPU:0", "CPU:1"), object) is ring
    state.forget()
    assert state.ring_over == ("CPU:0", "CPU:1")
    assert state.ring(("CPU:0", "CPU:1"), object) is ring


def test_a_strategy_is_noted_and_not_kept() -> None:
    state = ProcessState()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert state.note(strategy) is strategy
    del strategy
    gc.collect()
    assert state.living_strategies() == ()
