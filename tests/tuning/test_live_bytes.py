"""The bound of memory: of small graphs against every order, of networks against the allocator."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tfmultigpu.addons.tuning.live_bytes import least_bytes

ROOT = Path(__file__).parents[2]


def bound(function: Any, *specs: tf.TensorSpec, keeps: bool = False) -> int:
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return least_bytes(graph, graph.outputs, keeps_outputs=keeps)


def random_graph(seed: int) -> list[tuple[int, ...]]:
    """Returns for each operation the numbers of those that it reads; 0 is the input."""
    draw = random.Random(seed)
    graph: list[tuple[int, ...]] = []
    for number in range(1, 7):
        graph.append(tuple(draw.sample(range(number), min(number, draw.choice((1, 2))))))
    return graph


def least_of_all_orders(graph: list[tuple[int, ...]]) -> int:
    """Returns the least peak of any order: what was made, and is read after this operation."""
    wanted = {len(graph)}
    for number in reversed(range(1, len(graph) + 1)):
        if number in wanted:
            wanted.update(graph[number - 1])
    operations = sorted(wanted - {0})
    least = None
    for order in itertools.permutations(operations):
        place = {operation: at for at, operation in enumerate(order)}
        reads = {one: [r for r in graph[one - 1] if r] for one in order}
        if any(place[r] > place[one] for one in order for r in reads[one]):
            continue
        peak = 0
        for at in range(len(order)):
            alive = 0
            for made in order[:at]:
                readers = [place[one] for one in order if made in reads[one]]
                alive += bool(readers) and max(readers) > at
            peak = max(peak, alive)
        least = peak if least is None else min(least, peak)
    assert least is not None
    return least


ONE = (tf.sin, tf.cos, tf.exp, tf.tanh, tf.sigmoid, tf.math.softplus)
TWO = (tf.maximum, tf.minimum, tf.atan2, tf.math.squared_difference, tf.pow, tf.math.xdivy)


def run_graph(graph: list[tuple[int, ...]], x: tf.Tensor) -> tf.Tensor:
    """Returns the last tensor of the graph, whose operations are all different."""
    made = [x]
    for reads, one, two in zip(graph, ONE, TWO, strict=True):
        function: Any = one if len(reads) == 1 else two
        made.append(function(*[made[number] for number in reads]))
    return made[-1]


# Fails if the bound is above what an order of the operations needs.
@pytest.mark.parametrize("seed", range(12))
def test_no_order_needs_less(seed: int) -> None:
    graph = random_graph(seed)
    found = bound(lambda x: run_graph(graph, x), tf.TensorSpec([250]))
    assert found <= 1000 * least_of_all_orders(graph)


def test_what_is_there_in_every_order() -> None:
    spec = tf.TensorSpec([1000])

    def between(x: tf.Tensor) -> tf.Tensor:
        first = tf.sin(x)
        return tf.maximum(first, tf.cos(tf.exp(first)))  # While cos runs sin waits for maximum.

    assert bound(between, spec) == 4000
    assert bound(lambda x: tf.cos(tf.sin(x)), spec) == 0  # One may take the place of the other.
    assert bound(lambda x: (tf.cos(x), tf.sin(x)), spec, keeps=True) == 8000
    assert bound(lambda x: (tf.cos(x), tf.sin(x)), spec) == 0  # No order holds both for long.
    assert bound(lambda x: tf.cos(x) @ tf.sin(x), tf.TensorSpec([10, 10])) == 1200


def test_what_may_be_no_memory_of_its_own_counts_nothing() -> None:
    spec = tf.TensorSpec([100, 10])

    def views(x: tf.Tensor) -> list[tf.Tensor]:
        whole = tf.sin(x)
        return [tf.identity(whole), tf.reshape(whole, [-1]), tf.transpose(whole), whole[:50]]

    assert bound(views, spec, keeps=True) == 4000
    assert bound(lambda x: tf.split(tf.sin(x), 2), spec, keeps=True) == 4000
    skipped = lambda x: tf.cond(x[0, 0] > 0, lambda: tf.sin(x), lambda: tf.identity(x))  # noqa: E731
    assert bound(skipped, spec, keeps=True) == 0
    assert bound(lambda x: [tf.sin(x), tf.sin(x)], spec, keeps=True) == 4000  # Equal ones are one.
    assert bound(lambda x: [x, tf.ones([100, 10]) * 2.0], spec, keeps=True) == 0
    assert bound(lambda x: [tf.sin(x) * tf.ones([100, 10]), tf.sin(x)], spec, keeps=True) == 4000


def test_a_function_is_in_the_place_of_its_call_and_a_loop_keeps_what_it_pushes() -> None:
    called = tf.function(lambda x: tf.maximum(tf.sin(x), tf.cos(tf.exp(tf.sin(x)))))
    assert bound(lambda x: called(x), tf.TensorSpec([1000])) == 4000

    def loop(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            options = {"maximum_iterations": 7}
            body = lambda i, y: (i + 1, tf.sin(tf.exp(y)))  # noqa: E731
            _, y = tf.while_loop(lambda i, y: i < 7, body, (0, x), **options)
            loss = tf.sin(y)
        return tape.gradient(loss, x)

    # Exponentials of seven turns; sines are arguments of the turn after.
    assert bound(loop, tf.TensorSpec([1000])) == pytest.approx(7 * 4000, abs=8)


# Fails if the bound of a network is above the peak of its step, or hardly says anything.
@pytest.mark.slow
def test_the_bound_of_eight_networks_is_below_their_peaks() -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "plan_memory.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(program, env=environment, check=True, capture_output=True, text=True)
    lines = [line.split() for line in ran.stdout.splitlines()[1:]]
    assert len(lines) == 8
    for name, kept, given, bound, peak, share in lines:
        assert float(bound) <= float(peak), name
        assert float(share) >= 0.45, name
        assert float(kept) <= float(given) <= 1.1 * float(kept) + 0.1, name
