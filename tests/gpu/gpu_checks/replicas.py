"""Replicas on parts of a GPU give what the whole GPU gives, and the GPU what the CPU gives.

Tolerances are absolute below one and relative above. In float32 with TF32 off only the order of
additions differs, but cuDNN may take another algorithm for another number of rows: 1e-5. TF32 keeps
ten bits of each factor (a relative error of 5e-4 each), and another algorithm rounds others: 5e-3.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import images
from cases.images import batches

import tfmultigpu as tmg
from gpu_checks.place import Place
from gpu_checks.trainings import apart, on_device, step_on

EXACT, TF32 = 1e-5, 5e-3


def exact_without_tf32(place: Place) -> dict[str, Any]:
    """Uneven batches in shares by memory, TF32 off: every weight, loss and prediction."""
    return _hold(place, "as it is", EXACT, tf32=False, shares=place.limits)


def exact_with_tf32(place: Place) -> dict[str, Any]:
    """The same with TF32 on."""
    return _hold(place, "as it is", TF32, tf32=True)


def synchronized_batch_normalization(place: Place) -> dict[str, Any]:
    """Statistics are those of the global batch."""
    return _hold(place, "synchronized normalisation", EXACT, tf32=False)


def xla(place: Place) -> dict[str, Any]:
    """The replica phase compiled by XLA, against one device without XLA.

    Of TF32: without it XLA finds no convolution of float32 in cuDNN 9.3, for Keras' ``fit`` either.
    """
    return _hold(place, "by XLA", TF32, tf32=True, predict=False)


def four_parts(place: Place) -> dict[str, Any]:
    """Four unequal parts, a last batch of fewer rows than parts, two micro-batches."""
    return _hold(place, "micro-batches", EXACT, tf32=False, shares=place.limits)


def dropout_draws(place: Place) -> dict[str, Any]:
    """Replicas draw one device's numbers, and the GPU draws the CPU's: Philox has one answer."""
    masks = []
    for device in (place.devices[0], place.devices[-1], "CPU:0"):
        with tf.device(device):
            layer = keras.layers.Dropout(0.5, seed=9)
            masks.append(layer(tf.ones([64, 33]), training=True).numpy())
    for mask in masks[1:]:
        np.testing.assert_array_equal(mask, masks[0], err_msg="draws differ between devices")
    dropped = float(np.mean(masks[0] == 0))
    assert 0.4 < dropped < 0.6, f"{dropped} of the inputs dropped at a rate of 0.5"
    return _hold(place, "dropout", EXACT, tf32=False) | {"dropped": dropped}


def gpu_against_cpu(place: Place) -> dict[str, Any]:
    """The same five steps on the GPU and on the CPU, TF32 off and on."""
    facts: dict[str, Any] = {}
    # Other numbers of rows the second time: what cuDNN chose for a shape it keeps.
    for tf32, allowed, rows in ((False, EXACT, 24), (True, TF32, 23)):
        with_tf32(tf32)
        data = batches(rows, rows, 17 - tf32, rows, 5 + tf32)
        cpu, gpu = (step_on(on_device(name)) for name in ("CPU:0", place.devices[-1]))
        off = [float(gpu(batch)["loss"]) - float(cpu(batch)["loss"]) for batch in data]
        facts[f"tf32={tf32}"] = {
            "allowed": allowed,
            "weights": apart(gpu.model, cpu.model),
            "losses": float(np.max(np.abs(off))),
        }
        if place.rehearsal:
            break  # Virtual CPUs know no TF32.
    for name, found in facts.items():
        for what in ("weights", "losses"):
            # Both are known before one is judged.
            assert found[what] <= found["allowed"], f"{name}: the {what} are too far off: {facts}"
    return facts


def sharded_update(place: Place) -> dict[str, Any]:
    """Each variable updated on one part and copied to the others: the weights of one device."""
    return _hold(place, "owners", EXACT, tf32=False, shares=place.limits)


def sharded_variables(place: Place) -> dict[str, Any]:
    """Each weight on one part, by their memory: the weights of one device."""
    return _hold(place, "sharded variables", EXACT, tf32=False, shares=place.limits)


def checkpoints_cross_over(place: Place) -> dict[str, Any]:
    """Saved on replicas of the GPU and gone on with on the CPU, and the other way round."""
    with_tf32(False)
    data = batches(24, 17, 24)
    first, *rest = data
    straight = step_on(on_device("CPU:0"))
    for batch in data:
        straight(batch)
    facts = {}
    sides = place.strategy, functools.partial(on_device, "CPU:0")
    for name, begin, end in (("GPU to CPU", *sides), ("CPU to GPU", *sides[::-1])):
        directory = tempfile.mkdtemp()
        step = step_on(begin())
        step(first)
        tmg.Checkpoints(directory, train_step=step).save()
        other = step_on(end())
        restored = tmg.Checkpoints(directory, train_step=other).restore()
        assert restored == 1, f"restored step {restored}, saved was step 1"
        assert apart(step.model, other.model) == 0.0, "the model that was read is not the one saved"
        assert apart(step.optimizer, other.optimizer) == 0.0, "the optimizer's state differs"
        for batch in rest:
            other(batch)
        facts[name] = difference = apart(other.model, straight.model)
        assert difference <= EXACT, f"{name}: off an uninterrupted run by {difference:.1e}"
    return facts


def with_tf32(allowed: bool) -> None:
    """Sets whether float32 products may be computed in TF32."""
    experimental: Any = tf.config.experimental
    experimental.enable_tensor_float_32_execution(allowed)


def _hold(
    place: Place, name: str, tolerance: float, *, tf32: bool, **options: Any
) -> dict[str, Any]:
    """Holds a row of the table, and what it predicts then."""
    with_tf32(tf32)
    (case,) = [case for case in images.CASES if case.name == name]
    memory = dict(zip(place.devices, place.limits, strict=True))

    def build() -> tmg.testing.Training:
        with contextlib.ExitStack() as scopes:
            if case.sharded and tf.distribute.has_strategy():
                scopes.enter_context(tmg.sharded_variables(at_least=0, memory=memory))
            this = case.build()
        return tmg.testing.Training(this.model, this.optimizer, this.loss)

    largest = tmg.testing.assert_replica_invariant(
        build,
        case.batches,
        strategy=place.strategy(),
        tolerance=tolerance,
        **case.options,
        **options,
    )
    return {"allowed": tolerance, "largest": float(largest.amount), "of": str(largest)}
