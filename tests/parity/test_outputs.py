"""Several outputs, each divided by a weight of its own, over many steps in one call."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import plain, strategy_of

import tfmultigpu as tmg

SIZES = (5, 2, 9, 1, 6, 1)
ROWS = sum(SIZES)
FACTORS = {"kind": 2.0, "size": 0.25}

_random = np.random.default_rng(31)
LENGTHS = _random.integers(1, 5, (ROWS, 1))
LENGTHS[:5] = 4  # The first batch is long and the second short, so that weights by row are wrong.
LENGTHS[5:7] = 1
TOKENS = np.where(np.arange(4) < LENGTHS, _random.integers(1, 9, (ROWS, 4)), 0)
KIND = _random.integers(0, 3, (ROWS, 4))
SIZE = _random.normal(size=(ROWS, 4, 1)).astype("float32") + 3.0 * (LENGTHS[:, :, None] == 1)
SIZE = SIZE.astype("float32")
KIND_WEIGHT = _random.uniform(0.1, 3.0, (ROWS, 4)).astype("float32")
SIZE_WEIGHT = _random.uniform(0.1, 3.0, (ROWS, 4)).astype("float32")
SIZE_WEIGHT[7:16] = 0.0  # The whole third batch.
VALID = TOKENS > 0


class MeanLength(keras.layers.Layer):
    """Adds a loss that is a mean over the rows."""

    def call(self, tokens):
        length = keras.ops.sum(keras.ops.cast(tokens > 0, "float32"), axis=-1)
        self.add_loss(0.1 * keras.ops.mean(length))
        return tokens


def two_heads() -> keras.Model:
    tokens = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Embedding(9, 5, mask_zero=True)(MeanLength()(tokens))
    kind = keras.layers.Dense(3, "softmax", name="kind", kernel_regularizer="l2")(hidden)
    return keras.Model(
        tokens, {"kind": kind, "size": keras.layers.Dense(1, name="size")(hidden)}, name="heads"
    )


def batches(weighted: bool) -> list[tuple]:
    made, start = [], 0
    for rows in SIZES:
        part = slice(start, start + rows)
        y = {"kind": KIND[part], "size": SIZE[part]}
        weight = {"kind": KIND_WEIGHT[part], "size": SIZE_WEIGHT[part]}
        made.append((TOKENS[part], y, weight) if weighted else (TOKENS[part], y))
        start += rows
    return made


def as_nested(batches: list[tuple]) -> tf.data.Dataset:
    spec = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), batches[0])
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


def losses(reduction: str) -> dict[str, keras.losses.Loss]:
    return {
        "kind": keras.losses.SparseCategoricalCrossentropy(reduction=reduction),
        "size": keras.losses.MeanSquaredError(reduction=reduction),
    }


def by_hand(model: keras.Model, reduction: str, weighted: bool) -> dict[str, float]:
    """The whole data at once, in NumPy."""
    embedding, kernel, bias, size_kernel, size_bias = (
        value.astype("float64") for value in model.get_weights()
    )
    hidden = embedding[TOKENS]
    logits = hidden @ kernel + bias
    exponentials = np.exp(logits)
    chosen = np.take_along_axis(exponentials, KIND[..., None], -1)[..., 0]
    values = {
        "kind": np.log(exponentials.sum(-1)) - np.log(chosen),
        "size": ((hidden @ size_kernel + size_bias - SIZE) ** 2)[..., 0],
    }
    logs, loss = {}, 0.0
    for name, weight in (("kind", KIND_WEIGHT), ("size", SIZE_WEIGHT)):
        weight = VALID * (weight.astype("float64") if weighted else 1.0)
        divisor = weight.sum() if reduction == "mean_with_sample_weight" else VALID.sum()
        logs[f"{name}_loss"] = (values[name] * weight).sum() / divisor
        logs[f"{name}_weight"] = divisor
        loss += FACTORS[name] * logs[f"{name}_loss"]
    penalty = 0.01 * np.sum(kernel**2)
    return {**logs, "loss": loss + penalty + 0.1 * LENGTHS.mean(), "weight": ROWS}


def step_of(kind, replicas, reduction, **options):
    strategy = strategy_of(replicas)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model, optimizer = two_heads(), keras.optimizers.SGD(0.0)
    objective = tmg.steps.Objective(losses(reduction), loss_weights=FACTORS)
    if kind == "eval":
        return tmg.make_eval_step(model, objective, strategy, **options), model
    return tmg.make_train_step(model, optimizer, objective, strategy, **options), model


def assert_logs(logs, expected):
    assert {name for name in logs if name.startswith(("kind", "size"))} < set(expected)
    for name, value in expected.items():
        assert logs[name] == pytest.approx(value, rel=2e-6), name  # float32 sums of 100 values


@pytest.mark.parametrize(
    ("kind", "replicas", "options", "reduction", "weighted"),
    [
        pytest.param(
            *("eval", 3, {}, "mean_with_sample_weight", True),
            id="eval-3-{}-mean_with_sample_weight-masks and weights",
        ),
        ("train", 2, {"micro_batches": 2}, "sum_over_batch_size", True),
        ("train", 3, {}, "mean_with_sample_weight", False),
    ],
)
def test_losses_of_many_steps_are_those_of_all_rows(kind, replicas, options, reduction, weighted):
    step, model = step_of(kind, replicas, reduction, **options)
    data = tmg.distribute_dataset(as_nested(batches(weighted)), step.strategy)
    logs = plain(step.run(iter(data), 100))
    assert logs["steps"] == len(SIZES)
    expected = by_hand(model, reduction, weighted)
    assert_logs(logs, expected)
    each = [plain(step(batch)) for batch in data]
    by_rows = sum(log["loss"] * log["weight"] for log in each) / ROWS
    assert abs(by_rows - expected["loss"]) > 1e-2, "a mean by rows must be seen to be wrong"
    total = 0.0
    for name, factor in FACTORS.items():
        weights = [log[f"{name}_weight"] for log in each]
        assert sum(weights) == pytest.approx(expected[f"{name}_weight"], rel=1e-6)
        total += factor * expected[f"{name}_loss"]
        assert sum(
            log[f"{name}_loss"] * weight for log, weight in zip(each, weights, strict=True)
        ) / sum(weights) == pytest.approx(expected[f"{name}_loss"], rel=2e-6)


def test_calls_can_be_put_together():
    """Tallies are added; each output is divided by its own weight, once."""
    step, model = step_of("eval", 2, "mean_with_sample_weight")
    iterator = iter(tmg.distribute_dataset(as_nested(batches(True)), step.strategy))
    first, *others = [step.totals(iterator, 2)[""] for _ in range(3)]
    logs = plain(sum(others, first).logs())
    assert logs["steps"] == 6
    assert_logs(logs, by_hand(model, "mean_with_sample_weight", True))


def test_an_output_without_weight_has_no_loss():
    step, _ = step_of("eval", 2, "mean_with_sample_weight")
    x, y, weight = batches(True)[2]
    logs = plain(step((x, y, weight)))
    assert logs["size_loss"] == logs["size_weight"] == 0.0
    data = tmg.distribute_dataset(as_nested(batches(True)[2:3] * 2), step.strategy)
    many = plain(step.run(iter(data), 5))
    assert many["size_loss"] == many["size_weight"] == 0.0
    assert many["loss"] == pytest.approx(logs["loss"], rel=1e-6)
    assert many["kind_weight"] == pytest.approx(2 * logs["kind_weight"], rel=1e-6)
