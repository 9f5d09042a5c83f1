"""Errors keep their type inside compiled functions; one check of whole numbers for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu import errors
from tfmultigpu.arguments import check_count

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


def test_whole_numbers_of_every_kind_are_ints_and_all_else_is_an_error() -> None:
    for value in (3, 3.0, np.float32(3), np.int8(3), np.uint64(3), np.array(3), tf.constant(3)):
        number = check_count("steps", value)
        assert (number, type(number)) == (3, int), repr(value)
    others: list[Any] = [True, np.True_, 2.5, np.nan, "2", None, (1,), 1 + 0j]
    for value in others:
        with pytest.raises(TypeError, match=r"steps must be a whole number, at least 1\. Received"):
            check_count("steps", value)
    for least, value in ((1, 0), (0, -1), (4, 3)):
        with pytest.raises(ValueError, match=rf"at least {least}, or None\. Received: n={value}\."):
            check_count("n", value, least, other="None")
        assert check_count("n", least, least) == least
