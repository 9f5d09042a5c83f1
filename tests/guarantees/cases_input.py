"""Input."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from guarantee import Case, Difference
from one_device import strategy_of
from recipes import (
    Problem,
    Trained,
    X,
    Y,
    by_loop,
    by_step,
    compiled,
    crossentropy,
    divided_by,
    fresh,
    mirrored,
    one_device,
    rows,
    weights,
    weights_of,
)

import tfmultigpu as tmg

Input = functools.partial(Case, section="Input")
EVEN = Problem(rows(128))


def distributed_by_tensorflow(dataset: Any) -> Any:
    return mirrored(2).experimental_distribute_dataset(dataset)


def distributed_by_us(dataset: Any) -> Any:
    return tmg.distribute_dataset(dataset, strategy_of(2))


# Mistakes -----------------------------------------------------------------------------------------


NOT_BATCHED = (X, Y[:, None])


def features_on_a_replica() -> Difference:
    """A dataset of rows that are not batched: the axis of the features is split instead."""
    batch = next(iter(distributed_by_tensorflow(tf.data.Dataset.from_tensor_slices(NOT_BATCHED))))
    shard = mirrored(2).experimental_local_results(batch[0])[0]
    return Difference(6 - shard.shape[-1], "features missing on each replica, of 6")


def predictions_of_rows(predict: Callable[[Any, Any], Any], strategy: Any) -> Difference:
    with strategy.scope():
        model, _ = fresh(EVEN)
    found = predict(model, tf.data.Dataset.from_tensor_slices(X))
    return Difference(abs(len(found) - len(X)), "rows too many or too few")


def one_row_without_axis() -> Difference:
    next(iter(distributed_by_tensorflow(tf.data.Dataset.from_tensor_slices((X, Y)))))
    return Difference(0.0)


def refused(dataset: Callable[[], Any]) -> Any:
    def ours() -> Difference:
        next(iter(distributed_by_us(dataset())))
        return Difference(0.0)

    return ours


def unlike() -> Any:
    return tf.data.Dataset.from_tensors((X[:10], Y[:5]))


def split_unlike() -> Difference:
    (batch,) = distributed_by_tensorflow(unlike())
    x, y = (mirrored(2).experimental_local_results(part)[0] for part in batch)
    return Difference(len(x) - len(y), "rows without a label on each replica")


def length_of(data: Any, right: int) -> Difference:
    return Difference(abs(len(data) - right), "batches")


def numpy_given(distribute: Callable[[Any], Any]) -> Any:
    def found() -> Difference:
        seen = [len(tf.concat(batch.values, 0)) for batch in distribute(X[:10])]
        return Difference(abs(sum(seen) - 10), "rows")

    return found


REFUSAL = "the error says what to write"
MISTAKES = [
    Input(
        name="not-batched",
        title="A dataset that is not batched: features of one row are divided among replicas",
        plain=features_on_a_replica,
        ours=refused(lambda: tf.data.Dataset.from_tensor_slices(NOT_BATCHED)),
        ours_kind="error",
        ours_says="DataError",
        reason=REFUSAL,
    ),
    Input(
        name="not-batched-features",
        title="`predict` on features alone that are not batched",
        plain=lambda: predictions_of_rows(
            lambda model, data: model.predict(data, verbose=0), mirrored(2)
        ),
        ours=lambda: predictions_of_rows(tmg.predict, strategy_of(2)),
        ours_kind="error",
        ours_says="Error",
        reason="six features look like a batch of six numbers: the model is the first to know",
    ),
    Input(
        name="not-batched-scalars",
        title="A dataset that is not batched, with scalar labels",
        plain=one_row_without_axis,
        ours=refused(lambda: tf.data.Dataset.from_tensor_slices((X, Y))),
        ours_kind="error",
        ours_says="DataError",
        reason=REFUSAL,
    ),
    Input(
        name="other-number-of-labels",
        title="10 rows of features with 5 labels",
        plain=split_unlike,
        ours=refused(unlike),
        ours_kind="error",
        ours_says="DataError",
        reason=REFUSAL,
    ),
    Input(
        name="length",
        title="`len` of a distributed dataset",
        plain=lambda: length_of(distributed_by_tensorflow(EVEN.dataset()), 2),
        ours=lambda: length_of(distributed_by_us(EVEN.dataset()), 2),
    ),
    Input(
        name="numpy",
        title="NumPy arrays given to be distributed",
        plain=numpy_given(distributed_by_tensorflow),
        ours=numpy_given(lambda x: tmg.distribute_dataset(x, strategy_of(2), batch_size=5)),
    ),
]


# Kinds of data ------------------------------------------------------------------------------------


class Reads(keras.Model):
    """Any kind of input, made features of by a function."""

    def __init__(self, features: Callable[[Any], Any]) -> None:
        super().__init__()
        self.features = features
        self.dense = keras.layers.Dense(4)

    def build(self, shape: Any = None) -> None:
        self.dense.build((None, 6))
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.dense(self.features(inputs))


LENGTHS = np.random.default_rng(7).integers(1, 6, 128)
WORDS = np.array([" ".join("word"[:2] for _ in range(n)) for n in LENGTHS])


def ragged() -> Any:
    return tf.RaggedTensor.from_row_lengths(
        np.arange(LENGTHS.sum(), dtype="float32") % 7.0, LENGTHS.astype("int64")
    )


def wide(column: Any) -> Any:
    """Six features from one column."""
    return tf.cast(column, tf.float32)[:, None] * tf.constant([1.0, 0.5, -1.0, 0.1, 0.2, -0.3])


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "dict": (
        lambda: {"a": X[:128, :3], "b": X[:128, 3:]},
        lambda x: tf.concat([x["a"], x["b"]], 1),
    ),
    "tuple": (lambda: (X[:128, :3], X[:128, 3:]), lambda x: tf.concat([x[0], x[1]], 1)),
    "ragged": (ragged, lambda x: wide(tf.reduce_mean(x, axis=1))),
    "sparse": (
        lambda: tf.sparse.from_dense(np.where(X[:128] > 0, X[:128], 0.0).astype("float32")),
        lambda x: tf.reshape(tf.sparse.to_dense(x), [-1, 6]),
    ),
    "string": (lambda: tf.constant(WORDS), lambda x: wide(tf.strings.length(x)) / 10.0),
    "bool": (lambda: X[:128] > 0, lambda x: tf.cast(x, tf.float32)),
}


def dataset_of(kind: str) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((KINDS[kind][0](), Y[:128])).batch(64)


def problem_of(kind: str) -> Problem:
    def build() -> Any:
        model = Reads(KINDS[kind][1])
        model.build()
        return model

    return EVEN.replace(build=build)


def truth_of(kind: str) -> Trained:
    """One device: a tape over the batches of the same dataset."""
    model, optimizer = fresh(problem_of(kind))
    for x, y in dataset_of(kind):
        with tf.GradientTape() as tape:
            loss = crossentropy()(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return Trained(weights_of(model), [])


def fit_on(kind: str) -> Difference:
    strategy = mirrored(2)
    model = compiled(problem_of(kind), strategy)
    model.fit(dataset_of(kind), verbose=0)
    return weights(Trained(weights_of(model, strategy), []), truth_of(kind))


def loop_on(kind: str) -> Difference:
    found = by_loop(problem_of(kind), divided_by(64), dataset=dataset_of(kind))
    return weights(found, truth_of(kind))


def step_on(kind: str) -> Difference:
    return weights(by_step(problem_of(kind), data=dataset_of(kind)), truth_of(kind))


KIND_CASES = [
    Input(
        name=f"{way}-{kind}",
        title=f"{title}: {kind} input",
        plain=functools.partial(plain, kind),
        ours=functools.partial(step_on, kind),
        links=links,
        alone=way == "fit",
    )
    for way, title, plain, links, kinds in (
        ("loop", "Custom loop", loop_on, (), ("dict", "tuple", "ragged", "sparse", "string")),
        ("fit", "`fit`", fit_on, ("k#21172",), ("dict", "ragged", "sparse", "string", "bool")),
    )
    for kind in kinds
]


# Where data ends ----------------------------------------------------------------------------------


def unknown_length() -> tf.data.Dataset:
    return EVEN.dataset().filter(lambda x, y: True)


def generated() -> Any:
    yield from Problem(rows(256)).batches()


class BuiltLate(keras.Model):
    """A model that its first batch builds."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


def one_shot_fit() -> Difference:
    problem = Problem(rows(256), build=BuiltLate)
    strategy = mirrored(2)
    model = compiled(problem, strategy)
    batches = generated()
    dataset = tf.data.Dataset.from_generator(
        lambda: batches,
        output_signature=(
            tf.TensorSpec([None, 6], tf.float32),
            tf.TensorSpec([None], tf.int64),
        ),
    )
    model.fit(dataset, verbose=0)
    return Difference(4 - int(model.optimizer.iterations.numpy()), "batches not trained on, of 4")


def one_shot_step() -> Difference:
    problem = Problem(rows(256), build=BuiltLate)
    found = by_step(problem, data=generated)
    return Difference(4 - found.iterations, "batches not trained on, of 4")


def endless_fit() -> Difference:
    model = compiled(EVEN, mirrored(2))
    model.fit(EVEN.dataset().repeat(), epochs=2, verbose=0)
    return Difference(0.0)


def endless_evaluate() -> Difference:
    model = compiled(EVEN, strategy_of(2))
    tmg.evaluate(model, EVEN.dataset().repeat())
    return Difference(0.0)


def on_batch(train: bool) -> Any:
    problem = Problem(rows(8), replicas=2)

    def plain() -> Difference:
        model = compiled(problem, mirrored(2))
        if train:
            model.train_on_batch(*problem.arrays)
            return weights(Trained(weights_of(model, mirrored(2)), []), one_device(problem))
        return Difference(len(model.predict_on_batch(problem.arrays[0])) - 8, "rows too many")

    return plain


def predict_on_batch() -> Difference:
    problem = Problem(rows(8))
    strategy = strategy_of(2)
    with strategy.scope():
        model, _ = fresh(problem)
    return Difference(len(tmg.make_predict_step(model, strategy)(X[:8])) - 8, "rows too many")


def counted_beyond_the_end() -> Difference:
    strategy = mirrored(2)
    problem = Problem(rows(192), 16)
    with strategy.scope():
        model, optimizer = fresh(problem)
        optimizer.build(model.trainable_variables)

    def train_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = divided_by(16)(model, y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def five(iterator: Any) -> None:
        for _ in tf.range(5):
            strategy.run(train_step, args=next(iterator))

    iterator = iter(strategy.experimental_distribute_dataset(problem.dataset()))
    try:
        for _ in itertools.count():
            five(iterator)
    except tf.errors.OutOfRangeError:
        pass
    return Difference(int(optimizer.iterations.numpy()) - 12, "steps counted that never ran")


def counted_by_run() -> Difference:
    strategy = strategy_of(2)
    problem = Problem(rows(192), 16)
    with strategy.scope():
        model, optimizer = fresh(problem)
    step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
    iterator = iter(tmg.distribute_dataset(problem.dataset(), strategy))
    while int(step.run(iterator, 5)["steps"]):
        pass
    return Difference(int(optimizer.iterations.numpy()) - 12, "steps counted that never ran")


ENDS = [
    Input(
        name="unknown-length",
        title="Custom loop: a dataset of unknown length",
        plain=lambda: weights(
            by_loop(EVEN, divided_by(64), dataset=unknown_length()), one_device(EVEN)
        ),
        ours=lambda: weights(by_step(EVEN, data=unknown_length()), one_device(EVEN)),
    ),
    Input(
        name="one-shot-generator",
        title="`fit` on a generator that can be read once, of a model that its first batch builds",
        plain=one_shot_fit,
        ours=one_shot_step,
    ),
    Input(
        name="endless",
        title="`.repeat()` without a number of steps (`fit`; `tfmultigpu.evaluate`)",
        plain=endless_fit,
        ours=endless_evaluate,
        ours_kind="error",
        ours_says="DataError",
        reason="how far to read cannot be guessed",
        alone=True,
        patience=12.0,
    ),
    Input(
        name="train-on-batch",
        title="`train_on_batch`: one batch of 8 rows",
        plain=on_batch(train=True),
        ours=lambda: weights(by_step(Problem(rows(8))), one_device(Problem(rows(8)))),
        links=("tf#39270",),
    ),
    Input(
        name="predict-on-batch",
        title="`predict_on_batch`: 8 rows",
        plain=on_batch(train=False),
        ours=predict_on_batch,
        links=("tf#39270",),
    ),
    Input(
        name="end-inside-a-function",
        title="Five steps in one `tf.function`, where the data ends after twelve: "
        "`optimizer.iterations`",
        plain=counted_beyond_the_end,
        ours=counted_by_run,
    ),
]

CASES = [*MISTAKES, *KIND_CASES, *ENDS]
