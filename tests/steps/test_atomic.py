"""A step that raises has changed nothing, whatever refused the batch and on whichever replica."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, as_dataset, assert_same, cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu import _compat

# The model runs Python code, which may change something: it cannot be held to one device.
pytestmark = pytest.mark.filterwarnings("ignore:The step could not be held")

_random = np.random.default_rng(41)
X = _random.normal(size=(16, 4)).astype("float32")
X[:, 0] = 0  # Which check fails: that of this number, for any row.
Y = _random.normal(size=(16, 2)).astype("float32")
SIZES = (7, 6, 5)
CHECKS = [
    "assert in a layer",
    "assert in a branch",
    "assert in a function of the layer",
    "numbers that are not finite",
    "Python code",
    "matrix without inverse",
    "memory",
    "loss",
    "metric of the step",
    "metric of a layer",
]


def is_asked(inputs: tf.Tensor, check: str) -> tf.Tensor:
    return tf.reduce_any(tf.equal(inputs[:, 0], CHECKS.index(check) + 1.0))


def refuse(asked: tf.Tensor, text: str) -> tf.Operation:
    return tf.debugging.Assert(~asked, [text])


def raise_if(asked: np.ndarray) -> np.ndarray:
    if asked:
        raise FloatingPointError("Python code")
    return np.float32(0)


@tf.function
def checking(asked: tf.Tensor) -> None:
    tf.debugging.Assert(~asked, ["assert in a function of the layer"])


class Checks(keras.layers.Layer):
    """Checks whose results nobody uses, and what a layer may assign beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Sum()

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training:
            return inputs
        self.seen.update_state(inputs)
        refuse(is_asked(inputs, "assert in a layer"), "assert in a layer")
        branch = is_asked(inputs, "assert in a branch")
        tf.cond(
            branch,
            lambda: (refuse(branch, "assert in a branch"), 1)[1],
            lambda: 0,
        )
        checking(is_asked(inputs, "assert in a function of the layer"))
        asked = tf.cast(is_asked(inputs, "numbers that are not finite"), tf.float32)
        tf.debugging.check_numerics(1.0 / (1.0 - asked), "numbers that are not finite")
        tf.numpy_function(raise_if, [is_asked(inputs, "Python code")], tf.float32)
        singular = 1.0 - tf.cast(is_asked(inputs, "matrix without inverse"), tf.float32)
        nothing = tf.reduce_sum(tf.linalg.inv(tf.eye(2) * singular)) * 0.0
        size = tf.where(is_asked(inputs, "memory"), tf.constant(2**45, tf.int64), 1)
        nothing += tf.reduce_sum(tf.random.uniform(size[None])) * 0.0
        noise = keras.random.normal(tf.shape(inputs))  # By the seeds of all layers.
        return inputs + 0.1 * noise + nothing


class CheckedError(keras.metrics.MeanSquaredError):
    def update_state(self, y_true, y_pred, sample_weight=None):
        refuse(tf.reduce_any(y_true > 1e3), "metric of the step")
        return super().update_state(y_true, y_pred, sample_weight)


class CheckedSum(keras.metrics.Sum):
    def update_state(self, values, sample_weight=None):
        refuse(is_asked(values, "metric of a layer"), "metric of a layer")
        return super().update_state(values)


def loss(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    refuse(tf.reduce_any(y_true < -1e3), "loss")
    return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)


class Run:
    """A step, and all that it may change."""

    def __init__(self, replicas, micro_batches=1, synchronized=False, **options):
        strategy = strategy_of(replicas)
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layers = [Checks(), keras.layers.Dense(3, kernel_regularizer="l2")]
            layers[0].seen = CheckedSum()
            layers += [keras.layers.BatchNormalization(synchronized=synchronized)]
            layers += [keras.layers.Dropout(0.3), keras.layers.Dense(2)]
            self.model = keras.Sequential([keras.Input((4,)), *layers])
            self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)
            self.metric = CheckedError()
        options = {"loss_scale": "dynamic", "micro_batches": micro_batches, **options}
        self.step = tmg.make_train_step(
            self.model, self.optimizer, loss, strategy, metrics=[self.metric], **options
        )

    def variables(self):
        seeds = _compat.global_seeds()
        found = [*self.model.variables, *self.optimizer.variables, *self.metric.variables]
        found += [] if seeds is None else [seeds.state]
        scale = self.step.loss_scale
        scaling = [] if scale is None else [scale.scale, scale.good_steps]
        return [getattr(one, "value", one) for one in found] + scaling

    def copies(self):
        local = self.step.strategy.experimental_local_results
        return [copy for variable in self.variables() for copy in local(variable)]

    def state(self):
        """Every copy of every variable."""
        return [copy.numpy() for copy in self.copies()]

    def restore(self, state):
        for copy, value in zip(self.copies(), state, strict=True):
            copy.assign(value)


def assert_equal(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def batches(*checks):
    """Batches of some sizes; in the last row of each what the check of that name looks for."""
    made = []
    for size, check in zip(SIZES, checks, strict=False):
        x, y = X[:size].copy(), Y[:size].copy()
        if check == "metric of the step":
            y[-1] = 2e3
        elif check == "loss":
            y[-1] = -2e3
        elif check == "rows":
            y = y[:1]
        elif check is not None:
            x[-1, 0] = CHECKS.index(check) + 1.0
        made.append((x, y))
    return made


WAYS = {
    "step": lambda step, made: [step(batch) for batch in made],
    "run": lambda step, made: step.run(iter(as_dataset(made)), len(made)),
    "totals": lambda step, made: step.totals(iter(as_dataset(made)), len(made)),
}


TEXTS = {"rows": "differ in their number of rows", "matrix without inverse": "not invertible"}


def hold(run, train, checks, several):
    """Holds that a batch that is refused leaves what was there, for it and for those after it."""
    train(run.step, batches(None))  # All that is made on the way is made now.
    start = run.state()
    good = batches(None)
    if several:
        train(run.step, good)
    after_good = run.state()
    train(run.step, good)
    at_the_end = run.state()
    for check in checks:
        run.restore(start)
        error = {"rows": tmg.errors.DataError, "memory": tmg.OutOfMemoryError}.get(
            check, tf.errors.OpError
        )
        with pytest.raises(error, match=TEXTS.get(check, check)):
            train(run.step, batches(None, check, None) if several else batches(check))
        assert_equal(run.state(), after_good)
        train(run.step, good)
        assert_equal(run.state(), at_the_end)


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "synchronized", "way"),
    [
        (1, 3, False, "run"),
        (2, 1, False, "step"),
        (2, (1, 3), False, "totals"),
        (3, 1, True, "run"),
    ],
)
@pytest.mark.filterwarnings("ignore:BatchNormalization sees only")
def test_a_step_that_raises_has_changed_nothing(replicas, micro_batches, synchronized, way):
    run = Run(replicas, micro_batches, synchronized)
    checks = [check for check in CHECKS if check != "memory" or (replicas == 3 and way == "run")]
    hold(run, WAYS[way], [*checks, "rows"], several=way != "step")


@pytest.mark.filterwarnings("ignore:BatchNormalization sees only")
@pytest.mark.parametrize(
    ("replicas", "options"),
    [(2, {"shard_update": True}), (2, {"loss_scale": None, "clip_norm": 0.1})],
    ids=["one update for all replicas", "without a loss scale"],
)
def test_other_updates_wait_too(replicas, options):
    run = Run(replicas, **options)
    hold(run, WAYS["step"], ["assert in a layer", "metric of the step", "rows"], several=False)


def test_what_xla_computes_is_held_too():
    """Assertions inside are dropped by XLA; those of metrics and of rows are outside."""
    strategy = strategy_of(2)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [keras.layers.Dense(3), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)
        metric = CheckedError()
    step = tmg.make_train_step(
        model, optimizer, "mse", strategy, metrics=[metric], jit_compile=True
    )
    variables = [*model.variables, *optimizer.variables, *metric.variables]
    ((good,), (bad,)) = (batches(check) for check in (None, "metric of the step"))
    step(good)
    before = [variable.numpy() for variable in variables]
    with pytest.raises(tf.errors.OpError, match="metric of the step"):
        step(bad)
    assert_equal([variable.numpy() for variable in variables], before)
    step(good)
    constant = optimizer.learning_rate
    for variable, old in zip(variables, before, strict=True):
        if variable is not constant:
            assert not np.array_equal(variable.numpy(), old), variable.path


def doubled_if_asked(inputs):
    """Makes two rows of each, which the loss then has values for, where a row asks for that."""
    asked = tf.cast(tf.reduce_any(tf.equal(inputs[:, 0], 1.0)), tf.int32)
    return tf.ensure_shape(tf.tile(inputs, [1 + asked, 1]), [None, 4])


@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 2), (3, 1)])
def test_after_a_batch_that_is_refused_training_is_that_of_one_device(replicas, micro_batches):
    """Another number of losses than rows is seen last, when sums of all replicas are there."""

    def build():
        layers = [keras.layers.Lambda(doubled_if_asked), keras.layers.Dense(3, "tanh")]
        if micro_batches == 1:
            layers.append(keras.layers.BatchNormalization(synchronized=True))
        layers += [keras.layers.Dropout(0.3, seed=1), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((4,)), *layers])

    def optimizer():
        return keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01)

    def loss(y_true, y_pred, sample_weight=None):
        return keras.losses.MeanSquaredError()(y_true, y_pred)

    good = cut((X, Y[:, :1]), (7, 2, 1, 6))
    expected = ByHand(build, optimizer, loss).train(good)
    run = Replicated(replicas, build, optimizer, "mse", micro_batches=micro_batches)
    x = X[:1].copy()
    x[:, 0] = 1

    def step(batch):
        with pytest.raises(tmg.errors.LossError, match="did not return one value per row"):
            run.step((x, Y[:1, :1]))
        return run.step(batch)

    assert_same(run.train(good, step), expected)
