"""More programs that users write: generative, contrastive, reinforced, with memories and queues."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from programs import CLASSES, FEATURES, IDS, ROWS, Case, L, Program, X, Y, mse, sequential, with_layers, with_loss

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


class SamplesLatent(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, x: Any) -> Any:
        mean, log_variance = keras.ops.split(x, 2, axis=-1)
        kl = -0.5 * (1 + log_variance - mean**2 - keras.ops.exp(log_variance))
        self.add_loss(0.1 * keras.ops.mean(keras.ops.sum(kl, axis=-1)))
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seed_generator)
        return mean + keras.ops.exp(0.5 * log_variance) * noise


class Quantizes(L.Layer):
    """VQ-VAE: straight-through, the codebook a moving average of what chose each code."""

    def __init__(self) -> None:
        super().__init__()
        start = lambda shape, dtype=None: tf.reshape(tf.linspace(-1.0, 1.0, 20), (4, 5))  # noqa: E731
        self.codes = self.add_weight(shape=(4, 5), initializer=start, trainable=False)

    def call(self, x: Any) -> Any:
        apart = tf.reduce_sum((x[:, None] - self.codes[None]) ** 2, -1)
        chosen = tf.one_hot(tf.argmin(apart, -1), 4)
        quantized = chosen @ self.codes
        mean = tf.math.divide_no_nan(tf.transpose(chosen) @ x, tf.reduce_sum(chosen, 0)[:, None])
        used = tf.reduce_sum(chosen, 0)[:, None] > 0
        moved = 0.8 * self.codes + 0.2 * tf.where(used, mean, self.codes)
        self.codes.assign(tf.stop_gradient(moved))
        self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2))
        return x + tf.stop_gradient(quantized - x)


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


def over_own_mean(model: Any, x: Any, y: Any) -> Any:
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
    return advantage * tf.nn.sparse_softmax_cross_entropy_with_logits(chosen, model(x, training=True))


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


class ZeroGate(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gate = self.add_weight(shape=(), initializer="zeros")

    def call(self, x: Any) -> Any:
        return x + self.gate * (x - tf.reduce_mean(x, 0))


class ClipsItsGradient(L.Layer):
    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def identity(x: Any) -> Any:
            return tf.identity(x), lambda g: g / (tf.norm(g) + 1e-6) * 0.1

        return identity(x)


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


class Queue(L.Layer):
    """MoCo: keeps the last keys and compares with them."""

    def __init__(self, gather: bool = False) -> None:
        super().__init__()
        self.keys = self.add_weight(shape=(10, FEATURES), initializer="ones", trainable=False)
        self.gather = gather

    def call(self, x: Any) -> Any:
        old = self.keys.value
        new = tmg.gather_rows(x) if self.gather else x
        self.keys.assign(tf.concat([tf.stop_gradient(new), self.keys], 0)[:10])
        return tf.concat([x, x @ tf.transpose(old)], 1)


class RunningRewards(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.m = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.n = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        rows = tf.cast(tf.shape(x)[0], "float32")
        self.m.assign((self.m * self.n + tf.reduce_sum(x[:, 0])) / (self.n + rows))
        self.n.assign_add(rows)
        return x - self.m


class CountsSteps(L.Layer):
    def __init__(self, coupled: bool = False) -> None:
        super().__init__()
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.coupled = coupled

    def call(self, x: Any) -> Any:
        self.steps.assign_add(1.0)
        other = tf.reduce_mean(x, 0) if self.coupled else 0.1
        return x + other * tf.cast(self.steps > 1.5, x.dtype)


class PythonCounter(L.Layer):
    calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x * (1.0 + 0.5 * (self.calls % 2))


class VariableCounter(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.steps = tf.Variable(0.0, trainable=False)

    def call(self, x: Any) -> Any:
        self.steps.assign_add(1.0)
        return x * (1.0 + 0.1 * self.steps)


class CondOnMean(L.Layer):
    def call(self, x: Any) -> Any:
        return tf.cond(tf.reduce_mean(x[:, 0]) > 0.0, lambda: x, lambda: -0.5 * x)


class WhileLoop(L.Layer):
    def call(self, x: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h + x)), [0, x])[1]


class MapRows(L.Layer):
    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        self.dropout = L.Dropout(0.5) if noise else None

    def call(self, x: Any, training: bool = False) -> Any:
        if self.dropout is None:
            return tf.map_fn(lambda row: row / (1.0 + tf.norm(row)), x)
        return tf.map_fn(lambda row: self.dropout(row[None], training=training)[0], x)


class Numpy(L.Layer):
    def call(self, x: Any) -> Any:
        return x + tf.reshape(
            tf.numpy_function(lambda x: x - x.mean(0), [tf.stop_gradient(x)], tf.float32), tf.shape(x)
        )


class WeightNoise(L.Layer):
    """Noise on weights, whose shape is by chance that of a shard's rows."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.seed_generator = keras.random.SeedGenerator(9)

    def call(self, x: Any) -> Any:
        noise = keras.random.normal(self.shape, seed=self.seed_generator)
        return x + 0.3 * tf.reduce_sum(noise * tf.cast(tf.range(self.shape[0]), "float32")[:, None], 0)[0]


class DropTokens(L.Layer):
    """Dropout on the tokens that are not padding, all rows' in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.dropout = L.Embedding(9, 4), L.Dropout(0.5)

    def call(self, ids: Any, training: bool = False) -> Any:
        flat = tf.RaggedTensor.from_tensor(ids, padding=0)
        tokens = flat.with_flat_values(self.dropout(self.table(flat.flat_values), training=training))
        return tf.reduce_sum(tokens, 1)


class StochasticDepth(L.Layer):
    def __init__(self, per_row: bool) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(10)
        self.per_row = per_row

    def call(self, x: Any) -> Any:
        shape = (tf.shape(x)[0], 1) if self.per_row else (1, 1)
        keep = keras.random.uniform(shape, seed=self.seed_generator) < 0.5
        return x + tf.cast(keep, x.dtype) * tf.tanh(x)


class MixUp(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(10)

    def call(self, x: Any) -> Any:
        share = keras.random.beta((), 0.4, 0.4, seed=self.seed_generator)
        return share * x + (1 - share) * tf.reverse(x, [0])


def unlabelled(model: Any, x: Any, y: Any) -> Any:
    predictions = model(x, training=True)
    labelled = y[:, 0] > 0.3
    return tf.reduce_mean((tf.boolean_mask(y, labelled) - tf.boolean_mask(predictions, labelled)) ** 2, 1)


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


def global_seed() -> Program:
    model = sequential(L.Dense(5, "tanh"))
    return summed(lambda m, x, y: tf.reduce_mean((m(x + keras.random.normal(tf.shape(x), seed=3)) - y) ** 2, 1), lambda: model)()


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


def half(policy: str, *layers: Any) -> Any:
    def build() -> Program:
        model = keras.Sequential(
            [keras.Input((FEATURES,)), *[one(policy) for one in layers], L.Dense(CLASSES, dtype=policy), L.Activation("linear", dtype="float32")]
        )
        return Program(model, mse, {"loss": "mse"})

    return build


MORE_CASES = (
    Case("VAE", with_layers(lambda: L.Dense(8), SamplesLatent), "same"),
    Case("VQ-VAE with EMA", with_layers(lambda: L.Dense(5), Quantizes), "told"),
    Case("semi-hard triplets", with_loss(semi_hard), "told"),
    Case("SupCon", with_loss(sup_con), "told"),
    Case("label smoothing by batch", with_loss(softened_by_the_batch), "told"),
    Case("over the largest", with_loss(over_the_largest), "told"),
    Case("focal over positives", with_loss(over_positives), "told"),
    Case("A loss over its own mean", summed(over_own_mean), "told"),
    Case("A PPO", summed(ppo), "told"),
    Case("REINFORCE with batch baseline", summed(reinforce), "told"),
    Case("A class balanced, zero head", summed(balanced_zero_head, zero_head), "told"),
    Case("A zero gate", with_layers(ZeroGate), "told"),
    Case("A clips its gradient", with_layers(lambda: L.Dense(5), ClipsItsGradient), "told"),
    Case("WGAN-GP", summed(wgan_gp, GradientPenalty), "same"),
    Case("WGAN-GP micro", summed(wgan_gp, GradientPenalty, micro_batches=2), "same"),
    Case("mean teacher", mean_teacher(1), "same"),
    Case("mean teacher micro", mean_teacher(2), "told"),
    Case("queue", with_layers(Queue), "told"),
    Case("queue gathered", with_layers(lambda: Queue(True)), "same"),
    Case("running rewards", with_layers(RunningRewards), "told"),
    Case("counts steps", with_layers(CountsSteps), "same"),
    Case("A curriculum", with_layers(lambda: CountsSteps(True)), "told"),
    Case("A python counter", with_layers(PythonCounter), "told"),
    Case("variable counter", with_layers(VariableCounter), "told"),
    Case("cond on mean", with_layers(CondOnMean), "told"),
    Case("while loop", with_layers(WhileLoop), "same"),
    Case("map_fn", with_layers(MapRows), "same"),
    Case("map_fn dropout", with_layers(lambda: MapRows(True)), "told"),
    Case("numpy", with_layers(Numpy), "told"),
    Case("weight noise 4", with_layers(lambda: WeightNoise((4, 3))), "same"),
    Case("weight noise 3", with_layers(lambda: WeightNoise((3, 3))), "same"),
    Case("weight noise 7", with_layers(lambda: WeightNoise((7, 3))), "same"),
    Case("weight noise 1, two rows", with_layers(lambda: WeightNoise((1, 3))), "same", sizes=(7, 2, 2, 1)),
    Case("drop tokens", with_layers(DropTokens, inputs=(5,), dtype="int64"), "told", x=IDS),
    Case("depth row", with_layers(lambda: StochasticDepth(True)), "same", sizes=(7, 2, 1, 7)),
    Case("depth batch", with_layers(lambda: StochasticDepth(False)), "same", sizes=(7, 2, 1, 7)),
    Case("mixup", with_layers(MixUp), "told"),
    Case("unlabelled", summed(unlabelled), "same"),
    Case("centre loss", centre_loss, "told"),
    Case("two outputs", two_outputs, "same", y={"a": LABELS, "b": X[:, 1]}),
    Case("masked lstm", masked_lstm, "same", x=IDS),
    Case("attention", masked_attention, "same", x=IDS),
    Case("global seed", global_seed, "same"),
    Case("Dice", keras_loss(keras.losses.Dice), "told"),
    Case("Tversky", keras_loss(keras.losses.Tversky), "told"),
    Case("bf16 BN", half("mixed_bfloat16", lambda p: L.Dense(5, dtype=p), lambda p: L.BatchNormalization(dtype=p)), "told"),
    Case("f16 BN", half("mixed_float16", lambda p: L.Dense(5, dtype=p), lambda p: L.BatchNormalization(dtype=p)), "told"),
    Case("bf16 mean", half("mixed_bfloat16", lambda p: L.Dense(5, dtype=p), lambda p: L.Lambda(lambda x: x - 0.5 * tf.reduce_mean(x, 0), dtype=p)), "told"),
    Case("f16 mean", half("mixed_float16", lambda p: L.Dense(5, dtype=p), lambda p: L.Lambda(lambda x: x - 0.5 * tf.reduce_mean(x, 0), dtype=p)), "told"),
    Case("weights-only add_loss", with_layers(lambda: L.GroupNormalization(3)), "same"),
    Case("spectral", with_layers(lambda: L.SpectralNormalization(L.Dense(5))), "same"),
)
