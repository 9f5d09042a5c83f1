# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Several replicas, one curve
#
# This notebook trains one model on 1, 2 and 4 devices, by `tmg.fit` and by Keras' `fit`, and draws
# what each reports. It runs on any laptop in about a minute. It needs no GPU: the CPU is divided
# into four devices, before the first tensor.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

tf.get_logger().setLevel("ERROR")  # no line for each reduction of plain Keras
devices = tmg.split_device("CPU:0", parts=4)
print(devices)

# %% [markdown]
# ## The data
#
# Texts of unequal length, padded with zeros. Most are short, a few are long, as in most data sets.
# Each token has a tag that the model has to find.

# %%
EXAMPLES, LONGEST, BATCH_SIZE = 260, 48, 32
random = np.random.default_rng(1)
lengths = np.clip(np.exp(random.normal(1.8, 0.9, EXAMPLES)), 2, LONGEST)
lengths = lengths.astype(int)
numbers = random.normal(size=(EXAMPLES, LONGEST, 5))
place = np.arange(LONGEST) // 4
places = np.broadcast_to(np.eye(12)[place], (EXAMPLES, LONGEST, 12))
x = np.concatenate([numbers, places], axis=-1).astype("float32")
y = (np.argmax(numbers, axis=-1) + place) % 5
x[np.arange(LONGEST) >= lengths[:, None]] = 0.0
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)

# %% [markdown]
# Four replicas get eight texts each of the first batch. The numbers of their tokens differ:

# %%
tokens = lengths[:BATCH_SIZE].reshape(4, 8).sum(axis=1)
plt.figure(figsize=(6, 2.2))
plt.barh([f"replica {i}" for i in range(4)], tokens, color="#1f6fd0")
plt.gca().invert_yaxis()
plt.xlabel("tokens of the first batch")
plt.tight_layout()
plt.show()

# %% [markdown]
# A mean of the four means gives a token on a short shard more weight than a token on a long one.
# One device knows no shards: each token of the batch weighs the same.
#
# ## The training
#
# One function for all. Only the number of devices and the `fit` differ.


# %%
def train(fit, replicas):
    """Returns the loss of each epoch, as `fit` reports it."""
    prefer = "mirrored" if replicas > 1 else "one_device"
    strategy = tmg.create_strategy(prefer=prefer, devices=devices[:replicas])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [
            keras.layers.Masking(),
            keras.layers.Dense(32, "tanh"),
            keras.layers.Dense(5),
        ]
        model = keras.Sequential([keras.Input((LONGEST, 17)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
    return np.array(fit(model, data, epochs=10, verbose=0).history["loss"])


one = train(keras.Model.fit, 1)
curves = {}
for replicas in (1, 2, 4):
    curves[f"tmg.fit on {replicas}"] = train(tmg.fit, replicas)
for replicas in (2, 4):
    curves[f"Keras fit on {replicas}"] = train(keras.Model.fit, replicas)

# %% [markdown]
# ## The curves
#
# The wide grey line is Keras' `fit` on one device. All lines of `tmg.fit` lie on it.

# %%
epochs = np.arange(1, 11)
COLOURS = ["#74b3ff", "#1f6fd0", "#0b3d82", "#d98200", "#c03a3a"]
plt.figure(figsize=(6, 3.5))
plt.plot(epochs, one, color="#c0c4c8", linewidth=7, label="Keras fit on 1")
for (name, curve), colour in zip(curves.items(), COLOURS, strict=True):
    plt.plot(epochs, curve, color=colour, label=name)
plt.xlabel("epoch")
plt.ylabel("loss that fit reports")
plt.legend()
plt.tight_layout()
plt.show()

# %% [markdown]
# The distance to one device shows how far apart they are:

# %%
plt.figure(figsize=(6, 3.5))
for (name, curve), colour in zip(curves.items(), COLOURS, strict=True):
    distance = np.maximum(np.abs(curve - one), 1e-9)
    plt.semilogy(epochs, distance, color=colour, label=name)
plt.xlabel("epoch")
plt.ylabel("distance to one device")
plt.legend()
plt.tight_layout()
plt.show()

for name, curve in curves.items():
    print(f"{name}: at most {np.abs(curve - one).max():.0e} from one device")

# %% [markdown]
# About 1e-7 is the rounding of float32: replicas add the same numbers in another order. Keras'
# `fit` under a strategy is another training.

# %%
for name, curve in curves.items():
    apart = np.abs(curve - one).max()
    assert (apart < 1e-5) == name.startswith("tmg"), name

# %% [markdown]
# ## Next
#
# - Run it on your GPUs: replace `devices[:replicas]` by `["GPU:0", "GPU:1"][:replicas]`.
# - Divide a batch unequally: the notebook on unequal GPUs.
