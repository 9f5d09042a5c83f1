"""The Keras callback that saves and resumes a run in ``fit``, with the state of all others.

Their state is what ``state()`` returns, which ``set_state(value)`` takes, or plain attributes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.addons.checkpoints import state
from tfmultigpu.addons.checkpoints.files import Arrays, Stored
from tfmultigpu.addons.checkpoints.state import RunVariables
from tfmultigpu.errors import CheckpointError
from tfmultigpu.strategies.topology import tf_variable
from tfmultigpu.types import FitStart, RunningFit

_log = logging.getLogger("tfmultigpu")
_METRICS = "fit/metrics"

# Keras sets the first two. The others, of TensorBoard and CSVLogger, describe this process' files.
_NOT_STATE = {"params", "model", "is_tracing", "profiler_started", "should_write_train_graph"}
_NOT_STATE |= {"log_write_dir", "train_dir", "val_dir", "writers", "prev_summary_state"}
_NOT_STATE |= {"append_header"}
_METHOD = "state()"

# Callbacks by name, with a text for each attribute named like a parameter of their constructor.
_Callbacks = dict[str, tuple[Any, dict[str, str]]]


class CheckpointCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """The running ``fit`` of a ``Checkpoints``, or a stored one until a ``fit`` has resumed it.

    ``types.RunningFit`` says when ``fit`` calls it; all workers call alike.

    Attributes:
        every_batches: Steps of the run between two checkpoints; None means an epoch.
    """

    every_batches: int | None = None

    def __init__(self, run: Any, variables: RunVariables) -> None:
        """Takes the ``Checkpoints`` and its variables."""
        super().__init__()
        self._run, self._variables, self._exchange = run, variables, variables.exchange
        self.load(None)

    def load(self, stored: Stored | None) -> None:
        """Takes a checkpoint; None if the run continues in a loop without ``fit``."""
        self._fit: Any = None  # A ``RunningFit``, once it has begun.
        self._callbacks: _Callbacks = {}
        self._has_trained = self._is_due = False
        self._stored = stored if stored is not None and stored.run["fit"] is not None else None
        self._restored: Arrays = {}  # The variables of the run as hooks must leave them.

    def read(self) -> tuple[Mapping[str, Any] | None, Arrays]:
        """Returns the description of the ``fit`` for a checkpoint, and its arrays."""
        if self._stored is not None:
            arrays = self._stored.arrays
            return self._stored.run["fit"], {n: a for n, a in arrays.items() if n[:4] == "fit/"}
        if self._fit is None:
            return None, {}
        arrays = dict(state.read_state(self._metric_variables(), self._exchange))
        fit = {
            "callbacks": _read_states(self._callbacks, arrays, self._variables),
            "stopped": not self._run.step_in_epoch and self.is_stopping(),
            "start": dataclasses.astuple(self._start(self._fit, self._fit.batches)),
            "data": dict(self._fit.data),
            "sums": dict(self._fit.sums),
        }
        return fit, arrays

    def _start(self, fit: RunningFit, batches: int) -> FitStart:
        """Returns the place at which the run is now."""
        epoch = fit.first_epoch + self._run.epoch
        return FitStart(fit.seed, fit.first_epoch, epoch, self._run.step_in_epoch, batches)

    def on_fit_begin(self, fit: RunningFit) -> FitStart:
        """Returns where a ``fit`` begins, before its data is prepared."""
        if self._has_trained:
            raise CheckpointError(
                "Checkpoints hold one fit. Received: another call of fit. To resume the first, "
                "call checkpoints.restore() again. Just before a second one write, and restore, "
                "tmg.Checkpoints(another_directory, model, model.optimizer)."
            )
        self._fit, self._callbacks = fit, _named(fit.callbacks)
        if self._stored is None:
            return self._start(fit, 0)
        # What the program changed since ``restore`` is part of the run.
        self._restored = self._variables.read()
        stored = self._stored.run["fit"]
        start = FitStart(*stored["start"])
        if stored["stopped"]:
            _log.warning("A callback ended this run. To train further, fit without checkpoints.")
            start = dataclasses.replace(start, epoch=fit.epochs)
        return start

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores what all other ``on_train_begin`` have changed, such as a learning rate."""
        self._run.listen()
        self._has_trained = True
        self._variables.check_holds(self._fit.changed_variables())
        if self._stored is None:
            return
        self._run.check_data({n: v for n, v in self._fit.data.items() if v is not None})
        stored = self._stored.run["fit"]["callbacks"]
        if missing := sorted(stored.keys() - self._callbacks.keys()):
            _log.warning(
                "The checkpoint has callbacks that were not passed, so the run may end "
                "differently than without the restart: %s",
                ", ".join(missing),
            )
        self._undo_hooks()
        if not self._run.step_in_epoch:  # What the next hooks do is new.
            self._stored = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restores the logs of a resumed epoch, after all other ``on_epoch_begin``."""
        if self._stored is not None:
            self._undo_hooks()
            variables = self._metric_variables()
            arrays = {n: a for n, a in self._stored.arrays.items() if n.startswith(_METRICS)}
            state.check_fits(variables, arrays, "a checkpoint within an epoch")
            state.write_state(variables, arrays, self._exchange)
            self._fit.sums.update(self._stored.run["fit"]["sums"])
            self._stored = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts steps, and saves when it is time."""
        steps, every = batch + 1 - self._run.step_in_epoch, self.every_batches
        self._run.after_step(steps)
        step = self._run.step
        self._is_due = every is not None and step // every > (step - steps) // every
        # If a callback stops the run, its epoch ends before it is saved.
        if self._is_due and not self.is_stopping():
            self._run.save()
            self._is_due = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the epoch, and saves when it is time."""
        self._run.end_epoch()
        if self.every_batches is None or self._is_due:
            self._run.save()

    def on_fit_exit(self) -> None:
        """Restores the handler of the stop signal, also after an error."""
        self._run.stop_listening()

    def is_stopping(self) -> bool:
        """Returns whether a callback of any worker ends the ``fit``, if one runs."""
        stops = self._fit is not None and bool(self.model.stop_training)
        return bool(self._exchange("whether fit stops", [int(stops)]).any())

    def _undo_hooks(self) -> None:
        state.write_state(self._variables.all(), self._restored, self._exchange)
        if self._stored is not None:
            states = self._stored.run["fit"]["callbacks"]
            _write_states(self._callbacks, states, self._stored.arrays)

    def _metric_variables(self) -> dict[str, Any]:
        return state.numbered(_METRICS, self._fit.metric_variables())


def _named(callbacks: Iterable[Any]) -> _Callbacks:
    """Names callbacks by class, monitored metric and order; those of ``fit`` are left out."""
    by_name: _Callbacks = {}
    for callback in callbacks:
        kind = type(callback)
        if kind.__name__ != "ProgbarLogger" and not kind.__module__.startswith("tfmultigpu."):
            name = f"{kind.__name__} {getattr(callback, 'monitor', '')}".strip()
            number = sum(key.rpartition(" #")[0] == name for key in by_name)
            own = _parameters(callback, of_keras=False)
            settings = {n: repr(v) for n, v in vars(callback).items() if n.lstrip("_") in own}
            by_name[f"{name} #{number}"] = callback, settings
    return by_name


def _read_states(
    callbacks: _Callbacks, arrays: dict[str, np.ndarray[Any, Any]], variables: RunVariables
) -> dict[str, dict[str, Any]]:
    """Returns the state of each callback in JSON types, and adds its arrays to ``arrays``."""
    states: dict[str, dict[str, Any]] = {}
    saved = {id(variable) for variable in variables.all().values()}
    unsaved: list[str] = []
    for key, (callback, settings) in callbacks.items():
        states[key] = {}
        for name, value in _values(callback, settings, saved).items():
            try:
                states[key][name] = _pack(value, arrays)
            except (TypeError, RecursionError) as error:
                if name == _METHOD:
                    raise CheckpointError(
                        f"The state of a callback cannot be saved. Received: {error} from "
                        f"state() of {key}. Return numbers, strings, arrays, or lists and "
                        "dicts of them."
                    ) from None
                if not is_part_of_keras(type(callback)):
                    unsaved.append(f"{type(callback).__name__}.{name} ({error})")
    if unsaved:
        _warn_of_unsaved(", ".join(unsaved))
    return states


def _write_states(
    callbacks: _Callbacks, stored: Mapping[str, Mapping[str, Any]], arrays: Arrays
) -> None:
    """Restores the stored states; callbacks without one keep their values."""
    for key in stored.keys() & callbacks.keys():
        for name, packed in stored[key].items():
            value = _unpack(packed, arrays)
            if name == _METHOD:
                callbacks[key][0].set_state(value)
            else:
                setattr(callbacks[key][0], name, value)


@functools.cache  # Not again at each save.
def _warn_of_unsaved(attributes: str) -> None:
    _log.warning(
        "Checkpoints cannot save these attributes of callbacks: %s. A resumed run starts with new "
        "ones. Write state(), which returns numbers, strings, arrays, or lists and dicts of them, "
        "and set_state(value) in the callback.",
        attributes,
    )


def _values(callback: Any, settings: Mapping[str, str], saved: Collection[int]) -> dict[str, Any]:
    """Returns the result of ``state()``, or all attributes that may be state.

    Arguments of a constructor are not, unless they have changed: a run resumed with another
    ``patience`` uses it. Nor are functions, and what has only variables that are ``saved``.
    """
    if all(callable(getattr(type(callback), name, None)) for name in ("state", "set_state")):
        return {_METHOD: callback.state()}
    skipped = _NOT_STATE | _parameters(callback, of_keras=True)

    def is_state(name: str, value: Any) -> bool:
        if hasattr(value, "variables"):
            return any(id(tf_variable(variable)) not in saved for variable in value.variables)
        return not callable(value) and settings.get(name) != repr(value)

    attributes = {n: v for n, v in vars(callback).items() if n.lstrip("_") not in skipped}
    return {name: value for name, value in attributes.items() if is_state(name, value)}


def _parameters(callback: Any, *, of_keras: bool) -> set[str]:
    kinds = [kind for kind in type(callback).__mro__[:-1] if is_part_of_keras(kind) is of_keras]
    constructors = [vars(kind)["__init__"] for kind in kinds if "__init__" in vars(kind)]
    return {name for each in constructors for name in inspect.signature(each).parameters}


def _pack(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Returns a plain value in JSON types; its arrays go to ``arrays``. Else it is a TypeError."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, dict):
        items = [_pack(item, arrays) for item in (value.items() if kind is dict else value)]
        return items if kind is list else {kind.__name__: items}
    array = np.array(value) if isinstance(value, (np.ndarray, np.generic)) else None
    if array is None or array.dtype.kind not in "biufcSUMm":
        raise TypeError(kind.__name__)
    name = f"fit/callbacks/{len(arrays)}"
    arrays[name] = array
    return {"array": name}


def _unpack(packed: Any, arrays: Arrays) -> Any:
    """Returns the value of a packed one."""
    if isinstance(packed, list):
        return [_unpack(item, arrays) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "array":
        return np.array(arrays[content])[()]  # Of no dimensions: a scalar.
    return {"tuple": tuple, "dict": dict}[kind](_unpack(content, arrays))
