"""Accumulating gradients and scaling losses in a loop written by hand.

Windows, clipping and skipped updates: tests/promises/test_blocks_alone.py, test_windows.py and
test_composition_by_hand.py.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import step_on, strategy_of
from problems import crossentropy, labelled, networks

import tfmultigpu as tmg
from tfmultigpu.accumulation.loss_scale import LossScale
from tfmultigpu.strategies.collectives import forcing_addition


def accumulator_of(replicas: int, *values, dtype="float32"):
    strategy = strategy_of(replicas)
    with strategy.scope():
        variables = [tf.Variable(tf.constant(value, dtype)) for value in values]
        return strategy, variables, tmg.GradientAccumulator(variables)


def replica_id() -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, tf.float32)


def test_rows_of_an_embedding_are_summed_into_place_and_a_missing_gradient_is_zero():
    strategy, variables, accumulator = accumulator_of(2, np.zeros((4, 2)), [1.0])

    @tf.function
    def add():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(variables[0], [1, 1, 3]))
        gradients = tape.gradient(loss, variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        assert gradients[1] is None
        accumulator.add(gradients, 1.0)
        accumulator.add([None, tf.ones([1])], 1.0)

    strategy.run(add)
    gradients, weight = accumulator.reduce()
    np.testing.assert_allclose(gradients[0], np.array([[0, 0], [2, 2], [0, 0], [1, 1]]) / 2)
    np.testing.assert_allclose(gradients[1], [0.5])
    assert float(weight) == 4.0


def test_sums_of_bfloat16_are_wider():
    strategy, _, accumulator = accumulator_of(2, [0.0], dtype="bfloat16")
    add = tf.function(
        lambda: strategy.run(lambda: accumulator.add([tf.constant([1.0], "bfloat16")], 1.0))
    )
    for _ in range(300):  # bfloat16 would stop counting at 256
        add()
    gradients, weight = accumulator.reduce()
    assert gradients[0].dtype == "bfloat16"
    assert float(weight) == 600.0
    np.testing.assert_allclose(tf.cast(gradients[0], "float32"), [1.0])


# In memory: promises/test_composition_by_hand.py.
def test_gradients_that_replicas_add_are_scaled_clipped_and_applied():
    strategy, variables, accumulator = accumulator_of(2, [0.0, 0.0], dtype="float16")
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)
        scale = tmg.LossScale(8.0)
    strategy.run(lambda: accumulator.add([tf.stack([24.0, replica_id() * 64.0])], 0.5))

    @tf.function
    def update():
        gradients, weight = accumulator.reduce()
        unscaled, finite = scale.unscale(gradients)
        clipped, norm = tmg.clip_gradients([*unscaled, None], 5.0)
        tmg.apply_reduced_gradients(optimizer, clipped[:1], variables, where=finite)
        return weight, norm

    with forcing_addition(in_memory=False):
        weight, norm = update()
    assert (float(weight), float(norm), accumulator.count) == (1.0, 10.0, 0)
    for copy in strategy.experimental_local_results(variables[0]):
        np.testing.assert_allclose(copy, [-3.0, -4.0], rtol=1e-3)


# Fails if the weight 1 of reduction="sum" is added, over replicas, micro-batches or windows.
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_loss_that_is_a_sum_is_not_divided(replicas):
    strategy, variables, accumulator = accumulator_of(replicas, [0.0])
    loss = keras.losses.MeanSquaredError(reduction="sum")

    @tf.function
    def add():
        with tf.GradientTape() as tape:
            outputs = tf.ones([2, 1]) * variables[0]
            pair = tmg.loss_sum(loss, tf.ones([2, 1]) * (replica_id() + 1.0), outputs)
        accumulator.add(tape.gradient(pair.sum, variables), pair.weight)

    for _ in range(2):
        for _ in range(3):
            strategy.run(add)
        gradients, weight = accumulator.reduce()
        assert float(weight) == 1.0
        total = sum(-2.0 * 2 * 3 * (replica + 1) for replica in range(replicas))
        np.testing.assert_allclose(gradients[0], [total])
    assert float(accumulator.reduce()[1]) == 0.0


# Fails if a block of the global gradient takes the part of a replica, or the parts of all.
def test_parts_of_a_gradient_are_refused_by_each_block(subtests: pytest.Subtests):
    strategy, variables, _ = accumulator_of(2, [0.0])
    with strategy.scope():
        optimizer, scale = keras.optimizers.SGD(1.0), tmg.LossScale(8.0)
    blocks = (
        lambda gradients: tmg.clip_gradients(gradients, 1.0),
        scale.unscale,
        lambda gradients: tmg.apply_reduced_gradients(optimizer, gradients, variables),
    )
    parts = strategy.run(lambda: tf.ones([1]) * replica_id())
    told = r"added over all replicas.*window\.reduce"
    for block in blocks:
        with subtests.test(block=block):
            with pytest.raises(tmg.TfMultiGpuError, match=told):
                block([parts])
            with pytest.raises(tmg.TfMultiGpuError, match=told):
                strategy.run(block, args=([parts],))
    foreign = keras.optimizers.Adam(1.0)
    with pytest.raises(tmg.ScopeError, match="Create the optimizer in the scope"):
        tmg.apply_reduced_gradients(foreign, [tf.ones([1])], variables)
    with pytest.raises(tmg.TfMultiGpuError, match=r"LossScale\.update inside strategy\.run"):
        strategy.run(scale.update, args=(tf.constant(True),))
    assert variables[0].numpy().tolist() == [0.0]


# Other arguments: promises/test_bad_input.py.
def test_where_blocks_are_refused():
    strategy, _, accumulator = accumulator_of(2, [0.0])
    for reduce in (accumulator.reduce, tf.function(accumulator.reduce)):
        with pytest.raises(
            tmg.TfMultiGpuError, match=r"reduce inside strategy\.run.*after strategy\.run"
        ):
            strategy.run(reduce)
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    with one.scope():
        alone = tmg.GradientAccumulator([tf.Variable([0.0])])
    one.run(lambda: alone.add([tf.ones([1])], 2.0))
    assert one.run(alone.reduce)[0][0].numpy().tolist() == [0.5]
    with one.scope(), pytest.raises(tmg.ScopeError, match="another scope"):
        accumulator.reduce()
    outside = tf.Variable(0.0)
    with strategy.scope(), pytest.raises(tmg.ScopeError, match="model was created outside the sco"):
        tmg.GradientAccumulator([outside])


# Loss scales: one verdict about the global gradient. Overflows: promises/test_overflow.py --------


# Fails if gradients are divided by the rows after they were added, not before they were rounded.
def test_large_batches_do_not_overflow_float16() -> None:
    layers = keras.layers
    half = lambda: layers.Dense(4, dtype="mixed_float16")  # noqa: E731
    build = networks(6, lambda: layers.Dense(8, "tanh"), half)
    x, y, _ = labelled(4096, 6, 4, seed=17)
    options = {"loss_scale": 2.0**15, "verify": False}
    step = step_on(2, build, keras.optimizers.SGD, crossentropy(), **options)
    assert [float(step((x, y))["skipped"]) for _ in range(3)] == [0, 0, 0]


def test_a_dynamic_scale_halves_doubles_and_stays_in_bounds() -> None:
    def dynamic(scale: float, good_steps: int = 0) -> LossScale:
        own = LossScale(scale, growth_steps=3)
        own.good_steps.assign(good_steps)
        return own

    scale, seen = dynamic(8.0), []
    for finite in (True, True, True, True, False, True, True, True):
        scale.update(tf.constant(finite))
        seen.append((float(scale.value()), int(scale.good_steps)))
    assert seen == [(8, 1), (8, 2), (16, 0), (16, 1), (8, 0), (8, 1), (8, 2), (16, 0)]
    low, high = dynamic(1.5), dynamic(3e38, good_steps=2)
    for expected in (1.0, 1.0):
        low.update(tf.constant(False))
        assert float(low.value()) == expected
    high.update(tf.constant(True))
    assert np.isfinite(float(high.value()))
    fixed = LossScale(64, growth_steps=None)
    fixed.update(tf.constant(False))
    assert float(fixed.value()) == 64.0


# Fails if a compiled ``add``, which is traced once, hides from later windows whether it scaled.
@pytest.mark.parametrize("compiled", [False, True])
def test_a_wrong_order_with_a_scale_is_told_in_every_window(compiled):
    strategy, variables, window = accumulator_of(2, [1.0])
    with strategy.scope():
        optimizer, scale = keras.optimizers.SGD(0.0, momentum=0.9), tmg.LossScale(8.0)

    def adds(target_of):
        def replica():
            with tf.GradientTape() as tape:
                pair = tmg.loss_sum("mse", tf.zeros([1, 1]), variables[0][None])
                target = target_of(pair)
            window.add(tape.gradient(target, variables), pair)

        return tf.function(lambda: strategy.run(replica), autograph=False)

    def clip_first():
        tmg.clip_gradients(window.reduce()[0], 1.0)

    def program(function):
        return tf.function(function, autograph=False) if compiled else function

    scaled, plain = adds(scale.scale_loss), adds(lambda pair: pair.sum)
    with_scale = program(lambda: window.apply(optimizer, scale=scale))
    without = program(lambda: window.apply(optimizer))
    clips = program(clip_first)
    errors = (tmg.TfMultiGpuError, tf.errors.InvalidArgumentError)
    for _ in range(3):
        for add, right in ((scaled, with_scale), (plain, without)):
            add()
            norm = right()[0]
            np.testing.assert_allclose(norm, 2.0, rtol=1e-6)
        for add, wrong, words in (
            (scaled, without, "before scale.unscale"),
            (scaled, clips, "clip_gradients before scale.unscale"),
            (plain, with_scale, "were not multiplied by the loss scale"),
        ):
            add()
            updates = int(optimizer.iterations.numpy())
            with pytest.raises(errors, match=words):
                wrong()
            assert int(optimizer.iterations.numpy()) == updates
            window.reduce()


# Fails if of several scaled losses in one target only the last must be in the window.
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_scaled_pair_must_be_in_a_window(replicas, first):
    strategy, variables, window = accumulator_of(replicas, [1.0])
    with strategy.scope():
        optimizer, scale = keras.optimizers.SGD(0.0), tmg.LossScale(8.0)

    def replica(joins):
        with tf.GradientTape() as tape:
            pairs = [
                tmg.loss_sum(loss, tf.zeros([1, 1]), variables[0][None]) for loss in ("mse", "mae")
            ]
            if joins:
                pairs = [tmg.LossSum(pairs[0].sum + pairs[1].sum, pairs[0].weight)]
            target = tf.add_n(list(map(scale.scale_loss, pairs[:: 1 - 2 * first])))
        window.add(tape.gradient(target, variables), pairs[0])

    for _ in range(2):
        strategy.run(replica, args=(False,))
        with pytest.raises(tmg.TfMultiGpuError, match=r"tmg\.LossSum\(p\.sum \+ q\.sum, p\.weight"):
            window.apply(optimizer, scale=scale)
        strategy.run(replica, args=(True,))
        norm, _ = window.apply(optimizer, scale=scale)
        np.testing.assert_allclose(norm, 3.0, rtol=1e-6)


# Marks that are lost, and scales that change ------------------------------------------------------


def trains_by_hand(replicas, add, apply, *, compiled=True):
    """Returns what a step by hand changes, with another number of rows on each replica."""
    strategy, variables, window = accumulator_of(replicas, [1.0])
    with strategy.scope():
        optimizer, scale = keras.optimizers.SGD(1.0), tmg.LossScale(1024.0)
    rows = np.arange(1.0, 6.0, dtype="float32")[:, None]

    def step(batch):
        strategy.run(lambda x: add(x, variables, window, scale), args=(batch,))
        apply(window, optimizer, scale)

    run = tf.function(step, autograph=False) if compiled else step
    for batch in tmg.distribute_dataset(rows, strategy, batch_size=5):
        run(batch)
    return 1.0 - variables[0].numpy()


def pair_of(x, variables):
    return tmg.loss_sum("mse", tf.zeros_like(x), x * variables[0])


def differentiated(x, variables, target_of):
    with tf.GradientTape() as tape:
        pair = pair_of(x, variables)
        target = target_of(pair)
    return tape.gradient(target, variables), pair


def rows_of(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


def by_a_function(x, variables, window, scale):
    """Adds gradients and a pair that a function returns, which keeps no marks."""
    gradients = tf.function(differentiated, autograph=False)
    window.add(*gradients(x, variables, scale.scale_loss))


def with_rows(x, variables, window, scale):
    window.add(differentiated(x, variables, scale.scale_loss)[0], rows_of(x))


def number_with_rows(x, variables, window, scale):
    target_of = lambda pair: scale.scale_loss(pair.sum * 1.0)  # noqa: E731
    window.add(differentiated(x, variables, target_of)[0], rows_of(x))


def scaled_sum(x, variables, window, scale):
    window.add(*differentiated(x, variables, scale.scale_loss))


def apply(window, optimizer, scale):
    window.apply(optimizer)


def apply_scaled(window, optimizer, scale):
    window.apply(optimizer, scale=scale)


def apply_returned(window, optimizer, scale):
    gradients, _ = tf.function(lambda: tuple(window.reduce()), autograph=False)()
    tmg.apply_reduced_gradients(optimizer, gradients, window.variables)


# Fails if a scale in gradients is seen only on a pair that keeps its marks, or if it is not seen
# where nothing unscales.
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("add", "update", "words"),
    [
        (by_a_function, apply, "still carry the loss scale"),
        (by_a_function, apply_scaled, "in the function that calls scale_loss"),
        (with_rows, apply, "still carry the loss scale"),
        (with_rows, apply_scaled, r"Write window\.add\(gradients, pair\)"),
        (number_with_rows, apply, "still carry the loss scale"),
        (scaled_sum, apply_returned, "still carry the loss scale"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_scale_whose_mark_is_lost_is_told(replicas, add, update, words):
    with pytest.raises(tmg.TfMultiGpuError, match=words):
        trains_by_hand(replicas, add, update)
    expected = trains_by_hand(1, scaled_sum, apply_scaled)
    np.testing.assert_allclose(expected, 2.0 * 11.0, rtol=1e-6)
    np.testing.assert_allclose(trains_by_hand(replicas, scaled_sum, apply_scaled), expected)


# Fails if the sum of a pair is taken for the weight that divides it.
def test_the_sum_of_a_pair_is_no_weight():
    def add(x, variables, window, scale):
        gradients, pair = differentiated(x, variables, lambda pair: pair.sum)
        window.add(gradients, pair.sum)

    with pytest.raises(TypeError, match=r"weight=pair\.sum\. Write window\.add"):
        trains_by_hand(2, add, apply)


# Fails if a mean that divides the sum by a number of rows is taken for a sum.
@pytest.mark.parametrize(("replicas", "compiled"), [(1, False), (2, True)])
def test_a_sum_divided_by_its_rows_is_told(replicas, compiled):
    def mean(x, variables, window, scale):
        window.add(*differentiated(x, variables, lambda pair: pair.sum / rows_of(x)))

    def weighted(x, variables, window, scale):
        window.add(*differentiated(x, variables, lambda pair: pair.sum * 0.3))

    with pytest.warns(tmg.errors.ReplicaDependenceWarning, match="divided by a number of rows"):
        trains_by_hand(replicas, mean, apply, compiled=compiled)
    changed = trains_by_hand(replicas, weighted, apply, compiled=compiled)
    np.testing.assert_allclose(changed, 0.3 * 22.0, rtol=1e-6)


# Fails if a window is unscaled by what another one has made of their scale since.
@pytest.mark.parametrize("replicas", [1, 2])
def test_windows_that_share_a_scale_are_unscaled_by_the_one_that_scaled(replicas):
    strategy, variables, first = accumulator_of(replicas, [1.0])
    with strategy.scope():
        second = tmg.GradientAccumulator(variables)
        sgd, scale = keras.optimizers.SGD(1.0), tmg.LossScale(1024.0)

    def add(x, windows):
        for window, factor in windows:
            gradients, pair = differentiated(x, variables, scale.scale_loss)
            window.add([gradient * factor for gradient in gradients], pair)

    def step(batch):
        strategy.run(add, args=(batch, [(first, np.inf), (second, 1.0)]))
        first.apply(sgd, scale=scale)
        second.apply(sgd, scale=scale)

    rows = np.arange(1.0, 6.0, dtype="float32")[:, None]
    (batch,) = tmg.distribute_dataset(rows, strategy, batch_size=5)
    tf.function(step, autograph=False)(batch)
    np.testing.assert_allclose(variables[0], 1.0 - 22.0, rtol=1e-6)
    assert float(scale.value()) == 512.0

    strategy.run(add, args=(batch, [(second, 1.0)]))
    scale.update(tf.constant(False))
    with pytest.raises(tmg.TfMultiGpuError, match="changed while a window was filled"):
        strategy.run(add, args=(batch, [(second, 1.0)]))
