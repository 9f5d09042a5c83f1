"""Random draws in steps: batches that others cut, XLA, generators beside the model.

Layers are in tests/promises/test_draws.py, functions in test_draw_rows.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut

import tfmultigpu as tmg
from tfmultigpu.steps.draws import Draws

layers, draw = keras.layers, keras.random
_random = np.random.default_rng(8)
X = _random.normal(size=(40, 6)).astype("float32")
Y = _random.integers(0, 3, 40)


def noisy() -> keras.Model:
    inner = [layers.Dense(8, "tanh"), layers.Dropout(0.4, seed=3), layers.Dense(8, "tanh")]
    inner += [layers.GaussianNoise(0.3, seed=4), layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *inner])


def sgd() -> Any:
    return keras.optimizers.SGD(0.1)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# Fails if draws are for other rows of a batch that TensorFlow cut, or whose number of rows is known
# while tracing.
def test_however_a_batch_is_cut() -> None:
    run = Replicated(2, noisy, sgd, LOSS, verify=False)
    even = cut((X, Y), (8, 8))
    truth = ByHand(noisy, sgd, LOSS).train(even)
    whole = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8, drop_remainder=True)
    assert whole.element_spec[0].shape[0] == 8
    assert_same(run.train(run.strategy.experimental_distribute_dataset(whole)), truth)
    run.reset()
    iterator = iter(tmg.distribute_dataset(whole, run.strategy))
    assert_same(run.result([float(run.step.run(iterator, 1)["loss"]) for _ in even]), truth)


@pytest.mark.slow
def test_draws_of_a_step_compiled_by_xla_are_those_of_one_device_compiled_by_it() -> None:
    """XLA's numbers are others than those without, on one device too."""
    # Few, because XLA compiles for each number of rows; even, because it pairs normal numbers so.
    batches = cut((X, Y), (8, 1))
    truth = Replicated(1, noisy, sgd, LOSS, jit_compile=True).train(batches)
    without = ByHand(noisy, sgd, LOSS).train(batches)
    assert np.abs(truth.weights[0] - without.weights[0]).max() > 1e-3
    run = Replicated(2, noisy, sgd, LOSS, jit_compile=True, micro_batches=2)
    assert_same(run.train(batches), truth)


# That one of the scope is drawn from as on one device is in parity/programs.py. Fails if one that
# is no state of all replicas is drawn from in silence.
def test_generators_made_outside_the_scope_or_at_each_call_are_refused() -> None:
    outside = draw.SeedGenerator(1, name="beside")

    def step(replicas: int, seed: Callable[[], Any], **options: Any) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            x = batch[0] + draw.normal(keras.ops.shape(batch[0]), seed=seed())
            return tmg.loss_sum(LOSS, batch[1], model(x, training=training))

        return Replicated(replicas, noisy, sgd, None, forward=forward, **options).step

    batch = X[:7], Y[:7]
    assert np.isfinite(float(step(1, lambda: outside)(batch)["loss"]))
    with pytest.raises(tmg.ScopeError, match=r"(?s)'beside', .* 2 replica.*SeedGenerator\("):
        step(2, lambda: outside)(batch)
    with pytest.raises(tmg.TfMultiGpuError, match=r"something else each time.*in the scope"):
        step(2, lambda: draw.SeedGenerator(1), micro_batches=2)(batch)


# Fails if draws cost anything where one replica has all rows.
def test_one_replica_without_micro_batches_draws_as_keras_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def operations() -> Counter[str]:
        run = Replicated(1, noisy, sgd, LOSS)
        run.step((X[:4], Y[:4]))  # Everything is built.
        spec = [tf.TensorSpec([None, 6]), tf.TensorSpec([None], tf.int64)]
        step = tf.function(lambda x, y: run.step((x, y)), input_signature=spec, autograph=False)
        graph = step.get_concrete_function().graph.as_graph_def()
        nodes = [graph.node, *[function.node_def for function in graph.library.function]]
        return Counter(node.op for some in nodes for node in some)

    with_us = operations()
    monkeypatch.setattr(Draws, "around_model", lambda *_: nullcontext())
    assert with_us == operations()
