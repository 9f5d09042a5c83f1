"""Many steps in one call: the end of the data and its failures, calls that are cut, tallies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from one_device import as_dataset, cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu.steps import call_lengths

_random = np.random.default_rng(31)
X = _random.normal(size=(24, 5)).astype("float32")
Y = _random.normal(size=(24, 1)).astype("float32")
SIZES = (8, 6, 1, 5, 4)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has calls take one, four, sixteen steps, however busy the machine is."""
    # As if a call took no time.
    monkeypatch.setattr(call_lengths, "time", SimpleNamespace(perf_counter=lambda: 0.0))


def make_step(replicas: int, heads: int = 1, **options: Any) -> Any:
    strategy = strategy_of(replicas)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dropout(0.2, seed=1)(keras.layers.Dense(4, "tanh")(inputs))
        hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
        outputs = [keras.layers.Dense(1, name=f"head{i}")(hidden) for i in range(heads)]
        model = keras.Model(inputs, outputs if heads > 1 else outputs[0])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        metrics = [keras.metrics.MeanSquaredError()] if heads == 1 else []
    loss = ["mse"] * heads if heads > 1 else "mse"
    options = {"loss_scale": "dynamic", "metrics": metrics, **options}
    return tmg.make_train_step(model, optimizer, loss, strategy, **options)


def state(step: Any) -> list[np.ndarray]:
    """All that a step has changed."""
    owners = (step.model, step.optimizer, *step.metrics, *step.features)
    return [variable.numpy() for owner in owners for variable in owner.variables]


# Fails if a cut call is not, to the bit, one call, is traced anew, or takes a batch too many.
@pytest.mark.usefixtures("fast")
def test_calls_that_are_cut_add_up_to_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut_up = (make_step(2, heads=5, verify=False) for _ in range(2))
    data = as_dataset(cut((X, Y), SIZES)).map(lambda x, y: (x, (y,) * 5)).repeat()
    with monkeypatch.context() as uncut:
        all_at_once = property(lambda self: 1000, lambda self, steps: None)
        uncut.setattr(call_lengths.CallLength, "steps", all_at_once, raising=False)
        expected = whole.run(iter(data), 12)
    lengths = iter([1, 2, 4, 2])
    asked: list[int] = []

    def in_turn(_: Any) -> int:
        asked.append(next(lengths, 9))
        return asked[-1]

    monkeypatch.setattr(
        call_lengths.CallLength, "steps", property(in_turn, lambda self, _: None), raising=False
    )
    iterator = iter(data)
    found = cut_up.run(iterator, 12)
    assert asked == [1, 2, 4, 2, 9]  # Of which the last had three left.
    assert {name: value.numpy() for name, value in found.items()} == {
        name: value.numpy() for name, value in expected.items()
    }
    for here, there in zip(state(cut_up), state(whole), strict=True):
        np.testing.assert_array_equal(here, there)
    assert len(next(iterator)[0]) == SIZES[12 % 5]
    assert len(cut_up._loops) == 1
    # Where the data ends in the middle of a call, nothing more is asked for.
    asked.clear()
    assert int(cut_up.run(iter(data.take(5)), 100)["steps"]) == 5
    assert asked == [9]
