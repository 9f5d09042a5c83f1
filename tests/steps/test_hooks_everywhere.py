"""Whoever traces a step enters the hooks of its features, each where it is documented."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from problems import network, normal_rows

import tfmultigpu as tmg
from tfmultigpu._patch import lock_of
from tfmultigpu.addons.verification.locate import locate
from tfmultigpu.addons.verification.one_device import OneDevice
from tfmultigpu.addons.verification.putting_back import Kept
from tfmultigpu.steps import Feature
from tfmultigpu.steps.batches import cut_batch
from tfmultigpu.steps.predict import join_rows
from tfmultigpu.strategies.attached import attached
from tfmultigpu.user_code import place_of_user, warn

X, Y = map(tf.constant, normal_rows(7, 4, 2))
HOOKS = {name for name, value in vars(Feature).items() if inspect.isfunction(value)}
HOOKS -= {name for name in HOOKS if name.startswith("_")}

OF_CALLS = {"bind", "on_one_device", "around_call"}
OF_TRACES = HOOKS - OF_CALLS
FORWARD = {"around_trace", "around_model", "around_replica", "around_phase"}
# What each place that traces enters, and outside of what it begins.
EXPECTED = {
    "step": OF_TRACES | {"around_call"},
    "loop": OF_TRACES | {"around_call"},
    "chain": OF_TRACES | {"around_call"},
    "one device": OF_TRACES | {"bind", "on_one_device"},
    "located": FORWARD,
    "evaluation": FORWARD | {"around_call"},
    "prediction": FORWARD | {"around_call"},
}


class Notes(Feature):
    """Notes each hook that is called, and those of a trace that are called outside of one."""

    def __init__(self, called: set[str], outside: set[str]) -> None:
        self.called, self.outside = called, outside
        self._open = 0

    def on_one_device(self) -> Feature:
        self.called.add("on_one_device")
        return Notes(self.called, self.outside)

    @contextlib.contextmanager
    def around_trace(self) -> Iterator[None]:
        self.called.add("around_trace")
        self._open += 1
        yield
        self._open -= 1

    def note(self, name: str) -> None:
        self.called.add(name)
        # The update on one device is not traced.
        if name in OF_TRACES - {"after_update"} and not self._open:
            self.outside.add(name)


def _noting(name: str) -> Callable[..., Any]:
    def hook(self: Notes, *args: Any) -> Any:
        self.note(name)
        return getattr(Feature, name)(self, *args)

    return hook


for _name in HOOKS - {"on_one_device", "around_trace"}:
    setattr(Notes, _name, _noting(_name))


@pytest.fixture(scope="module")
def entered() -> dict[str, tuple[set[str], set[str]]]:
    """Returns for each place which hooks were called, and which of them outside of a trace."""
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    called: set[str] = set()
    outside: set[str] = set()
    noted: dict[str, tuple[set[str], set[str]]] = {}

    def note(place: str, run: Callable[[], Any]) -> Any:
        called.clear()
        outside.clear()
        result = run()
        noted[place] = set(called), set(outside)
        return result

    def step() -> Any:
        with strategy.scope():
            model, sgd = network(4, keras.layers.Dense(2)), keras.optimizers.SGD(0.1)
        notes = Notes(called, outside)
        return tmg.make_train_step(model, sgd, "mse", strategy, verify=False, features=[notes])

    trained = step()
    note("step", lambda: trained((X, Y)))
    data = tmg.distribute_dataset((X, Y), strategy, batch_size=4)
    looped = step()
    note("loop", lambda: looped.run(iter(data), 2))
    chain = tmg.chain_steps(step())
    note("chain", lambda: chain((X, Y)))

    # The check of a first step, in its two parts.
    shards, offsets = cut_batch(strategy, (X, Y))
    leaves = [tf.nest.flatten(shard) for shard in shards]
    program, _ = trained.runner.programs.of_batch(((X, Y), leaves, offsets))

    def on_one_device() -> Any:
        device = OneDevice(trained, tf.identity, Kept(trained), by_itself=True)
        device.run((X, Y), program)
        return device

    device = note("one device", on_one_device)

    def join(parts: Any) -> Any:
        return join_rows(strategy, parts)

    note("located", lambda: locate(trained, device, join, shards, offsets.numpy(), 1e-3))

    # Steps that do not train have the features that an add-on has left with the strategy.
    attached(strategy).serve(lambda: Notes(called, outside), strategy.scope)
    evaluates = tmg.make_eval_step(trained.model, "mse", strategy, verify=False)
    predicts = tmg.make_predict_step(trained.model, strategy, verify=False)
    note("evaluation", lambda: evaluates((X, Y)))
    note("prediction", lambda: predicts(X))
    return noted


def test_the_walk_knows_all_hooks() -> None:
    assert len(HOOKS) == 11
    assert "around_trace" in HOOKS


@pytest.mark.parametrize("place", EXPECTED)
def test_each_place_that_traces_enters_the_hooks(entered: Any, place: str) -> None:
    called, outside = entered[place]
    assert called == EXPECTED[place]
    assert outside == set()


def test_each_kind_of_step_takes_the_lock_of_collectives() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])  # It adds by collectives.
    with strategy.scope():
        model, sgd = network(4, keras.layers.Dense(2)), keras.optimizers.SGD(0.1)
    train = tmg.make_train_step(model, sgd, "mse", strategy)
    evaluate = tmg.make_eval_step(model, "mse", strategy)
    lock = lock_of(strategy, "calls")
    for step in (train, tmg.chain_steps(train), evaluate, tmg.make_predict_step(model, strategy)):
        assert [one for one in step.runner.locks if one is lock] == [lock]


def test_a_package_whose_name_begins_as_ours_is_the_users() -> None:
    for ours in (Path(tmg.__file__).parent, Path(keras.__file__).parent):
        names: dict[str, Any] = {"place_of_user": place_of_user}
        source = "def asks(): return place_of_user()"
        exec(compile(source, str(ours.with_name(f"{ours.name}_more") / "layer.py"), "exec"), names)
        assert names["asks"]() == "asks (line 1 of layer.py)"


# Fails if a message names the copy of a function that AutoGraph runs.
def test_a_place_in_a_tf_function_is_the_one_that_was_written() -> None:
    places = []

    @tf.function
    def converted(x: Any) -> Any:
        if x > 0:
            x = x + 1.0
        places.append(place_of_user())
        warn("at this line")
        return x

    with pytest.warns(UserWarning, match="at this line") as caught:
        converted(tf.constant(1.0))
    assert [warning.filename for warning in caught] == [__file__]
    lines = Path(__file__).read_text().splitlines()
    assert lines[caught[0].lineno - 1].strip() == 'warn("at this line")'
    assert places == [f"converted (line {caught[0].lineno - 1} of {Path(__file__).name})"]


def test_a_feature_may_return_a_new_gradient() -> None:
    class New(Feature):
        takes_lists = True

        def on_gradient(self, gradient: Any) -> Any:
            return type(gradient)(gradient.tensors, gradient.norm)

    class Sees(Feature):
        def on_gradient(self, gradient: Any) -> Any:
            self.seen = [variable.path for variable in gradient.variables]
            return gradient

    sees = Sees()
    strategy = tmg.create_strategy(devices=["CPU:0"])
    with strategy.scope():
        model, sgd = network(4, keras.layers.Dense(2)), keras.optimizers.SGD(0.1)
    features = [New(), sees]
    step = tmg.make_train_step(model, sgd, "mse", strategy, loss_scale="dynamic", features=features)
    bad = X + np.inf
    logs = [step((rows, Y)) for rows in (X, bad, X)]
    assert [float(each["skipped"]) for each in logs] == [0, 1, 0]
    assert float(logs[2]["loss_scale"]) == float(logs[0]["loss_scale"]) / 2
    assert sees.seen == [variable.path for variable in step.variables]
