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
# # GPUs of unequal speed and memory
#
# A fast GPU with much memory, and a slow one with little. With equal parts the fast one waits, and
# the small one decides how large a batch can be. This notebook plans unequal parts, and shows that
# the result stays that of one device. Two virtual CPUs stand for the two GPUs.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np

import tfmultigpu as tmg

devices = tmg.split_device("CPU:0", parts=2)
BATCH_SIZE = 1000

# %% [markdown]
# ## Speed decides the shares
#
# Say the first GPU takes 4,000 examples a second and the second 1,000. On a real machine
# `tmg.measured_capacities(step, batch)` measures it. Two virtual CPUs would be equally fast.

# %%
speeds = (4000.0, 1000.0)
shares = tmg.plan_shares(BATCH_SIZE, speeds)
print(shares)

# %%
figure, axes = plt.subplots(2, 1, figsize=(6, 3.2), sharex=True)
for axis, title, parts in zip(
    axes, ("equal parts", "planned shares"), ((500, 500), shares), strict=True
):
    busy = [rows / speed for rows, speed in zip(parts, speeds, strict=True)]
    names = ["fast GPU", "slow GPU"]
    axis.barh(names, [max(busy)] * 2, color="#dddddd")
    bars = axis.barh(names, busy, color="#1f6fd0")
    labels = [f"{rows} examples" for rows in parts]
    axis.bar_label(bars, labels, label_type="center", color="white")
    axis.invert_yaxis()
    axis.set_title(f"{title}: {max(busy):.2f} s a step", loc="left")
axes[1].set_xlabel("seconds; blue: computes, grey: waits")
plt.tight_layout()
plt.show()

# %% [markdown]
# ## Memory decides the micro-batches
#
# The fast GPU holds 2,000 examples at once, the slow one only 60. It takes its share in parts,
# which it adds up by itself.

# %%
micro_batches = tmg.data.plan_micro_batches(shares, (2000, 60))
print(micro_batches)

# %% [markdown]
# ## The result is that of one device
#
# Dropout is in the model on purpose: each replica draws its rows of the draws of one device.

# %%
random = np.random.default_rng(1)
x = random.normal(size=(3500, 16)).astype("float32")
y = np.argmax(x[:, :4], axis=1)


def train(replicas, shares=None, micro_batches=1):
    """Returns the loss of each step and the weights after five epochs."""
    prefer = "mirrored" if replicas > 1 else "one_device"
    strategy = tmg.create_strategy(prefer=prefer, devices=devices[:replicas])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [
            keras.layers.Dense(32, "tanh"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(4),
        ]
        model = keras.Sequential([keras.Input((16,)), *layers])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(
        model,
        optimizer,
        loss,
        strategy,
        micro_batches=micro_batches,
    )
    data = tmg.distribute_dataset(
        (x, y),
        strategy,
        batch_size=BATCH_SIZE,
        shares=shares,
    )
    losses = [float(step(batch)["loss"]) for _ in range(5) for batch in data]
    return np.array(losses), model.get_weights()


one, one_weights = train(1)
both, both_weights = train(2, shares, micro_batches)

# %%
plt.figure(figsize=(6, 3.2))
plt.plot(one, color="#c0c4c8", linewidth=7, label="one device")
label = f"shares {shares}, in parts {micro_batches}"
plt.plot(both, color="#1f6fd0", label=label)
plt.xlabel("step; each fourth has 500 examples, the others 1,000")
plt.ylabel("loss")
plt.legend()
plt.tight_layout()
plt.show()

# %%
pairs = zip(one_weights, both_weights, strict=True)
gap = max(np.abs(a - b).max() for a, b in pairs)
print(f"largest difference of a weight: {gap:.0e}")
assert gap < 1e-5

# %% [markdown]
# ## On your GPUs
#
# Name them in `create_strategy(devices=["GPU:0", "GPU:1"])`, measure with `measured_capacities`,
# and read the free memory with `memory_capacities`. The guide on GPUs of different memory has each
# line.
