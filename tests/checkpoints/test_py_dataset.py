"""A fit over a ``PyDataset`` that shuffles itself resumes with the order that it would have had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from law.model import regression, small
from one_device import strategy_of

import tfmultigpu as tmg

ROWS, SIZE, EPOCHS = 10, 4, 4
(X, Y), *_ = regression([ROWS])


class Shuffled(keras.utils.PyDataset):
    """Rows in another order after each epoch, by a state of its own that nothing saves."""

    def __init__(self) -> None:
        super().__init__()
        self.random, self.order = np.random.default_rng(5), np.arange(ROWS)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        rows = self.order[SIZE * index :][:SIZE]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.order = self.random.permutation(ROWS)


class Killed(Exception):
    """Of a callback."""


def run(folder: Path, has_data: bool, killed_after: int | None = None) -> Any:
    """Trains from the newest checkpoint to the end, or to the batch where it is killed."""
    keras.utils.set_random_seed(3)
    with strategy_of(2).scope():
        training = small()
        training.model.compile(training.optimizer, training.loss)
    data = Shuffled()
    given = {"data": data} if has_data else {}
    checkpoints = tmg.Checkpoints(folder, training.model, training.optimizer, **given)
    checkpoints.restore()
    seen = []

    def kill(batch: int, logs: Any) -> None:
        seen.append(batch)
        if len(seen) == killed_after:
            raise Killed

    progress = keras.callbacks.LambdaCallback(on_train_batch_end=kill)
    history = tmg.fit(
        training.model, checkpoints.data or data, epochs=EPOCHS, validation_data=Shuffled(),
        callbacks=[checkpoints.callback(every_steps=2), progress], verbose=0, verify=False,
    )  # fmt: skip
    return training.model.get_weights(), history.history


# Fails if an epoch that is passed over does not shuffle, or the one before the first epoch is left
# out or added in the run that resumes; also for the validations in between.
@pytest.mark.parametrize("has_data", [True, False])
@pytest.mark.parametrize("killed", [5, 7])
def test_a_resumed_fit_has_the_order_of_its_epoch(
    has_data: bool, killed: int, tmp_path: Path
) -> None:
    weights, history = run(tmp_path / "whole", has_data)
    with pytest.raises(Killed):
        run(tmp_path / "killed", has_data, killed)
    resumed, later = run(tmp_path / "killed", has_data)
    for ours, truth in zip(resumed, weights, strict=True):
        np.testing.assert_allclose(ours, truth, rtol=1e-6, atol=1e-7)
    for name in history:
        assert history[name][-1] == pytest.approx(later[name][-1], rel=1e-5), name
