"""The code that the threads of this process run."""

from __future__ import annotations

import sys
from types import FrameType


def frames_of_threads() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread, by the identity of the thread.

    Private: ``sys._current_frames``, which Python documents. ``faulthandler``, which is public,
    writes a text without names of threads and without the lines of code. Without it a watch could
    not say what a thread waits for.
    """
    return sys._current_frames()
