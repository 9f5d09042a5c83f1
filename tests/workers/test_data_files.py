"""Several workers read files: every row once an epoch, the losses of one device, or an error."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import worker_files

import tfmultigpu as tmg
from tfmultigpu.addons.testing import run_workers
from tfmultigpu.data.sharded_dataset import distribute_dataset


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What one process found, and what each of two workers did."""
    folder = tmp_path_factory.mktemp("files")
    for count in (1, 2, 5):
        worker_files.write_files(folder, count)
    ended = run_workers(worker_files.run, 2, args=[str(folder)], timeout=600.0)
    return {1: [worker_files.run(str(folder))], 2: [one.value for one in ended]}


@pytest.mark.slow
def test_each_row_once_an_epoch_and_the_losses_of_one_device(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    for workers, files in itertools.product((1, 2), (1, 2, 5)):
        own = [one[files] for one in found[workers]]
        assert len(own) == workers
        np.testing.assert_array_equal(sum(one["seen"] for one in own), 2)
        for one in own:
            assert len(one["losses"]) == 2 * 21
            np.testing.assert_allclose(one["losses"], found[1][0][files]["losses"], rtol=1e-6)


@pytest.mark.slow
def test_workers_that_read_different_data_are_told(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    first, second = found[2]
    for case in ("without a seed", "other order", "by number"):
        assert second[case].startswith(
            "The workers read different data: the first 1 batches of pass 1 differ, or the lengths"
        ), (case, second[case])
    # The first 1, 2, 4, 8, ... batches are compared; a busy machine hears of 8 at the next.
    said = r"the first (8|16|32) batches of pass 1 differ"
    assert re.search(said, second["later batch"]), second["later batch"]
    assert "5 on worker 0 and 4 on worker 1" in second["other length"]
    assert "dataset.shuffle(size, seed=1)" in second["without a seed"]
    for one in (first, second):
        assert one["seed for all"] == ""
        assert one["dict"] == one["alike by number"] == ""


def test_one_process_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = distribute_dataset(np.zeros((4, 2), "float32"), batch_size=2)
    assert len(data) == 2
    assert [batch.shape[0] for batch in data] == [2, 2]
    assert isinstance(data, tmg.data.ShardedDataset)
