"""What a first step says of draws that are not of the rows of a replica, and of late variables.

A draw of ``2 * rows`` may lie side by side for each row, or block after block as the label noise of
``tf.concat([fake, real], 0)``: the first is right, and the report of the second names the draw.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg

L = keras.layers
X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Draw = Callable[[Any, Any], Any]  # From the seeds and the number of rows to numbers [.., 1].


def uniform(seeds: Any, rows: Any) -> Any:
    return keras.random.uniform((rows, 1), seed=seeds)


class Problem:
    """A critic of three weights, with its generators of seeds; each of its steps is a first one."""

    def __init__(self) -> None:
        self.strategy = tmg.create_strategy(devices=2)
        keras.utils.set_random_seed(3)
        with self.strategy.scope():
            self.model = keras.Sequential([keras.Input((4,)), L.Dense(1)])
            self.seeds = keras.random.SeedGenerator(5)
            self.generator = tf.random.Generator.from_seed(5)
            self.optimizer = keras.optimizers.SGD(0.1)

    def told(self, forward: Any) -> list[str]:
        """Returns what the first step of a forward warns of."""
        step = tmg.make_train_step(self.model, self.optimizer, None, self.strategy, forward=forward)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(X)
        kind = tmg.ReplicaDependenceWarning
        return [str(each.message) for each in caught if issubclass(each.category, kind)]

    def labels(self, draw: Draw) -> Any:
        """Returns the forward of a critic whose labels for fake and real rows have some noise."""

        def critic(model: Any, x: Any, training: bool) -> Any:
            rows = tf.shape(x)[0]
            labels = tf.concat([tf.zeros([rows, 1]), tf.ones([rows, 1])], 0)
            labels += 0.1 * draw(self.seeds, rows)
            outputs = model(tf.concat([2.0 * x, x], 0), training=training)
            return tmg.loss_sum("mse", labels, outputs)

        return critic


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem()


# Fails if the loss is blamed for the draw, the draw is not found, or the line to write does not
# help.
def test_a_draw_for_several_parts_is_named_with_its_line(problem: Problem) -> None:
    def both(seeds: Any, rows: Any) -> Any:
        return uniform(seeds, 2 * rows)

    def each(seeds: Any, rows: Any) -> Any:
        return tf.concat([uniform(seeds, rows) for _ in range(2)], 0)

    (said,) = problem.told(problem.labels(both))
    assert f"the draw in uniform (line {uniform.__code__.co_firstlineno + 1} of " in said
    assert "whose first axis is 2 * rows" in said
    assert "tf.concat([keras.random.normal((rows, 4), seed=seeds) for _ in range(2)], 0)" in said
    assert problem.told(problem.labels(each)) == []


# Fails if a draw before a layer is taken for a fault of the layer, which mixes no rows.
def test_a_draw_before_a_layer_is_named_and_not_the_layer(problem: Problem) -> None:
    def noisy(model: Any, x: Any, training: bool) -> Any:
        rows = tf.shape(x)[0]
        both = tf.concat([2.0 * x, x, -x], 0)
        both += keras.random.normal((3 * rows, 4), seed=problem.seeds)
        outputs = model(both, training=training)
        return tmg.LossSum(tf.reduce_sum(tf.square(outputs)), 3 * rows)

    (said,) = problem.told(noisy)
    assert "the draw in " in said
    assert "whose first axis is 3 * rows" in said


# Fails if a draw is blamed that is right, beside a loss that is not.
def test_a_draw_side_by_side_is_not_blamed(problem: Problem) -> None:
    def coupled(model: Any, x: Any, training: bool) -> Any:
        rows = tf.shape(x)[0]
        weights = tf.reshape(uniform(problem.seeds, 3 * rows), [rows, 3])
        values = model(x, training=training) * weights
        return tmg.LossSum(tf.reduce_sum(values) + tf.reduce_max(values), tf.shape(x)[0])

    (said,) = problem.told(coupled)
    assert "the draw" not in said
    assert "tmg.gather_rows(tensor)" in said


# Fails if each replica draws the first numbers, and the report says that it is the loss.
@pytest.mark.parametrize(("more", "formula"), [(5, "rows + 5"), (-1, "rows - 1")])
def test_a_draw_of_some_more_or_less_is_named(problem: Problem, more: int, formula: str) -> None:
    def forward(model: Any, x: Any, training: bool) -> Any:
        outputs = model(x, training=training)[: min(more, 0) or None]
        noise = uniform(problem.seeds, tf.shape(x)[0] + more)[max(more, 0) :]
        return tmg.LossSum(tf.reduce_sum(outputs * noise), tf.shape(x)[0])

    (said,) = problem.told(forward)
    assert f"whose first axis is {formula}." in said


# Fails if draws by a generator of TensorFlow, of which each replica has its own, are not named.
def test_a_generator_of_tensorflow_is_named(problem: Problem) -> None:
    def of_tensorflow(_: Any, rows: Any) -> Any:
        return problem.generator.uniform([2 * rows, 1])

    (said,) = problem.told(problem.labels(of_tensorflow))
    assert "a draw of tf.random.Generator" in said
    assert "keras.random.SeedGenerator" in said


# Fails if a draw that is alike on all replicas, as the first by a seed of TensorFlow is in each
# function, is taken for one that each call repeats.
def test_a_seed_of_tensorflow_is_told(problem: Problem) -> None:
    def noisy(model: Any, x: Any, training: bool) -> Any:
        outputs = model(x + tf.random.normal([4], seed=3), training=training)
        return tmg.LossSum(tf.reduce_sum(outputs), tf.shape(x)[0])

    told = problem.told(noisy)
    assert len(told) == 1
    assert "differs between two runs on one device. Draw by keras.random" in told[0]


class Late(keras.losses.Loss):
    """Creates a variable in its first call."""

    scale: Any = None

    def __init__(self, create: Any) -> None:
        super().__init__()
        self._create = create

    def call(self, y: Any, outputs: Any) -> Any:
        if self.scale is None:
            self.scale = self._create()
        return tf.reduce_mean(self.scale * tf.square(y - outputs), -1)


class Early(Late):
    """Creates it at once."""

    def __init__(self, create: Any) -> None:
        super().__init__(create)
        self.scale = self._create()


def tensorflow_variable() -> Any:
    return tf.Variable(2.0, trainable=False)


def keras_variable() -> Any:
    return keras.Variable(2.0, trainable=False)


def error_of(call: Callable[[], Any]) -> Exception | None:
    """Returns what a call raises, of whatever class."""
    try:
        call()
    except Exception as error:
        return error
    return None


# Fails if TensorFlow's error about placeholders comes up, or if the line to write does not help.
@pytest.mark.parametrize("create", [tensorflow_variable, keras_variable])
def test_a_variable_of_the_first_call_is_refused_where_it_is_made(
    problem: Problem, create: Any
) -> None:
    def step_of(loss: Any) -> Any:
        model, optimizer = problem.model, problem.optimizer
        return tmg.make_train_step(model, optimizer, loss, problem.strategy, verify=False)

    late = step_of(Late(create))
    for _ in range(2):  # Also once more: nothing is left of the first.
        error = error_of(lambda: late((X, X[:, :1])))
        assert isinstance(error, tmg.ScopeError)
        assert f"created in {create.__name__} (line " in str(error)
        assert "with strategy.scope():" in str(error)
    with problem.strategy.scope():
        early = Early(create)
    plain = float(np.mean(np.square(X[:, :1] - problem.model(X))))
    scaled = float(step_of(early)((X, X[:, :1]))["loss"])
    np.testing.assert_allclose(scaled, 2.0 * plain, rtol=1e-5)


# Fails if a metric is refused that builds itself in its first update, as Keras allows.
def test_a_metric_that_builds_itself_in_forward_counts_every_row(problem: Problem) -> None:
    with problem.strategy.scope():
        problem.model.f1 = keras.metrics.F1Score(threshold=0.5)
    labels = (X[:, :1] > 0).astype("float32")
    before = 1 / (1 + np.exp(-problem.model(X).numpy()))

    def forward(model: Any, batch: Any, training: bool) -> Any:
        x, y = batch
        outputs = model(x, training=training)
        model.f1.update_state(y, tf.sigmoid(outputs))
        return tmg.loss_sum("mse", y, outputs)

    model, optimizer = problem.model, problem.optimizer
    step = tmg.make_train_step(model, optimizer, None, problem.strategy, forward=forward)
    step((X, labels))
    plain = keras.metrics.F1Score(threshold=0.5)
    plain.update_state(labels, before)
    np.testing.assert_allclose(model.f1.result(), plain.result(), rtol=1e-6)


# Fails if an evaluation of nothing returns a loss of zero, as of a model that a forward trained.
def test_nothing_to_evaluate_is_no_loss_of_zero(problem: Problem) -> None:
    with problem.strategy.scope():
        problem.model.compile("sgd")
    error = error_of(lambda: tmg.evaluate(problem.model, X, X[:, :1], verbose=0))
    assert isinstance(error, tmg.errors.LossError)
    assert "make_eval_step(model, None, strategy, forward=f)" in str(error)
