"""A signal that TensorFlow takes for itself is given back to who had it."""

from __future__ import annotations

import ctypes
import signal
import threading

from tfmultigpu.strategies.stop_signals import keeping_handler


def test_a_signal_taken_behind_pythons_back_is_given_back() -> None:
    """In another thread, too, where `signal.signal` refuses."""
    heard: list[str] = []
    where = "before"

    def take() -> None:
        nonlocal where
        ignore = ctypes.c_void_p(int(signal.SIG_IGN))
        with keeping_handler(signal.SIGUSR1):
            ctypes.pythonapi.PyOS_setsig(signal.SIGUSR1, ignore)
            where = "inside"
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(where))
    try:
        signal.raise_signal(signal.SIGUSR1)
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        where = "after"
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == ["before", "after"]
