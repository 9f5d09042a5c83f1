"""Right and wrong calls for type checkers; never run. A line with `# error` must be refused."""

from __future__ import annotations

import keras
import tensorflow as tf

import tfmultigpu as tmg

strategy = tmg.create_strategy(prefer="mirrored", devices=2, communication="ring")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(1e-3)
dataset = tf.data.Dataset.range(8).batch(4)

# Right.
with strategy.scope():
    data = tmg.distribute_dataset(dataset, strategy, shares=(3, 1))
strategy.reduce("SUM", strategy.gather(1.0, axis=0), axis=None)
step = tmg.make_train_step(model, optimizer, None, strategy, loss_scale=8.0, shard_update=False)
tmg.make_eval_step(model, "mse", strategy, verify="gradients")
tmg.fit(model, dataset, step=step, verbose=2, steps_per_call=4).history["loss"]
tmg.evaluate(model, dataset, verbose=0)
tmg.Checkpoints("runs/1", model, optimizer, data)
tmg.explain(model, optimizer, dataset, tf.distribute.get_strategy())
print(tmg.errors.DataError(tmg.__version__), tmg.testing.virtual_devices(2))

# Wrong: a choice that does not exist.
tmg.create_strategy(prefer="mirorred")  # error
tmg.create_strategy(communication="rings")  # error
tmg.make_train_step(model, optimizer, "mse", shard_update="yes")  # error
tmg.make_train_step(model, optimizer, "mse", loss_scale="dynamc")  # error
tmg.make_train_step(model, optimizer, "mse", verify="frist")  # error
tmg.fit(model, dataset, verbose=3)  # error
tmg.fit(model, dataset, steps_per_call="all")  # error

# Wrong: another object than belongs there.
tmg.make_train_step(strategy, optimizer, "mse")  # error
tmg.make_train_step(model, "adam", "mse")  # error
tmg.distribute_dataset(dataset, 64)  # error
tmg.Checkpoints("runs/1", model, strategy)  # error
tmg.split_device(4, "CPU:0")  # error

# Wrong: a name that does not exist.
tmg.fit(model, dataset, epoch=2)  # error
tmg.create_strategy(device=2)  # error
tmg.Fit(model, dataset)  # error
