"""Each advice: the mistake is named, and with the line written the result is that of one device."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.pair import strategy_of
from problems import network, normal_rows

import tfmultigpu as tmg

L = keras.layers
X, Y = normal_rows(14, 4, 1)
Call = Callable[[Any, Any], Any]
Gather = Callable[[Any], Any]
Forward = Callable[[Any, Any, bool], Any]


class Calls(L.Layer):
    """Calls a function with itself and its input; each keyword is a state with its first value."""

    def __init__(self, function: Call, **states: Any) -> None:
        super().__init__()
        self._function = function
        for name, value in states.items():
            initializer = keras.initializers.Constant(value)
            weight = self.add_weight(
                name=name, shape=np.shape(value), initializer=initializer, trainable=False
            )
            setattr(self, name, weight)

    def call(self, x: Any) -> Any:
        return self._function(self, x)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: the layer between two others, the loss, and the options of its step."""

    layer: Callable[[], Any] = lambda: L.Activation("tanh")
    loss: Callable[[], Any] = lambda: "mse"
    forward: Forward | None = None
    micro_batches: int = 1
    replicas: int = 2
    before_step: Callable[[Any], None] = lambda model: None

    def train(self, replicas: int, **options: Any) -> tuple[list[Any], list[str]]:
        """Returns what two steps of 7 rows leave, and what was said."""
        strategy = strategy_of(replicas)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = network(4, L.Dense(4), self.layer(), L.Dense(1))
            optimizer, loss = keras.optimizers.SGD(0.1), self.loss()
        if self.forward is not None:
            options, loss = {**options, "forward": self.forward}, None
        step = tmg.make_train_step(model, optimizer, loss, strategy, **options)
        losses = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for first in (0, 7):
                self.before_step(model)
                losses.append(float(step((X[first : first + 7], Y[first : first + 7]))["loss"]))
        kind = tmg.ReplicaDependenceWarning
        said = [str(each.message) for each in caught if issubclass(each.category, kind)]
        return [*model.get_weights(), np.array(losses)], said

    def told(self) -> str:
        """Returns what was said, once."""
        (said,) = self.train(self.replicas, micro_batches=self.micro_batches)[1]
        return said

    def is_one_devices(self) -> None:
        """Holds the program to one device, in silence."""
        expected, _ = self.train(1, verify=False)
        values, said = self.train(self.replicas, micro_batches=self.micro_batches)
        assert said == []
        for value, plain in zip(values, expected, strict=True):
            np.testing.assert_allclose(value, plain, rtol=2e-5, atol=1e-6)


def rows_of_replica(x: Any) -> Any:
    return x


# Layers in which rows meet ------------------------------------------------------------------------


def standardizes(gather: Gather) -> Program:
    """Returns a batch normalization of one's own, which keeps a mean."""

    def call(layer: Any, x: Any) -> Any:
        every = gather(x)
        mean = tf.reduce_mean(every, 0)
        layer.mean.assign(0.9 * layer.mean + 0.1 * mean)
        return (x - mean) / tf.sqrt(tf.math.reduce_variance(every, 0) + 1e-3)

    return Program(lambda: Calls(call, mean=np.zeros(4)))


def keeps_largest(gather: Gather) -> Program:
    def call(layer: Any, x: Any) -> Any:
        largest = tf.maximum(layer.largest, tf.reduce_max(tf.abs(gather(x))))
        layer.largest.assign(largest)
        return x

    return Program(lambda: Calls(call, largest=0.1))


def has_codebook(gather: Gather) -> Program:
    """Returns a vector quantization whose codes are moving averages."""

    def call(layer: Any, x: Any) -> Any:
        codes, every = tf.convert_to_tensor(layer.codes), gather(x)

        def choose(rows: Any) -> Any:
            apart = tf.reduce_sum(tf.square(rows[:, None] - codes[None]), -1)
            return tf.one_hot(tf.argmin(apart, -1), 3)

        chosen = choose(every)
        count = 0.9 * layer.count + 0.1 * tf.reduce_sum(chosen, 0)
        total = 0.9 * layer.total + 0.1 * tf.matmul(chosen, every, transpose_a=True)
        layer.count.assign(count)
        layer.total.assign(total)
        layer.codes.assign(total / count[:, None])
        return x + tf.stop_gradient(tf.matmul(choose(x), codes) - x)

    codes = np.random.default_rng(0).normal(size=(3, 4))
    states = {"codes": codes, "count": np.ones(3), "total": codes}
    return Program(lambda: Calls(call, **states))


def balances(gather: Gather) -> Program:
    """Returns a mixture of experts that adds how unevenly they are chosen."""

    def call(layer: Any, x: Any) -> Any:
        gates = tf.nn.softmax(x)
        every = gather(gates)
        chosen = tf.reduce_mean(tf.one_hot(tf.argmax(every, -1), 4), 0)
        layer.add_loss(4.0 * tf.reduce_sum(chosen * tf.reduce_mean(every, 0)))
        return x * gates

    return Program(lambda: Calls(call))


def contrasts(gather: Gather) -> Program:
    def call(layer: Any, x: Any) -> Any:
        every = tf.math.l2_normalize(gather(x), -1)
        alike = tf.matmul(every, every, transpose_b=True)
        places = tf.range(tf.shape(every)[0])
        values = tf.nn.sparse_softmax_cross_entropy_with_logits(places, alike)
        layer.add_loss(tf.reduce_mean(values))
        return x

    return Program(lambda: Calls(call))


def mixes_in_forward(gather: Gather) -> Program:
    def forward(model: Any, batch: Any, training: bool) -> Any:
        x = batch[0] - tf.reduce_mean(gather(batch[0]), 0)
        return tmg.loss_sum("mse", batch[1], model(x, training=training))

    return Program(forward=forward)


ROWS_MEET = {
    "a batch normalization": (standardizes, "is Calls '"),
    "a largest value": (keeps_largest, "the state 'calls"),
    "a codebook": (has_codebook, "the state 'calls"),
    "a mixture of experts": (balances, "is what Calls '"),
    "a contrastive loss of a layer": (contrasts, "is what Calls '"),
    "a forward before the model": (mixes_in_forward, "the input of "),
}


@pytest.mark.parametrize("case", ROWS_MEET)
def test_rows_that_meet_are_gathered(case: str) -> None:
    build, named = ROWS_MEET[case]
    said = build(rows_of_replica).told()
    assert named in said
    assert "every = tmg.gather_rows(tensor)" in said
    build(tmg.gather_rows).is_one_devices()


# What is assigned ---------------------------------------------------------------------------------


def ramp(layer: Any, x: Any) -> Any:
    layer.ramp.assign_add(0.1)
    return x * tf.convert_to_tensor(layer.ramp)


def test_a_variable_of_tensorflow_comes_before_the_layers_that_read_it() -> None:
    variable = tf.Variable(0.5, trainable=False, name="temperature")

    def assigns(layer: Any, x: Any) -> Any:
        variable.assign_add(0.1)
        return x

    def both() -> Any:
        return keras.Sequential([Calls(assigns), L.Dense(4), Calls(lambda _, x: x * variable)])

    def plain_loss(y: Any, outputs: Any) -> Any:
        variable.assign_add(0.1)
        return tf.reduce_mean(tf.square(y - outputs), -1) * variable

    for mistake in (Program(both), Program(loss=lambda: plain_loss)):
        said = mistake.told()
        assert "is the tf.Variable 'temperature" in said
        assert "add_weight of a layer" in said
        assert "keras.Variable(0.5, trainable=False) in strategy.scope()" in said

    def loss() -> Any:
        own = keras.Variable(0.5, trainable=False)

        def value(y: Any, outputs: Any) -> Any:
            own.assign_add(0.1)
            return tf.reduce_mean(tf.square(y - outputs), -1) * own

        return value

    Program(lambda: Calls(ramp, ramp=0.5)).is_one_devices()
    Program(loss=loss).is_one_devices()


def test_python_that_counts_its_traces_is_not_taken_for_rows_that_meet() -> None:
    traces = []

    def counts(_: Any, x: Any) -> Any:
        traces.append(1)
        return x * float(len(traces))

    def layers() -> Any:
        return keras.Sequential([L.Dropout(0.1), Calls(counts), Calls(lambda _, x: x - 1.0)])

    said = Program(layers).told()
    assert "is Calls '" in said
    assert "self.steps.assign_add(1.0)" in said
    assert "gather_rows" not in said
    Program(lambda: Calls(ramp, ramp=0.5)).is_one_devices()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_state_that_changes_with_each_micro_batch(replicas: int) -> None:
    def program(call: Call, parts: int = 2, **options: Any) -> Program:
        layer = lambda: Calls(call, ramp=0.5)  # noqa: E731
        return Program(layer, micro_batches=parts, replicas=replicas, **options)

    said = program(ramp).told()
    assert "is the state 'calls" in said
    assert "Write micro_batches=1; or change it once for each global batch" in said
    program(ramp, parts=1).is_one_devices()

    def count(model: Any) -> None:
        model.layers[1].ramp.assign_add(0.1)

    outside = program(lambda layer, x: x * tf.convert_to_tensor(layer.ramp), before_step=count)
    outside.is_one_devices()
    expected, _ = program(ramp, parts=1).train(1, verify=False)
    values, _ = outside.train(replicas, micro_batches=2)
    np.testing.assert_allclose(values[-1], expected[-1], rtol=2e-5)


# The way back, and rounding -----------------------------------------------------------------------


def test_a_gradient_that_is_clipped_on_the_way_back() -> None:
    def clips(**options: Any) -> Program:
        @tf.custom_gradient
        def same(x: Any) -> Any:
            return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.05, **options)

        return Program(lambda: Calls(lambda _, x: same(x)))

    said = clips().told()
    assert "The losses agree, and the gradient does not" in said
    assert "(axes=-1)" in said
    clips(axes=-1).is_one_devices()


def rounds(before: Call, *after: Any) -> Program:
    """Returns a program that rounds its inputs: what TensorFlow makes of it differs by graph."""
    strategy_loss = Program().loss

    def forward(model: Any, batch: Any, training: bool) -> Any:
        x = before(None, batch[0])
        return tmg.loss_sum(strategy_loss(), batch[1], model(x, training=training))

    return Program(lambda: keras.Sequential([*after, L.Activation("tanh")]), forward=forward)


def test_rounding_that_tensorflow_takes_out_of_one_graph_is_blamed_on_no_layer() -> None:
    trick = rounds(lambda _, x: (x + 1e5) - 1e5)
    (said,) = trick.train(2)[1]
    assert "(x + 1e5) - 1e5" in said
    assert "depends on how the batch was cut:" not in said
    rounds(lambda _, x: tf.round(128.0 * x) / 128.0).is_one_devices()
    centred = L.Lambda(lambda x: x - tf.reduce_mean(x, 0), name="centred")
    said = rounds(lambda _, x: (x + 1e5) - 1e5, centred).told()
    assert "is Lambda '" in said
    assert "centred'" in said
