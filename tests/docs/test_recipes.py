"""Each recipe of a page trains what plain Keras and TensorFlow train on one device.

The blocks of a page run in this process, on its virtual CPUs, up to the recipe; the recipe then
trains on several replicas, and the weights are held to a loop that has nothing of this library.
``RECIPES`` has a row for each function and class that a page defines.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import Training, cut
from law.pair import strategy_of
from law.plain import train_once
from problems import networks, normal_rows as arrays
from test_documentation import PAGES, all_programs_of, blocks_of

import tfmultigpu as tmg

REPLICAS = (2, 3)
Recipe = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Held:
    """A recipe.

    Attributes:
        page: The name of the page, without ``docs/`` and ``.md``.
        names: The functions and classes of the page that belong to it.
        to: What it is held to.
        hold: Raises if they differ.
    """

    page: str
    names: tuple[str, ...]
    to: str
    hold: Recipe


RECIPES: list[Held] = []
# What the pages define and do not call a recipe: what is wrong on purpose, and where it is held.
OTHERS = {
    ("contributing/own-features", "train"): "uses the recipe GradientNoise",
    (
        "same-bits",
        "train",
    ): "compares its hashes itself; tests/promises/test_same_bits.py holds them",
    ("watch", "batches"): "is slow on purpose; tests/watching holds what is said",
    ("contributing/loops", "fit"): "the lines for KerasTuner, which is not installed here",
    ("contributing/steps", "train"): "threads are held in tests/promises/test_threads.py",
    (
        "contributing/measured",
        "Block",
    ): "the page holds it to the model without; tests/promises/test_recompute.py",
    ("testing", "build"): "the page holds it to one device itself",
    ("testing", "train"): "the page holds it to one device itself",
    ("testing", "test_my_model_trains_on_any_number_of_replicas"): "as above",
    ("testing", "test_my_loop_trains_on_any_number_of_replicas"): "as above",
    ("contributing/data", "read"): "by numbers: tests/data/test_preprocessing.py",
    ("contributing/data", "write"): "writes the files of the page",
    ("contributing/data", "decode"): "decodes; seeds of rows: tests/data/test_preprocessing.py",
    ("checkpoints", "build"): "resumed runs are held in tests/promises/test_resume.py",
    ("checkpoints", "read"): "as above",
    ("checkpoints", "train"): "as above",
    ("contributing/checkpoints", "Teacher"): "as above",
    ("contributing/unequal-gpus", "try_batch"): "measures, and trains nothing that is kept",
    ("speed", "build"): "is measured, and has no result",
    ("start", "build"): "the page holds it to one device itself",
}


def recipe(page: str, *names: str, to: str) -> Callable[[Recipe], Recipe]:
    def note(hold: Recipe) -> Recipe:
        RECIPES.append(Held(page, names, to, hold))
        return hold

    return note


# Pages --------------------------------------------------------------------------------------------


def run(code: str, scope: dict[str, Any], name: str) -> None:
    """Runs code of a page where there are eight CPUs already."""
    path = FOLDER[0] / f"{name.replace('/', '_')}_{len(code)}.py"
    path.write_text(code)  # AutoGraph reads the source of a function from its file.
    keras.utils.set_random_seed(1)
    with (
        mock.patch.object(tmg.devices, "split_device", return_value=("CPU:0", "CPU:1")),
        mock.patch.object(tmg, "split_device", return_value=("CPU:0", "CPU:1")),
        mock.patch.object(tf.config, "set_logical_device_configuration"),
    ):
        exec(compile(code, str(path), "exec"), scope)


FOLDER: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    FOLDER[:] = [tmp_path_factory.mktemp("pages")]


class Page:
    """The blocks of a page, which run one after the other."""

    def __init__(self, name: str) -> None:
        path = PAGES["README.md"] if name == "README" else PAGES[f"docs/{name}.md"]
        self.name = name
        self.text = path.read_text()
        self.blocks = [block.code for block in blocks_of(self.text) if block.language == "python"]
        self.scope: dict[str, Any] = {"__name__": "page"}

    def until(self, words: str) -> dict[str, Any]:
        """Runs the blocks up to the one with these words; returns the names they define."""
        while True:
            code = self.blocks.pop(0)
            run(code, self.scope, self.name)
            if words in code:
                return self.scope


@functools.cache
def whole(name: str) -> dict[str, Any]:
    """Returns the names of a page that is one program."""
    page = Page(name)
    return page.until(page.blocks[-1])


def built(model: Callable[[], Any], strategy: Any = None) -> Any:
    keras.utils.set_random_seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        return model()


def plain(model: Any, optimizer: Any, loss: Callable[..., Any], batches: Sequence[Any]) -> list:
    """Returns the weights after training on one device by ``law.plain``."""
    training = Training(model, optimizer, None, whole=loss)
    for batch in batches:
        train_once(training, batch)
    return model.get_weights()


def equal(actual: Any, expected: Any, atol: float = 2e-6) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=atol)


def hold_step(
    build: Callable[[], Any],
    make: Callable[..., Any],
    loss: Callable[..., Any],
    batches: Sequence[Any],
    before: Callable[[], Any] = lambda: None,
) -> None:
    """Holds that ``make(model, optimizer, strategy)``, a step, trains as the plain loop does."""
    before()
    expected = plain(built(build), keras.optimizers.SGD(0.1), loss, batches)
    for replicas in REPLICAS:
        strategy = strategy_of(replicas)
        before()
        model = built(build, strategy)
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.1)
        step = make(model, optimizer, strategy)
        for batch in batches:
            step(batch)
        equal(model.get_weights(), expected)


def hold_fit(build: Callable[[], Any], ours: Any, keras_loss: Any, x: Any, y: Any) -> None:
    """Holds that a loss under ``tmg.fit`` trains and reports what another does under Keras."""
    alone = built(build)
    alone.compile(keras.optimizers.SGD(0.01), keras_loss)
    history = alone.fit(x, y, batch_size=7, shuffle=False, epochs=2, verbose=0).history
    for replicas in REPLICAS:
        model = built(build, strategy_of(replicas))
        with strategy_of(replicas).scope():
            model.compile(keras.optimizers.SGD(0.01), ours)
        found = tmg.fit(model, x, y, batch_size=7, shuffle=False, epochs=2, verbose=0).history
        np.testing.assert_allclose(found["loss"], history["loss"], rtol=1e-5)
        equal(model.get_weights(), alone.get_weights())


def mlp(inputs: int, outputs: int) -> Callable[[], Any]:
    layers = keras.layers
    return networks(inputs, lambda: layers.Dense(5, "tanh"), lambda: layers.Dense(outputs))


# Losses over the whole batch ----------------------------------------------------------------------


@recipe("coupled-losses", "nt_xent", "forward", to="NT-Xent of all views, on one device")
def simclr() -> None:
    forward = whole("coupled-losses")["forward"]

    def all_views(model: Any, batch: Any) -> Any:
        views = tf.math.l2_normalize(tf.concat([model(view) for view in batch], 0), -1)
        count = tf.shape(views)[0]
        logits = tf.matmul(views, views, transpose_b=True) / 0.5 - 1e9 * tf.eye(count)
        partner = tf.roll(tf.range(count), count // 2, 0)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(partner, logits))

    hold_step(
        mlp(8, 4),
        lambda *parts: tmg.make_train_step(*parts[:2], None, parts[2], forward=forward),
        all_views,
        cut(arrays(13, 8, 8), (8, 2, 3)),
    )


@recipe(
    "contributing/coupled-losses", "circle", to="keras.losses.Circle under Keras' fit and evaluate"
)
def circle() -> None:
    page_loss = whole("contributing/coupled-losses")["circle"]
    (x,) = arrays(17, 5)
    y = np.arange(17) % 5 % 3

    def build() -> Any:
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(3), keras.layers.UnitNormalization()]
        )

    hold_fit(build, page_loss, keras.losses.Circle(gamma=80), x, y)


@recipe(
    "contributing/coupled-losses",
    "batch_dice",
    to="the same number of the whole batch under Keras' fit",
)
def dice() -> None:
    (images,) = arrays(17, 36)
    images = images.reshape(17, 6, 6, 1)

    def build() -> Any:
        return keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                keras.layers.Conv2D(1, 3, padding="same"),
                keras.layers.Activation("sigmoid"),
            ]
        )

    def of_all(y_true: Any, y_pred: Any) -> Any:
        y_true = tf.cast(y_true, y_pred.dtype)
        both = tf.reduce_sum(y_true * y_pred)
        return 1 - 2 * both / (tf.reduce_sum(y_true) + tf.reduce_sum(y_pred) + 1e-6)

    hold_fit(
        build, whole("contributing/coupled-losses")["batch_dice"], of_all, images, images > 0.5
    )


@recipe(
    "contributing/coupled-losses", "LoadBalance", to="Keras' fit of the same layer on one device"
)
def load_balance() -> None:
    x, y = arrays(17, 8, 1)
    layer = whole("contributing/coupled-losses")["LoadBalance"]

    def build() -> Any:
        return keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(4, "softmax"), layer(), keras.layers.Dense(1)]
        )

    hold_fit(build, "mse", "mse", x, y)


# Steps and models of one's own --------------------------------------------------------------------


@recipe("own-steps", "forward", "Distiller", to="the train_step of the class, on one device")
def distillation() -> None:
    page = whole("own-steps")
    x, y = arrays(11, 8, 1)

    def taught(strategy: Any = None) -> Any:
        page["teacher"] = built(mlp(8, 1), strategy)
        page["teacher"].set_weights([2.0 * weight for weight in page["teacher"].get_weights()])
        return built(mlp(8, 1), strategy)

    expected = taught()
    model = page["Distiller"](expected, page["teacher"])
    model.compile(keras.optimizers.SGD(0.1))
    for batch in cut((x, y), (6, 1, 4)):
        model.train_step(batch)
    for replicas in REPLICAS:
        strategy = strategy_of(replicas)
        student = taught(strategy)
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.1)
            student.apart = keras.metrics.Mean(name="apart")
        step = tmg.make_train_step(student, optimizer, None, strategy, forward=page["forward"])
        for batch in cut((x, y), (6, 1, 4)):
            step(batch)
        equal(student.get_weights(), expected.get_weights())


@recipe(
    *("contributing/own-steps", "Autoencoder", "variational"),
    to="its loss by a tape, with the same noise",
)
def autoencoder() -> None:
    page = whole("contributing/own-steps")

    def loss(model: Any, batch: Any) -> Any:
        output, mean, spread = model(batch, training=True)
        kl = -0.5 * tf.reduce_sum(1 + spread - mean**2 - tf.exp(spread))
        return (tf.reduce_sum((batch - output) ** 2) + kl) / len(batch)

    def build() -> Any:
        model = page["Autoencoder"]()
        model(tf.zeros((2, 8)))
        model.seeds.state.assign([1, 0])
        return model

    hold_step(
        build,
        lambda *parts: tmg.make_train_step(*parts[:2], None, parts[2], forward=page["variational"]),
        loss,
        cut(arrays(11, 8)[0], (6, 1, 4)),
    )


@recipe(
    *("own-steps", "generate", "critic_loss", "generator_loss"),
    to="the critic's step and the generator's by a tape",
)
def gan() -> None:
    page = whole("own-steps")
    batches = cut(arrays(11, 8)[0], (6, 1, 4))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)

    def make() -> tuple[Any, Any]:
        keras.utils.set_random_seed(1)
        generator, critic = mlp(3, 8)(), mlp(8, 1)()
        generator.seeds = keras.random.SeedGenerator(2)
        page.update(generator=generator, critic=critic)
        return generator, critic

    generator, critic = make()
    optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
    for batch in batches:

        def fakes(batch: Any = batch) -> Any:
            return generator(keras.random.normal((len(batch), 3), seed=generator.seeds))

        def critics_loss(critic: Any, real: Any) -> Any:
            labels = tf.concat([tf.zeros((len(real), 1)), tf.ones((len(real), 1))], 0)
            return loss(labels, critic(tf.concat([fakes(), real], 0)))

        plain(critic, optimizers[0], critics_loss, [batch])
        ones = tf.ones((len(batch), 1))
        plain(
            generator, optimizers[1], lambda g, b, ones=ones: loss(ones, critic(fakes())), [batch]
        )
    expected = [*generator.get_weights(), *critic.get_weights()]
    for replicas in REPLICAS:
        strategy = strategy_of(replicas)
        with strategy.scope():
            generator, critic = make()
            ours = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
        first = tmg.make_train_step(critic, ours[0], None, strategy, forward=page["critic_loss"])
        second = tmg.make_train_step(
            generator, ours[1], None, strategy, forward=page["generator_loss"]
        )
        step = tmg.chain_steps(first, second)
        for batch in batches:
            step(batch)
        equal([*generator.get_weights(), *critic.get_weights()], expected)


@recipe(
    "contributing/own-features", "GradientNoise", to="a tape, and the same noise on the gradient"
)
def gradient_noise() -> None:
    page = whole("contributing/own-features")
    x, y = arrays(11, 3, 1)
    model, optimizer = built(mlp(3, 1)), keras.optimizers.SGD(0.1)
    for number, (inputs, labels) in enumerate(cut((x, y), (6, 1, 4))):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.square(model(inputs) - labels))
        gradients = tape.gradient(value, model.trainable_variables)
        noisy = [
            g + tf.random.stateless_normal(g.shape, [5 + i, number], stddev=0.1)
            for i, g in enumerate(gradients)
        ]
        optimizer.apply(noisy, model.trainable_variables)
    for replicas in REPLICAS:
        strategy = strategy_of(replicas)
        ours = built(mlp(3, 1), strategy)
        with strategy.scope():
            sgd = keras.optimizers.SGD(0.1)
        noise = page["GradientNoise"](0.1, seed=5)
        step = tmg.make_train_step(ours, sgd, "mse", strategy, features=[noise])
        for batch in cut((x, y), (6, 1, 4)):
            step(batch)
        equal(ours.get_weights(), model.get_weights())


@recipe("contributing/own-features", "LargestGradients", to="the largest gradient of a tape")
def largest_gradients() -> None:
    x, y = arrays(5, 3, 1)
    model = built(mlp(3, 1))
    with tf.GradientTape() as tape:
        value = tf.reduce_mean(tf.square(model(x) - y))
    gradients = tape.gradient(value, model.trainable_variables)
    strategy = strategy_of(3)
    ours = built(mlp(3, 1), strategy)
    with strategy.scope():
        sgd = keras.optimizers.SGD(0.1)
    feature = whole("contributing/own-features")["LargestGradients"]()
    tmg.make_train_step(ours, sgd, "mse", strategy, features=[feature])((x, y))
    found = [float(value.numpy()) for value in feature.values.values()]
    np.testing.assert_allclose(found, [np.abs(g).max() for g in gradients], rtol=1e-5)


# By hand ------------------------------------------------------------------------------------------


def by_hand_model(scope: dict[str, Any]) -> tuple[Any, Any]:
    """Returns a model on one device with the weights of the page's model now, and its optimizer."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.set_weights(scope["model"].get_weights())
    return model, keras.optimizers.SGD(0.1, clipnorm=1.0)


def squared(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(tf.square(model(batch[0]) - batch[1]))


@recipe("by-hand", "replica", "train", "add", "update", to="a tape on 6, 4, 8 and then 2 rows")
def by_hand() -> None:
    page = Page("by-hand")
    scope = page.until("def train(batch)")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, clipnorm=1.0)
    rows = scope["x"], scope["y"]
    plain(model, optimizer, squared, cut(rows, (6, 4)))
    equal(scope["model"].get_weights(), model.get_weights())
    page.until("def update()")
    for batch in cut(rows, (8, 2)):
        with tf.GradientTape() as tape:
            value = squared(model, batch)
        gradients = tape.gradient(value, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 5.0)
        optimizer.apply(gradients, model.trainable_variables)
    equal(scope["model"].get_weights(), model.get_weights())


@recipe("by-hand", "scaled_replica", "add_scaled", "update_if_finite", to="a tape on all 10 rows")
def by_hand_float16() -> None:
    page = Page("by-hand")
    scope = page.until("update_if_finite")
    model, optimizer = by_hand_model(scope)
    rows = scope["x"], scope["y"]
    for batch in tmg.distribute_dataset(rows, scope["strategy"], batch_size=8):
        scope["add_scaled"](batch)
    assert scope["update_if_finite"]()
    with tf.GradientTape() as tape:
        value = squared(model, rows)
    gradients = tape.gradient(value, model.trainable_variables)
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply(gradients, model.trainable_variables)
    equal(scope["model"].get_weights(), model.get_weights())


@recipe(
    "contributing/coupled-losses", "contrast", "compared", "train_compared",
    to="a tape on all 10 rows: each row against all rows",
)  # fmt: skip
def by_hand_compared_rows() -> None:
    page = Page("contributing/coupled-losses")
    scope = page.until("window = tmg.GradientAccumulator")
    model, optimizer = by_hand_model(scope)

    def against_all(model: Any, batch: Any) -> Any:
        outputs = model(batch[0])
        return tf.reduce_mean(tf.abs(outputs - tf.transpose(outputs)))

    plain(model, optimizer, against_all, [(scope["x"], scope["y"])])
    page.until("train_compared(iterator)")
    equal(scope["model"].get_weights(), model.get_weights())


@recipe("by-hand", "update_with_penalty", to="a tape on all 10 rows, and a penalty")
def by_hand_penalty() -> None:
    page = Page("by-hand")
    scope = page.until("update_if_finite")
    model, optimizer = by_hand_model(scope)
    with tf.GradientTape() as tape:
        kernel = model.trainable_variables[0]
        value = squared(model, (scope["x"], scope["y"]))
        value += 0.01 * tf.reduce_sum(tf.square(kernel))
    gradients = tape.gradient(value, model.trainable_variables)
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply(gradients, model.trainable_variables)
    page.until("update_with_penalty()\n")
    equal(scope["model"].get_weights(), model.get_weights())


@recipe("by-hand", to="a tape: the sentences on optimizer.apply, L2 and add_loss")
def by_hand_sentences() -> None:
    x, y = arrays(11, 3, 1)

    class Adds(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
            return x

    def build(penalty: Any = "l2") -> Any:
        hidden = keras.layers.Dense(4, kernel_regularizer=penalty)
        return keras.Sequential([keras.Input((3,)), hidden, Adds(), keras.layers.Dense(1)])

    batches = cut((x, y), (6, 1, 4))
    expected = plain(built(build), keras.optimizers.SGD(0.1), squared, batches)
    in_replica = plain(built(mlp(3, 1)), keras.optimizers.SGD(0.1), squared, batches)
    for replicas in REPLICAS:
        strategy = strategy_of(replicas)
        model, other = built(build, strategy), built(mlp(3, 1), strategy)
        with strategy.scope():
            window = tmg.GradientAccumulator(model.trainable_variables)
            optimizer, inside = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
            inside.build(other.trainable_variables)

        # "add its gradient after `reduce`, once"; "add them to the sum: value times rows".
        def replica(batch: Any, model: Any = model, window: Any = window) -> None:
            with tf.GradientTape() as tape:
                pair = tmg.loss_sum("mse", batch[1], model(batch[0], training=True))
                rows = tf.cast(tf.shape(batch[0])[0], tf.float32)
                extra = model.layers[1].losses[0]
                target = pair.sum + tf.where(rows > 0, extra, 0.0) * rows
            window.add(tape.gradient(target, model.trainable_variables), pair.weight)

        # "differentiate pair.sum over the weight of all replicas"
        def apply_inside(batch: Any, model: Any = other, optimizer: Any = inside) -> None:
            with tf.GradientTape() as tape:
                pair = tmg.loss_sum("mse", batch[1], model(batch[0], training=True))
                context = tf.distribute.get_replica_context()
                weight = tf.stop_gradient(context.all_reduce("SUM", pair.weight))
                target = pair.sum / weight
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(target, variables), variables)

        for batch in tmg.distribute_dataset(
            lambda: iter(batches), strategy, small_batches="partition"
        ):
            tf.function(lambda b, r=replica, s=strategy: s.run(r, args=(b,)))(batch)
            gradients, _ = window.reduce()
            with tf.GradientTape() as tape:
                penalty = model.layers[0].losses[0]
            kernel = model.layers[0].kernel
            added = tape.gradient(penalty, kernel)
            gradients = [
                g + added if v is kernel else g
                for g, v in zip(gradients, model.trainable_variables, strict=True)
            ]
            tmg.apply_reduced_gradients(optimizer, gradients, model.trainable_variables)
            tf.function(lambda b, r=apply_inside, s=strategy: s.run(r, args=(b,)))(batch)
        equal(model.get_weights(), expected)
        equal(other.get_weights(), in_replica)


# Single modules -----------------------------------------------------------------------------------


@recipe("modules", "replica", "train", to="a tape on 32, 32 and 7 rows")
def modules() -> None:
    page = Page("modules")
    scope = page.until("def replica(batch, rows)")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    rows = scope["x"], scope["x"][:, :1]
    plain(model, keras.optimizers.SGD(0.1), squared, cut(rows, (32, 32, 1)))
    equal(scope["model"].get_weights(), model.get_weights())

    scope = page.until("tmg.GradientAccumulator(variables)")
    keras.utils.set_random_seed(1)
    found = scope["train"](strategy_of(3))
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
    rows = scope["x"], scope["x"][:, :1]
    equal(found, plain(model, optimizer, squared, cut(rows, (32, 32, 7))))


@recipe("modules", to="Keras' fit: the step with dropout and L2")
def module_steps() -> None:
    page = Page("modules")
    page.blocks = page.blocks[-1:]
    scope = page.until("make_train_step")
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dropout(0.2), layers.Dense(1, kernel_regularizer="l2")]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(scope["x"], scope["x"][:, :1], batch_size=32, shuffle=False, verbose=0)
    equal(scope["model"].get_weights(), model.get_weights())


# Steps, data, loops, sharded variables ------------------------------------------------------------


@recipe("steps", to="a tape: L2, clip_norm and momentum in batches of 32, 32, 32 and 4 rows")
def steps() -> None:
    page = Page("steps")
    scope = page.until("clip_norm=1.0")
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(16, "tanh", kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(scope["x"], scope["y"], batch_size=32, shuffle=False, verbose=0)
    equal(scope["model"].get_weights(), model.get_weights())


@recipe(
    "contributing/own-steps", "forward", to="the weighted mean by a tape, in four micro-batches"
)
def weighted_forward() -> None:
    forward = whole("contributing/own-steps")["forward"]

    def loss(model: Any, batch: Any) -> Any:
        x, y = batch
        importance = 1.0 + tf.abs(x[:, 0])
        values = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
        return tf.reduce_sum(values * importance) / tf.reduce_sum(importance)

    x, _ = arrays(17, 8, 1)

    def make(model: Any, optimizer: Any, strategy: Any) -> Any:
        return tmg.make_train_step(
            model, optimizer, None, strategy, forward=forward, micro_batches=4
        )

    hold_step(mlp(8, 3), make, loss, cut((x, np.arange(17) % 3), (9, 2, 6)))


@recipe("contributing/data", "forward", to="the two means as one, by a tape")
def several_rows() -> None:
    forward = whole("contributing/data")["forward"]
    x, y, more = arrays(11, 2, 1, 6)

    def loss(model: Any, batch: Any) -> Any:
        (features, labels), unlabeled = batch
        known = tf.reduce_sum(tf.square(model(features) - labels))
        spread = tf.reduce_sum(tf.square(model(tf.reshape(unlabeled, [-1, 2]))))
        return (known + spread) / (4 * len(features))

    hold_step(
        mlp(2, 1),
        lambda *parts: tmg.make_train_step(*parts[:2], None, parts[2], forward=forward),
        loss,
        cut(((x, y), more.reshape(11, 3, 2)), (6, 1, 4)),
    )


@recipe("data", "augment", to="the function called for each example")
def augment() -> None:
    page = whole("data")
    images, kinds = page["images"], page["kinds"]

    def augmented(replicas: int) -> list[np.ndarray]:
        data = tmg.distribute_dataset(
            (images, kinds),
            strategy_of(replicas),
            batch_size=16,
            preprocess=page["augment"],
            seed=3,
        )
        local = strategy_of(replicas).experimental_local_results
        return [np.concatenate([shard.numpy() for shard in local(x)]) for x, _ in data]

    one = augmented(1)
    for replicas in REPLICAS:
        equal(augmented(replicas), one, atol=0.0)
    # With a factor of brightness of each example, and flipped or not.
    plain = [np.stack([i, i[:, ::-1]]) for i in images.astype("float32") / 255.0]
    for image, both in zip(np.concatenate(one), plain, strict=True):
        shifts = (image - both).reshape(2, -1)
        assert shifts.std(axis=1).min() < 1e-6
        assert abs(shifts).min(axis=0).max() <= 0.2 + 1e-6


@recipe("contributing/loops", "on_all_rows", to="compute_loss of the whole batch, on one device")
def loss_of_another_package() -> None:
    forward = whole("contributing/loops")["on_all_rows"]

    class Retrieval(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(4)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            scores = tf.matmul(y_pred, y, transpose_b=True)
            own = tf.range(tf.shape(scores)[0])
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, scores))

    def build() -> Any:
        model = Retrieval()
        model(tf.zeros((1, 8)))
        return model

    hold_step(
        build,
        lambda *parts: tmg.make_train_step(*parts[:2], None, parts[2], forward=forward),
        lambda model, batch: model.compute_loss(y=batch[1], y_pred=model(batch[0])),
        cut(arrays(13, 8, 4), (8, 2, 3)),
    )


@recipe("sharded-variables", "build", to="Keras' fit of the same model")
def sharded() -> None:
    page = Page("sharded-variables").until("def build()")
    x, _ = arrays(20, 512, 1)
    alone = built(page["build"])
    alone.compile(keras.optimizers.SGD(0.1), "mse")
    alone.fit(x, x[:, :3], batch_size=8, shuffle=False, verbose=0)
    keras.utils.set_random_seed(1)
    with strategy_of(3).scope(), tmg.sharded_variables():
        model = page["build"]()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    tmg.fit(model, x, x[:, :3], batch_size=8, shuffle=False, verbose=0)
    equal(model.get_weights(), alone.get_weights())


@recipe("contributing/sharded-variables", "blocks", to="a tape, without placement")
def layers_by_hand() -> None:
    page = whole("contributing/sharded-variables")
    batches = cut(arrays(11, 8, 1), (6, 5))
    expected = plain(built(mlp_of_blocks), keras.optimizers.SGD(0.1), squared, batches)
    model = built(page["blocks"])
    step = tmg.make_train_step(
        model, keras.optimizers.SGD(0.1), "mse", tf.distribute.get_strategy(), micro_batches=2,
        features=[tmg.sharding.LayersByHand(pipeline=True)],
    )  # fmt: skip
    for batch in batches:
        step(batch)
    equal(model.get_weights(), expected)


def mlp_of_blocks() -> Any:
    x = inputs = keras.Input((8,))
    x = keras.layers.Dense(16, "tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


# What changes a program of Keras ------------------------------------------------------------------


@recipe("README", "replica", "my_step", to="a tape: 15 batches of 64 rows and one of 40")
def readme() -> None:
    page = Page("README")
    scope = page.until("def my_step")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1)])
    sgd = keras.optimizers.SGD(0.1, global_clipnorm=5.0)
    sizes = [64] * 15 + [40]
    plain(model, sgd, squared, cut((scope["x"], scope["y"]), sizes) * 4)
    equal(scope["model"].get_weights(), model.get_weights())


def sides(page: str, words: str) -> str:
    """Returns the right side of the diff with these words."""
    programs = all_programs_of(PAGES[page].read_text())
    (program,) = [p for p in programs if words in p and "tfmultigpu" in p]
    return program


@recipe("coming-from", to="Keras' fit; the README's diff as well")
def diffs() -> None:
    with mock.patch.object(tmg, "create_strategy", return_value=strategy_of(3)):
        after: dict[str, Any] = {}
        run(sides("docs/coming-from.md", "tmg.make_train_step"), after, "coming_from")
        fitted: dict[str, Any] = {}
        code = sides("README.md", "tmg.fit(model").replace("epochs=3", "epochs=1, shuffle=False")
        run(code, fitted, "readme")
    for scope in (after, fitted):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        x = scope["x"]
        model.fit(x, x[:, :1], batch_size=64, shuffle=False, verbose=0)
        equal(scope["model"].get_weights(), model.get_weights(), atol=2e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tfmultigpu.ReplicaDependenceWarning")
@pytest.mark.parametrize("held", RECIPES, ids=lambda held: held.hold.__name__)
def test_a_recipe_trains_what_one_device_trains(held: Held) -> None:
    held.hold()


def defined(page: str) -> set[str]:
    """Returns the functions and classes that the blocks of a page define."""
    nodes = [node for code in Page(page).blocks for node in ast.parse(code).body]
    kinds = ast.FunctionDef, ast.ClassDef
    return {node.name for node in nodes if isinstance(node, kinds)}


# Fails if a page has a recipe that nothing holds to one device, or a row names what is gone.
def test_each_recipe_of_a_page_has_a_row() -> None:
    pages = [name.removeprefix("docs/").removesuffix(".md") for name in PAGES]
    there = {(page, name) for page in pages for name in defined(page)}
    rows = {(held.page, name) for held in RECIPES for name in held.names} | set(OTHERS)
    assert there - rows == set(), "write the recipe with what it is held to"
    assert rows - there == set()
