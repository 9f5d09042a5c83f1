"""With ``logical_replicas``, several processes end with the bits of one process on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from law import bits_functions
from law.processes import Worker, call_all, pool

more = pytest.mark.more
Results = dict[str, list[np.ndarray]]


@pytest.fixture(scope="module")
def alone() -> Any:
    """A process of one device."""
    worker = pool().start()
    assert worker.call(bits_functions.join, 1) == 1
    yield worker
    worker.end()


# Three workers end with an odd one in the tree of additions; four show its order.
@pytest.fixture(
    scope="module",
    params=[(2, 4), pytest.param((3, 6), marks=more), pytest.param((4, 8), marks=more)],
    ids="{0[0]} workers".format,
)
def cluster(request: pytest.FixtureRequest) -> Any:
    """Workers that have joined, and the number of logical replicas."""
    workers = pool().cluster(request.param[0])
    assert set(call_all(workers, bits_functions.join, len(workers))) == {len(workers)}
    yield workers, request.param[1]
    for worker in workers:
        worker.end()


def assert_same_bits(expected: Results, results: list[Results]) -> None:
    for worker, result in enumerate(results):
        for name, arrays in expected.items():
            for number, (array, value) in enumerate(zip(arrays, result[name], strict=True)):
                message = f"{name} {number} of worker {worker}"
                np.testing.assert_array_equal(value, array, err_msg=message)


# Fails if workers add in another order than one device, count what metrics add for each worker,
# leave a state of a layer to each of them, or send the rows of a table in another order.
def test_steps_and_what_is_resumed_on_one_device(
    cluster: tuple[list[Worker], int], alone: Worker, tmp_path: Path
) -> None:
    workers, count = cluster
    folders = [str(tmp_path / name) for name in ("one", "several")]
    alone.begin(bits_functions.stepped, count, folders[0])
    results = call_all(workers, bits_functions.stepped, count, folders[1])
    assert_same_bits(alone.result(), results)

    # What the workers have saved continues on one device, and what it has saved on workers.
    alone.begin(bits_functions.stepped, count, folders[1])
    results = call_all(workers, bits_functions.stepped, count, folders[0])
    assert_same_bits(alone.result(), results)


# Fails if the History of fit, a validation or an evaluation is rounded otherwise on workers.
def test_fit_and_evaluate(cluster: tuple[list[Worker], int], alone: Worker) -> None:
    workers, count = cluster
    alone.begin(bits_functions.fitted, count)
    results = call_all(workers, bits_functions.fitted, count)
    assert_same_bits(alone.result(), results)
