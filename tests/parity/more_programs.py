"""More programs that users write: generative, contrastive, reinforced, with memories and queues."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from layers_of_users import (
    CountsSteps,
    DropTokens,
    MapRows,
    MixUp,
    NormalizesItsGradient,
    Numpy,
    Overwrites,
    PenalizesItsWeights,
    PythonCounter,
    Quantizes,
    Queue,
    RunningRewards,
    SamplesLatent,
    StochasticDepth,
    VariableCounter,
    WeightNoise,
    WhileLoop,
    ZeroGate,
)
from programs import (
    CLASSES,
    FEATURES,
    IDS,
    ROWS,
    AddsLoss,
    Case,
    L,
    Program,
    X,
    mse,
    sequential,
    with_layers,
    with_loss,
)

import tfmultigpu as tmg

_random = np.random.default_rng(6)
LABELS = _random.integers(0, CLASSES, 3 * ROWS)


def summed(values: Any, model: Any = None, **options: Any) -> Any:
    """A program of ``forward``, which computes ``values(model, x, y)`` of each row."""

    def build() -> Program:
        made = (model or (lambda: sequential(L.Dense(5, "tanh"))))()

        def forward(model: Any, batch: Any, training: bool) -> Any:
            rows = values(model, *batch)
            return tmg.LossSum(tf.reduce_sum(rows), tf.size(rows))

        plain = lambda model, x, y: tf.reduce_mean(values(model, x, y))  # noqa: E731
        return Program(made, plain, {"loss": None, "forward": forward, **options})

    return build


def semi_hard(y: Any, predictions: Any) -> Any:
    labels = tf.argmax(y, -1)
    apart = tf.reduce_sum((predictions[:, None] - predictions[None]) ** 2, -1)
    same = tf.cast(labels[:, None] == labels[None], "float32")
    positive = tf.reduce_max(apart * same, 1)
    negative = tf.reduce_min(apart + 1e3 * same, 1)
    return tf.nn.relu(positive - negative + 1.0)


def sup_con(y: Any, predictions: Any) -> Any:
    labels = tf.argmax(y, -1)
    z = tf.math.l2_normalize(predictions, 1)
    logits = z @ tf.transpose(z) - 1e9 * tf.eye(tf.shape(z)[0])
    same = tf.cast(labels[:, None] == labels[None], "float32") - tf.eye(tf.shape(z)[0])
    return -tf.math.divide_no_nan(
        tf.reduce_sum(same * tf.nn.log_softmax(logits), 1), tf.reduce_sum(same, 1)
    )


def softened_by_the_batch(y: Any, predictions: Any) -> Any:
    p = tf.nn.softmax(y)
    p = 0.9 * p + 0.1 * tf.reduce_mean(p, 0)
    return tf.nn.softmax_cross_entropy_with_logits(p, predictions)


def over_the_largest(y: Any, predictions: Any) -> Any:
    values = tf.reduce_mean((y - predictions) ** 2, 1)
    return values / tf.stop_gradient(tf.reduce_max(values))


def over_positives(y: Any, predictions: Any) -> Any:
    t = tf.cast(y > 0, "float32")
    p = tf.sigmoid(predictions)
    focal = tf.nn.sigmoid_cross_entropy_with_logits(t, predictions) * (t - p) ** 2
    return tf.reduce_sum(focal, 1) / tf.reduce_sum(t)


def over_its_mean(model: Any, x: Any, y: Any) -> Any:
    values = tf.reduce_mean((y - model(x, training=True)) ** 2, 1)
    return values / tf.stop_gradient(tf.reduce_mean(values))


def ppo(model: Any, x: Any, y: Any) -> Any:
    """The first step after rows were collected: all ratios are one."""
    chosen = tf.argmax(y, -1)
    rewards = x[:, 0]
    advantage = (rewards - tf.reduce_mean(rewards)) / (tf.math.reduce_std(rewards) + 1e-6)
    log_p = -tf.nn.sparse_softmax_cross_entropy_with_logits(chosen, model(x, training=True))
    ratio = tf.exp(log_p - tf.stop_gradient(log_p))
    return -tf.minimum(ratio * advantage, tf.clip_by_value(ratio, 0.8, 1.2) * advantage)


def reinforce(model: Any, x: Any, y: Any) -> Any:
    chosen = tf.argmax(y, -1)
    rewards = x[:, 0]
    advantage = rewards - tf.reduce_mean(rewards)
    return advantage * tf.nn.sparse_softmax_cross_entropy_with_logits(
        chosen, model(x, training=True)
    )


def zero_head() -> Any:
    return keras.Sequential(
        [keras.Input((FEATURES,)), L.Dense(5, "tanh"), L.Dense(CLASSES, kernel_initializer="zeros")]
    )


def balanced_zero_head(model: Any, x: Any, y: Any) -> Any:
    """Weights of classes by their numbers in the batch, with mean one."""
    labels = tf.one_hot(tf.argmax(y, -1), CLASSES)
    weights = labels @ (1 / (1 + tf.reduce_sum(labels, 0)))[:, None]
    weights = weights[:, 0] / tf.reduce_mean(weights)
    return weights * tf.nn.softmax_cross_entropy_with_logits(labels, model(x, training=True))


class GradientPenalty(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.body = sequential(L.Dense(5, "tanh"))
        self.seed_generator = keras.random.SeedGenerator(8)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.body(x)

    def penalty(self, x: Any) -> Any:
        alpha = keras.random.uniform((tf.shape(x)[0], 1), seed=self.seed_generator)
        between = alpha * x - (1 - alpha) * x
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = tf.reduce_sum(self.body(between))
        return (tf.norm(tape.gradient(score, between), axis=1) - 1) ** 2


def wgan_gp(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(model(x) * y, 1) + model.penalty(x)


def mean_teacher(micro_batches: int) -> Any:
    def build() -> Program:
        model, teacher = sequential(L.Dense(5, "tanh")), sequential(L.Dense(5, "tanh"))
        teacher.trainable = False

        def values(model: Any, x: Any, y: Any) -> Any:
            for old, new in zip(teacher.weights, model.weights, strict=True):
                old.assign(0.9 * old + 0.1 * new)
            return tf.reduce_mean((model(x, training=True) - teacher(x) - y) ** 2, 1)

        program = summed(values, lambda: model, micro_batches=micro_batches)()
        program.watched += teacher.weights
        return program

    return build


def unlabelled(model: Any, x: Any, y: Any) -> Any:
    predictions = model(x, training=True)
    labelled = y[:, 0] > 0.3
    return tf.reduce_mean(
        (tf.boolean_mask(y, labelled) - tf.boolean_mask(predictions, labelled)) ** 2, 1
    )


def centre_loss() -> Program:
    model = sequential(L.Dense(5, "tanh"))
    centres = keras.Variable(np.ones((CLASSES, CLASSES), "float32"), trainable=False)

    def values(model: Any, x: Any, y: Any) -> Any:
        own = tf.one_hot(tf.argmax(y, -1), CLASSES)
        predictions = model(x, training=True)
        apart = predictions - own @ centres.value
        moved = tf.transpose(own) @ apart / (1 + tf.reduce_sum(own, 0))[:, None]
        centres.assign(centres.value + 0.5 * tf.stop_gradient(moved))
        return tf.reduce_sum(apart**2, 1)

    program = summed(values, lambda: model)()
    program.watched.append(centres)
    return program


def two_outputs() -> Program:
    inputs = keras.Input((FEATURES,))
    hidden = L.Dense(5, "tanh")(inputs)
    outputs = {"a": L.Dense(CLASSES, name="a")(hidden), "b": L.Dense(1, name="b")(hidden)}
    model = keras.Model(inputs, outputs)

    def plain(model: Any, x: Any, y: Any) -> Any:
        p = model(x, training=True)
        a = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y["a"], p["a"]))
        return a + 0.5 * tf.reduce_mean((p["b"][:, 0] - y["b"]) ** 2)

    a = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"loss": {"a": a, "b": "mse"}, "loss_weights": {"a": 1.0, "b": 0.5}}
    return Program(model, plain, options)


def masked_lstm() -> Program:
    model = sequential(
        L.Embedding(9, 4, mask_zero=True),
        L.LSTM(4, dropout=0.3, recurrent_dropout=0.3),
        inputs=(5,),
        dtype="int64",
    )
    return Program(model, mse, {"loss": "mse"})


def masked_attention() -> Program:
    ids = keras.Input((5,), dtype="int64")
    h = L.Embedding(9, 4, mask_zero=True)(ids)
    h = L.MultiHeadAttention(2, 2, dropout=0.3)(h, h)
    model = keras.Model(ids, L.Dense(CLASSES)(L.GlobalAveragePooling1D()(h)))
    return Program(model, mse, {"loss": "mse"})


def fixed_seed(model: Any, x: Any, y: Any) -> Any:
    noise = keras.random.normal(tf.shape(x), seed=3)
    return tf.reduce_mean((model(x + noise) - y) ** 2, 1)


def keras_loss(loss: Any, activation: str = "sigmoid") -> Any:
    def build() -> Program:
        model = keras.Sequential([keras.Input((FEATURES,)), L.Dense(CLASSES, activation)])
        made = loss()
        plain = lambda model, x, y: made(tf.cast(y > 0, "float32"), model(x, training=True))  # noqa: E731

        class Binary(keras.losses.Loss):
            def call(self, y: Any, p: Any) -> Any:
                return made.call(tf.cast(y > 0, "float32"), p)

        return Program(model, plain, {"loss": Binary()})

    return build


def norm_in_half(policy: str) -> Any:
    def build() -> Program:
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                L.Dense(5, dtype=policy),
                L.BatchNormalization(dtype=policy),
                L.Dense(CLASSES, dtype=policy),
                L.Activation("linear", dtype="float32"),
            ]
        )
        return Program(model, mse, {"loss": "mse"})

    return build


def with_options(build: Any, **options: Any) -> Any:
    def changed() -> Program:
        program = build()
        program.options.update(options)
        return program

    return changed


def by_gradients(build: Any) -> Any:
    """The loss of the first step shows nothing, the gradients do."""
    return with_options(build, verify="gradients")


def adds(loss: Any) -> Any:
    return with_layers(lambda: L.Dense(4), lambda: AddsLoss(loss))


def each_positive(x: Any) -> Any:
    return tf.reduce_sum(tf.nn.relu(x)) / tf.reduce_sum(tf.cast(x > 0, "float32"))


def paired_with_every_row(y: Any, predictions: Any) -> Any:
    return (y[:, 0] - predictions[:, :1]) ** 2


MORE_CASES = (
    Case("VAE", with_layers(lambda: L.Dense(8), SamplesLatent), "same", sizes=(7, 2, 1, 7)),
    Case(
        "VAE in micro-batches",
        with_options(with_layers(lambda: L.Dense(8), SamplesLatent), micro_batches=2),
        "same",
        sizes=(7, 3, 1, 7),
    ),
    Case("VQ-VAE", with_layers(lambda: L.Dense(5), Quantizes), "told", "Quantizes"),
    Case("triplets by semi-hard mining", with_loss(semi_hard), "told", "gather_rows"),
    Case("SupCon", with_loss(sup_con), "told", "gather_rows"),
    Case("labels softened by the batch", with_loss(softened_by_the_batch), "told", "gather_rows"),
    Case("a loss over the largest", with_loss(over_the_largest), "told", "gather_rows"),
    Case("a focal loss over the positives", with_loss(over_positives), "told", "gather_rows"),
    Case("a loss over its mean", by_gradients(summed(over_its_mean)), "told", "the gradient"),
    Case("PPO, advantages normalized in the loss", by_gradients(summed(ppo)), "told"),
    Case("REINFORCE with the batch as baseline", summed(reinforce), "told", "gather_rows"),
    Case(
        "balanced classes before a head of zeros",
        by_gradients(summed(balanced_zero_head, zero_head)),
        "told",
        "the gradient",
    ),
    Case("a gate of zero", by_gradients(with_layers(ZeroGate)), "told", "ZeroGate"),
    Case(
        "a layer that normalizes its gradient",
        by_gradients(with_layers(lambda: L.Dense(5), NormalizesItsGradient)),
        "told",
        "the gradient",
    ),
    Case("WGAN-GP", summed(wgan_gp, GradientPenalty), "same", sizes=(7, 2, 1, 7)),
    Case("WGAN-GP in micro-batches", summed(wgan_gp, GradientPenalty, micro_batches=2), "same"),
    Case("a mean teacher", mean_teacher(1), "same"),
    Case("a mean teacher in micro-batches", mean_teacher(2), "told", "micro_batches=1"),
    Case("a queue of keys", with_layers(Queue), "told", "Queue"),
    Case("running rewards", with_layers(RunningRewards), "told", "RunningRewards"),
    Case("a mean in a trained weight", with_layers(Overwrites), "told", "which a layer assigns"),
    Case("a centre of each class", centre_loss, "told", "the state"),
    Case("a counter of steps", with_layers(CountsSteps), "same"),
    Case("a counter in Python", with_layers(PythonCounter), "told", "PythonCounter"),
    Case("a counter in a tf.Variable", with_layers(VariableCounter), "unverified", "AssignAdd"),
    Case("tf.numpy_function", with_layers(Numpy), "unverified", "PyFunc"),
    Case("dropout in tf.map_fn", with_layers(lambda: MapRows(True)), "unverified", "Assign"),
    Case("tf.map_fn", with_layers(MapRows), "same"),
    Case("tf.while_loop", with_layers(WhileLoop), "same"),
    Case("noise of four rows", with_layers(lambda: WeightNoise((4, 3))), "same"),
    Case("noise of one row", with_layers(lambda: WeightNoise((1, 3))), "same", sizes=(7, 2, 1)),
    Case(
        "dropout on the tokens of all rows",
        with_layers(DropTokens, inputs=(5,), dtype="int64"),
        "told",
        x=IDS,
    ),
    Case(
        "stochastic depth by row",
        with_layers(lambda: StochasticDepth(True)),
        "same",
        sizes=(7, 2, 1, 7),
    ),
    Case(
        "stochastic depth by batch",
        with_layers(lambda: StochasticDepth(False)),
        "same",
        sizes=(7, 2, 1, 7),
    ),
    Case("mixup with the reversed batch", with_layers(MixUp), "told", "MixUp"),
    Case("labels of some rows", summed(unlabelled), "same"),
    Case("two outputs", two_outputs, "same", y={"a": LABELS, "b": X[:, 1]}),
    Case("LSTM with dropout behind a mask", masked_lstm, "same", x=IDS, sizes=(7, 1)),
    Case("attention with dropout behind a mask", masked_attention, "same", x=IDS),
    Case("noise by a seed that is a number", summed(fixed_seed), "same"),
    Case("Dice over the batch", keras_loss(keras.losses.Dice), "refused", "one number"),
    Case("Tversky over the batch", keras_loss(keras.losses.Tversky), "refused", "one number"),
    Case("a loss of all pairs by accident", with_loss(paired_with_every_row), "refused"),
    Case("local norm in bfloat16", norm_in_half("mixed_bfloat16"), "told"),
    Case("local norm in float16", norm_in_half("mixed_float16"), "told"),
    Case(
        "minus the batch mean, compiled by XLA",
        with_options(
            with_layers(lambda: L.Lambda(lambda x: x - tf.reduce_mean(x, 0))), jit_compile=True
        ),
        "told",
        "Lambda",
    ),
    Case("GroupNormalization", with_layers(lambda: L.GroupNormalization(3)), "same"),
    Case(
        "SpectralNormalization",
        with_layers(lambda: L.SpectralNormalization(L.Dense(5))),
        "same",
    ),
    Case("add_loss of weights alone", with_layers(PenalizesItsWeights), "same", sizes=(8, 7, 5)),
    Case("add_loss of tf.nn.l2_loss", adds(tf.nn.l2_loss), "same", sizes=(8, 7, 5)),
    Case(
        "add_loss of a sum over a written number of rows",
        adds(lambda x: tf.reduce_sum(x**2) / 8.0),
        "same",
        sizes=(8, 7, 5),
    ),
    Case(
        "add_loss of a sum and a mean",
        adds(lambda x: tf.reduce_sum(x**2) + tf.reduce_mean(x**2)),
        "told",
        "added loss",
    ),
    Case("add_loss over the positives", adds(each_positive), "told", "added loss"),
    Case("add_loss of a maximum", adds(tf.reduce_max), "told", "added loss"),
)
