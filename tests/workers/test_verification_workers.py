"""First steps over two real workers are held to one device on every worker."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
def test_two_workers_verify_the_whole_batch_or_the_same_part_of_it(results: Any) -> None:
    same = {"outcome": "same", "rows": [12, 12], "culprit": "", "warnings": 0, "steps": 2}
    told = {"outcome": "different", "rows": [12, 12], "culprit": "Lambda", "warnings": 1}
    part = {"rows": [8, 12], "steps": 1}
    for found in results("verification"):
        assert found == {
            "same": same,
            "different": {**told, "steps": 2},
            "part, same": {**same, **part},
            "part, different": {**told, **part},
        }
