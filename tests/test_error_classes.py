"""Errors keep their type inside compiled functions."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu import errors

ERRORS = [name for name in vars(errors) if name.endswith("Error")]


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_in_a_compiled_function_keeps_its_type(name: str) -> None:
    kind = getattr(errors, name)

    @tf.function
    def failing(x: tf.Tensor) -> tf.Tensor:
        raise kind("no sum")

    with pytest.raises(errors.TfMultiGpuError, match="no sum") as raised:
        failing(tf.constant(1.0))
    assert type(raised.value) is kind


def test_the_length_of_endless_data() -> None:
    data = tmg.distribute_dataset(tf.data.Dataset.range(4).batch(2).repeat())
    assert data.cardinality() == tf.data.INFINITE_CARDINALITY
    with pytest.raises(TypeError, match="is infinite"):
        len(data)
