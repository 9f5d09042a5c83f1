"""One check of whole numbers for the whole library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmultigpu.arguments import check_count


def test_whole_numbers_of_every_kind_become_an_int() -> None:
    kinds = (3, 3.0, np.float32(3), np.int8(3), np.uint64(3), np.array(3), tf.constant(3))
    for value in kinds:
        number = check_count("steps", value)
        assert (number, type(number)) == (3, int), repr(value)


def test_everything_else_is_a_type_error() -> None:
    others: list[Any] = [True, np.True_, 2.5, np.nan, "2", None, (1,), 1 + 0j]
    for value in others:
        with pytest.raises(TypeError, match=r"steps must be a whole number, at least 1\. Received"):
            check_count("steps", value)


def test_a_number_that_is_too_small_is_a_value_error() -> None:
    for least, value in ((1, 0), (0, -1), (4, 3)):
        with pytest.raises(ValueError, match=rf"at least {least}, or None\. Received: n={value}\."):
            check_count("n", value, least, other="None")
        assert check_count("n", least, least) == least
