"""MLflow's autologging under fit, in runs that are started, found and ended."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from one_device import strategy_of

import tfmultigpu as tmg

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("default")  # MLflow and SQLAlchemy warn by themselves.

_random = np.random.default_rng(5)
X = _random.normal(size=(21, 5)).astype("float32")
Y = _random.normal(size=(21, 1)).astype("float32")
FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


@pytest.fixture(params=["keras", "tensorflow"])
def flavor(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.create_experiment("here", artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment("here")
    module = getattr(mlflow, request.param)
    original = keras.Model.fit
    module.autolog(log_models=False, log_datasets=False, silent=True)
    assert keras.Model.fit is not original
    yield module
    module.autolog(disable=True)
    while mlflow.active_run() is not None:
        mlflow.end_run()


def made(replicas):
    keras.utils.set_random_seed(3)
    with strategy_of(replicas).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def runs():
    return mlflow.search_runs(output_format="list")


def values(run, name):
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
    return [one.value for one in sorted(history, key=lambda one: one.step)]


def test_fit_logs_to_a_run_that_it_ends(flavor):
    model = made(2)
    history = tmg.fit(model, X, Y, validation_data=(X, Y), **FIT).history
    (run,) = runs()
    assert run.info.status == "FINISHED"
    assert run.data.params["epochs"] == "2"
    assert run.data.params["batch_size"] == "8"
    for name in ("loss", "val_loss"):
        assert values(run, name) == pytest.approx(history[name])
    assert mlflow.active_run() is None


def test_the_active_run_stays_active(flavor):
    with mlflow.start_run() as run:
        tmg.fit(made(2), X, Y, **FIT)
        assert mlflow.active_run().info.run_id == run.info.run_id
    assert len(runs()) == 1
    assert len(values(runs()[0], "loss")) == 2


def test_model_fit_inside_fit_here_logs_once(flavor):
    model = made(2)
    with tmg.fit_here(model):
        model.fit(X, Y, **FIT)
    (run,) = runs()
    assert len(values(run, "loss")) == 2


def test_a_fit_that_raises_is_a_failed_run(flavor):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        tmg.fit(made(2), X, Y, callbacks=[Stop()], **FIT)
    (run,) = runs()
    assert run.info.status == "FAILED"


def test_every_so_many_steps(flavor):
    flavor.autolog(log_every_epoch=False, log_every_n_steps=2, log_models=False, silent=True)
    tmg.fit(made(2), X, Y, **FIT)
    (run,) = runs()
    assert len(values(run, "loss")) == 3  # of 6 steps


def test_a_callback_of_mlflow_is_not_doubled(flavor):
    with mlflow.start_run() as run:
        tmg.fit(made(2), X, Y, callbacks=[flavor.MlflowCallback()], **FIT)
    assert len(values(mlflow.get_run(run.info.run_id), "loss")) == 2
    assert "epochs" not in mlflow.get_run(run.info.run_id).data.params


def test_nothing_is_logged_when_it_is_off(flavor):
    flavor.autolog(disable=True)
    tmg.fit(made(2), X, Y, **FIT)
    assert runs() == []
