"""Adding gradients to a window is each replica's own affair until the window is reduced."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from law.pair import strategy_of

import tfmultigpu as tmg


# Fails if a micro-batch cannot be left out on one replica, because adding it would communicate.
def test_adding_to_a_window_waits_for_no_other_replica() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        window = tmg.GradientAccumulator([variable])
        optimizer = keras.optimizers.SGD(1.0)

    @tf.function
    def add_on_one_replica() -> None:
        def replica() -> None:
            context = tf.distribute.get_replica_context()
            if context.replica_id_in_sync_group == 1:
                window.add([tf.constant([3.0, 5.0])], 2.0)

        strategy.run(replica)

    try:
        add_on_one_replica()
    except (RuntimeError, ValueError, TypeError) as error:
        raise AssertionError(f"adding in a condition of one replica: {error}") from None
    gradients, weight = window.reduce()
    assert float(weight) == 2.0
    np.testing.assert_array_equal(gradients[0].numpy(), [1.5, 2.5])
    # The window was not empty, though the first replica added nothing.
    add_on_one_replica()
    window.apply(optimizer)
    np.testing.assert_array_equal(variable.numpy(), [-0.5, -0.5])
