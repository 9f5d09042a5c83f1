"""First steps over two real workers are held to one device on every worker."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
def test_two_workers_verify_the_whole_batch_or_say_that_they_cannot(results: Any) -> None:
    same = {"outcome": "same", "culprit": "", "warnings": 0, "steps": 2}
    told = {"outcome": "different", "culprit": "Lambda", "warnings": 1}
    unsent = {"outcome": "not verified", "culprit": "", "warnings": 1, "steps": 1}
    for found in results("verification"):
        assert found == {
            "same": same,
            "different": {**told, "steps": 2},
            "too large": unsent,
        }
