"""``prepare``: ``model.fit``, ``evaluate`` and ``predict`` of other people's code run ours."""

from __future__ import annotations

import inspect
from contextlib import ExitStack

import keras

from tfmultigpu.addons.loops.evaluation import evaluate
from tfmultigpu.addons.loops.methods import as_method, check_names, refuse_own_methods
from tfmultigpu.addons.loops.prediction import predict
from tfmultigpu.addons.loops.training import fit
from tfmultigpu.steps.make import StepOptions
from tfmultigpu.strategies.scopes import check_backend
from tfmultigpu.types import KerasModel, Options


def prepare(model: KerasModel, **options: object) -> ExitStack:
    """Makes ``model.fit``, ``evaluate`` and ``predict`` of one model object run ``tmg``'s.

    Use it for code that calls these methods itself: a tuner, a callback that calls
    ``self.model.evaluate``, a notebook. They take the arguments of Keras and return what Keras
    returns. Other models, also clones of this one, are not changed, nor is any class.

    Args:
        model: A Keras model.
        **options: Arguments of ``fit`` that Keras does not have, such as ``micro_batches``,
            ``clip_norm`` or ``forward``; ``verify`` applies to all three, ``logical_replicas`` to
            ``fit`` and ``evaluate``.

    Returns:
        An object that undoes this, by ``close()`` or at the end of a ``with`` block. The last
        preparation is undone first.

    Raises:
        LossError: The class of the model has replaced one of the methods, which would then not be
            called.
        TypeError: ``model`` is not a model, or an option is unknown.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> with tmg.prepare(model):
        ...     history = model.fit(np.ones((5, 2)), np.ones((5, 1)), verbose=0)
        >>> list(history.history)
        ['loss']
    """
    check_backend(model)
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"prepare takes a keras.Model. Received: {type(model).__name__}. Write "
            "tmg.prepare(model)."
        )
    known = {*inspect.signature(fit).parameters, *StepOptions.__annotations__}
    check_names("prepare", options, known, " Arguments of Keras are for model.fit(...).")
    refuse_own_methods(model, "fit", "fit", "evaluate", "predict")

    def given(*names: str) -> Options:
        return {name: options[name] for name in names if name in options}

    methods = {
        "fit": as_method(model, "fit", fit, **options),
        "evaluate": as_method(model, "evaluate", evaluate, **given("verify", "logical_replicas")),
        "predict": as_method(model, "predict", predict, **given("verify")),
    }
    attributes = model.__dict__  # Not by setattr, with which Keras would track them.
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)

    def remove() -> None:
        for name, method in methods.items():
            if attributes.get(name) is not method:
                continue
            del attributes[name]
            if name in before:
                attributes[name] = before[name]

    # No generator, which would undo all of it once nobody holds what is returned.
    undo = ExitStack()
    undo.callback(remove)
    return undo
