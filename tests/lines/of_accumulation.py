"""Sums of losses and gradients by hand, and their update."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from problems import network

import tfmultigpu as tmg
from lines.messages import Told, example
from lines.parts import (
    X,
    Y,
    compiled,
    dense,
    fit,
    made,
    optimizer_of,
    step,
    strategy_of,
    window,
)

ZEROS = [np.zeros((4, 2), "float32"), np.zeros(2, "float32")]  # For the variables of ``made()``.


def gradient_in_replicas(loss: Any, model: Any = None, strategy: Any = None) -> Any:
    """Returns what replicas get that differentiate ``loss(labels, outputs)``."""
    strategy, model = strategy or strategy_of(2), model or made()

    def replica() -> Any:
        with tf.GradientTape() as tape:
            value = loss(Y, model(X))
        return tape.gradient(value, model.trainable_variables)

    return tf.function(lambda: strategy.run(replica), autograph=False)()


@example("The window was created in another scope")
def accumulator_of_another_scope(told: Told) -> None:
    accumulator = window(made().trainable_variables)
    with told():
        strategy_of(3).run(accumulator.add, args=(ZEROS, 1.0))
    accumulator = window(made(replicas=3).trainable_variables, 3)
    strategy_of(3).run(accumulator.add, args=(ZEROS, 1.0))


@example("The accumulator was created outside the scope of the strategy")
def accumulator_outside_the_scope(told: Told) -> None:
    strategy, variables = strategy_of(2), made().trainable_variables
    with told(
        tmg.ScopeError, r"scope\(\):\n        window = tmg\.GradientAccumulator\(variables\)$"
    ):
        tmg.GradientAccumulator(variables)
    with strategy.scope():
        window = tmg.GradientAccumulator(variables)
    strategy.run(window.add, args=(ZEROS, 1.0))


@example("no variables. Build the model")
def accumulator_of_a_model(told: Told) -> None:
    model = made()
    with told():
        window(model)
    window(model.trainable_variables)


@example("add takes one gradient for each variable")
def too_few_gradients(told: Told) -> None:
    accumulator = window(made().trainable_variables)
    with told():
        strategy_of(2).run(accumulator.add, args=([None], 1.0))
    strategy_of(2).run(accumulator.add, args=(ZEROS, 1.0))


@example("add needs the weight by which the sum of these losses is to be divided")
def add_without_a_weight(told: Told) -> None:
    strategy, variables = strategy_of(2), (model := made()).trainable_variables
    accumulator = window(variables)
    for wrong in ((), ("mean",)):
        with told(TypeError, r"Received: weight=.*Write window\.add\(gradients, weight=pair\)"):
            strategy.run(accumulator.add, args=(ZEROS, *wrong))

    def replica() -> None:
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum("mse", Y, model(X))
        accumulator.add(tape.gradient(pair.sum, variables), weight=pair)

    strategy.run(replica)


@example("add is for each replica")
def add_outside_of_replicas(told: Told) -> None:
    accumulator = window(made().trainable_variables)
    with told(tmg.TfMultiGpuError):
        accumulator.add(ZEROS, 1.0)
    strategy_of(2).run(accumulator.add, args=(ZEROS, 1.0))


@example('a loss with reduction="sum" and another')
def two_kinds_of_weights(told: Told) -> None:
    variables = made().trainable_variables
    summed = keras.losses.MeanSquaredError(reduction="sum")

    def replica(first: Any, second: Any) -> None:
        first.add(ZEROS, tmg.loss_sum(summed, Y, Y).weight)
        second.add(ZEROS, tmg.loss_sum("mse", Y, Y).weight)

    accumulator = window(variables)
    with told(tmg.TfMultiGpuError, "both in one window"):
        strategy_of(2).run(replica, args=(accumulator, accumulator))
    strategy_of(2).run(replica, args=(window(variables), window(variables)))


@example("{} must be a positive, finite number")
def clip_limit_of_zero(told: Told) -> None:
    with told():
        tmg.clip_gradients([tf.constant([1.0])], 0)
    tmg.clip_gradients([tf.constant([1.0])], 1.0)
    for wrong in (0, -8.0):
        with told():
            tmg.LossScale(wrong)
    tmg.LossScale(1024.0)
    with told():
        step(clip_norm=0.0)
    step(clip_norm=1.0)


@example("A LossScale is dynamic unless growth_steps is None")
def loss_scale_by_name(told: Told) -> None:
    with told():
        tmg.LossScale("dynamic")  # type: ignore[arg-type]
    assert float(tmg.LossScale().value()) == 2.0**15


@example("scale_loss divided a LossSum to the size of a mean")
def scaled_pair_that_is_not_added(told: Told) -> None:
    strategy, variables = strategy_of(2), (model := made()).trainable_variables
    with strategy.scope():
        scale = tmg.LossScale(8.0)

    def gradients_of(target_of: Any, give: Any = None) -> Any:
        accumulator = window(variables)

        def replica() -> Any:
            with tf.GradientTape() as tape:
                pair = tmg.loss_sum("mse", Y, model(X))
                target = target_of(pair)
            gradients = tape.gradient(target, variables)
            return accumulator.add(gradients, give(pair)) if give else gradients

        gradients = tf.function(lambda: strategy.run(replica), autograph=False)()
        if give:
            return accumulator.reduce()[0]
        return [strategy.reduce("SUM", gradient, axis=None) for gradient in gradients]

    def mean_of(pair: Any) -> Any:
        context: Any = tf.distribute.get_replica_context()
        return pair.sum / tf.stop_gradient(context.all_reduce("SUM", pair.weight))

    with told():
        scale.unscale(gradients_of(scale.scale_loss, lambda pair: pair.weight * 1.0))
    added = scale.unscale(gradients_of(scale.scale_loss, lambda pair: pair))[0]
    scaled = scale.unscale(gradients_of(lambda pair: scale.scale_loss(mean_of(pair))))[0]
    np.testing.assert_allclose(added[0], scaled[0], rtol=1e-6)


class Hand(NamedTuple):
    """What a loop by hand has."""

    window: Any
    optimizer: Any
    scale: Any


def by_hand(
    target_of: Any,
    update: Any,
    *,
    eager: bool = False,
    changed: Any = list,
    optimizer: Any = optimizer_of,
) -> None:
    """Runs one step of a loop by hand, in which a mistake may be.

    Args:
        target_of: ``target_of(pair, outputs, hand)``: what is differentiated.
        update: ``update(hand)``, after ``strategy.run``.
        eager: Whether nothing is compiled.
        changed: What is done with the gradients of a replica.
        optimizer: Makes the optimizer.
    """
    strategy, model = strategy_of(2), made()
    with strategy.scope():
        scale = tmg.LossScale(8.0)
    hand = Hand(window(model.trainable_variables), optimizer(), scale)

    def replica() -> None:
        with tf.GradientTape() as tape:
            outputs = model(X)
            pair = tmg.loss_sum("mse", Y, outputs)
            target = target_of(pair, outputs, hand)
        hand.window.add(changed(tape.gradient(target, model.trainable_variables)), pair)

    def train() -> None:
        strategy.run(replica)
        update(hand)

    (train if eager else tf.function(train, autograph=False))()


def wrong(told: Told, words: str, *loop: Any, **options: Any) -> None:
    """Holds that an error with some words comes of a loop by hand, in a function and eagerly."""
    for eager in (False, True):
        with told(tmg.TfMultiGpuError, words):
            by_hand(*loop, eager=eager, **options)


def right(*loop: Any, **options: Any) -> None:
    """Runs a loop by hand in a function and eagerly."""
    for eager in (False, True):
        by_hand(*loop, eager=eager, **options)


def sum_of(pair: Any, _outputs: Any, _hand: Hand) -> Any:
    return pair.sum


def scaled(pair: Any, _outputs: Any, hand: Hand) -> Any:
    return hand.scale.scale_loss(pair)


def apply(hand: Hand) -> None:
    hand.window.apply(hand.optimizer)


def apply_scaled(hand: Hand) -> None:
    hand.window.apply(hand.optimizer, scale=hand.scale, clip_norm=1.0)


def in_order(hand: Hand) -> None:
    gradients, finite = hand.scale.unscale(hand.window.reduce()[0])
    gradients, _ = tmg.clip_gradients(gradients, 1.0)
    tmg.apply_reduced_gradients(hand.optimizer, gradients, hand.window.variables, where=finite)
    hand.scale.update(finite)


def no_unscale(hand: Hand) -> None:
    gradients = hand.window.reduce()[0]
    tmg.apply_reduced_gradients(hand.optimizer, gradients, hand.window.variables)


def clip_first(hand: Hand) -> None:
    tmg.clip_gradients(hand.window.reduce()[0], 1.0)


@example("The gradients still carry the loss scale")
def loss_scale_that_is_not_taken_out(told: Told) -> None:
    wrong(told, r"apply_reduced_gradients before scale\.unscale", scaled, apply)
    wrong(told, r"apply_reduced_gradients before scale\.unscale", scaled, no_unscale)
    wrong(told, r"clip_gradients before scale\.unscale", scaled, clip_first)
    wrong(
        told,
        "apply_reduced_gradients before",
        lambda pair, _, hand: hand.scale.scale_loss(pair.sum),
        no_unscale,
    )
    right(scaled, apply_scaled)
    right(scaled, in_order)


@example("The gradients were divided by the loss scale before")
def unscale_twice(told: Told) -> None:
    def twice(hand: Hand) -> None:
        hand.scale.unscale(hand.scale.unscale(hand.window.reduce()[0])[0])

    wrong(told, "unscale for the second time", scaled, twice)
    right(scaled, in_order)


@example("The gradients were clipped with the loss scale in them")
def clip_before_unscale(told: Told) -> None:
    # Of gradients that no window has added it is not known whether they carry a scale.
    clipped, _ = tmg.clip_gradients([tf.ones([2])], 1.0)
    with told(tmg.TfMultiGpuError, "unscale after clip_gradients"):
        tmg.LossScale(8.0).unscale(clipped)
    right(scaled, in_order)


@example("The losses were not multiplied by the loss scale")
def scale_loss_forgotten(told: Told) -> None:
    wrong(told, r"target = scale\.scale_loss\(pair\)", sum_of, apply_scaled)
    right(scaled, apply_scaled)
    # No pair notes these.
    right(lambda pair, _, hand: pair.sum * hand.scale.value(), apply_scaled)
    right(lambda pair, _, hand: pair.sum * hand.scale.scale, apply_scaled)
    right(lambda pair, _, hand: hand.scale.scale_loss(pair.sum * 1.0), apply_scaled)


@example("The loss scale changed while a window was filled")
def loss_scale_of_two_windows(told: Told) -> None:
    strategy, variables = strategy_of(2), (model := made()).trainable_variables
    with strategy.scope():
        scale, other = tmg.LossScale(8.0), tmg.LossScale(8.0)
    accumulator = window(variables)

    def add() -> None:
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum("mse", Y, model(X))
            target = scale.scale_loss(pair)
        accumulator.add(tape.gradient(target, variables), pair)

    strategy.run(add)
    scale.update(tf.constant(False))
    with told(tmg.TfMultiGpuError):
        strategy.run(add)
    accumulator.reduce()
    strategy.run(add)
    other.update(tf.constant(False))
    strategy.run(add)
    assert float(scale.unscale(accumulator.reduce()[0])[1])


@example("scale is a tmg.LossScale")
def loss_scale_optimizer_as_scale(told: Told) -> None:
    def apply_by_optimizer(hand: Hand) -> None:
        hand.window.apply(hand.optimizer, scale=hand.optimizer)

    with told(TypeError, "LossScaleOptimizer|SGD|Adam"):
        by_hand(sum_of, apply_by_optimizer, eager=True)
    right(scaled, apply_scaled)


@example("add takes the gradients in the order of its variables")
def gradients_in_another_order(told: Told) -> None:
    variables = (model := made()).trainable_variables
    accumulator = window(variables)

    def add(of: Any) -> None:
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum("mse", Y, model(X))
        accumulator.add(tape.gradient(pair.sum, of), pair)

    with told(tmg.TfMultiGpuError, "of shape"):
        strategy_of(2).run(add, args=(variables[::-1],))
    strategy_of(2).run(add, args=(accumulator.variables,))


@example("The losses of one window need one loss scale")
def one_of_two_losses_scaled(told: Told) -> None:
    def two_losses(target_of: Any) -> Any:
        def first(pair: Any, outputs: Any, hand: Hand) -> Any:
            with tf.GradientTape() as tape:
                other = tmg.loss_sum("mae", Y, hand.window.variables[1][None] + 0.0 * Y)
                target = target_of(other, outputs, hand)
            hand.window.add([None, tape.gradient(target, hand.window.variables[1])], other)
            return scaled(pair, outputs, hand)

        return first

    wrong(told, "both in one window", two_losses(sum_of), apply_scaled)
    right(two_losses(scaled), apply_scaled)


@example("Of gradients by hand an optimizer that scales the loss cannot know")
def loss_scale_optimizer_by_hand(told: Told) -> None:
    def wrapped() -> Any:
        with strategy_of(2).scope():
            return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))

    def scaled_by_it(pair: Any, _outputs: Any, hand: Hand) -> Any:
        return hand.optimizer.scale_loss(pair.sum)

    def factor() -> Any:
        return optimizer_of(loss_scale_factor=8.0)

    for update in (apply, no_unscale):
        wrong(told, "LossScaleOptimizer with a", scaled_by_it, update, optimizer=wrapped)
    wrong(told, "SGD with a loss scale", sum_of, apply, optimizer=factor)
    for optimizer in (wrapped, factor):
        right(scaled, apply_scaled, optimizer=optimizer)
        right(scaled, in_order, optimizer=optimizer)


@example("Nothing was added to the window since it was emptied")
def empty_window(told: Told) -> None:
    def twice(hand: Hand) -> None:
        hand.window.reduce()
        hand.window.apply(hand.optimizer)

    def pieces_twice(hand: Hand) -> None:
        hand.window.reduce()
        no_unscale(hand)

    kinds = {False: tf.errors.InvalidArgumentError, True: tmg.TfMultiGpuError}
    for eager, kind in kinds.items():
        for update in (twice, pieces_twice):
            with told(kind, r"if window\.count is not 0, and call reduce once for each window"):
                by_hand(sum_of, update, eager=eager)
    right(sum_of, apply)


@example("add needs the gradients of the sum that belongs to the weight")
def gradients_of_a_mean(told: Told) -> None:
    def mean(_pair: Any, outputs: Any, _hand: Hand) -> Any:
        return tf.reduce_mean(tf.square(Y - outputs))

    for eager in (False, True):
        with told(tmg.errors.ReplicaDependenceWarning, "a pair whose sum was not differentiated"):
            by_hand(mean, apply, eager=eager)
    right(sum_of, apply)


@example("A replica has only a part of the gradient: clipped parts")
def clipping_in_a_replica(told: Told) -> None:
    def clipped(gradients: Any) -> Any:
        return tf.clip_by_global_norm(gradients, 0.1)[0]

    def clipped_alone(gradients: Any) -> Any:
        return [tf.clip_by_norm(gradient, 0.1) for gradient in gradients]

    for changed in (clipped, clipped_alone):
        with told(tmg.errors.ReplicaDependenceWarning, r"window\.apply\(optimizer, clip_norm="):
            by_hand(sum_of, apply, changed=changed)
    right(sum_of, lambda hand: hand.window.apply(hand.optimizer, clip_norm=0.1))
    right(sum_of, apply, optimizer=lambda: optimizer_of(global_clipnorm=0.1))


@example("This call needs the gradient that was added over all replicas")
def reduce_in_a_replica(told: Told) -> None:
    accumulator = window(made().trainable_variables)
    with told():
        strategy_of(2).run(accumulator.reduce)
    accumulator.reduce()


@example("A float8 layer computes its scales from a whole batch")
def float8(told: Told) -> None:
    def quantized() -> Any:
        model = dense()
        model.layers[0].quantize("float8")
        return model

    with told(tmg.TfMultiGpuError, "Leave out layer.quantize"):
        step(made(quantized))((X, Y))
    with told(tmg.TfMultiGpuError, "Leave out layer.quantize"):
        alone = tf.distribute.get_strategy()
        tmg.make_train_step(quantized(), keras.optimizers.SGD(), "mse", alone)((X, Y))
    step(made())((X, Y))


@example("A LossScaleOptimizer scales dynamically")
def loss_scale_beside_a_loss_scale_optimizer(told: Told) -> None:
    with strategy_of(2).scope():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with told(ValueError, r"Leave out loss_scale=8\.0"):
        step(optimizer=optimizer, loss_scale=8.0)((X, Y))
    step(optimizer=optimizer)((X, Y))


@example("global_mean is for each replica")
def global_mean_outside_of_replicas(told: Told) -> None:
    with told(), strategy_of(2).scope():
        tmg.global_mean(tmg.loss_sum("mse", Y, Y))
    strategy_of(2).run(lambda: tmg.global_mean(tmg.loss_sum("mse", Y, Y)))


@example("The values of a loss are a dense tensor")
def ragged_losses(told: Told) -> None:
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
    with told():
        tmg.loss_sum(lambda y, p: tf.square(y - p), ragged, ragged)
    tmg.loss_sum(lambda y, p: tf.reduce_mean(tf.square(y - p), axis=-1), ragged, ragged)


@example("is one number for a batch, or couples the examples")
def one_number_for_a_batch(told: Told) -> None:
    with told():
        tmg.loss_sum(lambda y, p: tf.reduce_mean(tf.square(y - p)), Y, Y)
    tmg.loss_sum(lambda y, p: tf.reduce_mean(tf.square(y - p), axis=-1), Y, Y)
    of_all = tf.reduce_mean(tf.square(Y))
    tmg.loss_sum(lambda y, p: tf.fill(tf.shape(p)[:1], of_all), Y, Y)
    rows = np.ones(8, "float32")
    with told(tmg.errors.LossError, r"y_true\[:, None\] and y_pred\[:, None\]"):
        tmg.loss_sum("mse", rows, rows)
    tmg.loss_sum("mse", rows[:, None], rows[:, None])


@example("The values of the loss {} have an unknown number of axes")
def squeezed_without_an_axis(told: Told) -> None:
    def train(**axis: int) -> None:
        def loss(y_true: Any, y_pred: Any) -> Any:
            return tf.square(tf.squeeze(y_true - y_pred, **axis))

        step(made(lambda: network(4, keras.layers.Dense(1))), loss)((X, Y[:, :1]))

    with told():
        train()
    train(axis=-1)


@example("pairs each row with every row")
def rows_paired_with_all(told: Told) -> None:
    class Own(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return tf.square(y_true - y_pred)

    def traced(axes: Any) -> Any:
        def loss(y_true: Any, y_pred: Any) -> Any:
            return tmg.loss_sum(Own(), axes(y_true), y_pred)

        specs = tf.TensorSpec([None]), tf.TensorSpec([None, 1])
        return tf.function(loss, autograph=False).get_concrete_function(*specs)

    with told(tmg.errors.LossError):
        traced(lambda y_true: y_true)
    traced(lambda y_true: y_true[:, None])


@example("sample_weight has a weight for each row")
def weights_of_other_axes(told: Told) -> None:
    y = np.ones((8, 3, 1), "float32")
    weights = np.ones(8, "float32")
    with told():
        tmg.loss_sum("mse", y, y, weights)
    tmg.loss_sum("mse", y, y, weights[:, None])
    divides = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    with told(tmg.errors.LossError, r"tf\.fill\(tf\.shape\(y_pred\)\[:1\]"):
        tmg.loss_sum(divides, Y, Y, 2.0)
    tmg.loss_sum(divides, Y, Y, tf.fill(tf.shape(Y)[:1], 2.0))


@example("global_mean is for logs. Each replica has only a part")
def gradient_of_a_number_for_logs(told: Told) -> None:
    def mean(y: Any, p: Any) -> Any:
        return tmg.global_mean(tmg.loss_sum("mse", y, p))

    with told():
        gradient_in_replicas(mean)
    gradient_in_replicas(lambda y, p: tmg.loss_sum("mse", y, p).sum)


@example("pair.weight divides after all replicas were added")
def mean_of_a_shard(told: Told) -> None:
    def mean(y: Any, p: Any) -> Any:
        pair = tmg.loss_sum("mse", y, p)
        return pair.sum / pair.weight

    def mean_of_all(y: Any, p: Any) -> Any:
        pair = tmg.loss_sum("mse", y, p)
        context: Any = tf.distribute.get_replica_context()
        return pair.sum / tf.stop_gradient(context.all_reduce("SUM", pair.weight))

    with told():
        gradient_in_replicas(mean)
    gradient_in_replicas(lambda y, p: tmg.loss_sum("mse", y, p).sum)
    gradient_in_replicas(mean_of_all)


@example("The state of this optimizer exists once")
def apply_of_a_sharded_optimizer(told: Told) -> None:
    model, optimizer = made(), optimizer_of(kind=keras.optimizers.Adam)
    step(model, optimizer=optimizer, shard_update=True)((X, Y))
    variables = model.trainable_variables
    gradients = [tf.zeros(v.shape) for v in variables]
    with told():
        strategy_of(2).run(optimizer.apply, args=(gradients, variables))
    tmg.apply_reduced_gradients(optimizer, gradients, variables)


@example("shard_update={} came too late or is not possible")
def shard_update_too_late(told: Told) -> None:
    model, optimizer = made(), optimizer_of()
    step(model, optimizer=optimizer, shard_update=False)((X, Y))
    with told():
        step(model, optimizer=optimizer, shard_update=True)((X, Y))
    step(model, optimizer=optimizer)((X, Y))


@example("The optimizer was built for other variables")
def optimizer_of_another_model(told: Told) -> None:
    first, second, optimizer = made(), made(), optimizer_of()
    optimizer.build(first.trainable_variables)
    words = r"scope\(\).*optimizer\.build\(a\.trainable_variables \+ b\.trainable_variables\)"
    with told(tmg.ScopeError, rf"Create a new one in strategy\.{words}"):
        step(second, optimizer=optimizer)((X, Y))
    optimizer = optimizer_of()
    optimizer.build(first.trainable_variables + second.trainable_variables)
    step(first, optimizer=optimizer)((X, Y))
    step(second, optimizer=optimizer)((X, Y))


@example("There is nothing to update")
def no_gradients(told: Told) -> None:
    model, optimizer = made(), optimizer_of()
    variables = model.trainable_variables
    with told(tmg.TfMultiGpuError, "no gradient for 2 variables"):
        tmg.apply_reduced_gradients(optimizer, [None, None], variables)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(X))
    tmg.apply_reduced_gradients(optimizer, tape.gradient(loss, variables), variables)


@example("apply_reduced_gradients takes one gradient for each variable")
def one_gradient_too_few(told: Told) -> None:
    variables, optimizer = made().trainable_variables, optimizer_of()
    with told(tmg.TfMultiGpuError, "1 gradients for 2 variables"):
        tmg.apply_reduced_gradients(optimizer, [tf.ones([4, 2])], variables)
    tmg.apply_reduced_gradients(optimizer, [tf.ones([4, 2]), None], variables)


class Centralized(keras.optimizers.SGD):
    """Takes the mean out of each gradient, where the train_step of Keras calls it."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        pairs = [(g - tf.reduce_mean(g, 0, keepdims=True), v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs)


class CentralizedInApply(keras.optimizers.SGD):
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = [g - tf.reduce_mean(g, 0, keepdims=True) for g in grads]
        super().apply(grads, trainable_variables)


class Scales(keras.optimizers.SGD):
    def scale_loss(self, loss: Any) -> Any:
        return 3.0 * super().scale_loss(loss)


@example("The optimizer replaces {} of Keras")
def methods_that_replicas_do_not_call(told: Told) -> None:
    def trained(optimizer: Any, weight: Any = None, *, by_keras: bool = False) -> Any:
        with strategy_of(1 if by_keras else 2).scope():
            model = dense()
            model.compile(optimizer(0.1), "mse", loss_weights=weight)
        model.set_weights([np.ones((4, 2)), np.zeros(2)])
        options: Any = {"batch_size": 2, "shuffle": False, "verbose": 0}
        if by_keras:
            model.fit(X, Y, **options)
        else:
            fit(X, Y, model=model, **options)
        return model.get_weights()

    own = ((Centralized, CentralizedInApply, None), (Scales, keras.optimizers.SGD, [3.0]))
    for optimizer, instead, weight in own:
        with told(tmg.TfMultiGpuError, rf"{optimizer.__name__}\."):
            trained(optimizer)
        pairs = zip(trained(instead, weight), trained(optimizer, by_keras=True), strict=True)
        for actual, expected in pairs:
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@example("Replicas cannot train with gradient_accumulation_steps")
def gradient_accumulation_steps(told: Told) -> None:
    size = 2
    one = dense()
    start = one.get_weights()
    one.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    one.fit(X, Y, batch_size=size, shuffle=False, verbose=0)

    with told(tmg.TfMultiGpuError, r"batch_size=2 \* batch_size, micro_batches=2"):
        step(optimizer=optimizer_of(gradient_accumulation_steps=2))((X, Y))
    model = compiled()
    model.set_weights(start)
    fit(X, Y, model=model, batch_size=2 * size, micro_batches=2, shuffle=False)
    for weight, expected in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-6)
