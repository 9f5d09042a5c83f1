"""What is seen of Keras on one thread, and what is assigned there."""

from __future__ import annotations

import threading

import keras
import numpy as np

from tfmultigpu.losses.recording import changing_assignments, noting_losses_read, recording_calls


def test_assignments_are_changed_on_one_thread_while_the_context_lasts() -> None:
    before = keras.Variable.assign
    variable, other = keras.Variable(1.0), keras.Variable(2.0)
    with changing_assignments(lambda one, value: -value if one is variable else value):
        variable.assign_add(1.0)
        assert float(variable.numpy()) == -2.0
        with changing_assignments(lambda one, value: value + 10.0):
            variable.assign(3.0)  # The inner context is asked first.
        assert float(variable.numpy()) == -13.0
        other.assign(5.0)
        thread = threading.Thread(target=variable.assign, args=(7.0,))
        thread.start()
        thread.join()
        assert float(variable.numpy()) == 7.0
    assert float(other.numpy()) == 5.0
    assert keras.Variable.assign is before


def test_calls_of_layers_and_operations_are_seen_in_the_order_in_which_they_end() -> None:
    before = keras.layers.Layer.__call__, keras.Operation.__call__
    inputs = keras.Input((2,))
    hidden = keras.layers.Dense(3, name="hidden")(inputs)
    model = keras.Model(inputs, keras.ops.relu(hidden))
    with recording_calls() as calls:
        result = model(np.ones((1, 2), "float32"))
    assert [type(layer).__name__ for layer, _ in calls][-3:] == ["Dense", "Relu", "Functional"]
    assert calls[-1][1] is result
    assert (keras.layers.Layer.__call__, keras.Operation.__call__) == before


def test_losses_that_are_read_are_noted_if_there_are_any() -> None:
    before = keras.layers.Layer.__dict__["losses"]
    plain = keras.layers.Dense(1)
    strict = keras.layers.Dense(1, kernel_regularizer="l2")
    for layer in (plain, strict):
        layer.build((None, 2))
    noted: list[object] = []
    with noting_losses_read(noted.append):
        assert plain.losses == []
        assert len(strict.losses) == 1
    assert noted == [strict]
    assert keras.layers.Layer.__dict__["losses"] is before
    assert len(strict.losses) == 1
