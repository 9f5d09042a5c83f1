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
    other = keras.Model(keras.Input((2,)), keras.Input((2,)))
data = tmg.distribute_dataset(dataset, strategy, shares=(3, 1), sharding="rows")
step = tmg.make_train_step(model, optimizer, "mse", strategy, micro_batches=2, clip_norm=1.0)
step = tmg.make_train_step(model, optimizer, "mse", loss_scale="dynamic", verify=True)
step = tmg.make_train_step([model, other], optimizer, None, loss_scale=8.0, shard_update=False)
tmg.make_eval_step(model, "mse", strategy, verify="gradients")
tmg.make_predict_step(model, strategy)
history = tmg.fit(model, dataset, epochs=2, verbose=2, steps_per_call=4, shard_update="auto")
losses = history.history["loss"]
tmg.fit(model, dataset, step=step, loss_scale=None, verify="first", verbose="auto")
tmg.evaluate(model, dataset, verbose=0)
tmg.predict(model, dataset, verbose="auto")
tmg.Checkpoints("runs/1", model, optimizer, data)
tmg.explain(model, optimizer, dataset, strategy)
tmg.memory_capacities(strategy, model=model, optimizer=optimizer)
tf.distribute.get_strategy().run(lambda: None)

# Wrong: a choice that does not exist.
tmg.create_strategy(prefer="mirorred")  # error
tmg.create_strategy(communication="rings")  # error
tmg.plan_strategy("gpu")  # error
tmg.make_train_step(model, optimizer, "mse", shard_update="yes")  # error
tmg.make_train_step(model, optimizer, "mse", loss_scale="dynamc")  # error
tmg.make_train_step(model, optimizer, "mse", verify="frist")  # error
tmg.make_train_step(model, optimizer, "mse", reduce_dtype="float16")  # error
tmg.fit(model, dataset, shard_update="yes")  # error
tmg.fit(model, dataset, verbose=3)  # error
tmg.fit(model, dataset, steps_per_call="all")  # error
tmg.evaluate(model, dataset, verify="last")  # error
tmg.predict(model, dataset, verbose="yes")  # error
tmg.distribute_dataset(dataset, sharding="files")  # error

# Wrong: another object than belongs there.
tmg.make_train_step(model, strategy, "mse")  # error
tmg.make_train_step(strategy, optimizer, "mse")  # error
tmg.make_train_step(model, optimizer, "mse", 64)  # error
tmg.make_train_step(model, "adam", "mse")  # error
tmg.distribute_dataset(dataset, 64)  # error
tmg.make_eval_step(model, "mse", 64)  # error
tmg.make_predict_step(model, "mirrored")  # error
tmg.fit(strategy, dataset)  # error
tmg.evaluate(64, dataset)  # error
tmg.Checkpoints(64, model, optimizer)  # error
tmg.Checkpoints("runs/1", model, strategy)  # error
tmg.split_device(4, "CPU:0")  # error

# Wrong: an argument that does not exist.
tmg.fit(model, dataset, epoch=2)  # error
tmg.make_train_step(model, optimizer, "mse", micro_batch=2)  # error
tmg.distribute_dataset(dataset, strategy, batchsize=64)  # error
tmg.create_strategy(device=2)  # error
