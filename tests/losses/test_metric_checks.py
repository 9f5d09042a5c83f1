"""Metrics that are not sums over rows are refused on several replicas, all others are exact."""

from __future__ import annotations

import inspect
import math
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu.losses.metric_checks import check_adds, is_from_keras

SIZES = (7, 2, 16, 1, 3, 3)
_random = np.random.default_rng(17)
X = _random.normal(size=(32, 4)).astype("float32")
Y = _random.uniform(size=(32, 3)).astype("float32").round()
W = _random.uniform(0.2, 2.0, 32).astype("float32")


def model_of(classes: int = 3) -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(classes, "sigmoid")])


def step_of(replicas, metric, *, kind="train", **options):
    """A step with a metric made by ``metric()`` in the scope."""
    strategy = strategy_of(replicas)
    with strategy.scope():
        model, made, optimizer = model_of(), metric(), keras.optimizers.SGD(0.0)
    options = options or {"metrics": [made]}
    options = {name: [made] if value is None else value for name, value in options.items()}
    if kind == "eval":
        return tmg.make_eval_step(model, "mse", strategy, **options), model, made
    step = tmg.make_train_step(model, optimizer, "mse", strategy, **options)
    return step, model, made


class Own(keras.metrics.Metric):
    """A metric with one variable, whose new value is ``new(old value, labels, predictions)``."""

    def __init__(self, new=None, initializer="zeros", dtype="float32", name="mine"):
        super().__init__(name=name)
        self.new = new
        self.state = self.add_variable((), initializer, dtype=dtype, name="state")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(tf.cast(self.new(self.state.value, y_true, y_pred), self.state.dtype))

    def result(self):
        return self.state + 0


def sum_of_errors(old, y, p):
    return old + tf.reduce_sum(tf.abs(y - p))


# What is refused ----------------------------------------------------------------------------------

NO_SUMS = {
    "max": lambda old, y, p: tf.maximum(old, tf.reduce_max(p)),
    "max of errors": lambda old, y, p: tf.maximum(old, tf.reduce_max(tf.abs(y - p))),
    "min": lambda old, y, p: tf.minimum(old, tf.reduce_min(p)),
    "last": lambda old, y, p: tf.reduce_mean(p),
    "exponential average": lambda old, y, p: 0.9 * old + 0.1 * tf.reduce_sum(p),
    "product": lambda old, y, p: old * (1.0 + tf.reduce_mean(p)),
    "max of a thousand": lambda old, y, p: tf.maximum(old, 1000.0 * tf.reduce_max(p)),
}
NO_SUMS_OVER_ROWS = {
    "batches": lambda old, y, p: old + 1.0,
    "means of batches": lambda old, y, p: old + tf.reduce_mean(p),
    "squared sum of a batch": lambda old, y, p: old + tf.reduce_sum(p) ** 2,
}


SPEC = tf.TensorSpec([None, 3])


def refusal(metric, y_true=SPEC, y_pred=SPEC):
    with pytest.raises(tmg.errors.LossError) as caught:
        check_adds(metric, y_true, y_pred)
    return str(caught.value)


def test_what_is_no_sum_over_rows_is_refused():
    for name, new in NO_SUMS.items():
        message = refusal(Own(new))
        assert "Received: 'mine', whose variable 'mine/state' is not a sum: the same" in message, (
            name
        )
        assert "to it if it is 0, and " in message, name
        assert "Keep sums and counts over the rows: self.total.assign_add(" in message, name
        assert "divide in result()" in message, name
    for name, new in NO_SUMS_OVER_ROWS.items():
        assert "is not a sum over rows: two rows in one batch add" in refusal(Own(new)), name
    message = refusal(Own(NO_SUMS_OVER_ROWS["batches"]))
    assert re.search("in one batch add 1 to it, and one after .* other 2", message)


class RunningMean(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="running")
        self.mean = self.add_weight(name="mean", initializer="zeros")
        self.rows = self.add_weight(name="rows", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(tf.cast(tf.shape(y_pred)[0], "float32"))
        self.mean.assign_add(tf.reduce_sum(tf.reduce_mean(y_pred, -1) - self.mean) / self.rows)

    def result(self):
        return self.mean + 0.0


@pytest.mark.parametrize(
    ("kind", "way", "many"), [("train", "metrics", False), ("eval", "weighted_metrics", True)]
)
def test_a_running_mean_is_refused_by_every_step(kind, way, many):
    step, _, made = step_of(2, RunningMean, kind=kind, **{way: None})
    data = tmg.distribute_dataset((X, Y, W), step.strategy, batch_size=8)
    for _ in range(2):  # and at the second attempt
        with pytest.raises(tmg.errors.LossError, match="variable 'running/mean' is not a sum"):
            _ = step.run(iter(data), 2) if many else step((X, Y, W))
    assert float(made.result()) == 0.0


class Outer(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="outer")
        self.inner = Own(NO_SUMS["max"], name="inner")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.inner.update_state(y_true, y_pred)

    def result(self):
        return self.inner.result()


def test_where_the_fault_is_is_named():
    def batch_error(y_true, y_pred):
        return tf.reduce_mean(tf.abs(y_true - y_pred))

    wrapper = keras.metrics.MeanMetricWrapper(batch_error, name="error")
    assert "'outer', whose variable 'inner/state' is not a sum" in refusal(Outer())
    assert re.search("'error', whose variable .* is not a sum over rows", refusal(wrapper))
    seen = Own(lambda old, y, p: old | tf.reduce_any(p > 2.0), dtype="bool")
    assert "is of type bool, which cannot be added" in refusal(seen)


class FromOne(Own):
    def __init__(self, name="from_one", dtype="float32"):
        super().__init__(sum_of_errors, initializer="ones", name=name)


class FromAnything(Own):
    def __init__(self, start):
        super().__init__(sum_of_errors, keras.initializers.Constant(start), name="anything")


def test_a_state_that_does_not_start_at_zero():
    step, _, _ = step_of(3, FromOne)
    with pytest.raises(tmg.errors.LossError) as caught:
        step((X, Y))
    message = str(caught.value)
    assert "'from_one/state' of 'from_one', which starts at 1 on each of 3 replicas" in message
    assert "initializer='zeros'" in message


def test_a_start_that_cannot_be_found_out_is_spoken_of():
    step, _, _ = step_of(2, lambda: FromAnything(2.0))
    with pytest.warns(tmg.ReplicaDependenceWarning, match=r"'anything'.*is not zero.*reset_state"):
        step((X, Y))


def test_a_metric_in_use_is_not_taken_for_one_that_starts_elsewhere():
    class Errors(Own):
        def __init__(self):
            super().__init__(sum_of_errors)

    strategy = strategy_of(2)
    with strategy.scope():
        model, metric = model_of(), Errors()
    truth = Errors()
    for _ in range(2):  # the second step finds what the first left behind
        step = tmg.make_eval_step(model, "mse", strategy, metrics=[metric])
        for x, y in cut((X, Y), SIZES):
            step((x, y))
            truth.update_state(y, model(x))
    metric.state.assign(metric.state.value)  # as a checkpoint does: the same on each replica
    tmg.make_eval_step(model, "mse", strategy, metrics=[metric])((X, Y))
    truth.update_state(Y, model(X))
    np.testing.assert_allclose(float(metric.result()), float(truth.result()), rtol=1e-6)


def test_one_replica_takes_any_metric():
    step, model, made = step_of(1, lambda: Own(NO_SUMS["max"]))
    step((X, Y))
    assert float(made.result()) == pytest.approx(float(np.max(model(X))), rel=1e-6)


def test_a_metric_that_cannot_be_tried_is_spoken_of():
    class Picky(Own):
        def update_state(self, y_true, y_pred, sample_weight=None):
            if y_pred.shape[0] is not None:
                raise RuntimeError("only inside a step\nand nowhere else")
            super().update_state(y_true, y_pred)

    step, _, _ = step_of(2, lambda: Picky(sum_of_errors))
    text = r"'mine' could not be checked: RuntimeError: only inside a step\. If it keeps"
    with pytest.warns(tmg.ReplicaDependenceWarning, match=text):
        step((X, Y))


def test_a_state_that_keras_does_not_know_is_left_alone_and_spoken_of():
    class Raw(Own):
        def __init__(self):
            super().__init__(sum_of_errors)
            self.raw = tf.Variable(
                0.0,
                aggregation=tf.VariableAggregation.SUM,
                synchronization=tf.VariableSynchronization.ON_READ,
            )

        def update_state(self, y_true, y_pred, sample_weight=None):
            super().update_state(y_true, y_pred)
            self.raw.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))

    step, _, made = step_of(2, Raw)
    with pytest.warns(tmg.ReplicaDependenceWarning, match=r"keeps a tf\.Variable.*add_variable"):
        step((X, Y))
    assert float(made.raw.numpy()) == len(X)


# What is accepted ---------------------------------------------------------------------------------

CLASSES = {
    name: one
    for name, one in vars(keras.metrics).items()
    if inspect.isclass(one) and name not in ("Metric", "Mean", "Sum", "MeanMetricWrapper")
}
ARGUMENTS = {
    "MeanIoU": {"num_classes": 2},
    "IoU": {"num_classes": 2, "target_class_ids": [0]},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0]},
}


def test_a_metric_of_keras_along_the_rows_is_refused():
    step, _, _ = step_of(2, lambda: keras.metrics.CosineSimilarity(axis=0))
    with pytest.raises(tmg.errors.LossError, match="must be made of sums over rows"):
        step((X, Y))
    for name in ("CosineSimilarity", "PearsonCorrelation", "ConcordanceCorrelation"):
        kind = getattr(keras.metrics, name, None)
        if kind is not None:
            assert "must be made of sums over rows" in refusal(kind(axis=0)), name
            check_adds(kind(axis=1), SPEC, SPEC)


def test_every_metric_of_keras_keeps_sums_over_rows():
    """They are not tried while a program runs, to save the time; so they are here."""
    wrong = {}
    for name, kind in CLASSES.items():
        metric = kind(**ARGUMENTS.get(name, {}))
        # The axis of the other may be that of the rows.
        assert is_from_keras(metric) == (name != "CosineSimilarity"), name
        one_number = name.startswith("Sparse") or name in ("MeanIoU", "IoU")
        y_true = tf.TensorSpec([None], tf.int64) if one_number else SPEC
        y_pred = y_true if name in ("MeanIoU", "IoU") else SPEC
        if not metric.variables or name == "R2Score":
            metric.update_state(tf.zeros([1, 3]), tf.zeros([1, 3]))
            metric.reset_state()
        with warnings.catch_warnings():
            warnings.simplefilter("error", tmg.ReplicaDependenceWarning)
            try:
                check_adds(metric, y_true, y_pred, tf.TensorSpec([None]))
            except (tmg.errors.LossError, tmg.ReplicaDependenceWarning) as error:
                wrong[name] = str(error)
        assert not any(np.any(variable.numpy()) for variable in metric.variables), name
    assert wrong == {}


# How it is tried ----------------------------------------------------------------------------------


def test_the_state_is_not_touched():
    metric = Own(sum_of_errors)
    metric.update_state(tf.constant([1.0]), tf.constant([4.0]))
    check_adds(metric, SPEC, SPEC)
    assert float(metric.result()) == 3.0


def test_states_of_every_kind_of_number():
    def rows(old, y, p):
        return old + tf.cast(tf.shape(p)[0], old.dtype)

    for dtype in ("float16", "bfloat16", "float64", "int64", "uint8"):
        check_adds(Own(rows, dtype=dtype), SPEC, SPEC)
        ones = Own(lambda old, y, p: tf.ones_like(old), dtype=dtype)
        assert "is not a sum" in refusal(ones), dtype


def test_labels_of_every_kind():
    kinds = []

    def rows(old, y, p):
        kinds.append(y)
        first = tf.nest.flatten(y)[0]
        if isinstance(first, tf.SparseTensor):
            return old + tf.cast(first.dense_shape[0], old.dtype)
        count = p.shape[0] if first is None else tf.cast(tf.shape(first)[0], old.dtype)
        return old + tf.cast(count, old.dtype)

    for y_true in (
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None, 1], tf.string),
        tf.TensorSpec([4, None, 3], tf.bool),
        tf.RaggedTensorSpec([None, None, 2], tf.float32, ragged_rank=1),
        tf.SparseTensorSpec([None, 5], tf.float32),
        {"a": tf.TensorSpec([None, 2]), "b": [tf.TensorSpec([None], tf.float16)]},
        None,
    ):
        kinds.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error", tmg.ReplicaDependenceWarning)
            check_adds(Own(rows), y_true, SPEC)
        assert len(kinds) == 5, y_true
        if y_true is not None:
            tf.nest.assert_same_structure(kinds[0], y_true, check_types=False)


def test_large_predictions_are_tried_on_fewer_positions():
    shapes = []

    def count(old, y, p):
        shapes.append((y.shape.as_list(), p.shape.as_list()))
        return old + tf.cast(tf.size(p), old.dtype)

    y_true, y_pred = tf.TensorSpec([None, 1024], tf.int32), tf.TensorSpec([None, 1024, 50_000])
    check_adds(Own(count), y_true, y_pred)
    assert shapes[0] == ([2, 2], [2, 2, 50_000])
    # A whole batch of these takes minutes: every update is given a few positions alone.
    assert max(math.prod(prediction) for _, prediction in shapes) <= 2 * 2 * 50_000


def test_a_metric_is_tried_once_and_not_at_every_step():
    eager = []

    def rows(old, y, p):
        if tf.executing_eagerly():
            eager.append(p)
        return old + tf.cast(tf.shape(p)[0], old.dtype)

    step, _, made = step_of(2, lambda: Own(rows))
    for batch in cut((X, Y), SIZES):
        step(batch)
    assert len(eager) == 5
    assert float(made.result()) == sum(SIZES)


def test_a_metric_is_tried_where_the_step_is_part_of_a_function():
    step, _, made = step_of(2, lambda: Own(sum_of_errors))
    bad, _, _ = step_of(2, lambda: Own(NO_SUMS["max"]))
    tf.function(lambda x, y: step((x, y))["loss"], autograph=False)(X, Y)
    assert float(made.result()) > 0.0
    with pytest.raises(tmg.errors.LossError, match="is not a sum"):
        tf.function(lambda x, y: bad((x, y))["loss"], autograph=False)(X, Y)


def test_a_metric_of_ones_own_that_waits_for_shapes():
    class Columns(keras.metrics.Metric):
        def __init__(self, add):
            super().__init__(name="columns")
            self.add = add
            self.totals = None

        def update_state(self, y_true, y_pred, sample_weight=None):
            if self.totals is None:
                self.totals = self.add_variable((y_pred.shape[-1],), "zeros", name="totals")
            self.totals.assign(self.add(self.totals.value, tf.reduce_sum(y_pred, axis=0)))

        def result(self):
            return tf.reduce_max(self.totals.value)

    step, model, made = step_of(3, lambda: Columns(tf.add))
    step((X, Y))
    expected = np.asarray(model(X)).sum(axis=0).max()
    assert float(made.result()) == pytest.approx(expected, rel=1e-6)
    step, _, _ = step_of(3, lambda: Columns(tf.maximum))
    with pytest.raises(tmg.errors.LossError, match="'columns/totals' is not a sum"):
        step((X, Y))


def test_a_model_that_does_not_run_on_shapes_alone():
    class Eager(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.dense.build((None, 4))
            self.built = True

        def compute_output_spec(self, *args, **kwargs):
            raise RuntimeError("no shapes here")

        def call(self, inputs):
            return self.dense(inputs)

    strategy = strategy_of(2)
    with strategy.scope():
        model, made = Eager(), Own(sum_of_errors)
    step = tmg.make_eval_step(model, "mse", strategy, metrics=[made])
    with pytest.warns(
        tmg.ReplicaDependenceWarning, match=r"(?s)does not run on shapes alone .*no shapes here"
    ):
        step((X, Y))
