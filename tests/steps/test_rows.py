"""tmg.gather_rows and tmg.rows: losses over the whole batch train as on one device.

The losses are those of docs/coupled-losses.md, taken from the page: one with a value for each row,
and one with a number for the batch. Loops by hand contain no code of ours.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import SEED, Replicated, difference, strategy_of

import tfmultigpu as tmg
from tfmultigpu.addons.testing import run_workers

PAGE = Path(__file__).parents[2] / "docs" / "coupled-losses.md"
LossError = tmg.errors.LossError
layers = keras.layers
SIZES = (8, 1, 3, 2, 5, 8)
_random = np.random.default_rng(5)
FIRST = _random.normal(size=(27, 6)).astype("float32")
SECOND = (FIRST + _random.normal(scale=0.3, size=FIRST.shape)).astype("float32")
IMAGES = _random.normal(size=(27, 4, 4, 1)).astype("float32")
MASKS = (IMAGES + _random.normal(scale=0.5, size=IMAGES.shape) > 0.3).astype("float32")


@functools.cache
def of_the_page(function: str) -> Callable[..., Any]:
    """A function that the page defines."""
    for block in PAGE.read_text().split("```python\n")[1:]:
        for node in ast.parse(block.split("```")[0]).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                names = {"tf": tf, "tmg": tmg, "keras": keras}
                exec(compile(ast.Module([node], []), str(PAGE), "exec"), names)
                return names[function]
    raise AssertionError(f"{PAGE.name} defines no {function}")


def encoder() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(7, "tanh"), layers.Dense(4)])


def segmenter() -> keras.Model:
    convolution = layers.Conv2D(1, 3, padding="same", activation="sigmoid")
    return keras.Sequential([keras.Input((4, 4, 1)), convolution])


# The losses of one device, each written in its textbook form -------------------------------------


def simclr(model: Any, batch: Any) -> Any:
    views = tf.concat([model(view, training=True) for view in batch], 0)
    views /= tf.norm(views, axis=-1, keepdims=True)
    similar = tf.exp(tf.matmul(views, views, transpose_b=True) / 0.5)
    others = tf.reduce_sum(similar, axis=1) - tf.linalg.diag_part(similar)
    rows = views.shape[0] // 2
    partners = tf.concat([tf.range(rows) + rows, tf.range(rows)], 0)
    return tf.reduce_mean(-tf.math.log(tf.gather(similar, partners, batch_dims=1) / others))


def dice(model: Any, batch: Any) -> Any:
    images, masks = batch
    predicted = model(images, training=True)
    both = tf.reduce_sum(predicted * masks)
    return 1 - 2 * both / (tf.reduce_sum(predicted) + tf.reduce_sum(masks) + 1e-6)


def views_to(loss: str) -> Callable[..., Any]:
    """The forward function of the page for two views, without Keras' cast to float32."""

    def forward(model: Any, batch: Any, training: bool) -> Any:
        values = of_the_page(loss)(*(model(view, training=training) for view in batch))
        return tmg.LossSum(tf.reduce_sum(values), tf.size(values))

    return forward


# For each: the model, the arrays of the data, the loss of one device, and loss or forward of ours.
CASES: dict[str, tuple[Any, Any, Any, Callable[[], dict[str, Any]]]] = {
    "simclr": (encoder, (FIRST, SECOND), simclr, lambda: {"forward": views_to("nt_xent")}),
    "dice": (segmenter, (IMAGES, MASKS), dice, lambda: {"loss": of_the_page("batch_dice")}),
}  # fmt: skip


def sgd() -> Any:
    return keras.optimizers.SGD(0.02, momentum=0.9)


def data_of(case: str) -> tf.data.Dataset:
    arrays, ends = CASES[case][1], np.cumsum(SIZES)
    spec = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), arrays)
    batches = [
        tf.nest.map_structure(lambda a, cut=(end - size, end): a[slice(*cut)], arrays)
        for end, size in zip(ends, SIZES, strict=True)
    ]
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


@functools.cache
def by_hand(case: str) -> tuple[list[np.ndarray], list[float]]:
    """Weights and losses of one device, by a loop without any code of ours."""
    build, _, objective, _ = CASES[case]
    keras.utils.set_random_seed(SEED)
    model, optimizer = build(), sgd()
    losses = []
    for batch in data_of(case):
        with tf.GradientTape() as tape:
            loss = objective(model, batch)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        losses.append(float(loss))
    return [weight.numpy() for weight in model.weights], losses


def ours(replicas: Any, case: str) -> Replicated:
    build, _, _, options = CASES[case]
    return Replicated(replicas, build, sgd, **{"loss": None, **options()})


# Fails if a replica sees rows of its own only, of a batch with fewer rows than replicas all rows
# several times, or if gradients do not find back to the rows of others.
@pytest.mark.parametrize(
    ("case", "replicas", "shares"),
    [
        ("simclr", 3, (1, 4, 2)),
        ("dice", 2, (3, 1)),
    ],
)
def test_a_loss_over_the_whole_batch_is_that_of_one_device(
    case: str, replicas: int, shares: Sequence[int] | None
) -> None:
    run = ours(replicas, case)
    result = run.train(tmg.distribute_dataset(data_of(case), run.strategy, shares=shares))
    weights, losses = by_hand(case)
    assert difference(result.weights, weights) <= 2e-6
    np.testing.assert_allclose(result.losses, losses, rtol=5e-6, atol=2e-6)


@pytest.mark.slow
def test_two_workers() -> None:
    """Also many steps in one call, whose gathered rows differ in number from step to step."""
    script = Path(__file__).with_name("worker_coupled.py")
    for run in run_workers(script, 2, timeout=900):
        (line,) = [one for one in run.output.splitlines() if one.startswith("RESULT ")]
        found = json.loads(line.removeprefix("RESULT "))
        for case in ("simclr", "dice"):
            weights, losses = by_hand(case)
            flat = np.concatenate([weight.ravel() for weight in weights])
            np.testing.assert_allclose(found[case][0], flat, rtol=0, atol=2e-6)
            loss = np.average(losses, weights=SIZES)
            np.testing.assert_allclose(found[case][1], loss, rtol=5e-6)


# gather_rows by itself ---------------------------------------------------------------------------


def on_replicas(
    replicas: int, batch: Any, function: Callable[[Any], Any], shares: Sequence[int] | None = None
) -> list[Any]:
    """What a function of a shard returns on each replica, in a loop of the user."""
    strategy = strategy_of(replicas)
    data = tmg.distribute_dataset(batch, strategy, batch_size=99, shares=shares)
    run = tf.function(lambda iterator: strategy.run(function, args=(next(iterator),)))
    results = run(iter(data))
    parts = [strategy.experimental_local_results(one) for one in tf.nest.flatten(results)]
    return [tf.nest.pack_sequence_as(results, [part[i] for part in parts]) for i in range(replicas)]


DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]


def test_every_dtype_to_the_last_bit() -> None:
    for rows in (1, 2, 7):
        numbers = _random.integers(0, 100, (rows, 2))
        batch = {name: tf.cast(numbers - 50 * (name[0] == "f"), name).numpy() for name in DTYPES}
        for dtype in ("int64", "uint64"):
            largest, least = np.iinfo(dtype).max, np.iinfo(dtype).min
            batch[f"large {dtype}"] = np.array([largest, 2**53 + 1, *[least] * 5][:rows], dtype)
        batch["not finite"] = np.array([np.nan, 1.0, np.inf, -np.inf, 2.0, 3.0, 4.0][:rows], "f4")
        for gathered in on_replicas(3, batch, tmg.gather_rows, (4, 1, 2)):
            for name, rows_of_all in gathered.items():
                assert rows_of_all.dtype == batch[name].dtype
                np.testing.assert_array_equal(rows_of_all.numpy(), batch[name])


def test_the_place_of_rows_in_those_that_are_gathered() -> None:
    def gather(shard: Any) -> Any:
        here, gathered = tmg.rows(), tmg.gather_rows(shard)
        return gathered[here.first : here.first + here.count], shard

    for rows in (1, 5):
        batch = np.arange(rows * 6, dtype="float32").reshape(rows, 3, 2)
        for own, shard in on_replicas(3, batch, gather):
            np.testing.assert_array_equal(own.numpy(), shard.numpy())


# Replica r weighs row i by (r + 1) * (i + 1).
@pytest.mark.parametrize(
    ("dtype", "rows"), [("float32", 7), ("float16", 1), ("bfloat16", 3), ("float64", 2)]
)
def test_gradients_go_to_the_replica_that_holds_the_row(dtype: str, rows: int) -> None:
    def gradient(shard: Any) -> Any:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        with tf.GradientTape() as tape:
            tape.watch(shard)
            every = tf.cast(tmg.gather_rows(shard), "float32")
            factors = tf.cast(tf.range(1, tf.shape(every)[0] + 1) * (replica + 1), "float32")
            value = tf.reduce_sum(every * factors[:, None])
        return tape.gradient(value, shard)

    found = on_replicas(3, tf.cast(np.ones((rows, 2)), dtype).numpy(), gradient)
    assert all(one.dtype == dtype for one in found)
    found = [tf.cast(one, "float32").numpy()[:, 0] for one in found]
    np.testing.assert_array_equal(np.concatenate(found), np.arange(1, rows + 1) * (1 + 2 + 3))


def test_gradients_of_gradients_and_of_some_of_the_rows() -> None:
    batch = np.arange(1.0, 6.0, dtype="float32")[:, None]

    def second(shard: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(shard)
            with tf.GradientTape() as inner:
                inner.watch(shard)
                some = tf.gather(tmg.gather_rows(shard), [4, 0, 0])  # Its gradient: IndexedSlices.
                value = tf.reduce_sum(some**3)
            first = inner.gradient(value, shard)
        return first, outer.gradient(first, shard)

    pairs = zip(*on_replicas(2, batch, second), strict=True)
    first, again = (np.concatenate(parts) for parts in pairs)
    times = np.array([2, 0, 0, 0, 1])[:, None] * 2  # And two replicas.
    np.testing.assert_allclose(first, times * 3 * batch**2)
    np.testing.assert_allclose(again, times * 6 * batch)
    tensor = tf.constant(batch)
    assert tmg.gather_rows(tensor) is tensor  # One replica has them.


# In steps: places, and what is refused ------------------------------------------------------------

BATCH = (FIRST[:5], _random.normal(size=(5, 4)).astype("float32"))


def step_with(loss: Any, replicas: int = 2, **options: Any) -> Any:
    return Replicated(replicas, encoder, sgd, loss, verify=False, **options).step


# Fails if the places of parts, or in what XLA compiles, are not those in the global batch.
@pytest.mark.parametrize("options", [{"micro_batches": 3}, {"jit_compile": True}])
def test_places_need_no_other_replica(options: dict[str, Any]) -> None:
    def places(y_true: Any, y_pred: Any) -> Any:
        here = tmg.rows()
        own = tf.cast(here.first + tf.range(here.count), tf.float32)
        return own + 0 * tf.reduce_sum(y_pred, -1)

    step = step_with(places, **options)
    for rows in (7, 2, 1):
        batch = FIRST[:rows], np.zeros((rows, 4), "float32")
        assert float(step(batch)["loss"]) == pytest.approx((rows - 1) / 2)


def mean_of_all(y_true: Any, y_pred: Any) -> Any:
    value = tf.reduce_mean((tmg.gather_rows(y_pred) - tmg.gather_rows(y_true)) ** 2)
    return tf.fill(tf.shape(y_pred)[:1], value)


def in_a_branch(y_true: Any, y_pred: Any) -> Any:
    return tf.cond(
        tf.reduce_sum(y_pred) > 0,
        lambda: mean_of_all(y_true, y_pred),
        lambda: tf.reduce_sum(y_pred, -1),
    )


def both_views(y_true: Any, y_pred: Any) -> Any:
    every = tmg.gather_rows(tf.concat([y_pred, y_pred], 0))
    return tf.reduce_sum(y_pred, -1) * tf.reduce_sum(every)


def test_where_replicas_cannot_meet_and_what_has_no_rows() -> None:
    meet = r"please avoid nested `tf\.function`s or control flow"  # TensorFlow's own words.
    in_a_function = tf.function(mean_of_all)
    for step, text in (
        (step_with(mean_of_all, micro_batches=3), r"one micro-batch only\. Write micro_batches"),
        (step_with(mean_of_all, 1, micro_batches=2), r"one micro-batch only\. Write micro_batches"),
        (step_with(mean_of_all, jit_compile=True), "jit_compile=True. Leave it out"),
        (step_with(in_a_function), meet),
        (step_with(in_a_branch), meet),
        (step_with(both_views), r"Received: rows, and rows of the batch here 4, 2"),
    ):
        with pytest.raises((tmg.TfMultiGpuError, RuntimeError), match=text):
            step(BATCH)
        assert int(step.optimizer.iterations.numpy()) == 0
    step_with(mean_of_all, 1, jit_compile=True)(BATCH)  # Where there is nothing to wait for.

    y = tf.ones([2, 2])
    for value, text in (
        (tf.reduce_mean(y), r"shape \(\)\. Gather numbers for each"),
        (tf.strings.as_string(y), "dtype string"),
        (tf.cast(y, tf.complex64), "dtype complex64"),
        (tf.RaggedTensor.from_tensor(y), r"to_tensor\(\)"),
        (tf.sparse.from_dense(y), "SparseTensor"),
    ):
        with pytest.raises(LossError, match=text):
            tmg.gather_rows(value)
    with pytest.raises(
        LossError,
        match=r"tmg\.gather_rows is called where the global batch is not known.*forward=f",
    ):
        strategy_of(2).run(lambda: tmg.gather_rows(y))
    with pytest.raises(LossError, match=r"tmg\.rows is called where the global batch is not know"):
        strategy_of(2).run(lambda: tmg.rows().first)
