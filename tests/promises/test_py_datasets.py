"""A ``PyDataset`` trains what it trains in Keras, which calls its methods at the same times."""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from law.model import regression, small
from law.pair import assert_logs, assert_replicas_agree, strategy_of
from law.plain import PlainLoop, assert_values

import tfmultigpu as tmg

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]
ROWS, SIZE = 10, 4  # Batches of 4, 4 and 2 rows: no number of replicas divides them all.
(X, Y), *_ = regression([ROWS])
keras_fit = functools.partial(keras.Model.fit, shuffle=False)


class Shuffled(keras.utils.PyDataset):
    """Rows in another order after each ``on_epoch_end``; notes what is called, and when."""

    def __init__(self, model: Any, batches: int | None = 3, **options: Any) -> None:
        super().__init__(**options)
        self.num_batches_of_pass, self.model = batches, model
        self.random, self.order = np.random.default_rng(5), np.arange(ROWS)
        self.calls: list[tuple[str, int, bool]] = []

    @property
    def num_batches(self) -> int | None:
        return self.num_batches_of_pass

    def __getitem__(self, index: int) -> Any:
        rows = self.order[SIZE * (index % 3) :][:SIZE]
        return X[rows], Y[rows]

    def note(self, name: str) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self.calls.append((name, int(self.model.optimizer.iterations.numpy()), is_main))

    def on_epoch_begin(self) -> None:
        self.note("begin")

    def on_epoch_end(self) -> None:
        self.note("end")
        self.order = self.random.permutation(ROWS)


def compiled(replicas: int | None) -> Any:
    """Returns a model on one device, without strategy, or on replicas."""
    keras.utils.set_random_seed(3)
    if replicas is None:
        training = small()
        training.model.compile(training.optimizer, training.loss)
        return training.model
    with strategy_of(replicas).scope():
        training = small()
        training.model.compile(training.optimizer, training.loss)
    return training.model


def train(fit: Any, evaluate: Any, predict: Any, model: Any) -> Any:
    """Returns what trainings, an evaluation and a prediction give and call."""
    histories, calls = [], []
    validation = Shuffled(model, 2)
    plans: list[dict[str, Any]] = [
        {"x": Shuffled(model), "epochs": 3, "validation_data": validation},
        {"x": Shuffled(model), "epochs": 2, "steps_per_epoch": 5},
        {"x": Shuffled(model, workers=2), "epochs": 2},
    ]  # fmt: skip
    for plan in plans:
        calls.append(plan["x"].calls)
        histories.append(fit(model, verbose=0, **plan).history)
    read = [Shuffled(model), Shuffled(model), Shuffled(model)]
    results = evaluate(model, read[0], verbose=0), evaluate(model, read[1], steps=2, verbose=0)
    predictions = predict(model, read[2], verbose=0)
    calls += [validation.calls, *(each.calls for each in read)]
    values = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    return histories, calls, results, predictions, values


@functools.cache
def of_keras() -> Any:
    evaluate = functools.partial(keras.Model.evaluate, return_dict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(keras_fit, evaluate, keras.Model.predict, compiled(None))


# Fails if on_epoch_end comes before the last step, not before the first epoch, once more or once
# less, if either hook is called in another thread, or if a batch is read before them.
@pytest.mark.parametrize(
    "replicas",
    [pytest.param(1, marks=pytest.mark.more), pytest.param(2, marks=pytest.mark.more), 3],
)
def test_a_py_dataset_that_shuffles_itself_trains_as_in_keras(replicas: int) -> None:
    expected = of_keras()
    model = compiled(replicas)
    evaluate = functools.partial(tmg.evaluate, return_dict=True)
    ours = train(tmg.fit, evaluate, tmg.predict, model)
    assert ours[1] == expected[1]
    assert all(is_main for calls in ours[1] for _, _, is_main in calls)
    assert [name for name, *_ in ours[1][0]] == ["end", *["begin", "end"] * 3]
    for history, truth in zip(ours[0], expected[0], strict=True):
        assert_logs(history, truth)
    for result, truth in zip(ours[2], expected[2], strict=True):
        assert_logs(result, truth)
    np.testing.assert_allclose(ours[3], expected[3], rtol=1e-6)
    variables = [*model.variables, *model.optimizer.variables]
    assert_values(ours[4], expected[4], [variable.path for variable in variables])
    assert_replicas_agree(strategy_of(replicas), model.variables)


# Fails if an epoch of fewer batches than a pass reads some of the next epoch, whose order it does
# not know yet, or begins a new pass. (Keras reads them ahead, and now and then trains on them.)
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.more), 3])
def test_no_batch_is_read_before_its_epoch(replicas: int) -> None:
    model = compiled(replicas)
    weights = model.get_weights()
    # Epochs of two batches: in passes of three they end after 2, 1 and 2; one without end goes on.
    for batches, epochs in ((3, [(0, 1), (2,), (0, 1)]), (None, [(0, 1), (2, 3), (4, 5)])):
        keras.utils.set_random_seed(3)
        truth = small()
        data, sequence = Shuffled(truth, batches), []
        for indices in epochs:
            data.on_epoch_end()
            sequence += [data[index] for index in indices]
        PlainLoop(truth, sequence[0]).train(sequence)

        model.set_weights(weights)
        data, before = Shuffled(model, batches), int(model.optimizer.iterations.numpy())
        tmg.fit(model, data, epochs=3, steps_per_epoch=2, verify=False, verbose=0)
        pairs = [[v.numpy() for v in m.variables] for m in (model, truth.model)]
        assert_values(*pairs, [variable.path for variable in truth.model.variables])
        ends = [steps - before for name, steps, _ in data.calls if name == "end"]
        assert ends == np.cumsum([0, *map(len, epochs)]).tolist()


class InOrder(keras.utils.PyDataset):
    """Rows in one order, of which threads of Keras make batches."""

    def __init__(self) -> None:
        super().__init__(workers=2)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return X[SIZE * index :][:SIZE], Y[SIZE * index :][:SIZE]


# Fails if the pass that the epochs of fit continue is ended or moved on by a validation of the same
# distributed data, or if a pass is closed while its thread is still in it.
@pytest.mark.parametrize("replicas", [2])
def test_epochs_of_some_steps_continue_a_pass_that_others_read_too(replicas: int) -> None:
    options = {"epochs": 6, "steps_per_epoch": 2, "verbose": 0}
    plain, model = compiled(None), compiled(replicas)
    truth = keras_fit(plain, InOrder(), validation_data=InOrder(), **options)
    data = tmg.distribute_dataset(InOrder(), strategy_of(replicas))
    history = tmg.fit(model, data, validation_data=data, verify=False, **options)
    assert_logs(history.history, truth.history)
    assert_values(model.get_weights(), plain.get_weights(), [v.path for v in plain.weights])
