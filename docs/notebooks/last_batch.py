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
# # What the last batch does
#
# Ten rows in batches of four: two batches of four rows, and one of two. This notebook trains on
# them twice, on one device and on three, and asks each time for the weights.
#
# There may be no three devices here, so the CPU is cut in three, before the first tensor.

# %%
import keras
import numpy as np

import tfmultigpu as tmg

devices = tmg.split_device("CPU:0", parts=3)
print(devices)

# %% [markdown]
# The data: rows of three features and a target that a linear model can find.

# %%
features = np.random.default_rng(1).normal(size=(10, 3)).astype("float32")
targets = features @ np.array([[1.0], [-2.0], [3.0]], "float32")

# %% [markdown]
# One function for both. Nothing in it depends on how many devices there are.


# %%
def train(strategy):
    """Ten epochs of gradient descent; returns the model and the last logs."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    data = tmg.distribute_dataset((features, targets), strategy, batch_size=4)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    for _ in range(10):
        for batch in data:
            logs = step(batch)
    return model, logs


one, one_logs = train(tmg.create_strategy(prefer="one_device", devices=devices[:1]))
three, three_logs = train(tmg.create_strategy(devices=devices))

# %% [markdown]
# Four rows over three replicas are shards of two, one and one. A mean over the means of these
# shards would count the lonely rows twice. The last batch has two rows, for three replicas: every
# replica gets both, and each row counts one third on each of them.

# %%
print("rows in the last batch:", float(three_logs["weight"]))
print("loss:", float(one_logs["loss"]), float(three_logs["loss"]))
for a, b in zip(one.get_weights(), three.get_weights(), strict=True):
    print("largest difference:", np.abs(a - b).max())
    np.testing.assert_allclose(a, b, atol=1e-6)
