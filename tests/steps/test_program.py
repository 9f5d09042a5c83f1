"""Programs: each has its own trace, and what is of no use any more is let go."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.steps import program

L = keras.layers
X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


class AddsIfAsked(keras.Model):
    """Counts, and adds a loss, for batches that have a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.seen = L.Dense(3), keras.metrics.Sum(name="seen")

    def call(self, inputs: Any) -> Any:
        if "more" in inputs:
            self.add_loss(tf.reduce_mean(inputs["more"]))
            self.seen.update_state(inputs["more"])
        return self.dense(inputs["x"])


def few() -> Any:
    return {"x": X}, X


def many() -> Any:
    return {"x": X, "more": X[:, :1]}, X


# Fails if a kind of batch is read by the layout of another, which was traced last; or if a metric
# counts as not updated because the last trace does not.
def test_each_kind_of_batch_has_its_own_trace() -> None:
    model = AddsIfAsked()
    model(few()[0])
    step = tmg.make_train_step(model, keras.optimizers.SGD(0.0), "mse", verify=False)
    batches = {"few": few(), "many": many()}
    losses = {name: [float(step(batch)["loss"])] for name, batch in batches.items()}
    inside = tf.function(lambda: step(batches["many"])["loss"])
    losses["many"].append(float(inside()))
    for name in ("few", "many", "few"):
        losses[name].append(float(step(batches[name])["loss"]))
        data = tf.data.Dataset.from_tensors(batches[name])
        for _ in range(2):
            losses[name].append(float(step.run(iter(data), 2)["loss"]))
    added = float(np.mean(X[:, 0]))
    assert np.ptp(losses["few"]) < 1e-6
    assert np.ptp(losses["many"]) < 1e-6
    assert losses["many"][0] - losses["few"][0] == pytest.approx(added, abs=1e-6)
    assert {id(variable) for variable in model.seen.variables} <= step.assigned.keys()


def graphs() -> int:
    gc.collect()
    return sum(type(each).__name__ == "FuncGraph" for each in gc.get_objects())


def dense_step(*layers: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), *(layers or [L.Dense(3)])])
    return tmg.make_train_step(model, keras.optimizers.SGD(0.01), "mse", verify=False)


# Fails if an old program is kept, by a step, a chain of it, or a step that the chain settles.
@pytest.mark.parametrize("chained", [False, True])
def test_programs_with_other_settings_are_let_go(chained: bool) -> None:
    step = part = dense_step()
    if chained:
        step = tmg.chain_steps(part)
    counts = []
    for number in range(3):
        part.optimizer.clipnorm = 1.0 + number
        step((X, X))
        if chained:
            part((X, X))
            assert len(part.runner.programs) == 1
        assert len(step.runner.programs) == 1
        counts.append(graphs())
    assert counts[2] <= counts[0]


# Fails if variables that are replaced, for good, leave a program each.
def test_programs_of_variables_that_are_gone_are_let_go() -> None:
    model = keras.Sequential([keras.Input((3,)), L.Dense(3), L.Dense(3)])
    steps = tmg.make_predict_step(model), tmg.make_eval_step(model, "mse")
    for _ in range(3):
        for step in steps:
            step((X, X))
            assert len(step.runner.programs) == 1
        model.pop()
        model.add(L.Dense(3))
    np.testing.assert_allclose(steps[0]((X, X)), model(X), rtol=1e-5)


# Fails if who trains one layer after another keeps the program of each.
def test_a_step_keeps_programs_of_a_few_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MOST", 2)
    layers = [L.Dense(3) for _ in range(3)]
    step = dense_step(*layers)
    for layer in layers:
        step((X, X))
        layer.trainable = False
        assert len(step.runner.programs) <= 2
    layers[-1].trainable = True
    kernel = layers[-1].kernel.numpy()
    step((X, X))
    assert np.any(layers[-1].kernel.numpy() != kernel)


# Fails if the ids of rows, and with them the graph of a trace, stay with an optimizer.
def test_no_graph_stays_with_the_optimizer_of_a_table() -> None:
    optimizer = keras.optimizers.SGD(0.1)

    def train() -> None:
        layers = [L.Embedding(20_000, 4), L.Flatten(), L.Dense(1)]
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *layers])
        step = tmg.make_train_step(model, optimizer, "mse", verify=False)
        step((np.zeros((4, 2), "int32"), np.zeros((4, 1), "float32")))

    before = graphs()
    train()
    assert graphs() <= before


def reads_of(step: Any, batch: Any, rows: int) -> list[str]:
    """The operations of a step that give a tensor with as many rows as a table has."""
    compiled, _ = step.runner.programs.of_batch(step.runner.batches.read(batch))
    return [
        operation.name
        for operation in compiled.run.graph.get_operations()
        for tensor in operation.outputs
        if tensor.dtype != tf.resource and tensor.shape.rank and tensor.shape[0] == rows
        and not {user.type for user in tensor.consumers()} <= {"Shape"}
    ]  # fmt: skip


# Fails if a step that only reads, traced before the step that writes rows, copies the table for
# good.
def test_who_reads_a_table_is_traced_anew_once_rows_are_written() -> None:
    rows = 5000
    inputs = keras.Input((2,), dtype="int32")
    table, dense = L.Embedding(rows, 16), L.Dense(1)
    model = keras.Model(inputs, dense(L.Flatten()(table(inputs))))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    batch = np.zeros((4, 2), "int32"), np.zeros((4, 1), "float32")
    trains = tmg.make_train_step(
        model, optimizer, "mse", variables=dense.trainable_variables, verify=False
    )
    readers = trains, tmg.make_eval_step(model, "mse"), tmg.make_predict_step(model)
    for step in readers:
        step(batch)
        assert reads_of(step, batch, rows)
    tmg.make_train_step(model, optimizer, "mse", verify=False)(batch)
    for step in readers:
        step(batch)
        assert not reads_of(step, batch, rows)
        assert len(step.runner.programs) == 1


class Chooses(keras.Model):
    """Says itself what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.trains = L.Dense(3), L.Dense(3), "first"

    def call(self, inputs: Any) -> Any:
        return self.second(self.first(inputs))

    @property
    def trainable_variables(self) -> Any:
        return getattr(self, self.trains).trainable_variables


# Fails if a model that says by itself what is trained is asked once only.
def test_a_model_may_say_what_is_trained() -> None:
    model = Chooses()
    model(X)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.variables)
    step = tmg.make_train_step(model, optimizer, "mse", verify=False)
    for name, other in (("first", "second"), ("second", "first"), ("first", "second")):
        model.trains = name
        moves, stays = getattr(model, name).kernel, getattr(model, other).kernel
        before, still = moves.numpy(), stays.numpy()
        step((X, X))
        assert np.any(moves.numpy() != before)
        np.testing.assert_array_equal(stays.numpy(), still)
    assert len(step.runner.programs) == 2


# Fails if a step goes on with the trace of a layer beside the model that is frozen, or computes in
# another dtype, since; or if what changes at each call is not named.
def test_a_layer_beside_the_model_may_change() -> None:
    teacher, dense = L.BatchNormalization(), L.Dense(3)
    teacher.build((None, 3))
    model = keras.Sequential([keras.Input((3,)), dense])

    def forward(model: Any, batch: Any, training: bool) -> Any:
        wanted = keras.ops.cast(teacher(batch[0], training=training), "float32")
        return tmg.loss_sum("mse", wanted, model(batch[0]))

    optimizer = keras.optimizers.SGD(0.0)
    step = tmg.make_train_step(model, optimizer, None, forward=forward, verify=False)

    def check() -> None:
        expected = np.mean((np.asarray(teacher(X, training=True), "float32") - dense(X)) ** 2)
        np.testing.assert_allclose(step((X, X))["loss"], expected, rtol=1e-5)

    check()
    check()
    assert step._version == 1
    teacher.trainable = False
    moving_mean = teacher.moving_mean.numpy()
    check()
    np.testing.assert_array_equal(teacher.moving_mean.numpy(), moving_mean)
    teacher.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    check()

    def take_turns() -> None:
        for number in range(6):
            teacher.trainable = number % 2 == 0
            step((X, X))

    with pytest.warns(UserWarning, match="the frozen layers beside the model"):
        take_turns()
