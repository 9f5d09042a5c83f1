"""Ray Train starts the workers, and starts them again when one is lost.

Ray sets ``TF_CONFIG`` in each worker, which ``create_strategy`` reads. The usual answer builds the
model with ``tf.keras`` and calls ``fit``. But Ray sets ``TF_USE_LEGACY_KERAS=1``, so that this is
another library than ``keras``, and the ``fit`` of Keras 3 fails on several workers.

    pip install 'tfmultigpu[ray]'
    python examples/schedulers/ray_train.py

Here one of the two workers kills itself in the first attempt; the second attempt goes on from the
checkpoint, and ends with the weights of one device that nobody disturbed.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import numpy as np
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config):
    """What every worker does; the first thing after the imports is the strategy."""
    import keras

    import tfmultigpu as tmg

    strategy = tmg.create_strategy()
    folder = Path(config["folder"])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.Input((8,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(50, 8)).astype("float32")
    data = tmg.distribute_dataset((x, x[:, :1]), strategy, batch_size=8)
    checkpoints = tmg.Checkpoints(folder / "checkpoints", model, model.optimizer, data)
    restored = checkpoints.restore()
    cluster = tmg.workers.cluster_from_environment()
    index = 0 if cluster is None else cluster.index
    (folder / f"worker-{index}-restored-{restored}").touch()

    def die(batch, logs):
        if config["dies"] and restored is None and index == 1 and batch == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [
        checkpoints.callback(every_steps=4),
        keras.callbacks.LambdaCallback(on_train_batch_end=die),
    ]
    tmg.fit(model, checkpoints.data, epochs=2, callbacks=callbacks, verbose=0)
    np.savez(folder / f"weights-{index}.npz", *model.get_weights())


def read_weights(folder, index):
    with np.load(folder / f"weights-{index}.npz") as stored:
        return np.concatenate([stored[name].ravel() for name in stored.files])


def main():
    with tempfile.TemporaryDirectory() as directory:
        ours, alone = Path(directory, "ours"), Path(directory, "alone")
        ours.mkdir()
        alone.mkdir()
        trainer = TensorflowTrainer(
            train,
            train_loop_config={"folder": str(ours), "dies": True},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                storage_path=str(ours), failure_config=FailureConfig(max_failures=3)
            ),
        )
        trainer.fit()
        train({"folder": str(alone), "dies": False})
        restored = sorted(path.name for path in ours.glob("worker-1-restored-*"))
        workers = [read_weights(ours, index) for index in range(2)]
        difference = np.abs(workers[0] - read_weights(alone, 0)).max()
    assert np.array_equal(*workers)
    assert difference < 1e-3
    print("restored:", *(name.rpartition("-")[2] for name in restored))
    print(f"2 workers, one killed, largest weight difference to one device: {difference:.1e}")


if __name__ == "__main__":
    main()
