"""Data that is distributed, cut, or read."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from problems import network

import tfmultigpu as tmg
from lines.messages import Told, example
from lines.parts import (
    X,
    Y,
    batches,
    compiled,
    distribute,
    fit,
    fitted,
    single_examples,
    step,
    strategy_of,
)


def read(data: Any) -> list[Any]:
    return list(data)


@example("must be {}. Received")
def not_a_count(told: Told) -> None:
    for wrong in (0, 2.5, True):
        with told():
            distribute((X, Y), batch_size=wrong)
    read(distribute((X, Y), batch_size=4))


@example("A batch is x, (x, y) or (x, y, sample_weight)")
def four_elements(told: Told) -> None:
    made = step()
    with told(tmg.errors.DataError, "a tuple of 4 elements"):
        made((X, X, Y, Y))
    with_inputs = keras.layers.Concatenate()

    def forward(model: Any, batch: Any, training: bool) -> Any:
        first, second, y, _ = batch
        return tmg.loss_sum("mse", y, model((first + second) / 2, training=training))

    assert with_inputs((X, X)).shape == (8, 8)  # Several inputs in an inner tuple.
    step(loss=None, forward=forward)((X, X, Y, Y))


@example("The batch holds no tensors")
def no_tensors(told: Told) -> None:
    made = step()
    with told(tmg.errors.DataError):
        made(())
    made((X, Y))


@example("A batch has no rows")
def no_rows(told: Told) -> None:
    made = step()
    with told():
        made((X[:0], Y[:0]))
    empty = batches().concatenate(batches(X[:0], Y[:0], size=1))
    for batch in distribute(empty.filter(lambda x, y: tf.shape(x)[0] > 0)):
        made(batch)


@example("The tensors of a batch differ in their number of rows")
def labels_of_other_rows(told: Told) -> None:
    with told():
        read(distribute(batches().map(lambda x, y: (x, y[:3]))))
    read(distribute(single_examples().batch(4)))
    # Two rows of another kind for each example.
    pairs = batches(X, np.ones((8, 2, 3), "float32")).map(lambda x, u: (x, tf.reshape(u, [-1, 3])))
    with told():
        read(distribute(pairs))
    rows = pairs.map(lambda x, u: (x, tf.reshape(u, [tf.shape(x)[0], 2, 3])))
    read(distribute(rows))


@example("class_weight must be a dict from class number to weight")
def class_weights_by_name(told: Told) -> None:
    model = classifier()
    with told(tmg.errors.DataError):
        fit(X, KINDS, model=model, class_weight={"cat": 2.0})
    fit(X, KINDS, model=model, class_weight={0: 1.0, 1: 5.0})


@example("Class weights and sample weights cannot be combined")
def both_weights(told: Told) -> None:
    model = classifier()
    with told(tmg.errors.DataError):
        fit((X, KINDS, np.ones(8)), model=model, class_weight={0: 1.0})
    fit((X, KINDS, np.where(KINDS == 0, 1.0, 5.0)), model=model)


KINDS = np.arange(8) % 2


def classifier() -> Any:
    return compiled("sparse_categorical_crossentropy", softmax)


def softmax() -> Any:
    return network(4, keras.layers.Dense(2, "softmax"))


@example("The dataset is not batched")
def not_batched(told: Told) -> None:
    dataset = single_examples(X[:, 0])
    with told():
        distribute(dataset)
    read(distribute(dataset.batch(4)))


@example("small_batches must be 'partition' or 'copy'")
def unknown_small_batches(told: Told) -> None:
    with told(tmg.errors.DataError, "Received: 'pad'"):
        distribute(batches(), small_batches="pad")
    read(distribute(batches(), small_batches="partition"))


@example("It is unknown whether the shards of the batch are copies")
def row_weight_of_an_unmarked_batch(told: Told) -> None:
    data = distribute(batches(), small_batches="copy")
    (batch, _) = read(data)
    with told():
        tf.function(lambda b: tmg.data.row_weight(b, strategy_of(2)), autograph=False)(batch)
    weight = tmg.data.row_weight(batch, strategy_of(2))
    tf.function(lambda b, w: w, autograph=False)(batch, weight)


@example("preprocess takes single examples, of which global batches")
def preprocess_without_batch_size(told: Told) -> None:
    with told(tmg.errors.DataError, "batch_size=64, preprocess=f"):
        distribute((X, Y), preprocess=lambda row: row)
    read(distribute((X, Y), batch_size=4, preprocess=lambda row: row))


@example("seed is for preprocess, which is missing")
def seed_without_preprocess(told: Told) -> None:
    with told(tmg.errors.DataError):
        distribute((X, Y), batch_size=4, seed=1)
    read(distribute((X, Y), batch_size=4))


@example("A for loop over an iterator inside a tf.function")
def loop_over_an_iterator(told: Told) -> None:
    data = distribute(batches())

    def over(iterable: Any) -> Any:
        count = tf.constant(0)
        for _ in iterable:
            count += 1
        return count

    with told(tmg.errors.DataError, "Write for batch in data, over the dataset"):
        tf.function(over)(iter(data))
    assert tf.function(lambda: over(data))() == 2


@example("A loop of Python over the data inside a tf.function would be unrolled")
def enumerated_in_a_function(told: Told) -> None:
    data = distribute(batches())

    def by_enumerate() -> Any:
        total = tf.constant(0)
        for number, _ in enumerate(data):
            total += number
        return total

    def by_a_tensor() -> Any:
        number = tf.constant(0)
        for _ in data:
            number += 1
        return number

    with told():
        tf.function(by_enumerate)()
    assert tf.function(by_a_tensor)() == 2


@example("The columns of a DataFrame make one array if they are numbers")
def columns_of_two_kinds(told: Told) -> None:
    pandas: Any = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"size": [0.1, 0.2, 0.3, 0.4], "kind": ["u", "v", "u", "w"]})
    with told(tmg.errors.DataError, r"Received: columns \{'size': 'float64', .*get_dum"):
        distribute(frame, batch_size=2)
    read(distribute(pandas.get_dummies(frame), batch_size=2))
    read(distribute({name: frame[name] for name in frame}, batch_size=2))


@example("Shares are one positive, finite number per replica")
def a_share_of_zero(told: Told) -> None:
    with told():
        distribute(batches(), shares=(1, 0))
    strategy = tmg.create_strategy(devices=["CPU:0"])
    read(tmg.distribute_dataset(batches(), strategy, shares=(1,)))


@example("The batch has fewer rows than there are replicas")
def computed_from_shards(told: Told) -> None:
    made = step()
    (batch,) = read(distribute((X[:1], Y[:1]), batch_size=4))
    strategy = strategy_of(2)
    with told():
        made((strategy.run(lambda x: x * 2, args=(batch[0],)), batch[1]))
    doubled = batches(X[:1], Y[:1]).map(lambda x, y: (x * 2, y))
    for batch in distribute(doubled):
        made(batch)


@example("An iterator can be read once")
def an_iterator(told: Told) -> None:
    def make_batches() -> Any:
        yield X[:4], Y[:4]

    with told():
        distribute(make_batches())
    read(distribute(make_batches))


@example("batch_size is for arrays")
def batch_size_of_a_dataset(told: Told) -> None:
    with told():
        fit(single_examples(), batch_size=4)
    fit(single_examples().batch(4))


@example("preprocess takes single examples: a tf.data.Dataset")
def preprocess_of_an_object(told: Told) -> None:
    class Source:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> Any:
            return X[i]

    source = Source()
    with told():
        distribute(source, batch_size=4, preprocess=lambda row: row)

    def read_one(number: Any) -> Any:
        return tf.numpy_function(lambda i: source[i], [number], tf.float32)

    read(distribute(np.arange(len(source)), batch_size=4, preprocess=read_one))


@example("The data is already distributed. Received")
def distributed_twice(told: Told) -> None:
    with told():
        distribute(distribute((X, Y), batch_size=4))
    read(distribute((X, Y), batch_size=4))


@example("Arrays are paired by rows")
def arrays_of_other_lengths(told: Told) -> None:
    with told():
        distribute((X, Y[:5]), batch_size=4)
    read(distribute((X, Y), batch_size=4))


@example("Arrays need the size of a global batch")
def arrays_without_batch_size(told: Told) -> None:
    with told():
        distribute((X, Y))
    read(tmg.distribute_dataset((X, Y), strategy_of(2), batch_size=64))


@example("The data cannot be distributed")
def not_data(told: Told) -> None:
    with told():
        distribute(7)
    it = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    read(distribute(lambda: it))


@example("The data yields no batches")
def a_generator_of_nothing(told: Told) -> None:
    with told():
        read(distribute(lambda: iter(())))
    read(distribute(lambda: iter([(X, Y)])))


@example("The function returns the same iterator each time")
def the_same_iterator(told: Told) -> None:
    generator = (batch for batch in [(X, Y), (X, Y), (X, Y)])
    data = distribute(lambda: generator)
    read(data)
    with told():
        read(data)
    data = distribute(lambda: (batch for batch in [(X, Y), (X, Y), (X, Y)]))
    assert len(read(data)) == len(read(data)) == 3


@example("The batches of the generator differ in their types")
def other_types(told: Told) -> None:
    with told():
        read(distribute(lambda: iter([(X, Y), (X, "label")])))
    read(distribute(lambda: iter([(X, Y), (X, Y)])))


@example("The data has no batches")
def no_batches(told: Told) -> None:
    with told(tmg.errors.DataError):
        tmg.predict(fitted(), batches(X).take(0))
    tmg.predict(fitted(), batches(X), verbose=0)
