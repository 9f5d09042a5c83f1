"""One check of whole numbers for the whole library."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmultigpu.arguments import check_count, count_option


def test_whole_numbers_of_every_kind_become_an_int() -> None:
    for value in (
        *(3, 3.0, np.float32(3), np.int8(3), np.uint64(3), np.array(3)),
        tf.constant(3),
    ):
        found = check_count("steps", value)
        assert (found, type(found)) == (3, int), repr(value)


def test_everything_else_is_a_type_error() -> None:
    others: list[Any] = [True, np.True_, 2.5, np.nan, "2", None, (1,), 1 + 0j]
    for value in others:
        with pytest.raises(TypeError) as caught:
            check_count("steps", value)
        assert str(caught.value) == (
            f"steps must be a whole number, at least 1. Received: steps={value!r}."
        )


def test_a_number_that_is_too_small_is_a_value_error() -> None:
    for least, value in ((1, 0), (0, -1), (4, 3)):
        text = rf"at least {least}, or None\. Received: n={value}\.$"
        with pytest.raises(ValueError, match=text):
            check_count("n", value, least, other="None")
        assert check_count("n", least, least) == least


def test_options_of_a_command_line_are_whole_numbers() -> None:
    assert count_option(0)("0") == 0
    for text in ("-1", "1.5", "many", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"at least 1. Received: '{text}'"):
            count_option()(text)
    with pytest.raises(argparse.ArgumentTypeError, match=r"at least 2 and at most 16\."):
        count_option(2, 16)("17")
