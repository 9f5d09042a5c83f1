"""Methods of Keras that a model replaces, and what to write for replicas instead of them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmultigpu.addons.loops.methods import is_ours
from tfmultigpu.errors import LossError
from tfmultigpu.strategies.topology import describe

# Methods that Keras calls in an evaluation.
OWN_METRICS = ("compute_metrics", "get_metrics_result")
EVALUATION = ("test_step", *OWN_METRICS, "compute_loss")

_FORWARD = """Write its loss as a forward, with one value for each row:
    def forward(model, batch, training):
        x, y = batch
        values = ...  # of model(x, training=training) and y
        return tmg.LossSum(tf.reduce_sum(values), tf.size(values))  # , {"name": (sum, weight)}
    model.compile(optimizer=...); tmg.fit(model, data, forward=forward)
To evaluate: tmg.make_eval_step(model, None, strategy, forward=forward).
Several optimizers: tmg.fit(model, data, step=tmg.chain_steps(first_step, second_step))."""
_METRICS = "Give metrics to model.compile(metrics=[...]), or values from a forward."
_INSTEAD = dict.fromkeys(OWN_METRICS, _METRICS)
_INSTEAD["predict_step"] = "Move what it computes to the call method of the model."


def own_methods(model: Any, *names: str) -> list[str]:
    """Returns the methods of Keras among ``names`` that a model replaces."""
    import keras

    return [
        name
        for name in names
        if (name in vars(model) and not is_ours(vars(model)[name]))
        or getattr(type(model), name) is not getattr(keras.Model, name)
    ]


def check_no_loop(model: Any, purpose: str) -> None:
    """Checks that a model does not replace what the loop of Keras calls."""
    name = f"make_{purpose}_function"
    if own_methods(model, name):
        raise LossError(
            f"The model replaces {name} of Keras, which makes what its loop calls. This library "
            f"calls its own step there, so it would be passed over. Received: "
            f"{type(model).__name__}.{name}. Write what it does as a {purpose}_step or a callback."
        )


def refused(model: Any, method: str, strategy: tf.distribute.Strategy, function: str) -> LossError:
    """Returns the error for a method of a model that cannot run on several replicas."""
    own = f"{type(model).__name__}.{method}"
    return LossError(
        f"The model replaces {method} of Keras. It would run on each replica alone, so its result "
        f"would depend on how the batch was cut. Received: {own}, and {describe(strategy)}. "
        f"{_INSTEAD.get(method, _FORWARD)}\nOn one device {function} runs {own} as Keras does."
    )
