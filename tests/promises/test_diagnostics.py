"""``doctor`` and ``explain`` find the mistakes they exist for; ``find_batch_size`` what fits."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings, strategies as st
from law.pair import strategy_of

import tfmultigpu as tmg


def severities(report: Any) -> list[str]:
    return [finding.severity for finding in report.findings]


def model_in(strategy: tf.distribute.Strategy) -> tuple[Any, Any]:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def batches(size: int) -> Any:
    rows = np.ones((24, 4), "float32"), np.ones((24, 2), "float32")
    return tf.data.Dataset.from_tensor_slices(rows).batch(size).prefetch(1)


def explained(model: Any, optimizer: Any, size: int, replicas: int) -> Any:
    return tmg.explain(model, optimizer, batches(size), strategy_of(replicas))


# Fails if a program without faults is accused of one.
@pytest.mark.parametrize("replicas", [2, 3])
def test_nothing_is_found_if_all_is_in_order(replicas: int) -> None:
    model, optimizer = model_in(strategy_of(replicas))
    report = tmg.explain(model, optimizer, strategy=strategy_of(replicas))
    assert not {"error", "warning"} & set(severities(report)), str(report)
    assert str(replicas) in str(report)
    # How fast the data is read may be warned of, on a busy machine.
    assert "error" not in severities(explained(model, optimizer, 6, replicas))


# Fails if the mistake for which only one device is used is not the first that is said, with the
# object at fault and the line to write.
def test_a_model_or_an_optimizer_outside_the_scope_is_found() -> None:
    inside, outside = model_in(strategy_of(2)), model_in(strategy_of(1))
    for pair, said in [((outside[0], outside[1]), "model"), ((inside[0], outside[1]), "optimizer")]:
        report = explained(*pair, size=6, replicas=2)
        assert severities(report)[0] == "error"
        assert said in str(report.findings[0])
        assert "scope" in str(report.findings[0])


def distilled(scope: Any, rows: int) -> Any:
    """Returns a step that has run, with a teacher that was made in a scope."""
    with scope:
        teacher = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        temperature = tf.Variable(2.0)
    model, optimizer = model_in(strategy_of(3))

    def forward(model: Any, x: Any, training: bool) -> tmg.LossSum:
        gap = model(x, training=training) - teacher(x) / temperature
        return tmg.LossSum(tf.reduce_sum(gap**2), tf.size(gap))

    step = tmg.make_train_step(
        model, optimizer, None, strategy_of(3), forward=forward, micro_batches=2, verify=False
    )
    step(np.ones((rows, 4), "float32"))
    return step


# Fails if a teacher, or a variable, that every replica copies from one device in each step is not
# named, with its bytes and the line to write; or if one that has a copy on each device is.
def test_what_each_replica_copies_in_each_step_is_named() -> None:
    def copied(scope: Any) -> list[Any]:
        # Where GPUs are hidden, that is told as well.
        found = tmg.explain(distilled(scope, 7)).findings
        return [one for one in found if one.code == "copied-each-step"]

    found = copied(contextlib.nullcontext())
    assert len(found) == 1
    finding = found[0]
    assert f"{4 * (4 * 2 + 2 + 1)} bytes" in finding.what
    assert "dense" in finding.what
    assert "CPU:0" in finding.what or "GPU:0" in finding.what
    assert "with strategy.scope()" in finding.change
    assert copied(strategy_of(3).scope()) == []


# Fails if one replica is called several.
def test_a_strategy_of_one_replica_is_found() -> None:
    model, optimizer = model_in(strategy_of(1))
    report = tmg.explain(model, optimizer, strategy=strategy_of(1))
    assert "create_strategy" in str(report)
    assert severities(report)


# Fails if replicas that all compute the same rows, or none, are not told.
def test_a_batch_smaller_than_the_replicas_is_found() -> None:
    model = model_in(strategy_of(3))
    small, uneven = (explained(*model, size=size, replicas=3) for size in (2, 4))
    found = [str(one) for one in small.findings if one.severity != "note"]
    known = [re.sub(r"\d+", "", str(one)) for one in uneven.findings]
    found = [one for one in found if re.sub(r"\d+", "", one) not in known]
    assert any("batch" in one and "2" in one and "3" in one for one in found), str(small)


# Fails if explaining trains, or reads the data away.
def test_explaining_changes_nothing() -> None:
    model, optimizer = model_in(strategy_of(2))
    before = model.get_weights()
    explained(model, optimizer, size=6, replicas=2)
    assert int(optimizer.iterations.numpy()) == 0
    np.testing.assert_equal(before, model.get_weights())


# Fails if the doctor misses what the environment hides, or shows addresses in what is pasted.
def test_the_doctor_names_what_is_wrong_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["secret.example:1"]}')
    text = str(tmg.doctor())
    assert "CUDA_VISIBLE_DEVICES" in text
    assert "TF_CONFIG" in text
    assert "secret.example" not in text
    assert tf.__version__ in text
    assert keras.__version__ in text
    assert "error" in severities(tmg.doctor())


def fitting(largest: int, tried: list[int]) -> Callable[[int], None]:
    def try_batch(size: int) -> None:
        tried.append(size)
        if size > largest:
            raise tf.errors.ResourceExhaustedError(None, None, f"OOM with {size} rows")

    return try_batch


# Fails if the result does not fit, is not the largest that does, or lies above the limit; or if a
# size is tried twice or the search goes on by single rows.
@settings(max_examples=8)
@example(largest=5000, start=3, limit=100)
@given(
    largest=st.integers(1, 5000), start=st.integers(1, 300), limit=st.none() | st.integers(1, 6000)
)
def test_the_largest_batch_that_fits(largest: int, start: int, limit: int | None) -> None:
    gc.freeze()  # Each failed try collects garbage: among what other tests left, half a second.
    tried: list[int] = []
    found = tmg.find_batch_size(fitting(largest, tried), start=start, limit=limit)
    assert found == min(largest, limit or largest)
    assert found in tried
    assert len(tried) <= 40
    assert limit is None or max(tried) <= limit


# Fails if another error is taken for a lack of memory, or none at all for a size of zero.
def test_other_errors_and_no_memory_at_all_are_errors() -> None:
    def broken(size: int) -> None:
        raise KeyError(size)

    with pytest.raises(KeyError):
        tmg.find_batch_size(broken)
    with pytest.raises((tmg.errors.TfMultiGpuError, tf.errors.ResourceExhaustedError), match="1"):
        tmg.find_batch_size(fitting(0, []))
