"""Check of the features that a dataset yields against the inputs of a model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmultigpu.addons.diagnostics.input_checks import Input
from tfmultigpu.addons.diagnostics.report import Finding
from tfmultigpu.data.batch_format import unpack_batch

__all__ = ["feature_findings"]


def feature_findings(seen: Input, model: Any) -> Iterator[Finding]:
    """Reports a built model that does not accept the features of a batch; computes nothing."""
    batch = seen.spec if seen.batch is None else _spec_of(seen.batch)
    if batch is None or not model.built:
        return
    features = unpack_batch(batch)[0]
    if any(one.shape.rank is None for one in tf.nest.flatten(features)):
        return
    problem = _call_problem(model, features)
    if problem is None:
        return
    takes = _input_shapes(model)
    yield Finding(
        # A custom step may unpack a batch that is not a tuple.
        "error" if isinstance(batch, tuple) else "warning",
        "features-do-not-fit",
        f"The model does not take the features of a batch: they are {_shapes(features)}"
        f"{'' if takes is None else f', and it takes {takes}'}.",
        f"Training fails at the first batch: {problem}",
        "dataset.map(lambda x, y: (..., y)), to features of these shapes and names; or "
        "make_train_step(..., forward=f), if f unpacks the batch",
    )


def _call_problem(model: Any, features: Any) -> str | None:
    """Returns the error of a call with these features, in a sentence; None without an error."""
    call = tf.function(lambda x: model(x, training=False), autograph=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call.get_concrete_function(features)
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        tf.errors.OpError,
    ) as error:
        return f"{type(error).__name__}: {_sentence(str(error))}"
    return None


def _sentence(text: str) -> str:
    # Keras prints the message in bold, between the place of the error and all arguments.
    bold = re.search(r"\x1b\[1m(.*?)\x1b\[0m", text.replace("\\x1b", "\x1b"), re.DOTALL)
    return " ".join((bold.group(1) if bold else text).split())[:300]


def _spec_of(batch: Any) -> Any:
    """Returns the type specs of a batch, with any number of examples."""

    def any_batch_size(spec: Any) -> Any:
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
            return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
        return spec

    return tf.nest.map_structure(lambda leaf: any_batch_size(tf.type_spec_from_value(leaf)), batch)


def _input_shapes(model: Any) -> Any:
    """Returns the input shapes of a functional model; None for other models."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    if len(inputs) == 1:
        return tuple(inputs[0].shape)
    return {one.name: tuple(one.shape) for one in inputs}


def _shapes(features: Any) -> Any:
    return tf.nest.map_structure(lambda one: tuple(one.shape), features)
