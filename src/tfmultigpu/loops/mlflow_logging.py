"""Logging of ``fit`` to MLflow while its autologging is on, which replaces only Keras' ``fit``."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfmultigpu.loops.callbacks import to_list
from tfmultigpu.loops.worker_agreement import is_chief

__all__ = ["is_of_mlflow", "with_mlflow"]

_log = logging.getLogger("tfmultigpu")
_FLAVORS = ("keras", "tensorflow")


def with_mlflow(
    callbacks: Any, strategy: tf.distribute.Strategy, parameters: Mapping[str, Any]
) -> Any:
    """Returns callbacks, and on the chief one of MLflow's if its autologging is on.

    The callback logs to the active run, or else to one that it starts and ends. MLflow's patch of
    ``model.fit`` also logs the model and the data; this does not, and says so.

    Args:
        callbacks: The callbacks of ``fit``.
        strategy: The strategy of the model.
        parameters: Arguments of ``fit`` to log.
    """
    flavor = _autologging()
    if flavor is None or not is_chief(strategy):
        return callbacks
    import keras

    given = to_list(callbacks)
    kinds = tuple(
        module.MlflowCallback for one in _FLAVORS if (module := sys.modules.get(f"mlflow.{one}"))
    )
    if any(isinstance(one, kinds) for one in given):
        return callbacks
    given.append(_make_callback(flavor, parameters))
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return keras.callbacks.CallbackList(given)
    return given


def is_of_mlflow(method: Any) -> bool:
    """Returns whether a method is one that MLflow's autologging has put in place of Keras' own."""
    mlflow = sys.modules.get("mlflow")
    code = getattr(method, "__code__", None)
    if mlflow is None or code is None or _autologging() is None:
        return False
    return Path(str(mlflow.__file__)).parent in Path(code.co_filename).parents


def _autologging() -> str | None:
    """Returns for which of MLflow's flavors autologging is on, or None."""
    utils: Any = sys.modules.get("mlflow.utils.autologging_utils")
    if utils is None:
        return None
    loaded = [one for one in _FLAVORS if f"mlflow.{one}" in sys.modules]
    return next((one for one in loaded if not utils.autologging_is_disabled(one)), None)


def _make_callback(flavor: str, parameters: Mapping[str, Any]) -> Any:
    mlflow: Any = sys.modules["mlflow"]
    utils: Any = sys.modules["mlflow.utils.autologging_utils"]
    config = functools.partial(utils.get_autologging_config, flavor)
    every_steps = config("log_every_n_steps", None)

    # The class of MLflow's callback turns errors of its methods, and of these, into warnings.
    class Autologging(sys.modules[f"mlflow.{flavor}"].MlflowCallback):  # type: ignore[misc]
        every_batches = None if every_steps is None else 1
        _started = False

        def on_train_begin(self, logs: Any = None) -> None:
            if mlflow.active_run() is None:
                mlflow.start_run(tags=config("extra_tags", None))
                self._started = True
            mlflow.log_params(dict(parameters))
            super().on_train_begin(logs)

        def on_train_end(self, logs: Any = None) -> None:
            self._end("FINISHED")

        def on_fit_exit(self) -> None:
            self._end("FAILED")

        def _end(self, status: str) -> None:
            mlflow.flush_async_logging()
            if self._started:
                self._started = False
                mlflow.end_run(status)

    _say_once()
    return Autologging(
        log_every_epoch=config("log_every_epoch", True), log_every_n_steps=every_steps
    )


@functools.cache
def _say_once() -> None:
    _log.warning(
        "MLflow's autologging is on: fit logs parameters, metrics and the summary of the model. It "
        'does not log the model and the data: mlflow.keras.log_model(model, name="model") does.'
    )
