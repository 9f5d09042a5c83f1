# python ray_train.py, where a Ray cluster is: train_on_worker runs on each worker.
import os
import sys
import tempfile

from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")  # 60 by default.


def train_on_worker(config):
    import keras  # Here, in the worker; never tf.keras.
    import numpy as np

    import tfmultigpu as tmg

    class Report(keras.callbacks.Callback):
        """Reports each epoch to Ray once, however often the workers start again."""

        def __init__(self):
            super().__init__()
            self.rows = []  # tmg.Checkpoints saves and restores it.

        def on_epoch_end(self, epoch, logs=None):
            self.rows.append({"epoch": epoch, **logs})
            self.report()

        def on_train_end(self, logs=None):
            self.report()

        def report(self):
            reported = train.get_all_reported_checkpoints()
            last = max((r.metrics["epoch"] for r in reported), default=-1)
            for row in self.rows[last + 1 :]:
                with tempfile.TemporaryDirectory() as folder:
                    checkpoint = None
                    if tmg.workers.is_first():
                        self.model.save(f"{folder}/model.keras")
                        checkpoint = train.Checkpoint.from_directory(folder)
                    train.report(row, checkpoint=checkpoint)

    strategy = tmg.create_strategy()  # Reads what Ray has set.
    x = np.random.default_rng(0).normal(size=(250, 4)).astype("float32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2)
        model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    checkpoints = tmg.Checkpoints(config["checkpoints"], model, model.optimizer)
    checkpoints.restore()
    callbacks = [Report(), checkpoints.callback(every_steps=2)]
    options = {"batch_size": 64, "epochs": 4, "verbose": 0, "logical_replicas": 4}
    tmg.fit(model, x, x[:, :1], callbacks=callbacks, **options)
    return model


def trainer(folder, **scaling):
    """Returns a trainer whose folder is on a disk that all nodes see."""
    return TensorflowTrainer(
        train_on_worker,
        train_loop_config={"checkpoints": f"{folder}/checkpoints"},
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(
            name="ray",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=3),
        ),
    )


if __name__ == "__main__":
    print(trainer(sys.argv[1], num_workers=(1, 2), use_gpu=True).fit().metrics)
