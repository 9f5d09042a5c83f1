"""Signals while TensorFlow joins: it takes SIGTERM behind Python's back, and holds its lock."""

from __future__ import annotations

import ctypes
import signal
import threading

from tfmultigpu.addons.workers.joining import _as_tensorflow_holds_the_lock


def test_a_signal_taken_behind_pythons_back_is_given_back() -> None:
    """In another thread, too, where `signal.signal` refuses."""
    heard: list[str] = []
    where = "before"

    def take() -> None:
        nonlocal where
        with _as_tensorflow_holds_the_lock(60.0):
            ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, ctypes.c_void_p(int(signal.SIG_IGN)))
            where = "inside"
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(where))
    try:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        where = "after"
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["after"]
