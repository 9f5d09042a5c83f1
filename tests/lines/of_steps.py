"""Steps: what they are made of, given and called with."""

from __future__ import annotations

import re
import sys
import types
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from problems import network

import tfmultigpu as tmg
from lines.messages import Told, example
from lines.parts import (
    X,
    Y,
    batches,
    compiled,
    dense,
    distribute,
    fit,
    made,
    optimizer_of,
    step,
    strategy_of,
    window,
)

BATCH = X, Y


def two_heads() -> Any:
    x = keras.Input((4,))
    return keras.Model(x, {name: keras.layers.Dense(2, name=name)(x) for name in ("a", "b")})


def mean_of(model: Any, batch: Any, training: bool) -> Any:
    return tmg.loss_sum("mse", batch[1], model(batch[0], training=training))


def by_forward(forward: Any, build: Any = dense, **options: Any) -> Any:
    return step(made(build), None, forward=forward, **options)(BATCH)


@example("model must be a Keras model or layer")
def normalized_by_name(told: Told) -> None:
    model = made(lambda: network(4, keras.layers.BatchNormalization()))
    with told(TypeError, "Received: .*model"):
        tmg.synchronize_batch_norm("model")
    tmg.synchronize_batch_norm(model)


@example("A step runs on all replicas of its strategy by itself")
def a_step_in_another_scope(told: Told) -> None:
    trained = step()
    with told(tmg.ScopeError, "in the scope of Mirrored.*with 3 repl"), strategy_of(3).scope():
        trained(BATCH)
    trained(BATCH)


@example("The batch was distributed for another strategy")
def a_batch_of_tensorflow_for_three(told: Told) -> None:
    trained = step()
    (batch,) = strategy_of(3).experimental_distribute_dataset(batches(size=8))
    with told():
        trained(batch)
    (batch,) = strategy_of(2).experimental_distribute_dataset(batches(size=8))
    trained(batch)


@example("Inside a tf.function the step does not know how many rows")
def a_batch_into_a_function(told: Told) -> None:
    trained = step()
    (batch,) = distribute(batches(size=8))
    theirs = iter(strategy_of(2).experimental_distribute_dataset(batches(size=8)))
    with told(tmg.errors.DataError, r"call step\(next\(iterator\)\)"):
        tf.function(lambda shards: trained(shards)["loss"], autograph=False)(batch)
    with told():
        tf.function(lambda it: trained(next(it))["loss"], autograph=False)(theirs)
    trained(batch)
    iterator = iter(distribute(batches(size=8)))
    tf.function(lambda it: trained(next(it))["loss"], autograph=False)(iterator)


@example("got no rows")
def a_shard_without_rows(told: Told) -> None:
    trained = step()
    one = batches(X[:1], Y[:1])
    (batch,) = strategy_of(2).experimental_distribute_dataset(one)
    with told():
        trained(batch)
    for batch in distribute(one):
        trained(batch)


@example("A batch is a tensor or a tuple or dict of tensors with rows")
def a_number_in_a_batch(told: Told) -> None:
    trained = step()
    with told(tmg.errors.DataError, "Received: float"):
        trained((X, 3.0))
    for batch in distribute(batches()):
        trained(batch)


@example("A stateful layer carries the state of each row")
def stateful(told: Told) -> None:
    def build(**options: Any) -> Any:
        shape = {"batch_shape": (8, 2, 4)} if options else {"shape": (2, 4)}
        return keras.Sequential(
            [keras.Input(**shape), keras.layers.GRU(2, name="memory", **options)]
        )

    sequences = np.ones((8, 2, 4), "float32"), Y
    with told(tmg.ScopeError, r"\['memory'\].*Drop stateful"):
        step(made(lambda: build(stateful=True)))(sequences)
    step(made(build))(sequences)
    alone = tmg.create_strategy(devices=1)
    with alone.scope():
        model, optimizer = build(stateful=True), keras.optimizers.SGD()
    for parts in ({"micro_batches": 2}, {"logical_replicas": 4}):
        with told(tmg.ScopeError, "batches in .* parts"):
            tmg.make_train_step(model, optimizer, "mse", alone, **parts)(sequences)
    tmg.make_train_step(model, optimizer, "mse", alone, verify=False)(sequences)


@example("The model has no variables yet and could not be built")
def not_built(told: Told) -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.dense(x["features"])

    model = made(Own)
    with told(tmg.ScopeError, r"scope\(\): model\(x\[:1\]\)"):
        step(model)(BATCH)
    with strategy_of(2).scope():
        model({"features": X[:1]})
    step(model)(({"features": X}, Y))


@example("chain_steps takes steps of make_train_step")
def a_chain_of_functions(told: Told) -> None:
    d_step, g_step = step(), step()
    of_three = tmg.make_train_step(made(replicas=3), optimizer_of(3), "mse", strategy_of(3))
    for wrong in ((d_step, lambda batch: None), ([d_step, g_step],), (), (d_step, of_three)):
        with told(TypeError):
            tmg.chain_steps(*wrong)
    tmg.chain_steps(d_step, g_step, names=("d", "g"))


@example("Each step needs a name of its own")
def two_names_alike(told: Told) -> None:
    first, second = step(), step()
    for names in (("step", "step"), ("step",)):
        with told(ValueError):
            tmg.chain_steps(first, second, names=names)
    tmg.chain_steps(first, second, names=("step_1", "step_2"))


@example("A seed generator was created outside the scope")
def seeds_outside_the_scope(told: Told) -> None:
    def noisy(seeds: Any) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            x = batch[0] + keras.random.normal(tf.shape(batch[0]), seed=seeds)
            return tmg.loss_sum("mse", batch[1], model(x))

        return forward

    outside = keras.random.SeedGenerator(1, name="beside")
    with told(tmg.ScopeError, r"'beside', .* 2 replica.*SeedGenerator\("):
        by_forward(noisy(outside))
    one, sgd = tf.distribute.get_strategy(), keras.optimizers.SGD()
    alone = tmg.make_train_step(dense(), sgd, None, one, forward=noisy(outside), verify=False)
    assert np.isfinite(float(alone(BATCH)["loss"]))
    with strategy_of(2).scope():
        seeds = keras.random.SeedGenerator(1)
    by_forward(noisy(seeds))


@example("is never called. Name it")
def a_hook_with_a_typing_error(told: Told) -> None:
    def named(hook: str) -> Any:
        return type("Own", (tmg.steps.Feature,), {hook: lambda self, gradient: gradient})

    with told(TypeError, r"Own\.on_gradients is never called\. Name it on_grad"):
        named("on_gradients")
    step(features=[named("on_gradient")()])(BATCH)


class Doubled(tmg.steps.Feature):
    """A feature of a user that returns what it is told."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def on_gradient(self, gradient: Any) -> Any:
        return self.returned(gradient, tuple([2.0 * each for each in gradient.tensors]))


@example("on_gradient must return the gradient")
def a_feature_that_returns_something_else(told: Told) -> None:
    for returned in (
        lambda _, tensors: tensors,
        lambda g, tensors: g._replace(tensors=tensors[1:]),
    ):
        with told(tmg.TfMultiGpuError, r"Doubled\.on_gradient must return the gradient, .*"):
            step(features=[Doubled(returned)])(BATCH)
    step(features=[Doubled(lambda g, tensors: g._replace(tensors=tuple(tensors)))])(BATCH)


@example("features takes a list of objects")
def features_that_are_none(told: Told) -> None:
    class Mine(tmg.steps.Feature):
        pass

    for features in ([Mine], Mine(), [object()]):
        with told(TypeError, "features takes a list of objects"):
            step(features=features)
    step(features=[Mine()])(BATCH)


def gathering(model: Any, batch: Any, training: bool) -> Any:
    y, outputs = tmg.gather_rows((batch[1], model(batch[0])))
    value = tf.reduce_mean(tf.square(y - outputs))
    rows = tf.cast(tf.shape(batch[0])[0], tf.float32)
    return tmg.LossSum(value * rows, rows)


@example("gather_rows would see the rows of one micro-batch only")
def gathered_in_micro_batches(told: Told) -> None:
    with told(tmg.TfMultiGpuError, "Write micro_batches"):
        by_forward(gathering, micro_batches=2)
    by_forward(gathering, micro_batches=1)


@example("is called where the global batch is not known")
def gathered_anywhere(told: Told) -> None:
    with told(tmg.errors.LossError, r"tmg\.gather_rows .*forward=f"):
        strategy_of(2).run(lambda: tmg.gather_rows(X))
    by_forward(gathering)
    for batch in distribute(batches()):
        strategy_of(2).run(lambda x, y: tmg.gather_rows(x), args=batch)
    run = strategy_of(2).run
    function = tf.function(
        lambda iterator: run(lambda x, y: tmg.gather_rows(x), args=next(iterator)), autograph=False
    )
    function(iter(distribute(batches())))


@example("gather_rows takes dense tensors of numbers or truth values")
def gathered_ragged(told: Told) -> None:
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0], [5.0]])

    def gathered(convert: Any) -> None:
        for batch in distribute(batches(ragged)):
            strategy_of(2).run(lambda x: tmg.gather_rows(convert(x)), args=batch)

    with told(tmg.errors.LossError, r"to_tensor\(shape="):
        gathered(lambda value: value)
    # Of one width on all replicas, as rows of one tensor are.
    gathered(lambda value: value.to_tensor(shape=[None, 2]))


@example("gather_rows adds the rows of all replicas, so they need one shape")
def gathered_at_other_widths(told: Told) -> None:
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0, 5.0, 6.0], [7.0]])

    def gathered(convert: Any) -> None:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            outputs, rows = model(batch[0]), tmg.gather_rows(convert(batch[1]))
            return tmg.LossSum(tf.reduce_sum(outputs) * tf.reduce_sum(rows), 4.0)

        step(loss=None, forward=forward)((X[:4], ragged))

    with told():
        gathered(lambda value: value.to_tensor())
    gathered(lambda value: value.to_tensor(shape=[None, 100]))


@example(
    "gather_rows takes one row per example of this replica, and this tensor has another number"
)
def gathered_views(told: Told) -> None:
    def gathered(views: Any) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            outputs = model(batch[0])
            first, second = tf.split(tmg.gather_rows(views(outputs, -outputs)), 2)
            return tmg.LossSum(tf.reduce_sum(first - second), 8.0)

        by_forward(forward)

    with told(tmg.TfMultiGpuError, "rows of the batch here 8, 4"):
        gathered(lambda first, second: tf.concat([first, second], 0))
    gathered(lambda first, second: tf.stack([first, second], 1))  # An axis of their own.

    def by_parts(model: Any, batch: Any, training: bool) -> Any:
        outputs = model(batch[0])
        first, second = tmg.gather_rows((outputs, -outputs))
        return tmg.LossSum(tf.reduce_sum(first - second), 8.0)

    by_forward(by_parts)


@example(
    "rows and gather_rows are asked in a strategy.run that is called with batches of different"
)
def rows_of_two_batches(told: Told) -> None:
    strategy = strategy_of(2)

    def firsts(*batches: Any) -> Any:
        return strategy.run(lambda *_: tmg.rows().first, args=batches)

    def of(data: Any) -> Any:
        return next(iter(tmg.distribute_dataset(data, strategy)))

    def dataset(rows: int) -> Any:
        return tf.data.Dataset.from_tensor_slices(X[:8]).batch(rows)

    with told(tmg.errors.LossError, "then of another 0, 3, 6, 0, 2, 4"):
        firsts(of(dataset(6)), of(dataset(4)))
    firsts(of(tf.data.Dataset.zip(dataset(4), dataset(4))))


def twice(inputs: Any) -> Any:
    """Makes two rows of each, of which the static shape does not tell."""
    return tf.ensure_shape(tf.tile(inputs, [2, 1]), [None, 4])


@example("The loss did not return one value per row")
def two_losses_of_each_row(told: Told) -> None:
    def trained(loss: Any) -> None:
        model = made(lambda: network(4, keras.layers.Lambda(twice), dense()))
        step(model, loss)((X[:1], Y[:1]))

    with told():
        trained("mse")
    loss = keras.losses.MeanSquaredError()
    trained(lambda y_true, y_pred: loss(y_true, y_pred) + tf.zeros_like(y_pred[:, 0]))


@example("XLA cannot compile what needs the other replicas")
def gathered_by_xla(told: Told) -> None:
    with told(tmg.TfMultiGpuError, "jit_compile=True. Leave it out"):
        by_forward(gathering, jit_compile=True)
    by_forward(gathering)


@example("shard_update is True, False or 'auto'")
def unknown_shard_update(told: Told) -> None:
    with told(ValueError, "Received: shard_update='yes'"):
        step(shard_update="yes")
    step(shard_update="auto")


@example("verify is 'first', True, False or 'gradients'")
def unknown_verify(told: Told) -> None:
    with told():
        step(verify="always")
    step(verify=True)


@example("The weight that divides the loss depends on trained variables")
def a_trained_weight(told: Told) -> None:
    def weighted(stop: bool) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            outputs = model(batch[0])
            weights = tf.nn.softplus(outputs[:, 0])
            values = tf.reduce_mean(tf.square(outputs - batch[1]), -1)
            total = tf.reduce_sum(weights)
            return tmg.LossSum(
                tf.reduce_sum(weights * values), tf.stop_gradient(total) if stop else total
            )

        return forward

    def over_all(model: Any, batch: Any, training: bool) -> Any:
        outputs = model(batch[0])
        weights = tf.nn.softplus(outputs[:, 0])
        values = tf.reduce_mean(tf.square(outputs - batch[1]), -1)
        total, rows = tf.reduce_sum(tmg.gather_rows(weights)), tmg.rows()
        count, all_rows = (tf.cast(n, tf.float32) for n in (rows.count, rows.total))
        return tmg.LossSum(tf.reduce_sum(weights * values) / total * all_rows, count)

    with told(tmg.TfMultiGpuError):
        by_forward(weighted(stop=False))
    by_forward(weighted(stop=True))
    by_forward(over_all, verify="gradients")


@example("variables must hold variables of the model")
def variables_of_another_model(told: Told) -> None:
    first, second = made(), made()
    with told(ValueError, "Make several models attr"):
        step(first, variables=second.trainable_variables)
    with strategy_of(2).scope():
        both = keras.Model()
        both.parts = [first, second]

    def forward(model: Any, batch: Any, training: bool) -> Any:
        outputs = model.parts[0](batch[0]) + model.parts[1](batch[0])
        return tmg.loss_sum("mse", batch[1], outputs)

    step(both, None, forward=forward, variables=second.trainable_variables)(BATCH)


@example("There is a loss but no labels")
def no_labels(told: Told) -> None:
    with told(tmg.errors.LossError):
        step()(X)
    step()((X, Y))
    step()((X, Y, np.ones(8, "float32")))

    def forward(model: Any, batch: Any, training: bool) -> Any:
        return tmg.loss_sum("mse", tf.zeros_like(batch[:, :2]), model(batch))

    step(None, None, forward=forward)(X)


@example("forward returns a sum over its rows")
def forward_of_a_mean(told: Told) -> None:
    with told(tmg.errors.LossError, r"Received: .*Tensor.*\. Return tmg\.loss_sum"):
        by_forward(lambda model, batch, training: tf.reduce_mean(model(batch[0])))
    by_forward(mean_of)
    by_forward(
        lambda model, batch, training: tmg.LossSum(
            tf.reduce_sum(model(batch[0])), tf.cast(tf.size(batch[1]), tf.float32)
        )
    )


@example("Give either a loss, or forward=f(model, batch, training)")
def loss_and_forward(told: Told) -> None:
    with told(tmg.errors.LossError):
        step(None, "mse", forward=mean_of)
    step(None, None, forward=mean_of)(BATCH)
    step(None, "mse")(BATCH)


@example("A regularizer gets the value of its own variable")
def a_regularizer_of_another_variable(told: Told) -> None:
    def tied() -> Any:
        first, second = keras.layers.Dense(4), keras.layers.Dense(4)
        first.build((None, 4))
        second.kernel_regularizer = lambda kernel: tf.reduce_sum(tf.square(kernel - first.kernel))
        return network(4, first, second, keras.layers.Dense(2))

    class Tied(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [keras.layers.Dense(4), keras.layers.Dense(4), keras.layers.Dense(2)]

        def call(self, x: Any) -> Any:
            for layer in self.parts:
                x = layer(x)
            between = self.parts[0].kernel - self.parts[1].kernel
            self.add_loss(tf.reduce_sum(tf.square(between)))
            return x

    with told():
        step(made(tied))(BATCH)
    step(made(Tied), verify=True)(BATCH)


@example("forward reads the losses of the model")
def losses_counted_twice(told: Told) -> None:
    def build() -> Any:
        return dense(kernel_regularizer="l2")

    def with_losses(model: Any, batch: Any, training: bool) -> Any:
        pair = mean_of(model, batch, training)
        return tmg.LossSum(pair.sum + sum(model.losses), pair.weight)

    with told():
        by_forward(with_losses, build)
    by_forward(mean_of, build)


@example("do not fit. Received")
def a_loss_of_an_unknown_output(told: Told) -> None:
    labels = {"a": Y, "b": Y}
    with told():
        step(made(two_heads), {"a": "mse", "up": "mse"})((X, labels))
    step(made(two_heads), {"a": "mse", "b": "mse"})((X, labels))
    step(made(two_heads), ["mse", "mse"])((X, [Y, Y]))


@example("loss_weights are numbers, which a step reads once")
def a_variable_as_loss_weight(told: Told) -> None:
    with strategy_of(2).scope():
        weight = keras.Variable(0.5, trainable=False)
    labels = {"a": Y, "b": Y}
    losses = {"a": "mse", "b": "mse"}
    with told(tmg.TfMultiGpuError):
        step(made(two_heads), tmg.steps.Objective(losses, loss_weights={"a": weight, "b": 1.0}))(
            (X, labels)
        )

    def forward(model: Any, batch: Any, training: bool) -> Any:
        outputs = model(batch[0])
        one = tmg.loss_sum("mse", batch[1]["a"], outputs["a"])
        other = tmg.loss_sum("mse", batch[1]["b"], outputs["b"])
        factor = tf.convert_to_tensor(weight.value)
        return tmg.LossSum(one.sum * factor + other.sum, one.weight)

    step(made(two_heads), None, forward=forward)((X, labels))


@example("A metric of a step is a keras.metrics.Metric")
def a_mean_as_metric(told: Told) -> None:
    with strategy_of(2).scope():
        mean, error = keras.metrics.Mean(), keras.metrics.MeanAbsoluteError()
    with told(tmg.errors.LossError, "Received: <Mean name=mean>"):
        step(metrics=[mean])
    assert "loss" in step(metrics=[error])(BATCH)


@example("A metric of a step is a keras.metrics.Metric")
def metrics_by_name(told: Told) -> None:
    error = keras.metrics.MeanAbsoluteError
    lines = {
        "mae": "keras.metrics.MeanAbsoluteError()",
        error: "keras.metrics.MeanAbsoluteError()",
        keras.losses.huber: "keras.metrics.MeanMetricWrapper(huber)",
    }
    for given, line in lines.items():
        with told(tmg.errors.LossError, re.escape(f"metrics=[{line}]")):
            step(metrics=[given])
    with told(tmg.errors.LossError, r"BinaryAccuracy\(\)"):
        step(metrics=["accuracy"])
    with strategy_of(2).scope():
        made_of = [error(), keras.metrics.MeanMetricWrapper(keras.losses.huber)]
    step(metrics=[*made_of, _accuracy()])(BATCH)


def _accuracy() -> Any:
    with strategy_of(2).scope():
        return keras.metrics.BinaryAccuracy()


@example("With forward the step sees no labels and predictions")
def metrics_beside_forward(told: Told) -> None:
    with strategy_of(2).scope():
        error = keras.metrics.MeanAbsoluteError()

    def forward(model: Any, batch: Any, training: bool) -> Any:
        outputs = model(batch[0])
        error.update_state(batch[1], outputs)
        return tmg.loss_sum("mse", batch[1], outputs)

    with told(tmg.errors.LossError):
        by_forward(mean_of, metrics=[error])
    by_forward(forward)


@example("A step takes one batch")
def two_arguments(told: Told) -> None:
    trained = step()
    with told(TypeError, r"one batch, not 2.*Write step\(\(x, y\)\)"):
        trained(X, Y)
    trained((X, Y))


def runs(trained: Any, wrong: Any, told: Told, words: str = "") -> None:
    with told(tmg.errors.DataError, words):
        trained.run(wrong, 2)
    iterator = iter(tmg.distribute_dataset(batches(), strategy_of(2)))
    assert int(trained.run(iterator, 2)["steps"]) == 2


@example("step.run takes an iterator, which remembers where it is")
def run_of_a_dataset(told: Told) -> None:
    runs(step(), batches(), told, r"Received: \w*Dataset\. Write iterator = ")


@example("step.run reads the batches of tmg.distribute_dataset, and this iterator is TensorFlow's")
def run_of_an_iterator_of_tensorflow(told: Told) -> None:
    runs(step(), iter(strategy_of(2).experimental_distribute_dataset(batches())), told)


@example("Received: data for {}; a step for {}")
def run_of_data_for_three(told: Told) -> None:
    trained = step()
    with told(tmg.errors.DataError, "data for MirroredStrategy with 3 .*; a step for Mirrored"):
        trained.run(iter(distribute(batches(), 3)), 1)
    trained.run(iter(distribute(batches())), 1)


@example("There is nothing to minimise")
def no_loss(told: Told) -> None:
    with told(tmg.errors.LossError, r"no layer adds one.*model\.compile\(loss="):
        step(None, None)(BATCH)
    step(None, "mse")(BATCH)
    step(None, None, forward=mean_of)(BATCH)
    fit(X, Y, model=compiled("mse"))


@example("Two logs of a chain have one name")
def two_logs_of_a_chain(told: Told) -> None:
    labels = {"a": Y, "b": Y}
    losses = {"a": "mse", "b": "mse"}
    heads = step(made(two_heads), losses)

    def forward(model: Any, batch: Any, training: bool) -> Any:
        return tmg.loss_sum("mse", batch[1]["a"], model(batch[0]))

    other = step(None, None, forward=forward)
    with told():
        tmg.chain_steps(heads, other, names=("x", "x_a"))((X, labels))
    tmg.chain_steps(heads, other, names=("x", "y"))((X, labels))


@example("No gradient reaches any trainable variable")
def no_gradient_at_all(told: Told) -> None:
    def rounded(model: Any, batch: Any, training: bool) -> Any:
        return tmg.loss_sum("mse", batch[1], tf.stop_gradient(model(batch[0])))

    with told():
        by_forward(rounded)
    by_forward(mean_of)

    def by_hand(*, inside: bool) -> None:
        model = made()
        accumulator = window(model.trainable_variables)

        def replica() -> None:
            outputs = None if inside else model(X)
            with tf.GradientTape() as tape:
                pair = tmg.loss_sum("mse", Y, model(X) if inside else outputs)
            accumulator.add(tape.gradient(pair.sum, model.trainable_variables), pair)

        strategy_of(2).run(replica)

    with told(tmg.errors.LossError, "call the model inside it"):
        by_hand(inside=False)
    by_hand(inside=True)


def one_used() -> Any:
    x = keras.Input((4,))
    used, unused = keras.layers.Dense(2, name="used"), keras.layers.Dense(2, name="unused")
    return keras.Model(x, [used(x), unused(x)])


@example("No gradient reaches some trainable variables")
def no_gradient_of_some(told: Told) -> None:
    model = made(one_used)
    with told():
        step(model, ["mse", None])((X, [Y, None]))
    model = made(one_used)
    model.get_layer("unused").trainable = False
    step(model, ["mse", None])((X, [Y, None]))

    def by_hand(variables: Any, *additions: Any) -> None:
        accumulator = window(variables)
        for gradients in additions:
            strategy_of(2).run(accumulator.add, args=(gradients, 1.0))
        accumulator.reduce()

    kernel, bias = made().trainable_variables
    with told():
        by_hand([kernel, bias], [np.zeros((4, 2)), None])
    by_hand([kernel], [np.zeros((4, 2))])
    by_hand([kernel, bias], [np.zeros((4, 2)), None], [None, np.zeros(2)])


@example("The model has no trainable variables")
def nothing_is_trained(told: Told) -> None:
    model = made()
    model.trainable = False
    with told():
        step(model)(BATCH)
    model.trainable = True
    step(model)(BATCH)


@example("The model does something else each time that it is traced")
def another_seed_in_each_call(told: Told) -> None:
    with strategy_of(2).scope():
        once = keras.random.SeedGenerator(1)

    def noisy(seeds: Any) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            noise = keras.random.normal(tf.shape(batch[0]), seed=seeds())
            return tmg.loss_sum("mse", batch[1], model(batch[0] + noise))

        return forward

    with told(tmg.TfMultiGpuError, "in the scope"):
        by_forward(noisy(lambda: keras.random.SeedGenerator(1)))
    by_forward(noisy(lambda: once))


@example("A variable is created in a step, where each replica")
def a_variable_of_the_first_call(told: Told) -> None:
    class Scaled(keras.losses.Loss):
        scale: Any = None

        def call(self, y: Any, outputs: Any) -> Any:
            if self.scale is None:
                self.scale = tf.Variable(2.0, trainable=False)
            return tf.reduce_mean(self.scale * tf.square(y - outputs), -1)

    class ScaledAtOnce(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.scale = keras.Variable(1.0, trainable=False)

    def another(y: Any, outputs: Any) -> Any:
        return tf.Variable(2.0) * tf.square(y - outputs)

    with told(tmg.ScopeError, r"created in .*Scaled\.call \(line \d+ of of_steps\.py\)"):
        step(loss=Scaled())(BATCH)
    with strategy_of(2).scope():
        loss = ScaledAtOnce()
    step(loss=loss)(BATCH)
    alone = tf.distribute.get_strategy()
    with told(tmg.ScopeError, "singleton tf.Variables"):
        tmg.make_train_step(dense(), keras.optimizers.SGD(), another, alone)(BATCH)
    tmg.make_train_step(dense(), keras.optimizers.SGD(), ScaledAtOnce(), alone)(BATCH)


@example("The batch was cut for another strategy")
def run_of_a_batch_for_three(told: Told) -> None:
    (batch,) = distribute(batches(size=8), 3)
    with told():
        strategy_of(2).run(lambda x, y: tf.reduce_sum(x), args=batch)
    (batch,) = distribute(batches(size=8))
    strategy_of(2).run(lambda x, y: tf.reduce_sum(x), args=batch)


@example("must be a {}. Received: {}. Write {} = {}.")
def a_strategy_by_name(told: Told) -> None:
    with told():
        tmg.distribute_dataset(batches(), "mirrored")
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    tmg.distribute_dataset(batches(), strategy)


@example("The {} was created {}. Received: variable {}")
def made_outside_the_scope(told: Told) -> None:
    with told():
        step(dense(), optimizer=optimizer_of())
    with told():
        step(made(replicas=3), optimizer=optimizer_of())
    outside = keras.optimizers.SGD(0.1)
    outside.build([keras.Variable(1.0)])
    with told():
        step(optimizer=outside)
    with strategy_of(2).scope():
        model, optimizer = dense(), keras.optimizers.SGD(0.1)
    step(model, optimizer=optimizer)(BATCH)


@example("A variable was added to the {} {}")
def lora_outside_the_scope(told: Told) -> None:
    optimizer, model = optimizer_of(), made()
    model.layers[0].enable_lora(4)
    with told(tmg.ScopeError, r"scope\(\):\n        layer\.enable_lora\(4\)"):
        step(model, optimizer=optimizer)
    model = made()
    with strategy_of(2).scope():
        model.layers[0].enable_lora(4)
    step(model, optimizer=optimizer)(BATCH)


@example("The model returns one value for a batch")
def one_value_for_a_batch(told: Told) -> None:
    class Mean(keras.layers.Layer):
        axis: int | None = None

        def call(self, x: Any) -> Any:
            return tf.reduce_mean(x, axis=self.axis)

    class MeanOfRows(Mean):
        axis = -1

    def predicted(layer: Any) -> Any:
        model = made(lambda: network(4, layer()))
        return tmg.make_predict_step(model, strategy_of(2), verify=False)(X)

    with told():
        predicted(Mean)
    assert predicted(MeanOfRows).shape == (8,)


@example("Replicas of this strategy share one copy of each variable")
def a_central_strategy(told: Told) -> None:
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with told():
        tmg.distribute_dataset(batches(), central)
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    with strategy.scope(), tmg.sharded_variables(at_least=0):
        model, optimizer = dense(), keras.optimizers.SGD(0.1)
    trained = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    for batch in tmg.distribute_dataset(batches(), strategy):
        trained(batch)


@example("This library trains models of Keras 3, and tf_keras is Keras 2")
def a_model_of_keras_2(told: Told) -> None:
    kind = type("Sequential", (), {"__module__": "tf_keras.src.engine"})
    with mock.patch.dict(sys.modules, {"tf_keras": types.ModuleType("tf_keras")}):
        with told():
            step(kind())
        step(made())(BATCH)
