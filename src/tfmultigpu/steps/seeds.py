"""Seeds of random draws: the same on all replicas, advanced once a step."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.errors import ScopeError


class GlobalSeeds:
    """Seeds of draws without a seed, during one call of ``strategy.run``.

    Keras keeps a generator of seeds for them, one for each thread. Replicas are threads, and a
    state that is to be alike on all of them is made before they start or beside them. So the
    generator of the thread that starts them serves all; the first draw has one made if there is
    none.

    Attributes:
        generator: The generator, or None where there is none yet.
        used: The states of all generators that were drawn from, Keras variables; known once traced.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        """Takes the strategy; call on the thread that starts the replicas."""
        self.generator = _compat.global_seeds()
        self.used: list[Any] = []
        self._strategy = strategy

    def next_of(self, original: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a seed from a generator, by ``original``, and notes that it was drawn from."""
        if all(state is not generator.state for state in self.used):
            if not self._is_on_replicas(generator):
                raise ScopeError(
                    "A seed generator was created outside the scope of the strategy. It has one "
                    "state for all replicas, so each draws other numbers than one device does. "
                    f"Received: {generator.name!r}, and {type(self._strategy).__name__} with "
                    f"{self._strategy.num_replicas_in_sync} replica(s). Create it inside the "
                    "scope:\n"
                    "    with strategy.scope():\n"
                    "        seeds = keras.random.SeedGenerator(seed)"
                )
            self.used.append(generator.state)
        return original(generator, *args, **kwargs)

    def on_replicas(self, original: Any) -> Any:
        """Returns the generator, made by ``original`` if there is none, on all replicas."""
        if self.generator is None or not self._is_on_replicas(self.generator):
            with ThreadPoolExecutor(1) as pool:  # A thread without scopes.
                self.generator = pool.submit(self._make, original).result()
        return self.generator

    def _is_on_replicas(self, generator: Any) -> bool:
        state = generator.state.value  # A tensor where it was assigned to already.
        if self._strategy.num_replicas_in_sync == 1 or not isinstance(state, tf.Variable):
            return True
        return bool(self._strategy.extended.variable_created_in_scope(state))

    def _make(self, original: Any) -> Any:
        import keras

        with self._strategy.scope():
            if self.generator is None:
                return original()
            copy = keras.random.SeedGenerator(0)
            copy.state.assign(self.generator.state)
            return copy


@contextmanager
def global_seeds(strategy: tf.distribute.Strategy) -> Iterator[GlobalSeeds]:
    """Shares the seeds of draws without a seed among the replicas run in the context."""
    seeds = GlobalSeeds(strategy)
    before = seeds.generator
    yield seeds
    if seeds.generator is not before:
        _compat.set_global_seeds(seeds.generator)


@contextmanager
def sharing_seeds(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Has draws without a seed, on this thread, draw from the generator of the replicas."""
    name = "global_seed_generator"
    home = _compat.home_of(name)
    with global_seeds(strategy) as seeds, patching(home, name, seeds.on_replicas):
        yield
