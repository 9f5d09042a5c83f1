"""Sample weights and masks are counted over all replicas, regularisation once: NumPy by hand."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st
from law.model import FLOAT, Batch
from law.pair import LOGS, dataset_of, strategy_of

import tfmultigpu as tmg

RATE, L2, TOKENS = 0.125, 0.0625, 3  # The first two are exact in float32, as Keras keeps them.
_random = np.random.default_rng(4)
TABLE = _random.normal(size=(7, 2))
KERNEL = _random.normal(size=(2, 1))
IDS = _random.integers(1, 7, (40, TOKENS)).astype("int32")
Y = _random.normal(size=(40, TOKENS, 1))
WEIGHTS = st.sampled_from([0.0, 0.0, 1e-3, 0.5, 1.0, 4.0, 1e3])


class Case(NamedTuple):
    replicas: int
    reduction: str
    weighted: bool = True
    added: bool = False  # Whether a forward adds the weights of two losses, in micro-batches.

    def __str__(self) -> str:
        return (
            f"N={self.replicas}, {self.reduction}"
            + ", masks alone" * (not self.weighted)
            + ", twice" * self.added
        )


# Fails if a replica divides by its own weight, a weight or mask counts in the sum only, a hidden
# token counts as an element, or a weighted row counts once for each copy of a small batch.
CASES = [
    Case(1, "mean_with_sample_weight"),
    Case(2, "sum_over_batch_size"),
    Case(3, "mean_with_sample_weight"),
    Case(3, "sum"),
    Case(3, "sum", added=True),
    Case(2, "mean_with_sample_weight", weighted=False),
]


def by_hand(
    reduction: str, y: Any, predicted: Any, kept: Any, weights: Any
) -> tuple[float, float, np.ndarray]:
    """Returns the sum, the weight, and the gradient of their quotient by the predictions."""
    counted = kept * weights
    total = np.sum(counted * np.square(predicted - y)[..., 0])
    weight = {
        "sum": 1.0,
        "sum_over_batch_size": np.sum(kept),
        "mean_with_sample_weight": np.sum(counted),
    }[reduction]
    slope = counted[..., None] * 2 * (predicted - y)
    return total, weight, slope / weight if weight else slope * 0


class Trained:
    """A masked Embedding and a regularised Dense layer, trained by the step and by hand."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.strategy = strategy_of(case.replicas)
        # What is not divided by the weights would diverge by those of a thousand.
        self.rate = RATE if case.reduction == "mean_with_sample_weight" else RATE / 1024
        penalty = keras.regularizers.L2(L2)
        with self.strategy.scope():
            self.model = keras.Sequential(
                [
                    keras.Input((TOKENS,), dtype="int32"),
                    keras.layers.Embedding(7, 2, mask_zero=True, **FLOAT),
                    keras.layers.Dense(1, use_bias=False, kernel_regularizer=penalty, **FLOAT),
                ]
            )
            optimizer = keras.optimizers.SGD(self.rate)
            loss = keras.losses.MeanSquaredError(reduction=case.reduction, **FLOAT)

        def twice(model: Any, batch: Any, training: bool) -> Any:
            total, weight = tmg.loss_sum(
                loss, batch[1], model(batch[0], training=training), batch[2]
            )
            return tmg.LossSum(total + total, weight + weight)

        options = (
            {"loss": None, "forward": twice, "micro_batches": 2} if case.added else {"loss": loss}
        )
        self.step = tmg.make_train_step(self.model, optimizer, strategy=self.strategy, **options)
        self.batches: list[Batch] = []
        like = self.batch(0, 1, [1.0])
        source = dataset_of(lambda: self.batches, like)
        self.data = tmg.distribute_dataset(source, self.strategy)

    def batch(self, start: int, size: int, weights: Any, hidden: Any = ()) -> Batch:
        ids = IDS[start : start + size].copy()
        for row in range(size):
            ids[row, [token for token in hidden if (row + token) % 2]] = 0
        y = Y[start : start + size]
        values = [weights[i % len(weights)] for i in range(ids.size)]
        weight = np.reshape(values, ids.shape)
        return (ids, y, weight) if self.case.weighted else (ids, y)

    def hold(self, batches: list[Batch]) -> None:
        """Holds the logs of each batch, and the weights after it, to what NumPy says."""
        table, kernel = TABLE.copy(), KERNEL.copy()
        self.model.set_weights([table, kernel])
        self.batches = batches
        for shards, batch in zip(self.data, batches, strict=True):
            ids, y, weights = (*batch, 1.0)[:3]
            logs = self.step(shards)
            total, weight, slope = by_hand(
                self.case.reduction, y, table[ids] @ kernel, ids != 0, weights
            )
            loss = (total / weight if weight else 0.0) + L2 * np.sum(np.square(kernel))
            np.testing.assert_allclose(logs["loss"], loss, **LOGS)
            np.testing.assert_allclose(logs["weight"], weight * (1 + self.case.added), **LOGS)
            by_table = np.zeros_like(table)
            np.add.at(by_table, ids, slope @ kernel.T)
            by_kernel = np.einsum("bti,bto->io", table[ids], slope) + 2 * L2 * kernel
            norm = np.sqrt(np.sum(np.square(by_table)) + np.sum(np.square(by_kernel)))
            np.testing.assert_allclose(logs["gradient_norm"], norm, **LOGS)
            table, kernel = table - self.rate * by_table, kernel - self.rate * by_kernel
            for actual, expected in zip(self.model.get_weights(), (table, kernel), strict=True):
                np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


trained = functools.cache(Trained)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_divided_by_the_weight_of_the_global_batch(case: Case) -> None:
    @settings(max_examples=8)
    @given(
        sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
        weights=st.lists(WEIGHTS, min_size=1, max_size=7),
        hidden=st.sets(st.integers(0, TOKENS - 1), max_size=TOKENS - 1),
    )
    def hold(sizes: list[int], weights: list[float], hidden: set[int]) -> None:
        starts = np.cumsum([0, *sizes])
        pairs = zip(starts, sizes, strict=False)
        trained(case).hold([trained(case).batch(s, n, weights, hidden) for s, n in pairs])

    sizes = [(0, 7), (7, 1), (8, 2), (10, 5)]
    trained(case).hold([trained(case).batch(*one, [0.0, 2.0, 0.5, 0.0], [1]) for one in sizes])
    hold()


# Fails if a batch without weight is skipped, gives NaN, or regularises once for each replica.
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.reduction == "mean_with_sample_weight"], ids=str
)
def test_a_batch_without_weight_still_regularises(case: Case) -> None:
    run = trained(case)
    batches = [run.batch(0, size, [0.0]) for size in (5, 1)]
    if not case.weighted:  # Every token hidden instead.
        batches = [(np.zeros_like(ids), y) for ids, y in batches]
    run.hold([*batches, run.batch(6, 4, [1.0]), batches[0]])
    run.hold(batches)
    np.testing.assert_array_equal(run.model.get_weights()[0], TABLE)
    np.testing.assert_allclose(
        run.model.get_weights()[1], KERNEL * (1 - 2 * RATE * L2) ** 2, rtol=1e-9
    )


# Fails if loss_sum divides, forgets a weight or a mask of its shard, or takes a mask's token as an
# element; or if global_mean is a mean of the means of the replicas.
@pytest.mark.parametrize("replicas", [2, 3])
def test_sums_of_shards_add_up_to_those_of_the_batch(replicas: int) -> None:
    strategy = strategy_of(replicas)
    losses = {
        name: keras.losses.MeanSquaredError(reduction=name, **FLOAT)
        for name in ("sum_over_batch_size", "mean_with_sample_weight", "sum")
    }
    batches = [
        (Y[a:b], Y[a + 1 : b + 1], IDS[a:b] % 3 != 0, np.abs(Y[a:b, :, 0]) * (IDS[a:b] > 2))
        for a, b in ((0, 7), (7, 12), (12, 14), (14, 15))
    ]

    def replica(shard: Any) -> Any:
        y, predicted, kept, weights = shard
        predicted = tf.identity(predicted)
        predicted._keras_mask = kept
        found = {}
        for name, loss in losses.items():
            one = tmg.loss_sum(loss, y, predicted, weights)
            found[name] = (one.sum, one.weight, tmg.global_mean(one))
        return found

    @tf.function
    def run(shard: Any) -> Any:
        return strategy.run(replica, args=(shard,))

    data = tmg.distribute_dataset(dataset_of(lambda: batches, batches[0]), strategy)
    for batch, shards in zip(batches, data, strict=True):
        found = run(shards)
        for name in losses:
            total, weight, _ = by_hand(name, *batch)
            local = [strategy.experimental_local_results(value) for value in found[name]]
            sums, weights, means = np.asarray([[float(one) for one in part] for part in local])
            mean = total / weight if weight else 0.0
            # Under a batch of fewer rows than replicas shards may be copies: of these the
            # quotient is that of the batch, and of a sum each replica holds a part alone.
            if name != "sum" and len(batch[0]) >= replicas:
                np.testing.assert_allclose(sums.sum(), total, **LOGS)
                np.testing.assert_allclose(weights.sum(), weight, **LOGS)
            if name != "sum" or len(batch[0]) >= replicas:
                np.testing.assert_allclose(means, mean, **LOGS)
