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
# # My loop, two optimizers
#
# A generator learns to draw points on a ring, a critic learns to tell them from true ones. Each has
# its own loss and its own optimizer, and the loop is written here. It trains on one device and on
# three, with the same result.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

devices = tmg.split_device("CPU:0", parts=3)
angles = np.random.default_rng(1).uniform(0, 2 * np.pi, 1000)
points = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")

# %% [markdown]
# ## Two losses
#
# A `forward` returns a sum and a weight, here by `tmg.loss_sum`. The step adds both over all
# replicas and divides once. Noise comes from a `SeedGenerator` that is an attribute of the model:
# each replica draws its rows of the noise of one device.


# %%
def make_models():
    """Returns a generator and a critic; called in the scope of the strategy."""
    generator = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(64, "tanh"),
            keras.layers.Dense(2),
        ],
        name="generator",
    )
    generator.seeds = keras.random.SeedGenerator(2)
    critic = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(64, "tanh"),
            keras.layers.Dense(1),
        ],
        name="critic",
    )
    return generator, critic


loss = keras.losses.BinaryCrossentropy(from_logits=True)


def make_losses(generator, critic):
    """Returns the loss of the critic and the loss of the generator."""

    def forged(batch, training):
        rows = tf.shape(batch)[0]
        noise = keras.random.normal((rows, 2), seed=generator.seeds)
        return generator(noise, training=training)

    def judge(critic, batch, training):
        true, false = critic(batch), critic(forged(batch, training))
        one = tmg.loss_sum(loss, tf.ones_like(true), true)
        other = tmg.loss_sum(loss, tf.zeros_like(false), false)
        return tmg.LossSum(one.sum + other.sum, one.weight)

    def forge(generator, batch, training):
        false = critic(forged(batch, training))
        return tmg.loss_sum(loss, tf.ones_like(false), false)

    return judge, forge


# %% [markdown]
# ## The loop
#
# `chain_steps` trains the critic and then the generator on each batch. The loop halves a learning
# rate in the middle. The last batch of an epoch has 40 points.


# %%
def train(replicas, epochs=120):
    """Returns the losses of each epoch and the generator."""
    prefer = "mirrored" if replicas > 1 else "one_device"
    strategy = tmg.create_strategy(prefer=prefer, devices=devices[:replicas])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        generator, critic = make_models()
        slow = keras.optimizers.Adam(2e-3, beta_1=0.5)
        fast = keras.optimizers.Adam(8e-3, beta_1=0.5)
    judge, forge = make_losses(generator, critic)
    step = tmg.chain_steps(
        tmg.make_train_step(critic, fast, None, strategy, forward=judge),
        tmg.make_train_step(generator, slow, None, strategy, forward=forge),
    )
    data = tmg.distribute_dataset(points, strategy, batch_size=64)
    history = []
    for epoch in range(epochs):
        if epoch == epochs // 2:
            slow.learning_rate = 1e-3
        logs = step.run(iter(data), 1000)  # all batches, in few calls
        losses = logs["critic_loss"], logs["generator_loss"]
        history.append([float(value) for value in losses])
    return np.array(history), generator


one, generator = train(1)
three, _ = train(3)

# %%
plt.figure(figsize=(6, 3.5))
names = [("critic", "#c03a3a"), ("generator", "#1f6fd0")]
for i, (name, colour) in enumerate(names):
    plt.plot(one[:, i], color="#c0c4c8", linewidth=7)
    plt.plot(three[:, i], color=colour, label=f"{name}, 3 replicas")
plt.xlabel("epoch; grey: one device")
plt.ylabel("loss")
plt.legend()
plt.tight_layout()
plt.show()
print(f"largest difference of a loss: {np.abs(one - three).max():.0e}")
assert np.abs(one - three).max() < 0.01

# %% [markdown]
# Two players that answer each other amplify rounding: 1e-7 in the first step becomes more in 1,920.
#
# ## What the generator draws

# %%
noise = keras.random.normal((300, 2), seed=5)
drawn = keras.ops.convert_to_numpy(generator(noise))
plt.figure(figsize=(3.6, 3.6))
plt.scatter(*points[:300].T, s=6, color="#c0c4c8", label="true")
plt.scatter(*drawn.T, s=6, color="#1f6fd0", label="drawn")
plt.axis("equal")
plt.legend()
plt.tight_layout()
plt.show()

# %% [markdown]
# ## Next
#
# `tmg.fit(generator, points, step=step, batch_size=64)` runs the same step with the callbacks, the
# progress bar and the `History` of Keras. `tmg.Checkpoints("run", train_step=step)` saves it.
