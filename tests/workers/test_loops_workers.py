"""Two real workers evaluate and predict as one device does, and each of them gets everything."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest


@pytest.mark.slow
def test_two_workers_give_what_one_device_gives(results: Any) -> None:
    one, *two = results("loops")
    assert two[0] == two[1]
    for name in ("evaluated", "again"):
        assert two[0][name] == pytest.approx(one[name], abs=1e-6), name
    np.testing.assert_allclose(two[0]["predicted"], one["predicted"], rtol=0, atol=1e-6)
    assert np.shape(one["predicted"]) == (31, 3)
    for name, rows in (("everything", 31), ("one row", 1)):
        dense = [found[name].pop("float32") for found in (one, two[0])]
        values = [np.array(json.loads(text)) for _, _, text in dense]
        assert values[0].shape == (rows, 2)
        np.testing.assert_allclose(values[1], values[0], rtol=0, atol=1e-6)
        # What is not computed but passed on comes through to the bit.
        assert two[0][name] == one[name]
        assert set(one[name]) >= {"text", "no text", "ragged", "bool", "uint64", "bfloat16"}
