"""A language model fine-tuned by LoRA: small matrices beside frozen ones, texts of unequal length.

The usual answer divides by the tokens of each replica and takes the mean of these means. Replicas
with short texts then count as much as those with long ones; the same happens to micro-batches.
After ``enable_lora`` outside the scope ``fit`` stops, with a message about ``colocate_vars_with``.

``fit`` adds the losses of all tokens that are not padding, counts them, and divides once. It trains
what is not frozen: here 2 % of the weights.
"""

from __future__ import annotations

import keras
import numpy as np

import tfmultigpu as tmg

BATCH, EPOCHS, WORDS, LENGTH, WIDTH, RANK = 32, 3, 50, 16, 64, 2

rng = np.random.default_rng(0)
steps = rng.integers(1, 4, size=(150, 1))  # each text counts in steps of its own
texts = 1 + (rng.integers(0, WORDS, size=(150, 1)) + steps * np.arange(LENGTH + 1)) % (WORDS - 1)
texts *= np.arange(LENGTH + 1) < rng.integers(3, LENGTH + 2, size=(150, 1))  # 0 is padding


def pretrained():
    """Returns a causal transformer of random weights, in the place of one that was loaded."""
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(tokens)
    normal = layers.LayerNormalization()(x)
    names = ("query", "value", "key")
    parts = [layers.Dense(WIDTH, use_bias=False, name=name)(normal) for name in names]
    attended = layers.Attention(use_scale=True, dropout=0.1)(parts, use_causal_mask=True)
    x = layers.Add()([x, layers.Dense(WIDTH)(attended)])
    hidden = layers.Dense(2 * WIDTH, "gelu")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dense(WIDTH)(hidden)])
    return keras.Model(tokens, layers.Dense(WORDS)(layers.LayerNormalization()(x)))


def add_lora(model):
    for layer in model.layers:
        adapted = layer.name in ("query", "value")
        layer.trainable = adapted
        if adapted:
            layer.enable_lora(RANK)  # freezes the matrix and adds two small ones


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = pretrained()
        add_lora(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), loss)
    parts = model.trainable_weights, model.weights
    trained, existing = (sum(int(np.prod(one.shape)) for one in part) for part in parts)
    assert trained < 0.02 * existing
    options = {"batch_size": BATCH, "epochs": EPOCHS, "validation_split": 0.2, "verbose": 0}
    history = tmg.fit(model, texts[:, :-1], texts[:, 1:], micro_batches=2, **options)
    return model.get_weights(), history.history


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
    reference, expected = train(tmg.create_strategy(devices=devices[:1]))
    weights, logs = train(tmg.create_strategy(devices=devices))
    difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
    print("  " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in logs.items()))
    print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
    assert difference < 1e-3
    assert logs["loss"][-1] < logs["loss"][0]
    assert all(np.allclose(logs[name], expected[name], atol=1e-3) for name in expected)


if __name__ == "__main__":
    main()
