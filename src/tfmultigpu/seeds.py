"""What random draws start from: alike on all replicas, and once a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu import _bridge

__all__ = ["GlobalSeeds", "global_seeds", "seed_states"]


class GlobalSeeds:
    """What draws without a seed draw from, during one call of ``strategy.run``.

    Keras keeps a generator of seeds for them, one for each thread. Replicas are threads, and a
    state that is to be alike on all of them is made before they start or beside them. So the
    generator of the thread that starts them serves all; the first draw has one made if there is
    none.

    Attributes:
        generator: The generator, or None where there is none yet.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        """Takes the strategy; call on the thread that starts the replicas."""
        self.generator = _bridge.global_seeds()
        self._strategy = strategy

    def on_replica(self, original: Any) -> Any:
        """Returns the generator for a draw on a replica; ``original`` makes one."""
        if self._strategy.num_replicas_in_sync == 1:
            self.generator = original()
        elif not self._is_on_replicas():
            made = threading.Thread(target=self._make, args=(original,))
            made.start()
            made.join()
        return self.generator

    def _is_on_replicas(self) -> bool:
        if self.generator is None:
            return False
        variable = self.generator.state.value
        return bool(self._strategy.extended.variable_created_in_scope(variable))

    def _make(self, original: Any) -> None:
        import keras

        with self._strategy.scope():
            if self.generator is None:
                self.generator = original()
                return
            copy = keras.random.SeedGenerator(0)
            copy.state.assign(self.generator.state)
            self.generator = copy


@contextmanager
def global_seeds(strategy: tf.distribute.Strategy) -> Iterator[GlobalSeeds]:
    """Shares the seeds of draws without a seed among the replicas run in the context."""
    seeds = GlobalSeeds(strategy)
    before = seeds.generator
    yield seeds
    if seeds.generator is not before:
        _bridge.set_global_seeds(seeds.generator)


def seed_states(model: Any, seeds: GlobalSeeds) -> list[Any]:
    """Returns the states of the seeds that a model may draw from, Keras variables.

    They are those of its layers, and that for draws without a seed where there is one yet.
    """
    weights = {id(variable) for variable in model.weights}
    states = [variable for variable in model.variables if id(variable) not in weights]
    return states if seeds.generator is None else [*states, seeds.generator.state]
