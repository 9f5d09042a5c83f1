"""Settings of devices: each example in a process where TensorFlow has not started its devices."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from problems import network
from tensorflow.python.eager.context import pywrap_tfe  # As tests/devices/test_configure.py does.

import tfmultigpu as tmg
from lines.messages import EXAMPLES, Told, example, told
from tfmultigpu.devices import discovery
from tfmultigpu.devices.gpu_memory import NvmlGpu

GIB = 1024**3


def run_alone(name: str) -> None:
    """Runs an example of this file by its name, in this process."""
    (chosen,) = [one for one in EXAMPLES if one.run.__name__ == name]
    chosen.run(functools.partial(told, chosen.messages()))


def three_gpus(driver: bool = False) -> None:
    """Has TensorFlow see three GPUs, and the driver know their memory or not."""
    names = [b"/physical_device:CPU:0", *(b"/physical_device:GPU:%d" % i for i in range(3))]
    pywrap_tfe.TF_ListPhysicalDevices = lambda: names
    pywrap_tfe.TF_GetDeviceDetails = lambda index: {"device_name": "NVIDIA H200"} if index else {}
    gpus = [NvmlGpu(f"GPU-{i}", "NVIDIA H200", 100 * GIB, 80 * GIB) for i in range(3)]
    discovery.read_gpus = lambda: tuple(gpus if driver else ())
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)


@example("{} leaves out {}")
def growth_of_some_gpus(told: Told) -> None:
    three_gpus()
    with told():
        tmg.enable_memory_growth(["GPU:0", "GPU:1"])
    tmg.enable_memory_growth()


@example("leaves out {}. TensorFlow would fail at the first operation")
def growth_of_some_gpus_with_the_others_hidden(told: Told) -> None:
    three_gpus()
    with told():
        tmg.enable_memory_growth(["GPU:0", "GPU:1"])
    tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[:2], "GPU")
    tmg.enable_memory_growth(["GPU:0", "GPU:1"])


@example("TensorFlow limits the memory of GPUs only")
def memory_of_a_cpu(told: Told) -> None:
    with told():
        tmg.split_device("CPU:0", parts=2, memory=GIB)
    tmg.split_device("CPU:0", parts=2)


@example("the parts of a GPU need a memory limit")
def parts_of_a_gpu_of_unknown_memory(told: Told) -> None:
    three_gpus()
    with told():
        tmg.split_device("GPU:0", parts=2)
    tmg.split_device("GPU:0", parts=2, memory=4 * GIB)


@example("memory limits for {} parts")
def three_limits_for_two_parts(told: Told) -> None:
    three_gpus()
    with told():
        tmg.split_device("GPU:0", parts=2, memory=[GIB, GIB, GIB])
    tmg.split_device("GPU:0", parts=2, memory=GIB)
    tmg.split_device("GPU:0", parts=2, memory=[GIB, GIB])


@example("{} needs {} bytes, but {} has {}")
def more_memory_than_there_is(told: Told) -> None:
    three_gpus(driver=True)
    with told():
        tmg.limit_memory({"GPU:2": 101 * GIB})
    tmg.limit_memory({"GPU:2": 100 * GIB})


@example("split or limited, and memory growth of")
def a_split_beside_memory_growth(told: Told) -> None:
    three_gpus()
    tmg.split_device("CPU:0", parts=2)
    with told():
        tmg.enable_memory_growth()
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    tmg.enable_memory_growth()


@example("would undo the split of")
def a_limit_of_a_split_gpu(told: Told) -> None:
    three_gpus()
    tmg.split_device("GPU:0", parts=2, memory=GIB)
    with told():
        tmg.limit_memory({"GPU:0": 4 * GIB})
    tmg.split_device("GPU:0", parts=2, memory=2 * GIB)


@example("a memory limit is a whole number of bytes")
def a_limit_as_text(told: Told) -> None:
    three_gpus()
    with told():
        tmg.limit_memory({"GPU:0": "8GB"})
    tmg.limit_memory({"GPU:0": 8 * 1024**3})


@example("limit_memory needs to know which GPU has which limit")
def one_limit_for_all_gpus(told: Told) -> None:
    three_gpus()
    with told():
        tmg.limit_memory(8e9)  # type: ignore[arg-type]
    tmg.limit_memory({"GPU:0": 8 * 1024**3})


@example("came after TensorFlow had started its devices")
def a_split_after_the_start(told: Told) -> None:
    # In another process, as a program whose line was moved up: nothing else undoes a start.
    child = os.fork()
    if not child:
        tmg.split_device("CPU:0", parts=2)
        os._exit(len(tf.config.list_logical_devices()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    tf.constant(1.0)
    with told():
        tmg.split_device("CPU:0", parts=2)
    tf.constant(1.0)


@example("kind is 'GPU', 'CPU' or 'TPU', or None for all")
def an_unknown_kind(told: Told) -> None:
    with told():
        tmg.list_devices("gpus")
    tmg.list_devices("GPU")


@example("A device name is a string")
def a_device_as_a_number(told: Told) -> None:
    three_gpus()
    with told():
        tmg.plan_strategy(devices=[0])
    tmg.plan_strategy(devices=["GPU:0"])


@example("A device name has a kind and an index")
def a_device_without_an_index(told: Told) -> None:
    three_gpus()
    with told():
        tmg.plan_strategy(devices=["GPU"])
    tmg.plan_strategy(devices=["GPU:0"])
    tmg.plan_strategy(devices=["/device:GPU:0"])


@example("devices is an empty list")
def no_devices(told: Told) -> None:
    with told():
        tmg.create_strategy(devices=[])
    tmg.create_strategy()
    tmg.create_strategy(devices=["CPU:0"])


@example("is named more than once")
def a_device_twice(told: Told) -> None:
    with told():
        tmg.create_strategy(devices=["CPU:0", "CPU:0"])
    tmg.create_strategy(devices=["CPU:0"])


@example("Asked for {}. Existing")
def a_device_that_is_missing(told: Told) -> None:
    with told():
        tmg.plan_strategy(devices=["CPU:0", "CPU:1"])
    tmg.plan_strategy(devices=["CPU:0"])
    tmg.split_device("CPU:0", parts=2)
    tmg.plan_strategy(devices=["CPU:0", "CPU:1"])


@example("{}, but this cannot be set for {} here")
def a_setting_of_another_device(told: Told) -> None:
    with told(tmg.DeviceNotFoundError, "GPU:5"):
        tmg.limit_memory({"GPU:5": GIB})
    with told(tmg.DeviceNotFoundError, "CPU:0"):
        tmg.enable_memory_growth(["CPU:0"])
    tmg.enable_memory_growth()
    with told(tmg.DeviceNotFoundError, "GPU:5"):
        tmg.split_device("GPU:5", parts=2)
    tmg.split_device("CPU:0", parts=2)


@example("{}, but this machine does not have {}")
def a_name_that_is_missing(told: Told) -> None:
    with told():
        tmg.plan_strategy(devices=["CPU:7"])
    tmg.split_device("CPU:0", parts=8)
    tmg.plan_strategy(devices=["CPU:7"])


@example("{} devices, but only {} exist")
def a_count_that_is_missing(told: Told) -> None:
    with told():
        tmg.create_strategy(devices=2)
    tmg.split_device("CPU:0", parts=2)
    tmg.create_strategy(devices=2)


# Strategies: what a process can do once -----------------------------------------------------------


@example("Running {} instead. Pass fallback=False")
def mirrored_on_one_cpu(told: Told) -> None:
    with told():
        tmg.create_strategy(prefer="mirrored", communication="nccl", devices=["CPU:0"])
    error: Any = None
    try:
        tmg.create_strategy(
            prefer="mirrored", communication="nccl", devices=["CPU:0"], fallback=False
        )
    except tmg.errors.StrategyUnavailableError as raised:
        error = raised
    assert error is not None


@example("Change that argument, or pass fallback=True")
def nccl_without_fallback(told: Told) -> None:
    tmg.split_device("CPU:0", parts=2)
    options: dict[str, Any] = {"devices": 2, "communication": "nccl"}
    with told():
        tmg.create_strategy(**options, fallback=False)
    tmg.create_strategy(devices=2, fallback=False)


@example("startup_timeout must be a number of seconds above 0")
def a_negative_timeout(told: Told) -> None:
    with told():
        tmg.create_strategy(startup_timeout=-1.0)
    tmg.create_strategy(startup_timeout=60.0)


@example("must be of one kind, GPUs or CPUs")
def devices_of_two_kinds(told: Told) -> None:
    three_gpus()
    with told():
        tmg.plan_strategy(devices=["CPU:0", "GPU:0"])
    tmg.plan_strategy(devices=["GPU:0", "GPU:1"])


@example("prefer='one_device' runs on one device")
def one_device_of_two(told: Told) -> None:
    tmg.split_device("CPU:0", parts=2)
    with told():
        tmg.create_strategy(prefer="one_device", devices=["CPU:0", "CPU:1"])
    tmg.create_strategy(prefer="one_device", devices=["CPU:0"])
    tmg.create_strategy(prefer="mirrored", devices=["CPU:0", "CPU:1"])


@example("must be one of {}. Received")
def an_unknown_choice(told: Told) -> None:
    three_gpus()
    for many in ("gpu", "gpus"):
        with told(ValueError, 'Write "auto", and name devices'):
            tmg.plan_strategy(prefer=many)  # type: ignore[arg-type]
    tmg.plan_strategy("auto", devices=["GPU:0", "GPU:1"])
    for first in (2, ["GPU:0", "GPU:1"], "GPU:0"):
        with told(ValueError, re.escape(f"Write create_strategy(devices={first!r}).")):
            tmg.plan_strategy(first)  # type: ignore[arg-type]
        tmg.plan_strategy(devices=first)


@example("would run on one device: the model was created outside the scope")
def a_fit_of_a_model_outside_the_scope(told: Told) -> None:
    tmg.split_device("CPU:0", parts=2)
    strategy = tmg.create_strategy(devices=2)
    rows = np.ones((4, 2), "float32")

    def build() -> Any:
        model = network(2, keras.layers.Dense(1))
        model.compile("sgd", "mse")
        return model

    with told():
        tmg.fit(build(), rows, rows[:, :1], verbose=0)
    for scope in (strategy, tmg.create_strategy(prefer="one_device")):
        with scope.scope():
            model = build()
        tmg.fit(model, rows, rows[:, :1], verbose=0)


@example("would run on one device: it got no strategy")
def a_step_without_the_strategy(told: Told) -> None:
    tmg.split_device("CPU:0", parts=2)
    strategy = tmg.create_strategy(devices=2)
    rows = np.ones((4, 2), "float32")

    def build() -> Any:
        return network(2, keras.layers.Dense(1))

    with told():
        tmg.distribute_dataset(rows, batch_size=2)
    with told():
        tmg.make_train_step(build(), keras.optimizers.SGD(), "mse")
    with strategy.scope():
        model, optimizer = build(), keras.optimizers.SGD()
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    data = tmg.distribute_dataset((rows, rows[:, :1]), strategy, batch_size=2)
    for batch in data:
        step(batch)
    alone = tmg.create_strategy(prefer="one_device")
    with alone.scope():
        model, optimizer = build(), keras.optimizers.SGD()
    tmg.make_train_step(model, optimizer, "mse", alone)((rows, rows[:, :1]))
