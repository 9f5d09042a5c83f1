"""The Keras callback that saves and resumes a run in ``fit``, with the state of all others.

Their state is what ``state()`` returns, which ``set_state(value)`` takes, or plain attributes.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.addons.checkpoints import state
from tfmultigpu.addons.checkpoints.files import Arrays, Stored
from tfmultigpu.addons.checkpoints.state import RunVariables
from tfmultigpu.errors import CheckpointError
from tfmultigpu.strategies.topology import tf_variable
from tfmultigpu.strategies.worker_exchange import digest_of
from tfmultigpu.types import Array, FitStart, ResumingCallback, RunningFit

if TYPE_CHECKING:
    from tfmultigpu.addons.checkpoints.manager import Checkpoints

_log = logging.getLogger("tfmultigpu")
_METRICS = "fit/metrics"
_METHOD = "state()"
# In JSON types, by the names of callbacks and attributes.
_States: TypeAlias = dict[str, dict[str, Any]]
_NewArrays: TypeAlias = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class EventsOfFit:
    """What a run does at the events of a ``fit``, as ``Checkpoints.epochs`` has it do in a loop.

    Attributes:
        begin: Called before any training: checks directory and data, then handles SIGTERM.
        read_data: Called with what is known of the data; compares it with the checkpoint.
        end_epoch: Called after each epoch.
        end: Called at the end, also after an error: restores the handler of SIGTERM, and passes on
            a signal that nobody has obeyed.
    """

    begin: Callable[[], None]
    read_data: Callable[[Mapping[str, Any]], None]
    end_epoch: Callable[[], None]
    end: Callable[[], None]


class CheckpointCallback(keras.callbacks.Callback, ResumingCallback):  # type: ignore[misc]
    """The running ``fit`` of a ``Checkpoints``, or a stored one until a ``fit`` has resumed it.

    ``types.ResumingCallback`` says when ``fit`` calls it; all workers call alike.

    Attributes:
        every_batches: Steps of the run between two checkpoints; None means an epoch.
    """

    def __init__(self, run: Checkpoints, variables: RunVariables, events: EventsOfFit) -> None:
        super().__init__()
        self._events = events
        self._run, self._variables, self._exchange = run, variables, variables.exchange
        self.every_batches: int | None = None
        self.load(None)

    def save_every(self, steps: int | None) -> None:
        """Saves after so many steps from now on; None means after each epoch."""
        self.every_batches = steps

    def load(self, stored: Stored | None) -> None:
        """Reads a checkpoint; None if the run continues in a loop without ``fit``."""
        self._fit: RunningFit | None = None  # Once it has begun.
        self._stored = stored if stored is not None and stored.run["fit"] else None
        # The states of callbacks and their arrays, once training has begun.
        self._begin: tuple[_States, Arrays] | None = None

    def read(self) -> tuple[Any, Arrays]:
        """Returns the description of the ``fit`` for a checkpoint, and its arrays."""
        if self._stored is not None:
            return self._stored.run["fit"], self._stored.of_fit
        if self._begin is None or self._fit is None:
            return None, {}
        fit, start = self._fit, self._fit.start
        self._variables.check_holds_states(fit.other_states(), fit.metric_variables())
        states, arrays = _read_states(self._callbacks, self._variables, self._begin[0])
        description = {
            "callbacks": states,
            "stopped": not self._run.step_in_epoch and self.is_stopping(),
            "begin": [start.seed, start.first_epoch, fit.batches()],
            "sums": dict(fit.sums()),
            "logical_replicas": fit.logical_replicas,
        }
        metrics = state.read_state(_metrics_of(fit), self._exchange)
        return description, {**arrays, **metrics}

    def on_fit_begin(self, asked: FitStart, epochs: int) -> FitStart:
        """Returns where a ``fit`` begins, before its data is prepared."""
        if self._begin is not None:
            raise CheckpointError(
                "Checkpoints hold one fit.",
                "another call of fit",
                "To resume the first, call checkpoints.restore() again. Before a second fit make "
                "tmg.Checkpoints(another_directory, model, model.optimizer) and restore it.",
            )
        if self._stored is None:
            epoch = asked.first_epoch + self._run.epoch
            return dataclasses.replace(asked, epoch=epoch, step=self._run.step_in_epoch)
        # Hooks must leave these. What the program changed since ``restore`` is part of the run.
        self._restored = self._variables.read(self._run.data)
        seed, first, batches = self._stored.run["fit"]["begin"]
        epoch = first + self._run.epoch
        if self._stored.run["fit"]["stopped"]:
            _log.warning("A callback ended this run. To train further, fit without checkpoints.")
            epoch = epochs
        return FitStart(seed, first, epoch, self._run.step_in_epoch, batches)

    def on_fit_ready(self, fit: RunningFit) -> None:
        """Begins to watch the ``fit``."""
        self._fit, self._callbacks = fit, _named(fit.callbacks)

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores what all other ``on_train_begin`` have changed, such as a learning rate."""
        if self._fit is None or self._begin is not None:
            raise CheckpointError(
                "The fit of Keras cannot resume.",
                "checkpoints.callback() in model.fit",
                "Write tmg.fit(model, data, callbacks=[...]), or tmg.prepare(model) before it.",
            )
        self._events.begin()
        self._variables.check_holds(self._fit.changed_variables())
        self._events.read_data(self._fit.data())
        self._begin = _read_states(self._callbacks, self._variables)
        if self._stored is None:
            return
        if missing := sorted(self._stored.run["fit"]["callbacks"].keys() - self._callbacks.keys()):
            _log.warning(
                "The checkpoint has callbacks that were not passed, so the run may end "
                f"differently than without the restart: {', '.join(missing)}"
            )
        before = self._stored.run["fit"]["logical_replicas"]
        state.say_if_cut_otherwise(before, self._fit.logical_replicas)
        if not self._run.step_in_epoch:  # What the next hooks do is new.
            self._undo_hooks(self._stored, self._begin)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restores the logs of a resumed epoch, after all other ``on_epoch_begin``."""
        stored, fit, begin = self._stored, self._fit, self._begin
        if stored is None or fit is None or begin is None:
            return
        arrays = {n: a for n, a in stored.of_fit.items() if n.startswith(_METRICS)}
        metrics = _metrics_of(fit)
        state.check_fits(metrics, arrays, "a checkpoint within an epoch")
        state.write_state(metrics, arrays, self._exchange)
        fit.restore_sums(stored.run["fit"]["sums"])
        self._undo_hooks(stored, begin)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts steps, and saves when it is time."""
        steps, every = batch + 1 - self._run.step_in_epoch, self.every_batches
        self._run.after_step(steps)
        step = self._run.step
        is_due = every is not None and step // every > (step - steps) // every
        # If a callback stops the run, its epoch ends before it is saved.
        if is_due and not self.is_stopping():
            self._run.save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the epoch, and saves when it is time, or the last one of the run."""
        self._events.end_epoch()
        if self.every_batches is None or self.is_stopping():
            self._run.save()

    def on_fit_exit(self) -> None:
        """Restores the handler of the stop signal, also after an error."""
        self._events.end()

    def is_stopping(self) -> bool:
        """Returns whether a callback of any worker ends the ``fit``, if one runs."""
        stops = self._fit is not None and bool(self.model.stop_training)
        return bool(self._exchange("whether fit stops", [int(stops)]).any())

    def _undo_hooks(self, stored: Stored, begin: tuple[_States, Arrays]) -> None:
        """Puts back what hooks have changed since this ``fit`` began, then what was stored."""
        self._variables.write(self._restored, stored.path)
        _write_states(self._callbacks, *begin)
        _write_states(self._callbacks, stored.run["fit"]["callbacks"], stored.of_fit)
        self._stored = None


def _metrics_of(fit: RunningFit) -> dict[str, tf.Variable]:
    """Returns the variables of the metrics in the logs, by name."""
    return state.by_name({_METRICS: fit.metric_variables()})


def _named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Names callbacks by class, monitored metric and order; callbacks of ``fit`` are left out."""
    by_name: dict[str, Any] = {}
    counts: dict[str, int] = collections.Counter()
    for callback in callbacks:
        if not isinstance(callback, (CheckpointCallback, keras.callbacks.ProgbarLogger)):
            name = f"{type(callback).__name__} {getattr(callback, 'monitor', '')}".strip()
            by_name[f"{name} #{counts[name]}"] = callback
            counts[name] += 1
    return by_name


def _read_states(
    callbacks: Mapping[str, Any], variables: RunVariables, begin: _States | None = None
) -> tuple[_States, _NewArrays]:
    """Returns the state of each callback and its arrays by name.

    That is what ``state()`` returns, or all attributes that differ from those at the ``begin`` of
    training: the others are settings, which a resumed run may change. Without ``begin`` it is all
    attributes, with a tuple of a text for those that are not plain.
    """
    saved = set(map(id, variables.all().values()))
    states: _States = {}
    arrays: _NewArrays = {}
    unsaved: list[str] = []
    for key, callback in callbacks.items():
        states[key] = {}
        values = _attributes(callback, saved)
        if _has_method(callback, "state") and _has_method(callback, "set_state"):
            values = {} if begin is None else {_METHOD: callback.state()}
        for name, value in values.items():
            of_value: _NewArrays = {}
            error: Exception | None = None
            try:
                packed = _pack(value, of_value)
            except (TypeError, RecursionError) as reason:
                packed, error = (repr(value),), reason
            # The text of other objects need not tell that they have changed.
            is_told = error is None or isinstance(value, (enum.Enum, os.PathLike))
            if begin is not None and begin[key].get(name, begin) == packed and is_told:
                continue
            if begin is None or error is None:
                states[key][name] = packed
                arrays |= of_value
            elif name == _METHOD or not _compat.is_part_of_keras(type(callback)):
                unsaved.append(f"{type(callback).__name__}.{name} ({error})")
    if unsaved:
        refusal = CheckpointError(
            f"Checkpoints cannot save these attributes of callbacks: {', '.join(unsaved)}. A "
            "resumed run would start with new ones.",
            "",
            "Write state(), which returns numbers, strings, arrays, or lists and dicts of them, "
            "and set_state(value) in the callback.",
        )
        if any(_METHOD in name for name in unsaved):
            raise refusal
        warnings.warn(str(refusal), stacklevel=2)  # Python shows the same text once.
    return states, arrays


def _has_method(callback: Any, name: str) -> bool:
    return callable(getattr(type(callback), name, None))


def _attributes(callback: Any, saved: Collection[int]) -> dict[str, object]:
    """Returns attributes that may be state: not functions, nor those with ``saved`` variables."""
    others = _compat.set_by_loops()
    if hasattr(callback, "monitor_op"):
        # Keras changes its sign together with a function, and would change it once more.
        others.add("min_delta")
    attributes = {}
    for name, value in vars(callback).items():
        if name in others:
            continue
        if hasattr(value, "variables"):
            is_state = any(id(tf_variable(variable)) not in saved for variable in value.variables)
        else:
            is_state = not callable(value)
        if is_state:
            attributes[name] = value
    return attributes


def _write_states(callbacks: Mapping[str, Any], states: _States, arrays: Arrays) -> None:
    for key in states.keys() & callbacks.keys():
        for name, packed in states[key].items():
            if name == _METHOD:
                callbacks[key].set_state(_unpack(packed, arrays))
            elif not isinstance(packed, tuple):
                setattr(callbacks[key], name, _unpack(packed, arrays))


def _pack(value: Any, arrays: _NewArrays) -> Any:
    """Returns a plain value in JSON types; its arrays go to ``arrays``. Else it is a TypeError."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is dict:
        return {"dict": [_pack(item, arrays) for item in value.items()]}
    if kind in (list, tuple):
        items = [_pack(item, arrays) for item in value]
        return items if kind is list else {"tuple": items}
    dtype = np.dtype(object)
    if kind is np.ndarray or isinstance(value, np.generic):
        dtype = value.dtype
    if dtype.kind not in "biufcSUMm" and dtype.isbuiltin != 2:  # 2: bfloat16 and similar types.
        raise TypeError(kind.__name__)
    content = np.array(value)
    name = f"fit/callbacks/{digest_of(f'{dtype} {content.shape} '.encode() + content.tobytes())}"
    arrays[name] = content
    return {"array": [name, dtype.name if dtype.isbuiltin == 2 else dtype.str]}


def _unpack(packed: Any, arrays: Arrays) -> object:
    """Returns the value of a packed one."""
    if isinstance(packed, list):
        return [_unpack(item, arrays) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "array":
        name, dtype = content
        return np.array(arrays[name]).view(dtype)[()]  # Of no dimensions: a scalar.
    return {"tuple": tuple, "dict": dict}[kind](_unpack(content, arrays))
