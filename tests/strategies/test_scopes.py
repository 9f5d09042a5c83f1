"""Models that are on no strategy, or on another one than the call: the error names the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from problems import network, normal_rows

import tfmultigpu as tmg
from tfmultigpu.strategies.process_state import process_state

(X,) = normal_rows(7, 3)
Y = X.sum(1, keepdims=True)
CALLS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda model: tmg.fit(model, (X, Y), batch_size=4, shuffle=False, verbose=0),
    "evaluate": lambda model: tmg.evaluate(model, (X, Y), batch_size=4),
    "predict": lambda model: tmg.predict(model, X, batch_size=4),
    "make_train_step": lambda model: tmg.make_train_step(model, model.optimizer, "mse"),
    "make_eval_step": lambda model: tmg.make_eval_step(model, "mse"),
    "make_predict_step": lambda model: tmg.make_predict_step(model),
    "distribute_dataset": lambda model: tmg.distribute_dataset((X, Y), batch_size=4),
    "GradientAccumulator": lambda model: tmg.GradientAccumulator(model.trainable_variables),
}


@pytest.fixture(autouse=True)
def nothing_created_before() -> None:
    """Other tests of this process created strategies that TensorFlow may still hold."""
    process_state.forget()


def two() -> tf.distribute.Strategy:
    return tmg.create_strategy(devices=["CPU:0", "CPU:1"])


def build() -> Any:
    keras.utils.set_random_seed(5)
    model = network(3, keras.layers.Dense(1))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


SCOPE = """    with strategy.scope():
        model = ..."""
ACCUMULATOR = """    with strategy.scope():
        window = tmg.GradientAccumulator(model.trainable_variables)"""


def of_tensorflow() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


# That the model is not trained then: tests/promises/test_blocks_alone.py.
@pytest.mark.parametrize(
    ("make", "call"), [(two, call) for call in CALLS] + [(of_tensorflow, call) for call in CALLS]
)
def test_a_model_on_no_strategy_beside_one_of_several_replicas(make: Any, call: str) -> None:
    process_state.forget()
    strategy, model = make(), build()
    with pytest.raises(tmg.ScopeError) as caught:
        CALLS[call](model)
    lines = (
        "Create the model in its scope, and give steps and distribute_dataset the strategy, "
        f"strategy=strategy:\n{SCOPE}"
    )
    why = "it got no strategy, and no model created in the scope of one"
    if call == "GradientAccumulator":
        lines = f"Create the model and the window in its scope:\n{ACCUMULATOR}"
    elif call in ("fit", "evaluate", "predict"):
        why = "the model was created outside the scope"
        lines = "Create the model in its scope, and compile it there:\n"
        lines += f"{SCOPE}\n        model.compile(...)"
    assert str(caught.value) == (
        f"{call} would run on one device: {why}. "
        f"Received: MirroredStrategy with 2 replica(s), unused. {lines}\n"
        'To run on one device, use tmg.create_strategy(prefer="one_device") in the same way.'
    )
    with strategy.scope():
        CALLS[call](build())


def test_of_several_strategies_none_is_guessed() -> None:
    ours, theirs = tmg.create_strategy(devices=["CPU:0", "CPU:1", "CPU:2"]), of_tensorflow()
    with theirs.scope():
        model = build()
    received = (
        r"Received: 2 strategies, none entered: MirroredStrategy with 2 replica\(s\), "
        r"MirroredStrategy with 3 replica\(s\)\. .* in the scope of one.*strategy=strategy"
    )
    with pytest.raises(tmg.ScopeError, match=received):
        tmg.distribute_dataset((X, Y), batch_size=4)
    with pytest.raises(tmg.ScopeError, match="2 strategies, none entered"):
        tmg.explain(build())
    assert "MirroredStrategy with 2 replica(s)" in str(tmg.explain(model))
    assert tmg.distribute_dataset((X, Y), ours, batch_size=4).strategy is ours


USED = ["not at all", "fit", "evaluate", "predict", "step"]


@pytest.mark.parametrize(
    ("make", "used"), [(two, used) for used in USED] + [(of_tensorflow, used) for used in USED]
)
def test_a_strategy_that_nobody_holds_does_not_count(make: Any, used: str) -> None:
    def use() -> None:
        strategy = make()
        with strategy.scope():
            model = build()
        if used in CALLS:
            CALLS[used](model)
        elif used == "step":
            tmg.make_train_step(model, model.optimizer, "mse", strategy)((X, Y))
        assert process_state.living_strategies() == (strategy,)

    use()
    assert process_state.living_strategies() == ()
    for call in CALLS.values():
        call(build())


# On another one -----------------------------------------------------------------------------------

ANOTHER = (
    "The model was created in the scope of another strategy than the one given. Received: variable "
    "{name!r} of the model, on MirroredStrategy with 2 replica(s), and {given}. Pass that "
    "strategy, strategy=strategy; or create the model in the scope, again if a notebook cell has "
    "made the strategy anew:\n"
    "    with strategy.scope():\n        model = ..."
)


def test_the_strategy_was_not_given_or_made_anew() -> None:
    old, new = two(), two()
    with old.scope():
        model = build()
    default = "TensorFlow's default strategy of one device, taken if none is given"
    for strategy, given in ((None, default), (new, "MirroredStrategy with 2 replica(s)")):
        for make in (
            lambda strategy=strategy: tmg.make_train_step(model, model.optimizer, "mse", strategy),
            lambda strategy=strategy: tmg.make_eval_step(model, "mse", strategy)((X, Y)),
            lambda strategy=strategy: tmg.make_predict_step(model, strategy)(X),
        ):
            with pytest.raises(tmg.ScopeError) as caught:
                make()
            assert str(caught.value) == ANOTHER.format(name=model.variables[0].path, given=given)
    with new.scope():
        again = build()
    with pytest.raises(tmg.ScopeError, match=r"The optimizer was created in the scope of another "):
        tmg.make_train_step(again, model.optimizer, "mse", new)
    with pytest.raises(tmg.ScopeError, match=r"and MirroredStrategy with 3 replica\(s\)\. "):
        tmg.make_predict_step(model, tmg.create_strategy(devices=["CPU:0", "CPU:1", "CPU:2"]))(X)


def test_data_for_another_strategy() -> None:
    strategy, other = two(), two()
    with strategy.scope():
        model = build()
    step = tmg.make_train_step(model, model.optimizer, "mse", strategy)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    device = tf.distribute.OneDeviceStrategy("CPU:0")
    for data, name in (
        (tmg.distribute_dataset(dataset, device), r"OneDeviceStrategy with 1 replica\(s\)"),
        (tmg.distribute_dataset(dataset, other), r"MirroredStrategy with 2 replica\(s\);"),
    ):
        line = r"tmg\.distribute_dataset\(dataset, step\.strategy\)"
        with pytest.raises(tmg.errors.DataError, match=f"Received: data for {name}.*{line}"):
            step.run(iter(data), 1)
        line = "Give the dataset itself"
        with pytest.raises(tmg.errors.DataError, match=f"Received: data for {name}.*{line}"):
            tmg.evaluate(model, data)
    assert int(step.optimizer.iterations.numpy()) == 0


# Fails if a loop runs on without the rows of replicas that it has not, or with all rows on each.
@pytest.mark.parametrize(
    ("cut", "run", "compiled"), [(3, 2, 0), (3, 2, 1), (2, 3, 1), (2, 1, 0), (1, 2, 0)]
)
def test_data_for_another_number_of_replicas(cut: int, run: int, compiled: bool) -> None:
    other, strategy = (tmg.create_strategy(devices=number) for number in (cut, run))
    count = lambda batch: strategy.run(tf.shape, [batch])  # noqa: E731
    (batch,) = tmg.distribute_dataset(X, other, batch_size=7)
    with pytest.raises(tmg.errors.DataError, match=rf"run of \w+ with {run} .* another number"):
        (tf.function(count, autograph=False) if compiled else count)(batch)


def test_the_strategy_in_scope_is_the_default() -> None:
    strategy = two()
    with strategy.scope():
        model = build()
        step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
        data = tmg.distribute_dataset((X, Y), batch_size=4)
    assert step.strategy is strategy
    assert [float(step(batch)["weight"]) for batch in data] == [4.0, 3.0]
