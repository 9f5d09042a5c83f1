"""No update waits until the host has looked at what a GPU computes: it starts them meanwhile.

A host that waits for a result leaves the GPU without work, and so does each update that waits for
the host. The step is traced and never run, so the strategy may name GPUs that are not here.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.graphs import DECISION, Dependencies
from law.pair import strategy_of

import tfmultigpu as tmg

UPDATE = "^Assign.*VariableOp$|^Resource(Apply|Scatter)"
COMPUTED = "^MatMul$"  # In forward and backward pass.
# What a kernel on the host decides or says, whatever device it names.
ON_THE_HOST = "^Assert$|^Print|^(Eager)?PyFunc|^(Stateless)?(If|While|Case)$|^String|^Where$"
# Shapes are known on the host when an operation is started, not when it has ended.
SHAPES = "^(Shape|ShapeN|Size|Rank)$"

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 1.0},
    "fixed scale": {"loss_scale": 8.0},
    "dynamic scale": {"loss_scale": "dynamic"},
}
MORE = ("clipped", "fixed scale")


def traced(**options: Any) -> Dependencies:
    """Returns the graph of a step with a draw, a penalty and metrics, of any number of rows."""
    strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
    layers = keras.layers
    with strategy.scope():
        hidden = [layers.Dense(4, "relu", kernel_regularizer="l2"), layers.Dropout(0.3)]
        model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(3)])
        optimizer = keras.optimizers.Adam(0.1)
        metrics = [keras.metrics.SparseCategoricalAccuracy()]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(
        model, optimizer, loss, strategy, metrics=metrics, verify=False, **options
    )
    x, y = np.zeros([5, 4], "float32"), np.zeros([5], "int32")
    data = tmg.distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(4), strategy)

    @tf.function
    def train(iterator: Any) -> Any:
        return step(next(iterator))["loss"]

    return Dependencies(train.get_concrete_function(iter(data)).graph)


def on_the_host(graph: Dependencies) -> set[str]:
    """Returns the operations of the host that wait for the forward pass, and not for shapes."""
    computed = set(graph.of_kind(COMPUTED))
    # By name alone, not with the variables, which are on a CPU because there is no GPU.
    named = {name for name, device in graph.devices.items() if device == "/device:CPU:0"}
    found = named | set(graph.of_kind(ON_THE_HOST))
    return {name for name in found if computed & graph.before(name, without=SHAPES)}


# Fails if a check of the step looks at what was computed, and updates wait for it; if a decision of
# the step is one of the host, but for the one branch of loss scaling.
@pytest.mark.parametrize(
    "case",
    ["plain", "dynamic scale", *(pytest.param(one, marks=pytest.mark.more) for one in MORE)],
)
def test_no_update_waits_for_the_host(case: str) -> None:
    graph = traced(**CASES[case])
    computed, waiting = set(graph.of_kind(COMPUTED)), on_the_host(graph)
    updates = {name: graph.before(name) for name in graph.of_kind(UPDATE)}
    trained = [name for name, before in updates.items() if computed & before]
    assert len(trained) >= 2 * 3 * 4  # Weights, and two slots of each, on both replicas.

    # Whether there is an update is one branch, as in Keras.
    branches = {name for name in waiting if name.endswith(DECISION)}
    assert len(branches) == ("scale" in case)
    branches |= {name.removesuffix(DECISION) for name in branches}
    for name, before in updates.items():
        assert not (waiting - branches) & before, name


def twice(x: Any) -> Any:
    """Makes two rows of each, of which the known shape does not tell."""
    return tf.ensure_shape(tf.tile(x, [2, 1]), [None, 4])


# Fails if a loss that has not one value per row is taken, or is seen after something was assigned;
# XLA leaves out assertions.
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"jit_compile": True}, id="by XLA", marks=pytest.mark.more),
    ],
)
def test_another_number_of_losses_than_rows_is_refused(options: dict[str, Any]) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        layers = [keras.layers.Lambda(twice), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False, **options)
    step.build()
    variables = [*model.variables, *optimizer.variables]
    before = [variable.numpy() for variable in variables]
    # A label of one row, which would be that of all rows.
    batch = np.ones([1, 4], "float32"), np.ones([1, 1], "float32")
    with pytest.raises(tmg.errors.LossError, match="did not return one value per row"):
        step(batch)
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, variable.path)
