"""The first step held to one device: what is said, what stays, what cannot be verified."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.steps.verification.comparison import Deviation, beyond_rounding
from tfmultigpu.steps.verification.effects import CannotVerifyError, check_changes_nothing
from tfmultigpu.steps.verification.one_device import Computed, OneDevice
from tfmultigpu.steps.verification.outcome import Difference, Verification
from tfmultigpu.steps.verification.rounding import Rounding, epsilon, largest_difference

L = keras.layers
_random = np.random.default_rng(0)
X = _random.normal(size=(23, 4)).astype("float32")
Y = _random.normal(size=(23, 2)).astype("float32")


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tmg.create_strategy(devices=["CPU:0", "CPU:1"])


def trained(
    strategy: Any, *layers: Any, loss: Any = "mse", verify: Any = "first", **options: Any
) -> tuple[Any, Any]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        made = [layer() for layer in layers]
        model = keras.Sequential([keras.Input((4,)), *made, L.Dense(2, name="last")])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    step = tmg.make_train_step(model, optimizer, loss, strategy, verify=verify, **options)
    return model, step


def values(model: Any, step: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in [*model.variables, *step.optimizer.variables]]


def minus_mean() -> Any:
    return L.Lambda(lambda x: x - tf.reduce_mean(x, 0), name="centred")


# What is said -------------------------------------------------------------------------------------


def test_a_step_that_is_the_same_says_so(strategy: Any) -> None:
    _, step = trained(strategy, lambda: L.Dense(3), lambda: L.Dropout(0.5))
    assert step.verification is None
    step((X[:7], Y[:7]))
    assert step.verification == Verification("same", 7, 7)
    assert str(step.verification) == (
        "The step computed what one device computes on the same batch."
    )


def test_a_difference_names_the_numbers_the_layer_the_line_to_write_and_the_users_line(
    strategy: Any,
) -> None:
    _, step = trained(strategy, lambda: L.Dense(3), minus_mean)
    with pytest.warns(tmg.ReplicaDependenceWarning) as caught:
        step((X[:7], Y[:7]))
    (warning,) = caught
    assert warning.filename == __file__
    found = step.verification
    assert found.outcome == "different"
    assert (found.rows, found.global_rows) == (7, 7)
    assert found.culprit.startswith("Lambda '")
    assert "centred" in found.culprit
    assert found.differences[0].quantity == "the loss"
    assert found.differences[0].one_device != found.differences[0].replicas
    assert str(warning.message) == str(found)
    for part in ("the loss is ", "'sequential", "tmg.gather_rows(tensor)"):
        assert part in str(found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step((X[:7], Y[:7]))  # Said once.


def test_a_loss_that_compares_rows_is_named_with_the_right_way_to_write_it(strategy: Any) -> None:
    def ranked(y: Any, predictions: Any) -> Any:
        return tf.reduce_mean(tf.square(predictions[:, None] - y[None]), axis=[1, 2])

    _, step = trained(strategy, loss=ranked)
    with pytest.warns(tmg.ReplicaDependenceWarning, match=r"is the loss\..*tmg\.gather_rows"):
        step((X[:7], Y[:7]))
    assert step.verification.culprit == "the loss"


def test_micro_batches_are_verified_on_one_device_too() -> None:
    alone = tf.distribute.get_strategy()
    _, step = trained(alone, L.BatchNormalization, micro_batches=3)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="Write micro_batches=1"):
        step((X[:7], Y[:7]))
    _, step = trained(alone, lambda: L.Dropout(0.5), micro_batches=3)
    step((X[:7], Y[:7]))
    assert step.verification.outcome == "same"


def test_one_replica_and_one_micro_batch_have_nothing_to_verify() -> None:
    _, step = trained(tf.distribute.get_strategy(), L.BatchNormalization)
    step((X[:7], Y[:7]))
    assert step.verification is None


def test_gradients_are_compared_when_asked(strategy: Any) -> None:
    def coupled_backwards(y: Any, predictions: Any) -> Any:
        """The values of mse; the gradient of something that adds up over the whole batch."""
        mean = tf.reduce_mean(predictions)
        nothing = tf.square(mean) - tf.stop_gradient(tf.square(mean) - 2 * mean * 0.0)
        return tf.reduce_mean(tf.square(y - predictions), -1) + nothing

    _, step = trained(strategy, loss=coupled_backwards)
    step((X[:7], Y[:7]))
    assert step.verification.outcome == "same"
    _, step = trained(strategy, loss=coupled_backwards, verify="gradients")
    with pytest.warns(tmg.ReplicaDependenceWarning, match="the gradient of '.*last"):
        step((X[:7], Y[:7]))
    _, step = trained(strategy, verify="gradients", clip_norm=0.01)
    step((X[:7], Y[:7]))
    assert step.verification.outcome == "same"


def test_every_step_is_verified_when_asked(strategy: Any) -> None:
    _, step = trained(strategy, minus_mean, verify=True)
    for _ in range(2):
        with pytest.warns(tmg.ReplicaDependenceWarning):
            step((X[:7], Y[:7]))
    data = tmg.distribute_dataset((X, Y), strategy, batch_size=8)
    with pytest.warns(tmg.ReplicaDependenceWarning) as caught:
        assert int(step.run(iter(data), 5)["steps"]) == 3
    assert len(caught) == 3


def test_other_values_of_verify_are_refused(strategy: Any) -> None:
    for verify in ("always", 1, None):
        with pytest.raises(ValueError, match="verify is 'first', True, False or 'gradients'"):
            trained(strategy, verify=verify)


# Eval and predict steps, fit, reports -------------------------------------------------------------


def test_eval_and_predict_steps_and_the_loops_are_verified(strategy: Any) -> None:
    model, _ = trained(strategy, minus_mean, verify=False)
    evaluate = tmg.make_eval_step(model, "mse", strategy)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="the loss is"):
        evaluate((X[:7], Y[:7]))
    predict = tmg.make_predict_step(model, strategy)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="an element of output 0 is"):
        predict(X[:7])
    assert predict.verification.culprit.startswith("Lambda")
    with strategy.scope():
        model.compile("sgd", "mse")
    for call in (
        lambda: tmg.evaluate(model, (X, Y), batch_size=8),
        lambda: tmg.predict(model, X, batch_size=8),
        lambda: tmg.fit(model, (X, Y), batch_size=8, verbose=0),
    ):
        with pytest.warns(tmg.ReplicaDependenceWarning):
            call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tmg.fit(model, (X, Y), batch_size=8, verbose=0, verify=False)
    report = tmg.explain(model, strategy=strategy, seconds=0)
    assert "replica-dependence" in report.codes
    assert "Lambda" in str(report)
    assert int(tmg.doctor().facts["verification"]["steps different"]) >= 1


# Nothing is changed -------------------------------------------------------------------------------


def test_verification_changes_no_bit_of_the_training(strategy: Any) -> None:
    def run(verify: Any) -> tuple[list[np.ndarray], list[float]]:
        layers = [
            lambda: L.Dense(5, kernel_regularizer="l2"),
            lambda: L.Dropout(0.5),
            lambda: L.Lambda(lambda x: x + keras.random.normal(tf.shape(x))),  # Without a seed.
        ]
        model, step = trained(strategy, *layers, micro_batches=2, verify=verify)
        losses = [float(step((X[i : i + 5], Y[i : i + 5]))["loss"]) for i in (0, 5, 10)]
        return values(model, step), losses

    with_it, without = run("first"), run(False)
    for one, other in zip(with_it[0], without[0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert with_it[1] == without[1]


def test_many_steps_in_a_call_are_those_of_a_call_without_verification(strategy: Any) -> None:
    def run(verify: Any) -> Any:
        model, step = trained(
            strategy, lambda: L.BatchNormalization(synchronized=True), verify=verify
        )
        data = tmg.distribute_dataset((X, Y), strategy, batch_size=4, prefetch_to_device=True)
        iterator = iter(data)
        logs = [step.run(iterator, steps) for steps in (2, 1, 9)]
        return values(model, step), [{k: float(v) for k, v in one.items()} for one in logs], step

    with_it, without = run("first"), run(False)
    assert with_it[2].verification.outcome == "same"
    assert [one["steps"] for one in with_it[1]] == [2, 1, 3]
    for one, other in zip(with_it[0], without[0], strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(with_it[1], without[1], strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_a_plain_iterator_of_ragged_batches_with_nothing_in_a_place_is_verified(
    strategy: Any,
) -> None:
    words = tf.ragged.constant([[1, 2], [3], [2, 2, 1], [1], [2], [3, 1], [1]])
    data = tf.data.Dataset.from_tensor_slices((words, Y[:7])).batch(5)
    data = data.map(lambda x, y: (x, y, None))
    with strategy.scope():
        model = keras.Sequential([L.Embedding(4, 3), L.GlobalAveragePooling1D(), L.Dense(2)])
        model.build((None, 3))
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(
        model,
        optimizer,
        None,
        strategy,
        forward=lambda model, batch, training: tmg.loss_sum(
            "mse", batch[1], model(batch[0].to_tensor(shape=[None, 3]), training=training)
        ),
    )
    assert int(step.run(iter(data), 5)["steps"]) == 2
    assert step.verification.outcome == "same"


# What cannot be verified --------------------------------------------------------------------------


def test_batches_of_fewer_rows_than_replicas_show_nothing_and_the_next_is_taken() -> None:
    four = tmg.create_strategy(devices=[f"CPU:{i}" for i in range(4)])
    _, step = trained(four, minus_mean)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step((X[:3], Y[:3]))
    assert step.verification.outcome == "not verified"
    assert "fewer rows than there are replicas" in str(step.verification)
    with pytest.warns(tmg.ReplicaDependenceWarning):
        step((X[:9], Y[:9]))


class Counting(L.Layer):
    """Assigns a variable of TensorFlow, which no scope of Keras holds back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return x


def test_code_with_effects_is_not_run_once_more(strategy: Any) -> None:
    model, step = trained(strategy, Counting)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="runs 'AssignAddVariableOp'"):
        step((X[:7], Y[:7]))
    assert float(model.layers[0].calls.numpy()) == 1.0
    assert step.verification.outcome == "not verified"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step((X[:7], Y[:7]))


def test_draws_that_no_two_runs_repeat_are_not_held_to_each_other(strategy: Any) -> None:
    _, step = trained(strategy, lambda: L.Lambda(lambda x: x + tf.random.normal(tf.shape(x))))
    with pytest.warns(tmg.ReplicaDependenceWarning, match=r"'RandomStandardNormal'.*keras\.random"):
        step((X[:7], Y[:7]))


def test_a_model_that_runs_on_replicas_only_is_told_and_trained(strategy: Any) -> None:
    def on_replicas_only(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync == 1:
            raise RuntimeError("two replicas are needed")
        return x

    _, step = trained(strategy, lambda: L.Lambda(on_replicas_only))
    with pytest.warns(
        tmg.ReplicaDependenceWarning, match="RuntimeError: .*two replicas are needed"
    ):
        step((X[:7], Y[:7]))
    assert int(step.optimizer.iterations.numpy()) == 1


def test_without_memory_for_the_whole_batch_a_part_of_it_is_compared(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any) -> Any:
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")

    monkeypatch.setattr(OneDevice, "compute", no_memory)
    _, step = trained(strategy, lambda: L.Dense(3))
    step((X[:20], Y[:20]))
    assert (step.verification.outcome, step.verification.rows) == ("same", 8)
    assert "8 of 20 rows compared: one device has not enough memory" in str(step.verification)
    _, step = trained(strategy, minus_mean)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="8 of 20 rows compared"):
        step((X[:20], Y[:20]))


def test_a_step_inside_a_function_of_the_users_is_trained_without_verification(
    strategy: Any,
) -> None:
    _, step = trained(strategy, minus_mean)
    iterator = iter(tmg.distribute_dataset((X, Y), strategy, batch_size=8))
    loss = tf.function(lambda: step(next(iterator))["loss"], autograph=False)()
    assert np.isfinite(float(loss))
    assert step.verification is None


# Rounding -----------------------------------------------------------------------------------------


def test_a_network_that_amplifies_rounding_raises_no_alarm(strategy: Any) -> None:
    chaotic = [
        lambda: L.Dense(64, "relu"),
        *[lambda: L.Lambda(lambda x: tf.sin(60.0 * x))] * 2,
    ]
    _, step = trained(strategy, *chaotic)
    step((X, Y))
    assert step.verification.outcome == "same"


def test_half_precision_raises_no_alarm_and_misses_no_difference(strategy: Any) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        kinds = (lambda: L.Dense(16, "relu"), lambda: L.Dropout(0.2))
        _, step = trained(strategy, *kinds)
        step((X, Y))
        assert step.verification.outcome == "same"
        far = lambda: L.Lambda(lambda x: x - 9.0 * tf.reduce_mean(x, 0))  # noqa: E731
        _, step = trained(strategy, *kinds, far)
        with pytest.warns(tmg.ReplicaDependenceWarning, match="Lambda"):
            step((X, Y))
    finally:
        keras.config.set_dtype_policy("float32")


def test_the_bound_follows_from_dtype_layers_and_additions() -> None:
    class Layer:
        compute_dtype = "float32"

    rounding = Rounding([Layer()] * 9)
    assert rounding.bound == pytest.approx(16 * 2**-23 * 3)
    assert rounding.of_sum("float32", 100) == pytest.approx(16 * 2**-23 * 3 + 4 * 2**-23 * 10)
    Layer.compute_dtype = "bfloat16"
    assert Rounding([Layer()] * 9).bound == 2**-7
    assert epsilon("float64") == 2**-52
    assert epsilon("bfloat16") == 2**-7


def test_the_largest_difference_is_found() -> None:
    cases: list[tuple[Any, Any, Any]] = [
        ([1.0, 2.0], [1.0, 2.0 + 1e-7], None),
        ([1.0, 2.0], [1.0, 2.1], (2.0, 2.1)),
        ([np.nan, 1.0], [np.nan, 1.0], None),
        ([np.inf], [np.inf], None),
        ([1.0], [np.nan], (1.0, np.nan)),
        ([3, 4], [3, 5], (4.0, 5.0)),
        ([3, 4], [3, 4], None),
        (2.0, 2.5, (2.0, 2.5)),
        ([], [], None),
    ]
    for one, other, apart in cases:
        found = largest_difference(np.array(one), np.array(other), 1e-6)
        assert (None if found is None else found[:2]) == pytest.approx(apart, nan_ok=True), one


def test_a_difference_counts_if_moving_the_weights_by_one_rounding_does_not_explain_it() -> None:
    def computed(loss: float) -> Computed:
        return Computed(np.array([loss, 4.0]), {}, [], [])

    moved = [computed(100.0), computed(100.1), computed(99.95)]  # One in a thousand.
    difference = Difference("the loss", 1.0, 1.01)
    within = Deviation("term", 0, difference, 0.010, 1.0)
    beyond = Deviation("term", 0, difference, 0.020, 1.0)
    infinite = Deviation("term", 0, difference, np.inf, 1.0)
    assert beyond_rounding([within, beyond, infinite], moved, 1, 16.0) == [beyond, infinite]


def test_operations_that_change_something_are_found() -> None:
    v = tf.Variable(1.0)

    def trace(make: Any) -> None:
        def traced() -> Any:
            result = make()
            graph = tf.compat.v1.get_default_graph()
            check_changes_nothing(graph, graph.get_operations())
            return result

        tf.function(traced, autograph=False).get_concrete_function()

    for allowed in (
        lambda: tf.square(v),
        lambda: tf.cond(v > 0, lambda: v.read_value(), lambda: v * 2),
        lambda: tf.random.stateless_uniform([2], [1, 2]) + v,
    ):
        trace(allowed)
    for make, refused in (
        (lambda: v.assign_add(1.0), "AssignAddVariableOp"),
        (lambda: tf.cond(v > 0, lambda: v.assign(1.0), lambda: v.assign(2.0)), "Assign"),
        (lambda: tf.function(lambda: v.assign(1.0))(), "Assign"),
        (lambda: tf.numpy_function(lambda x: x, [v], tf.float32), "PyFunc"),
        (lambda: tf.random.uniform([2]) + v, "RandomUniform"),
        (lambda: tf.function(lambda: tf.random.normal([2]))() + v, "RandomStandardNormal"),
    ):
        with pytest.raises(CannotVerifyError, match=refused):
            trace(make)
