"""Errors keep their type inside compiled functions; one check of whole numbers for all."""

from __future__ import annotations

import concurrent.futures
import copy
import multiprocessing
import pickle
import traceback
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


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_has_fields_and_joins_them(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("It broke.", "x=1", "Write x=2.")
    assert (error.what, error.received, error.write) == ("It broke.", "x=1", "Write x=2.")
    assert str(error) == "It broke. Received: x=1. Write x=2."
    shown = traceback.format_exception_only(error)
    assert shown == [f"tfmultigpu.errors.{name}: It broke. Received: x=1. Write x=2.\n"]


def test_empty_fields_are_left_out() -> None:
    def texts(*fields: str) -> tuple[str, str, str, str]:
        error = errors.DataError(*fields)
        return error.what, error.received, error.write, str(error)

    assert texts("It broke.") == ("It broke.", "", "", "It broke.")
    assert texts("It broke.", "x=1")[3] == "It broke. Received: x=1."
    assert texts("It broke.", "", "Write x=2.")[3] == "It broke. Write x=2."
    assert str(errors.TfMultiGpuError()) == ""  # type: ignore[call-arg]


def fails_in_another_process() -> None:
    raise errors.LossError("It broke.", "x=1", "Write x=2.")


def test_an_error_keeps_its_fields_in_copies_and_across_processes(
    subtests: pytest.Subtests,
) -> None:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        failure = pool.submit(fails_in_another_process).exception()
    for error in (failure, pickle.loads(pickle.dumps(failure)), copy.copy(failure)):
        with subtests.test(error=error):
            assert type(error) is errors.LossError
            assert error.args == ("It broke.", "x=1", "Write x=2.")
            assert str(error) == "It broke. Received: x=1. Write x=2."


def test_an_error_of_a_compiled_function_has_the_whole_text() -> None:
    @tf.function
    def failing(x: tf.Tensor) -> tf.Tensor:
        raise errors.LossError("It broke.", "x=1", "Write x=2.")

    with pytest.raises(errors.LossError, match=r"It broke\. Received: x=1\. Write x=2\.") as raised:
        failing(tf.constant(1.0))
    assert raised.value.what == str(raised.value)
    assert (raised.value.received, raised.value.write) == ("", "")


def test_the_length_of_endless_data() -> None:
    data = tmg.distribute_dataset(tf.data.Dataset.range(4).batch(2).repeat())
    assert data.cardinality() == tf.data.INFINITE_CARDINALITY
    with pytest.raises(TypeError, match="is infinite"):
        len(data)


def test_whole_numbers_of_every_kind_are_ints_and_all_else_is_an_error(
    subtests: pytest.Subtests,
) -> None:
    for value in (3, 3.0, np.float32(3), np.int8(3), np.uint64(3), np.array(3), tf.constant(3)):
        with subtests.test(value=value):
            number = check_count("steps", value)
            assert (number, type(number)) == (3, int), repr(value)
    others: list[Any] = [True, np.True_, 2.5, np.nan, "2", None, (1,), 1 + 0j]
    for value in others:
        with (
            subtests.test(value=value),
            pytest.raises(TypeError, match=r"steps must be a whole number, at least 1\. Received"),
        ):
            check_count("steps", value)
    for least, value in ((1, 0), (0, -1), (4, 3)):
        with subtests.test(least=least):
            with pytest.raises(
                ValueError, match=rf"at least {least}, or None\. Received: n={value}\."
            ):
                check_count("n", value, least, other="None")
            assert check_count("n", least, least) == least
