"""Whether a model takes what a dataset yields."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.diagnostics.input_checks import Input
from tfmultigpu.diagnostics.report import Finding

__all__ = ["feature_findings"]


def feature_findings(seen: Input, model: Any) -> Iterator[Finding]:
    """Says where a built model cannot take the features of a batch; computes nothing."""
    batch = seen.spec if seen.batch is None else _spec_of(seen.batch)
    if batch is None or not model.built:
        return
    features = unpack_batch(batch)[0]
    if any(one.shape.rank is None for one in tf.nest.flatten(features)):
        return
    said = _says(model, features)
    if said is None:
        return
    takes = _taken_by(model)
    yield Finding(
        # What is no pair of features and labels may be for a step that takes it apart by itself.
        "error" if isinstance(batch, tuple) else "warning",
        "features-do-not-fit",
        f"The model does not take the features of a batch: they are {_shapes(features)}"
        f"{'' if takes is None else f', and it takes {takes}'}.",
        f"Training fails at the first batch: {said}",
        "dataset.map(lambda x, y: (..., y)), to features of these shapes and names; or "
        "make_train_step(..., forward=f), where f takes a batch apart",
    )


def _says(model: Any, features: Any) -> str | None:
    """What a model says to such features, in a sentence; None where it takes them."""
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
    # Keras puts what it has to say in bold, between where it happened and all arguments.
    bold = re.search(r"\x1b\[1m(.*?)\x1b\[0m", text.replace("\\x1b", "\x1b"), re.DOTALL)
    return " ".join((bold.group(1) if bold else text).split())[:300]


def _spec_of(batch: Any) -> Any:
    """The types of a batch, with any number of rows."""

    def any_rows(spec: Any) -> Any:
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
            return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
        return spec

    return tf.nest.map_structure(lambda leaf: any_rows(tf.type_spec_from_value(leaf)), batch)


def _taken_by(model: Any) -> Any:
    """The shapes a model was built for; None for one that does not say."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    if len(inputs) == 1:
        return tuple(inputs[0].shape)
    return {one.name: tuple(one.shape) for one in inputs}


def _shapes(features: Any) -> Any:
    return tf.nest.map_structure(lambda one: tuple(one.shape), features)
