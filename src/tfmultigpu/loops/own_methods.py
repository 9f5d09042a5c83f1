"""Methods of Keras that a model replaces, and the lines to write for replicas instead of them."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import LossError
from tfmultigpu.losses.build_model import has_call
from tfmultigpu.strategies.topology import describe

__all__ = [
    "EVALUATION",
    "METHODS",
    "OWN_METRICS",
    "check_no_loop",
    "own_methods",
    "own_optimizers",
    "refused",
]

# Methods that Keras calls in an evaluation.
OWN_METRICS = ("compute_metrics", "get_metrics_result")
EVALUATION = ("test_step", *OWN_METRICS, "compute_loss")
METHODS = ("train_step", *EVALUATION, "predict_step")


def own_methods(model: Any, *names: str) -> list[str]:
    """Returns the methods of Keras among ``names`` that a model replaces.

    A method that only passes its arguments on to ``super()`` replaces nothing.
    """
    import keras

    return [
        name
        for name in names
        if name in vars(model) or _defined(type(model), name) is not _defined(keras.Model, name)
    ]


def check_no_loop(model: Any, purpose: str) -> None:
    """Checks that a model does not replace the loop of Keras, which this library replaces too.

    Args:
        model: The model.
        purpose: ``"train"``, ``"test"`` or ``"predict"``.

    Raises:
        LossError: It does.
    """
    name = f"make_{purpose}_function"
    if own_methods(model, name):
        raise LossError(
            f"The model replaces {name} of Keras, which makes the loop over batches. This library "
            f"has its own loop, so it would be passed over. Received: {type(model).__name__}."
            f"{name}. Write what it does as a {purpose}_step, or a callback."
        )


def refused(model: Any, method: str, strategy: tf.distribute.Strategy, function: str) -> LossError:
    """Returns the error for a method of a model that cannot run on several replicas.

    Args:
        model: The model.
        method: The name of the method.
        strategy: Its strategy.
        function: ``"fit"``, ``"evaluate"`` or ``"predict"``.
    """
    own = f"{type(model).__name__}.{method}"
    return LossError(
        f"The model replaces {method} of Keras. It would run on each replica alone, so its result "
        f"would depend on how the batch was cut. Received: {own}, and {describe(strategy)}. "
        f"{_instead(model, method, function)}\nOn one device {function} runs {own} as Keras does."
    )


def _instead(model: Any, method: str, function: str) -> str:
    own = f"{type(model).__name__}.{method}"
    if method == "predict_step":
        return f"Move what {own} computes to the model's call method."
    if method == "compute_loss":
        return (
            "It returns one number for the rows of a replica. Return one value per row, "
            "without the mean at the end, or a sum and what divides it:\n"
            "    return tmg.LossSum(tf.reduce_sum(values), tf.size(values))\n"
            "If it divides by what it counts in the batch, or is of another package, compute it "
            "from the rows of all replicas, and count it once for each row of this one:\n"
            f"    class Whole({type(model).__name__}):\n"
            "        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, "
            "training=True):\n"
            "            rows = tf.cast(tf.shape(tf.nest.flatten(x)[0])[0], tf.float32)\n"
            "            x, y, y_pred = tmg.gather_rows((x, y, y_pred))  # sample_weight too, "
            "if the data has it\n"
            "            loss = super().compute_loss(x, y, y_pred, sample_weight)\n"
            "            return tmg.LossSum(loss * rows, rows)"
        )
    if method in OWN_METRICS:
        return (
            "Give metrics to model.compile(metrics=[...]), or return values for the logs from a "
            f"forward:\n{_forward(model, method)}\n{_call(model, function)}"
        )
    optimizers = own_optimizers(model)
    if method == "train_step" and len(optimizers) > 1:
        return _chain(model, optimizers)
    return (
        f"Write the loss of {own} as a forward:\n{_forward(model, method)}\n"
        f"{_call(model, function)}{_after_the_update(model, method)}"
    )


def _forward(model: Any, method: str, name: str = "forward") -> str:
    names = _returned_names(getattr(type(model), method, None))
    logged = [one for one in names if one != "loss"]
    values = ", ".join(f'"{one}": (tf.reduce_sum({one}), tf.size({one}))' for one in _words(logged))
    result = f"loss, {{{values}}}" if values else "loss"
    parts, inputs = _batch_names(model, method)
    own = f"{type(model).__name__}.{method}"
    predicted = (
        f"model({inputs}, training=training)"
        if has_call(model)
        else f"...  # of the parts of the model, which has no call, as in {own}"
    )
    return (
        f"    def {name}(model, batch, training):\n"
        f"        {parts} = batch\n"
        f"        y_pred = {predicted}\n"
        f"        values = ...  # one for each row, as in {own}\n"
        "        loss = tmg.LossSum(tf.reduce_sum(values), tf.size(values))\n"
        f"        return {result}"
    )


def _call(model: Any, function: str) -> str:
    if function == "fit":
        optimizer = type(getattr(model, "optimizer", None)).__name__
        return (
            f"    model.compile(optimizer=model.optimizer)  # {optimizer}, without a loss\n"
            "    tmg.fit(model, data, forward=forward)"
        )
    return (
        "    step = tmg.make_eval_step(model, None, strategy, forward=forward)\n"
        "    logs = step.run(iter(tmg.distribute_dataset(data, strategy)), steps)"
    )


def _batch_names(model: Any, method: str) -> tuple[str, str]:
    """Returns the names of the parts of a batch in a method, and that of the inputs."""
    function = _parsed(getattr(type(model), method, None))
    if function is None or method not in ("train_step", "test_step") or len(function.args.args) < 2:
        return "x, y", "x"
    data = function.args.args[1].arg
    for one in ast.walk(function):
        if not isinstance(one, ast.Assign) or not isinstance(one.targets[0], (ast.Tuple, ast.List)):
            continue
        if ast.unparse(one.value) in (data, f"keras.utils.unpack_x_y_sample_weight({data})"):
            parts = one.targets[0].elts
            return ", ".join(ast.unparse(part) for part in parts), ast.unparse(parts[0])
    return data, data


def _after_the_update(model: Any, method: str) -> str:
    """Returns where to do what a method assigns by itself, such as an average of the weights."""
    function = _parsed(getattr(type(model), method, None))
    names = ("assign", "assign_add", "assign_sub")
    assigned = [
        ast.unparse(one)
        for one in (ast.walk(function) if function is not None else ())
        if isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in names
    ]
    if not assigned:
        return ""
    return (
        f"\nWhat it assigns besides, {assigned[0]}, goes to a callback: in on_train_batch_end if "
        "it comes after the update."
    )


def _chain(model: Any, optimizers: dict[str, Any]) -> str:
    """Returns the lines for a model that trains its parts with an optimizer each."""
    parts = [name.removesuffix("optimizer").rstrip("_") or "model" for name in optimizers]
    steps = "".join(
        f"        tmg.make_train_step(model, model.{name}, None, strategy,\n"
        f"            forward={part}_forward, variables=...),  # those of model.{name}, "
        f"{type(optimizer).__name__}\n"
        for (name, optimizer), part in zip(optimizers.items(), parts, strict=True)
    )
    return (
        f"Write the loss of each optimizer in {type(model).__name__}.train_step as a forward, and "
        f"chain their steps:\n{_forward(model, 'train_step', f'{parts[0]}_forward')}\n"
        f"    step = tmg.chain_steps(\n{steps}    )\n"
        "    tmg.fit(model, data, step=step)"
    )


def own_optimizers(model: Any) -> dict[str, Any]:
    """Returns the optimizers that a class keeps beside ``model.optimizer``, by attribute."""
    import keras

    kind = keras.optimizers.Optimizer
    return {
        name: value
        for name, value in model.__dict__.items()  # Also of a proxy.
        if isinstance(value, kind) and name != "optimizer" and not name.startswith("_")
    }


def _words(names: list[str]) -> list[str]:
    return [name for name in names if name.isidentifier()]


def _returned_names(method: Any) -> list[str]:
    """Returns the keys of the dicts that a method returns, as far as its source tells."""
    function = _parsed(method)
    if function is None:
        return []
    returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
    keys = [key for one in returned if isinstance(one, ast.Dict) for key in one.keys]
    found = [key.value for key in keys if isinstance(key, ast.Constant)]
    return list(dict.fromkeys(one for one in found if isinstance(one, str)))


def _defined(kind: type, name: str) -> Any:
    """Returns the first definition of a method that does more than to call ``super()``."""
    found = [vars(one)[name] for one in kind.__mro__ if name in vars(one)]
    return next((one for one in found[:-1] if not _only_calls_super(one, name)), found[-1])


def _only_calls_super(method: Any, name: str) -> bool:
    if not inspect.isfunction(method):
        return False
    function = _parsed(method)
    if function is None or function.decorator_list:
        return False
    body = [one for one in function.body if not _is_text(one)]
    if len(body) != 1 or not isinstance(body[0], ast.Return):
        return False
    call = body[0].value
    if not isinstance(call, ast.Call) or not _is_super(call.func, name):
        return False
    given = function.args
    if given.vararg or given.kwarg or given.kwonlyargs:
        return False
    parameters = [one.arg for one in [*given.posonlyargs, *given.args]][1:]
    return parameters == list(_passed(call)) and _same_defaults(method, name)


def _same_defaults(method: Any, name: str) -> bool:
    """Returns whether the parameters of a method are those of Keras, defaults included."""
    import keras

    own, theirs = (inspect.signature(one) for one in (method, getattr(keras.Model, name)))
    return [(p.name, p.default) for p in own.parameters.values()] == [
        (p.name, p.default) for p in theirs.parameters.values()
    ]


def _passed(call: ast.Call) -> Iterator[str]:
    """Yields the names that a call passes on; an empty one for anything else."""
    for one in call.args:
        yield one.id if isinstance(one, ast.Name) else ""
    for keyword in call.keywords:
        same = isinstance(keyword.value, ast.Name) and keyword.value.id == keyword.arg
        yield str(keyword.arg) if same else ""


def _is_super(function: ast.expr, name: str) -> bool:
    if not isinstance(function, ast.Attribute) or function.attr != name:
        return False
    of = function.value
    return isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@functools.lru_cache(maxsize=128)  # Each call of fit asks about the same few methods.
def _parsed(method: Any) -> ast.FunctionDef | None:
    """Returns the syntax tree of a method; None if its source is not to be had."""
    method = getattr(method, "python_function", method)  # Of a tf.function.
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return None
    return tree.body[0] if tree.body and isinstance(tree.body[0], ast.FunctionDef) else None
