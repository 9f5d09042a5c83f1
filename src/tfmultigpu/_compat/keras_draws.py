"""Functions by which Keras draws random numbers, and the generator of draws without a seed."""

from __future__ import annotations

import pkgutil
from typing import Any

# Functions that Keras and TensorFlow look up at each call, to draw.
_KERAS_SEEDS = "keras.src.random.seed_generator"
_GLOBAL_SEEDS = "global_seed_generator"
_DRAWS = {
    _GLOBAL_SEEDS: _KERAS_SEEDS,
    "stateless_uniform": "tensorflow:random",
    "stateless_normal": "tensorflow:random",
    "stateless_truncated_normal": "tensorflow:random",
    "stateless_categorical": "tensorflow:random",
    "stateless_gamma": "tensorflow:random",
    "stateless_binomial": "tensorflow:random",
    "stateless_random_uniform": "tensorflow.python.ops.stateless_random_ops",
    "next": "keras:random.SeedGenerator",
}


def global_seeds() -> Any:
    """Returns the generator for draws without a seed; None before the first such draw.

    Private: ``keras.src.backend.common.global_state``. The public function would create one, and
    take a number from Python's generator for it. Without it no step is traced.
    """
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute(_GLOBAL_SEEDS)


def set_global_seeds(generator: Any) -> None:
    """Sets the generator for draws without a seed; private as above."""
    from keras.src.backend.common import global_state

    global_state.set_global_attribute(_GLOBAL_SEEDS, generator)


def home_of(name: str) -> Any:
    """Returns the module or class that has a function by which Keras draws.

    Private: ``keras.src.random.seed_generator.global_seed_generator``, the source of draws without
    a seed. Without it they fail on replicas, or depend on their number. Private:
    ``tensorflow.python.ops.stateless_random_ops.stateless_random_uniform``, with which dropout and
    ``tf.image.stateless_random_flip_left_right`` draw. Without it all replicas drop and flip alike.
    """
    # After a colon nothing is imported: the user has the first tensorflow.random, not a second one.
    return pkgutil.resolve_name(_DRAWS[name])
