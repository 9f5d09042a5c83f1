"""The line of each message is run: the mistake is told by it, and after the line it is gone."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from law.processes import Worker, call_all, pool
from law.worker_functions import join

from lines.messages import EXAMPLES, Example, told
from lines.of_clusters import run_on_a_worker
from lines.of_devices import run_alone

for _file in sorted(Path(__file__).parent.glob("of_*.py")):
    importlib.import_module(f"lines.{_file.stem}")


class Cluster:
    """Two workers for all examples of a cluster, which leave them as they found them."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    @contextlib.contextmanager
    def joined(self) -> Iterator[list[Worker]]:
        """Yields the workers; the next example gets others, if this one fails."""
        workers, self._workers = self._workers, []
        if not workers:
            workers = pool().cluster()
            call_all(workers, join)
        yield workers
        self._workers = workers

    def end(self) -> None:
        for worker in self._workers:
            worker.end()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.end()


# Keras reads a learning rate by an old protocol of NumPy.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.run.__name__)
def test_the_line_helps(
    example: Example, cluster: Cluster, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = example.messages()
    assert expected, f"no message says {example.words!r}"
    if example.run.__module__ == run_alone.__module__:
        worker = pool().start()
        worker.call(run_alone, example.run.__name__)
        worker.end()
        return
    if example.run.__module__ == run_on_a_worker.__module__:
        with cluster.joined() as workers:
            call_all(workers, os.chdir, str(tmp_path))
            call_all(workers, run_on_a_worker, example.run.__name__)
        return
    told_now = []

    def watching(*held: Any) -> Any:
        told_now.append(True)
        return told(expected, *held)

    example.run(watching)
    assert told_now, "the example makes no mistake"
