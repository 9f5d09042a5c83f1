"""Losses over the whole batch: every replica sees the rows of all, and trains as one device does.

The losses are the ones of docs/coupled-losses.md, taken from the page, so that the page is held to
the loops written by hand here, which contain no code of ours.
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
from one_device import SEED, Replicated, as_dataset, difference, strategy_of

import tfmultigpu as tmg
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.steps.batch_function import Shards
from tfmultigpu.steps.random_draws import ReplicaRows
from tfmultigpu.steps.row_gathering import gathering_from
from tfmultigpu.strategies.topology import per_replica
from tfmultigpu.testing import run_workers

PAGE = Path(__file__).parents[2] / "docs" / "coupled-losses.md"
SIZES = (8, 1, 3, 2, 5, 8)

_random = np.random.default_rng(5)
FIRST = _random.normal(size=(27, 6)).astype("float32")
SECOND = (FIRST + _random.normal(scale=0.3, size=FIRST.shape)).astype("float32")
NUMBERS = _random.integers(0, 5, 27)
IMAGES = _random.normal(size=(27, 4, 4, 1)).astype("float32")
MASKS = (IMAGES + _random.normal(scale=0.5, size=IMAGES.shape) > 0.3).astype("float32")


@functools.cache
def of_the_page(function: str) -> Callable[..., Any]:
    """A function that the page defines."""
    source = PAGE.read_text()
    blocks = [block.split("```")[0] for block in source.split("```python\n")[1:]]
    for block in blocks:
        for node in ast.parse(block).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                names = {"tf": tf, "tmg": tmg, "keras": keras}
                exec(compile(ast.Module([node], []), str(PAGE), "exec"), names)
                return names[function]
    raise AssertionError(f"{PAGE.name} defines no {function}")


def encoder(dtype: str = "float32") -> keras.Model:
    hidden = keras.layers.Dense(7, "tanh", dtype=dtype)
    return keras.Sequential(
        [keras.Input((6,), dtype=dtype), hidden, keras.layers.Dense(4, dtype=dtype)]
    )


def embedder() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.UnitNormalization()])


def two_towers() -> keras.Model:
    query, item = keras.Input((6,)), keras.Input((6,))
    towers = [keras.layers.Dense(4)(query), keras.layers.Dense(4)(item)]
    return keras.Model([query, item], keras.ops.stack(towers, axis=1))


def segmenter() -> keras.Model:
    return keras.Sequential(
        [keras.Input((4, 4, 1)), keras.layers.Conv2D(1, 3, padding="same", activation="sigmoid")]
    )


# The losses of one device, each written in its textbook form -------------------------------------


def simclr(model: Any, batch: Any) -> Any:
    views = tf.concat([model(view, training=True) for view in batch], 0)
    views /= tf.norm(views, axis=-1, keepdims=True)
    similar = tf.exp(tf.matmul(views, views, transpose_b=True) / 0.5)
    others = tf.reduce_sum(similar, axis=1) - tf.linalg.diag_part(similar)
    rows = views.shape[0] // 2
    partners = tf.concat([tf.range(rows) + rows, tf.range(rows)], 0)
    found = tf.gather(similar, partners, batch_dims=1)
    return tf.reduce_mean(-tf.math.log(found / others))


def retrieval(model: Any, batch: Any) -> Any:
    inputs, numbers = batch
    towers = model(inputs, training=True)
    losses = []
    for row in range(towers.shape[0]):
        chosen = [i for i in range(towers.shape[0]) if i == row or numbers[i] != numbers[row]]
        logits = tf.stack([tf.reduce_sum(towers[row, 0] * towers[i, 1]) for i in chosen])
        losses.append(-tf.nn.log_softmax(logits)[chosen.index(row)])
    return tf.add_n(losses) / len(losses)


def barlow(model: Any, batch: Any) -> Any:
    first, second = (model(view, training=True) for view in batch)
    first, second = (
        (z - tf.reduce_mean(z, 0)) / tf.sqrt(tf.math.reduce_variance(z, 0) + 1e-3)
        for z in (first, second)
    )
    correlation = tf.einsum("ni,nj->ij", first, second) / first.shape[0]
    identity = tf.eye(4, dtype=correlation.dtype)
    return tf.reduce_sum((0.01 + 0.99 * identity) * (correlation - identity) ** 2)


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
    "retrieval": (
        two_towers,
        ((FIRST, SECOND), NUMBERS),
        retrieval,
        lambda: {"loss": of_the_page("in_batch_softmax")},
    ),
    "barlow": (
        functools.partial(encoder, "float64"),
        (FIRST.astype("float64"), SECOND.astype("float64")),
        barlow,
        lambda: {"forward": views_to("barlow_twins")},
    ),
    "circle": (
        embedder,
        (FIRST, NUMBERS),
        lambda model, batch: keras.losses.Circle(gamma=8)(batch[1], model(batch[0])),
        lambda: {"forward": of_the_page("circle_loss")},
    ),
    "dice": (segmenter, (IMAGES, MASKS), dice, lambda: {"loss": of_the_page("batch_dice")}),
}

# It divides a batch of two rows by their distance: in float32 one device is itself 1.4e-6 away
# from one in float64, and replicas up to 3.8e-6.
IN_FLOAT64 = {"barlow"}


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.02, momentum=0.9)


def batches_of(arrays: Any) -> list[Any]:
    starts = np.cumsum((0, *SIZES))
    return [
        tf.nest.map_structure(lambda a, i=i: a[starts[i] : starts[i + 1]], arrays)
        for i in range(len(SIZES))
    ]


@functools.cache
def by_hand(case: str) -> tuple[list[np.ndarray], list[float]]:
    """Weights and losses of one device, by a loop without any code of ours."""
    build, arrays, objective, _ = CASES[case]
    keras.utils.set_random_seed(SEED)
    model, optimizer = build(), sgd()
    losses = []
    for batch in batches_of(arrays):
        with tf.GradientTape() as tape:
            loss = objective(model, tf.nest.map_structure(tf.constant, batch))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        losses.append(float(loss))
    return [weight.numpy() for weight in model.weights], losses


def held(case: str, result: Any, what: object) -> None:
    weights, losses = by_hand(case)
    assert difference(result.weights, weights) <= (1e-12 if case in IN_FLOAT64 else 2e-6), what
    np.testing.assert_allclose(result.losses, losses, rtol=5e-6, atol=2e-6, err_msg=str(what))


def ours(replicas: int, case: str) -> Replicated:
    build, _, _, options = CASES[case]
    return Replicated(replicas, build, sgd, **{"loss": None, **options()})


@pytest.mark.parametrize(
    ("case", "replicas"),
    [("simclr", 2), ("simclr", 4), ("retrieval", 3), ("barlow", 2), ("circle", 3)],
)
def test_a_loss_over_the_whole_batch_is_that_of_one_device(case: str, replicas: int) -> None:
    held(case, ours(replicas, case).train(batches_of(CASES[case][1])), "whole batches")


@pytest.mark.parametrize(
    ("case", "replicas", "shares"), [("simclr", 3, (1, 4, 2)), ("dice", 2, (3, 1))]
)
def test_shards_of_different_sizes(case: str, replicas: int, shares: tuple[int, ...]) -> None:
    run = ours(replicas, case)
    arrays = CASES[case][1]
    spec = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), arrays)
    data = tf.data.Dataset.from_generator(lambda: iter(batches_of(arrays)), output_signature=spec)
    shards = tmg.distribute_dataset(data, run.strategy, shares=shares)
    held(case, run.train(shards), shares)


@pytest.mark.slow
def test_two_workers() -> None:
    for worker, run in enumerate(
        run_workers(Path(__file__).with_name("worker_coupled.py"), 2, timeout=900)
    ):
        (line,) = [one for one in run.output.splitlines() if one.startswith("RESULT ")]
        for case, found in json.loads(line.removeprefix("RESULT ")).items():
            weights, losses = by_hand(case)
            flat = np.concatenate([weight.ravel() for weight in weights])
            where = f"{case} on worker {worker}"
            np.testing.assert_allclose(found["weights"], flat, rtol=0, atol=2e-6, err_msg=where)
            np.testing.assert_allclose(found["losses"], losses, rtol=5e-6, atol=2e-6, err_msg=where)


@pytest.mark.filterwarnings("ignore:The result depends on how the batch was cut")
def test_without_the_other_rows_the_result_is_another() -> None:
    """What the tests above would find if rows were gathered of one replica alone."""

    def forward(model: Any, batch: Any, training: bool) -> Any:
        first, second = (tf.math.l2_normalize(model(view), -1) for view in batch)
        logits = tf.matmul(first, second, transpose_b=True) / 0.5
        here = tf.range(tf.shape(first)[0])
        values = tf.nn.sparse_softmax_cross_entropy_with_logits(here, logits)
        return tmg.LossSum(tf.reduce_sum(values), tf.size(values))

    one, two = (
        Replicated(n, encoder, sgd, None, forward=forward).train(batches_of((FIRST, SECOND)))
        for n in (1, 2)
    )
    assert difference(one.weights, two.weights) > 1e-3


def test_fit_and_run_and_evaluate() -> None:
    build, arrays, objective, _ = CASES["dice"]
    weights, losses = by_hand("dice")
    keras.utils.set_random_seed(SEED)
    strategy = strategy_of(3)
    with strategy.scope():
        model = build()
        model.compile(sgd(), loss=of_the_page("batch_dice"))
    tmg.fit(model, as_dataset(batches_of(arrays)), verbose=0)
    assert difference([weight.numpy() for weight in model.weights], weights) <= 2e-6
    batches = batches_of(arrays)[1:4]  # 1, 3 and 2 rows
    expected = [float(objective(model, tf.nest.map_structure(tf.constant, b))) for b in batches]
    mean = np.average(expected, weights=[1, 3, 2])
    assert tmg.evaluate(model, as_dataset(batches))["loss"] == pytest.approx(mean, rel=1e-5)

    run = ours(2, "dice")
    run.reset()
    step_losses = run.step.run(
        iter(tmg.distribute_dataset(as_dataset(batches_of(arrays)), run.strategy)), 9
    )
    assert float(step_losses["loss"]) == pytest.approx(np.average(losses, weights=SIZES), rel=1e-5)
    assert difference(run.result([]).weights, weights) <= 2e-6


# gather_rows by itself ---------------------------------------------------------------------------


def on_replicas(
    replicas: int, batch: Any, function: Callable[[Any], Any], shares: Sequence[int] | None = None
) -> list[Any]:
    """What a function of a shard returns on each replica, in a step as it were."""
    strategy = strategy_of(replicas)
    shares = (1,) * replicas if shares is None else shares

    @tf.function
    def run(batch: Any) -> Any:
        offsets = partition.shard_offsets(count_rows(batch), shares)
        shards = Shards(partition.cut_rows(batch, shares), offsets)

        def replica(shard: Any) -> Any:
            with gathering_from(ReplicaRows.of(shards, shard, None)):
                return function(shard)

        return strategy.run(replica, args=(per_replica(strategy, shards.local),))

    results = run(tf.nest.map_structure(tf.constant, batch))
    parts = [strategy.experimental_local_results(one) for one in tf.nest.flatten(results)]
    return [tf.nest.pack_sequence_as(results, [part[i] for part in parts]) for i in range(replicas)]


DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]


def test_every_dtype_in_one_structure() -> None:
    random = np.random.default_rng(7)
    for rows in (1, 2, 7):
        numbers = random.integers(0, 100, (rows, 2))
        batch = {
            dtype: tf.cast(numbers - 50 * (dtype[0] == "f"), dtype).numpy() for dtype in DTYPES
        }
        for gathered in on_replicas(3, batch, tmg.gather_rows, (4, 1, 2)):
            for dtype, rows_of_all in gathered.items():
                assert rows_of_all.dtype == dtype
                np.testing.assert_array_equal(rows_of_all.numpy(), batch[dtype])


def test_integers_are_exact_to_the_last_bit() -> None:
    for dtype in ("int64", "uint64"):
        numbers = np.array([np.iinfo(dtype).max, 2**53 + 1, np.iinfo(dtype).min, 3, 4], dtype)
        for gathered in on_replicas(2, numbers, tmg.gather_rows):
            np.testing.assert_array_equal(gathered.numpy(), numbers)


def test_not_finite_rows_do_not_touch_the_others() -> None:
    rows = np.array([[np.nan], [1.0], [np.inf], [-np.inf], [2.0]], "float32")
    for gathered in on_replicas(3, rows, tmg.gather_rows):
        np.testing.assert_array_equal(gathered.numpy(), rows)


@pytest.mark.parametrize(("rank", "rows"), [(1, 5), (2, 1), (4, 2)])
def test_several_rows_of_each_example_and_their_positions(rank: int, rows: int) -> None:
    batch = np.arange(rows * 3 * 2 ** (rank - 1), dtype="float32").reshape(
        rows, 3, *[2] * (rank - 1)
    )

    def gather(shard: Any) -> Any:
        crops = tf.reshape(shard, [-1, *shard.shape[2:]])
        gathered = tmg.gather_rows(crops, rows_per_example=3)
        own = tf.gather(gathered, tmg.steps.row_positions(crops, rows_per_example=3))
        return gathered, own, crops

    for gathered, own, crops in on_replicas(3, batch, gather):
        np.testing.assert_array_equal(gathered.numpy(), batch.reshape(rows * 3, *batch.shape[2:]))
        np.testing.assert_array_equal(own.numpy(), crops.numpy())


@pytest.mark.parametrize(
    ("dtype", "rows"), [("float32", 7), ("float16", 1), ("bfloat16", 3), ("float64", 2)]
)
def test_gradients_go_to_the_replica_that_holds_the_row(dtype: str, rows: int) -> None:
    """Replica r weighs row i by (r + 1) * (i + 1); a step weighs copies of a small batch itself."""
    batch = tf.cast(np.ones((rows, 2)), dtype).numpy()

    def gradient(shard: Any) -> Any:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        with tf.GradientTape() as tape:
            tape.watch(shard)
            every = tf.cast(tmg.gather_rows(shard), "float32")
            factors = tf.cast(tf.range(1, tf.shape(every)[0] + 1) * (replica + 1), "float32")
            value = tf.reduce_sum(every * factors[:, None])
        return tape.gradient(value, shard)

    found = on_replicas(3, batch, gradient)
    assert all(one.dtype == dtype for one in found)
    found = [tf.cast(one, "float32").numpy()[:, 0] for one in found]
    places = np.arange(1, rows + 1)
    if rows < 3:
        for replica, one in enumerate(found):
            np.testing.assert_array_equal(one, places * (replica + 1))
    else:
        np.testing.assert_array_equal(np.concatenate(found), places * (1 + 2 + 3))


def test_gradients_of_gradients_and_of_some_of_the_rows() -> None:
    batch = np.arange(1.0, 6.0, dtype="float32")[:, None]

    def second(shard: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(shard)
            with tf.GradientTape() as inner:
                inner.watch(shard)
                some = tf.gather(tmg.gather_rows(shard), [4, 0, 0])  # its gradient is IndexedSlices
                value = tf.reduce_sum(some**3)
            first = inner.gradient(value, shard)
        return first, outer.gradient(first, shard)

    first, again = (
        np.concatenate(parts) for parts in zip(*on_replicas(2, batch, second), strict=True)
    )
    times = np.array([2, 0, 0, 0, 1])[:, None] * 2  # and two replicas
    np.testing.assert_allclose(first, times * 3 * batch**2)
    np.testing.assert_allclose(again, times * 6 * batch)


def test_one_replica_gets_the_tensor_itself() -> None:
    tensor = tf.constant([[1.0], [2.0]])
    assert tmg.gather_rows(tensor) is tensor
    assert tmg.steps.row_positions(tensor).numpy().tolist() == [0, 1]
    (kept,) = on_replicas(
        1, np.ones((3, 1)), lambda shard: tf.constant(tmg.gather_rows(shard) is shard)
    )
    assert bool(kept)


# What is refused ----------------------------------------------------------------------------------


def test_outside_a_step() -> None:
    strategy = strategy_of(2)
    with pytest.raises(tmg.errors.LossError, match=r"called outside a step.*forward=f"):
        strategy.run(lambda: tmg.gather_rows(tf.ones([2, 1])))
    with (
        strategy.scope(),
        pytest.raises(tmg.errors.LossError, match="row_positions is called outside"),
    ):
        tmg.steps.row_positions(tf.ones([2, 1]))


def step_with(loss: Callable[..., Any], replicas: int = 2, **options: Any) -> Replicated:
    return Replicated(replicas, encoder, sgd, loss, **options)


BATCH = (FIRST[:5], _random.normal(size=(5, 4)).astype("float32"))


def mean_of_all(y_true: Any, y_pred: Any) -> Any:
    value = tf.reduce_mean((tmg.gather_rows(y_pred) - tmg.gather_rows(y_true)) ** 2)
    return tf.fill(tf.shape(y_pred)[:1], value)


def test_micro_batches() -> None:
    run = step_with(mean_of_all, micro_batches=(1, 3))
    with pytest.raises(
        tmg.errors.LossError, match=r"micro_batches=\(1, 3\)\. Write micro_batches=1"
    ):
        run.step(BATCH)
    with pytest.raises(tmg.errors.LossError, match="only the rows of this one"):
        step_with(mean_of_all, 1, micro_batches=2).step(BATCH)


@pytest.mark.parametrize("options", [{"micro_batches": 3}, {"jit_compile": True}])
def test_positions_need_no_other_replica(options: dict[str, Any]) -> None:
    """The mean of the positions of all rows, each counted once."""

    def positions(y_true: Any, y_pred: Any) -> Any:
        return tf.cast(tmg.steps.row_positions(y_pred), tf.float32) + 0 * tf.reduce_sum(y_pred, -1)

    run = step_with(positions, **options)
    for rows in (7, 2, 1):
        batch = FIRST[:rows], np.zeros((rows, 4), "float32")
        assert float(run.step(batch)["loss"]) == pytest.approx((rows - 1) / 2)


def test_xla() -> None:
    with pytest.raises(tmg.errors.LossError, match="Write jit_compile=False"):
        step_with(mean_of_all, jit_compile=True).step(BATCH)
    step_with(mean_of_all, 1, jit_compile=True).step(BATCH)  # where there is nothing to wait for


@pytest.mark.parametrize("wrap", ["tf.function", "tf.cond"])
def test_where_replicas_cannot_meet(wrap: str) -> None:
    def within(y_true: Any, y_pred: Any) -> Any:
        if wrap == "tf.function":
            return tf.function(mean_of_all)(y_true, y_pred)
        return tf.cond(
            tf.reduce_sum(y_pred) > 0,
            lambda: mean_of_all(y_true, y_pred),
            lambda: tf.reduce_sum(y_pred, -1),
        )

    with pytest.raises(
        tmg.errors.LossError, match=r"leave out @tf\.function, and call gather_rows before"
    ):
        step_with(within).step(BATCH)


def test_both_views_in_one_tensor() -> None:
    def views(y_true: Any, y_pred: Any) -> Any:
        every = tmg.gather_rows(tf.concat([y_pred, y_pred], 0))
        return tf.reduce_sum(y_pred, -1) * tf.reduce_sum(every)

    run = step_with(views)
    with pytest.raises(
        tmg.errors.LossError, match=r"Received: 4 rows, on a replica with 2 .*example=1\."
    ):
        run.step(BATCH)
    assert int(run.optimizer.iterations.numpy()) == 0


def test_what_has_no_rows_of_numbers() -> None:
    y = tf.ones([2, 2])
    for value, message in (
        (tf.reduce_mean(y), "single number"),
        (tf.strings.as_string(y), "dtype string"),
        (tf.cast(y, tf.complex64), "dtype complex64"),
        (tf.RaggedTensor.from_tensor(y), r"to_tensor\(\)"),
        (tf.sparse.from_dense(y), "SparseTensor"),
    ):
        with pytest.raises(tmg.errors.LossError, match=message):
            tmg.gather_rows(value)
