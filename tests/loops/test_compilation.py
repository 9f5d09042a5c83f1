"""What ``compile(jit_compile=)`` means for ``fit``: the decision alone, which needs no GPU."""

from __future__ import annotations

import functools
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.addons.loops.compiled import Compilation, choose_compilation

NUMBERS = tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None, 1], tf.float32)
WORDS = tf.TensorSpec([None, 4], tf.string), tf.TensorSpec([None, 1], tf.float32)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has TensorFlow list a GPU, of which nothing else is asked."""
    listed = tf.config.list_physical_devices

    def with_gpu(kind: str | None = None) -> list[Any]:
        gpus = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
        return gpus if kind == "GPU" else [*listed(kind), *([] if kind else gpus)]

    monkeypatch.setattr(tf.config, "list_physical_devices", with_gpu)


def chosen(
    jit_compile: Any = "auto", spec: Any = NUMBERS, strategy: Any = None, refuses: bool = False
) -> Compilation:
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        dense = keras.layers.Dense(1, name="dense")
        dense.supports_jit = not refuses
        model = keras.Sequential([keras.Input((4,)), dense])
        model.compile("sgd", "mse", jit_compile=jit_compile)
    return choose_compilation(model, strategy, spec)


def test_auto_is_off_without_a_gpu() -> None:
    found = chosen()
    assert (found.by_xla, found.reason) == (
        False,
        "compile(jit_compile=False), or 'auto' without a GPU",
    )
    assert chosen(True).by_xla


@pytest.mark.usefixtures("a_gpu")
def test_auto_is_what_keras_decides_on_a_gpu() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert chosen().by_xla
    assert chosen(False).reason == "compile(jit_compile=False)"
    on_strategy = chosen(strategy=strategy)
    assert not on_strategy.by_xla
    assert on_strategy.reason.endswith("'auto' on a strategy, where Keras never compiles")
    assert chosen(True, strategy=strategy).by_xla


@pytest.mark.usefixtures("a_gpu")
def test_what_xla_cannot_compile_is_not_compiled() -> None:
    assert chosen(spec=WORDS).reason == "XLA has no strings, and there are some in a batch"
    assert not chosen(spec=WORDS).by_xla
    assert chosen(refuses=True).reason == "XLA cannot compile the layer 'dense'"
    with pytest.warns(UserWarning, match="doesn't support"):
        assert not chosen(True, refuses=True).by_xla


def test_fit_follows_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    make = tmg.addons.loops.program.make_train_step

    @functools.wraps(make)
    def noting(*args: Any, **options: Any) -> Any:
        asked.append(options["jit_compile"])
        return make(*args, **options)

    monkeypatch.setattr(tmg.addons.loops.program, "make_train_step", noting)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    for jit_compile in (True, "auto"):
        model.compile("sgd", "mse", jit_compile=jit_compile)
        tmg.fit(model, tf.ones([4, 4]), tf.ones([4, 1]), batch_size=4, verbose=0)
    assert asked == [True, False]
