"""What the tests of meetings have in common: a card, time limits, calls at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tfmultigpu.errors import ClusterError

# Seconds: see test_rendezvous.py.
PROMISED, PATIENCE = 10.0, 120.0
CARD = {"the cluster": "one", "their devices": "1 CPU"}


def together(calls: Sequence[Callable[[], object]]) -> list[str | None]:
    """What each call raised (its text), all at the same time."""
    texts: list[str | None] = ["it did not return"] * len(calls)

    def run(place: int) -> None:
        try:
            calls[place]()
            texts[place] = None
        except ClusterError as error:
            texts[place] = str(error)

    threads = [
        threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    return texts
