"""The format of a batch: its parts, its tensors, their rows and their type specs."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from each import each

from tfmultigpu.data.batch_format import (
    any_rows,
    as_data_error,
    check_rows_agree,
    count_rows,
    tensors_of,
    with_dependencies,
)
from tfmultigpu.errors import DataError

DENSE = tf.zeros([5, 2])
RAGGED = tf.RaggedTensor.from_row_lengths(tf.range(6), tf.constant([2, 0, 1, 3, 0], tf.int32))
SPARSE = tf.sparse.from_dense(tf.eye(5))
LEAVES = (DENSE, RAGGED, SPARSE)


@each(
    ("leaf", "expected"),
    [
        (DENSE, tf.TensorSpec([None, 2])),
        (tf.constant(3), tf.TensorSpec([], tf.int32)),
        (RAGGED, tf.RaggedTensorSpec([None, None], tf.int32, 1, tf.int32)),
        (SPARSE, tf.SparseTensorSpec([None, 5])),
    ],
)
def test_a_tensor_and_its_spec_have_the_same_spec_of_any_rows(leaf: Any, expected: Any) -> None:
    assert any_rows(leaf) == expected
    assert any_rows(tf.type_spec_from_value(leaf)) == expected


def test_none_has_no_spec() -> None:
    assert any_rows(None) is None


def test_the_tensors_of_a_batch() -> None:
    batch = {"b": (RAGGED, None), "a": DENSE}
    first, second = tensors_of(batch)
    assert first is DENSE
    assert second is RAGGED
    assert tensors_of((None, {})) == []


def test_a_batch_that_waits_for_operations_is_the_same_batch() -> None:
    done = tf.Variable(0)

    @tf.function
    def wait(*batch: Any) -> Any:
        return with_dependencies([done.assign_add(1)], (batch, None))

    (dense, ragged, sparse), nothing = wait(*LEAVES)
    assert int(done) == 1
    assert nothing is None
    assert dense.shape == DENSE.shape
    assert ragged.to_list() == RAGGED.to_list()
    assert tf.sparse.to_dense(sparse).numpy().tolist() == tf.eye(5).numpy().tolist()


def test_count_rows_reads_the_first_tensor() -> None:
    for leaf in LEAVES:
        count = count_rows((None, leaf, tf.zeros([3])))
        assert count.dtype == tf.int64
        assert int(count) == 5


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(DataError, match=r"The batch holds no tensors\. Received: \(None, \{\}\)\."):
        count_rows((None, {}))


def failure(batch: tuple, *, traced: bool) -> Exception:
    def check(*parts: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(check_rows_agree(parts)):
            return tf.constant(0)

    specs = [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in batch]
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        (tf.function(check, input_signature=specs) if traced else check)(*batch)
    return as_data_error(caught.value)


@each("traced", [False, True])
def test_tensors_that_differ_in_rows_are_named_by_their_counts(traced: bool) -> None:
    error = failure((tf.zeros([10, 2]), tf.zeros([5]), tf.zeros([5])), traced=traced)
    assert isinstance(error, DataError)
    assert str(error) == (
        "The tensors of a batch differ in their number of rows (their first axis), so features "
        "and labels would be paired wrongly. Make batches of single examples, dataset.batch(n), or "
        "check what comes before .batch(). If each example has k rows of another kind, give them "
        "an axis of their own: tf.reshape(u, [rows, k, ...]). Received: rows 10, 5, 5."
    )


@each("traced", [False, True])
def test_a_batch_without_rows_says_how_to_drop_it(traced: bool) -> None:
    error = failure((tf.zeros([0, 2]), tf.zeros([0])), traced=traced)
    assert isinstance(error, DataError)
    assert str(error) == (
        "A batch has no rows. A replica cannot train on it. Drop empty batches: "
        "dataset.filter(lambda x, y: tf.shape(x)[0] > 0)."
    )


def test_other_errors_stay_as_they_are() -> None:
    error = tf.errors.InvalidArgumentError(None, None, "Incompatible shapes: [2] vs. [3]")
    assert as_data_error(error) is error


def test_rows_known_to_agree_cost_no_operation() -> None:
    @tf.function
    def checks(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.constant(len(check_rows_agree((x, y))))

    assert int(checks(tf.zeros([4, 2]), tf.zeros([4]))) == 0
