"""Two real workers fit as one device does, and each of them has everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.mark.slow
def test_two_workers_give_what_one_device_gives(results: Any, printed: Any) -> None:
    one, *two = results("fit")
    assert two[0] == two[1]
    assert ["Epoch 6/6" in output for output in printed("fit")] == [True, True, False]
    for name in ("shuffled", "stopped"):
        found, expected = two[0][name], one[name]
        assert found["steps"] == expected["steps"]
        assert list(found["history"]) == list(expected["history"])
        for key, values in expected["history"].items():
            np.testing.assert_allclose(
                found["history"][key], values, rtol=1e-5, atol=1e-6, err_msg=f"{name} {key}"
            )
        for weight, other in zip(found["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(weight, other, rtol=0, atol=1e-6, err_msg=name)
    assert two[0]["stopped"]["epochs"] == one["stopped"]["epochs"] == [0, 1]
    assert two[0]["without a seed"] == one["without a seed"] == 31
    workers_differ(results("fit", "OWN")[1:])
    found = two[0]["watched by all"]["history"], one["watched by all"]["history"]
    assert found[0].keys() == found[1].keys()
    # The second worker alone asked to stop, after the fourth batch.
    before = two[0]["watched by all"]["steps"]
    assert two[0]["stopped in an epoch"]["steps"] == before + 4


def workers_differ(own: list[dict[str, dict]]) -> None:
    """What is each worker's own: after which batches it was called, and what it was told."""
    # One asks for each second batch, the other for each third.
    batches = [1, 2, 3, 5]
    for worker in own:
        assert worker["seen"]["all"] == [*batches, *[["test", batch] for batch in batches]]
    assert [worker["seen"]["one"] for worker in own] == [[], [0, 1, 2, 3]]
    for number, worker in enumerate(own):
        errors = worker["errors"]
        assert list(errors) == ["rate", "weights", "epochs", "checkpoints"]
        here = "0.01" if number == 0 else "0.05"
        assert f"Received: learning rate {here} of this worker" in errors["rate"]
        assert "Give callbacks that change training (ReduceLROnPlateau" in errors["rate"]
        assert "Received: weights of this worker" in errors["weights"]
        received = f"Received: epochs={1 + number} on worker {number}, and another value on worker"
        assert received in errors["epochs"]
        assert f"callbacks of tmg.Checkpoints={number} on worker" in errors["checkpoints"]
