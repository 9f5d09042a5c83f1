"""Keras' own methods on one model object: called, replaced for a time, and refused if its own."""

from __future__ import annotations

import difflib
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import ParamSpec, TypeVar

import keras

from tfmultigpu import _compat
from tfmultigpu._patch import ignoring_warnings, lock_of
from tfmultigpu.addons.loops.hooks import swapping_averages
from tfmultigpu.addons.loops.loop import EvaluationLoop, TrainingLoop
from tfmultigpu.arguments import brief
from tfmultigpu.errors import LossError, TfMultiGpuError
from tfmultigpu.types import Function, KerasModel, Nested, Options

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_FORWARD = """Write its loss as a forward, with one value for each row:
    def forward(model, batch, training):
        x, y = batch
        values = ...  # of model(x, training=training) and y
        return tmg.LossSum(tf.reduce_sum(values), tf.size(values))
    model.compile(optimizer=...); tmg.fit(model, data, forward=forward)
To evaluate: tmg.make_eval_step(model, None, strategy, forward=forward).
Several optimizers: tmg.fit(model, data, step=tmg.chain_steps(first_step, second_step)).
What becomes of each line of a train_step: docs/own-steps.md, "Port a train_step"."""
_METRICS = "Give metrics to model.compile(metrics=[...]), or update them in a forward."
_PIPELINE = """A task of KerasHub preprocesses in its fit what a batch holds. Do so in the data:
    data = data.map(task.preprocessor)
    tmg.fit(task, data)"""
_FREEZE = "Freeze what is not trained: layer.trainable = False."
_INSTEAD = {
    "compute_metrics": _METRICS,
    "get_metrics_result": _METRICS,
    "predict_step": """Write what it computes as a model around this one:
    class Predictor(keras.Model):
        def __init__(self, model):
            super().__init__()
            self.model = model
        def call(self, x):
            return ...  # of self.model(x, training=False)
    with strategy.scope(): predictor = Predictor(model)
    tmg.predict(predictor, data)""",
    "losses": "Add a penalty of a weight as its regularizer, keras.layers.Dense(8, "
    "kernel_regularizer='l2'), and what depends on the batch by self.add_loss(value) in call.",
    "trainable_weights": _FREEZE,
    "trainable_variables": _FREEZE,
    "fit": "Call tmg.fit inside it.",
    "evaluate": "Call tmg.evaluate inside it.",
    "predict": "Call tmg.predict inside it.",
}
# Methods that Keras calls, and a step of this library does not.
_COMPILED = ("compute_loss", "compute_metrics", "get_metrics_result")
CALLED = {
    "fit": (
        *("make_train_function", "train_step", *_COMPILED),
        *("losses", "trainable_weights", "trainable_variables"),
    ),
    "evaluate": ("make_test_function", "test_step", *_COMPILED),
    "predict": ("make_predict_function", "predict_step"),
}


def refuse_own_methods(model: KerasModel, function: str, *methods: str) -> None:
    """Checks that a model replaces no method of Keras that ``function`` would pass over."""
    for name in methods or CALLED[function]:
        if replaces(model, name):
            advice = _INSTEAD.get(name, _FORWARD)
            if name in ("fit", "evaluate", "predict") and hasattr(model, "preprocess_samples"):
                advice = _PIPELINE
            raise LossError(
                f"The model replaces {name} of Keras, which tmg.{function} does not call: a "
                "replica has only a part of each batch.",
                f"{type(model).__name__}.{name}",
                f"{advice}\nOn one device write model.{function}(...).",
            )


def replaces(model: KerasModel, name: str) -> bool:
    """Returns whether a model has a method of its own in place of one of Keras."""
    here = vars(model).get(name)
    is_ours = getattr(here, "__module__", "").startswith("tfmultigpu.")
    of_class = getattr(type(model), name) is not getattr(keras.Model, name)
    return of_class or not (here is None or is_ours)


def around(loop: TrainingLoop | EvaluationLoop) -> Options:
    """Returns what the loop of Keras calls instead of its own functions, as attributes of a model.

    It would build what ``train_step`` of Keras needs, and read and reset metrics that nothing
    updates.
    """
    # Methods of one batch, in a callback, call the functions of the loop with data of Keras.
    functions = ("train", "test", "predict") if loop.mode == "train" else (loop.mode,)
    attributes = {
        "compile": _refuse_compile,
        "steps_per_execution": 1,
        "reset_metrics": loop.reset,
        "get_metrics_result": lambda: dict(loop.logs),
        **_compat.without_building(),
    }
    for function in functions:
        attributes[f"{function}_function"] = loop
    return attributes


def _refuse_compile(*_: object, **__: object) -> None:
    raise LossError(
        "compile in a callback takes away the functions that the loop of Keras is running.",
        "compile inside tmg.fit or tmg.evaluate",
        "Write two calls: tmg.fit(model, data, epochs=1); in the scope of the strategy "
        "model.compile(...); tmg.fit(model, data, initial_epoch=1, epochs=3). To freeze a layer or "
        "to set the learning rate, a callback needs no compile.",
    )


def in_one_thread(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Has a loop of Keras keep its model: the loop of another thread would mix its metrics.

    That one gets an error. It does not wait, which might be for ever: this loop may wait for it.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        model: KerasModel = args[0] if args else kwargs.get("model")
        if not isinstance(model, keras.Model):
            return function(*args, **kwargs)  # Which raises.
        lock = lock_of(model)
        if not lock.acquire(blocking=False):
            raise TfMultiGpuError(
                "Two threads cannot train or evaluate one model at a time: they would mix its "
                "metrics and weights.",
                f"{function.__name__} of model {model.name!r}, while fit or evaluate runs in "
                "another thread",
                "Wait for that one, thread.join(), or give each thread a model of its own; "
                "tmg.predict(model, x) may run meanwhile.",
            )
        try:
            return function(*args, **kwargs)
        finally:
            lock.release()

    return call


class OfLoop:
    """A model as the loop of Keras sees it, with attributes that this loop alone has.

    They are not set on the model, which other threads may use meanwhile.
    """

    def __init__(self, model: keras.Model, **attributes: object) -> None:
        vars(self).update(attributes, _model=model)

    def __getattr__(self, name: str) -> object:
        """Returns an attribute of the model."""
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Sets an attribute of the model, as ``stop_predicting``."""
        setattr(self._model, name, value)


def run_keras(
    model: KerasModel,
    name: str,
    feed: object,
    callbacks: keras.callbacks.CallbackList,
    *,
    of_loop: OfLoop | None = None,
    **kwargs: object,
) -> Nested:
    """Runs Keras' own ``fit``, ``evaluate`` or ``predict``.

    That is below ``keras.Model``, whose methods MLflow and others replace, and without the filter
    of tracebacks, which drops the causes of errors.
    """
    method = getattr(super(keras.Model, model), name)
    # Data of unknown length has ended: that is how it is told to Keras.
    ending = ignoring_warnings("Your input ran out of data; interrupting training")
    with ending, swapping_averages(callbacks.callbacks, getattr(model, "optimizer", None)):
        run = inspect.unwrap(method.__func__)
        return run(of_loop or model, feed, callbacks=callbacks, **kwargs)


def check_names(
    function: str, arguments: Mapping[str, object], known: Collection[str], otherwise: str = ""
) -> None:
    """Checks that a function knows arguments by their names; an error names similar ones."""
    compiled = inspect.signature(keras.Model.compile).parameters
    for name in arguments.keys() - set(known):
        similar = difflib.get_close_matches(name, known) or sorted(known)
        line = f"Write {' or '.join(similar)}.{otherwise}"
        if name in compiled:
            line = f"Write model.compile(..., {name}=...), in the scope of the strategy."
        raise TypeError(
            f"{function} has no argument {name!r}. Received: {name}={brief(arguments[name])}. "
            f"{line}"
        )


def as_method(model: KerasModel, name: str, function: Function, **more: object) -> Function:
    """Returns a function as a method of a model: with the arguments of Keras and ``more``."""
    reference = weakref.ref(model)
    signature = inspect.signature(getattr(keras.Model, name))
    _self, *parameters = signature.parameters.values()
    if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        parameters.pop()
    signature = signature.replace(parameters=parameters)

    def method(*args: object, **kwargs: object) -> Nested:
        of_fit = " Give arguments of tmg.fit to tmg.prepare(model, micro_batches=2)."
        check_names(f"model.{name}", kwargs, signature.parameters.keys(), of_fit)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        data, callbacks = given.pop("x"), given.pop("callbacks") or ()
        return function(reference(), data=data, callbacks=callbacks, **given, **more)

    method.__name__ = name
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method
