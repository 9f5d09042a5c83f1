"""Errors carry what code decides by, and importing them does not import TensorFlow."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import tensorflow as tf

from tfmultigpu import errors
from tfmultigpu.errors import MetricError, OutOfMemoryError, TfMultiGpuError, UnknownLengthError


def test_an_error_states_facts_that_its_class_documents() -> None:
    error = UnknownLengthError("no end")
    assert (error.infinite, error.fix) == (False, None)
    assert error.stating(infinite=True, fix="write this") is error
    assert (error.infinite, error.fix, str(error)) == (True, "write this", "no end")
    assert UnknownLengthError("another").infinite is False
    with pytest.raises(AttributeError, match="MetricError has no attribute 'infinite'"):
        MetricError("no sum").stating(infinite=True)


def test_facts_travel_with_the_error_to_another_process() -> None:
    sent = pickle.loads(pickle.dumps(UnknownLengthError("no end").stating(infinite=True)))
    assert (str(sent), sent.infinite) == ("no end", True)
    out = pickle.loads(pickle.dumps(OutOfMemoryError("GPU:0 is full")))
    assert (type(out), out.message) == (OutOfMemoryError, "GPU:0 is full")


def test_a_function_that_is_compiled_raises_the_class_itself() -> None:
    @tf.function
    def failing(x: tf.Tensor) -> tf.Tensor:
        raise MetricError("no sum")

    with pytest.raises(MetricError, match="no sum"):
        failing(tf.constant(1.0))


def test_out_of_memory_is_an_error_of_tensorflow_too() -> None:
    assert errors.OutOfMemoryError is OutOfMemoryError
    assert issubclass(OutOfMemoryError, tf.errors.ResourceExhaustedError)
    assert issubclass(OutOfMemoryError, TfMultiGpuError)
    assert OutOfMemoryError.__qualname__ == "OutOfMemoryError"
    with pytest.raises(AttributeError, match=r"'tfmultigpu\.errors' has no attribute 'Other'"):
        _ = errors.Other


def test_errors_and_clusters_do_not_import_tensorflow() -> None:
    code = (
        "import sys, tfmultigpu.errors, tfmultigpu.clusters.launcher; "
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
