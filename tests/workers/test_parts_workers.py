"""Two real workers on batches of parts give what one device gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.mark.slow
def test_two_workers_equal_one_device(results: Any) -> None:
    one, *two = results("parts")
    for worker, run in enumerate(two):
        for case, ours in run.items():
            where = f"{case} on worker {worker}"
            np.testing.assert_allclose(
                ours["weights"], one[case]["weights"], rtol=0, atol=4e-6, err_msg=where
            )
            assert ours["loss"] == pytest.approx(one[case]["loss"], rel=2e-6), where
            assert ours["verified"] == "same", where
