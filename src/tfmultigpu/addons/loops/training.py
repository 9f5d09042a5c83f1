"""``fit``: training over epochs by the loop of Keras, on every strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import keras

from tfmultigpu._patch import setting
from tfmultigpu.addons.loops.evaluation import evaluation_methods
from tfmultigpu.addons.loops.hooks import FitHooks, to_list
from tfmultigpu.addons.loops.inputs import check_steps, feed_of, labelled, split_off
from tfmultigpu.addons.loops.methods import around, check_names, in_one_thread, run_keras
from tfmultigpu.addons.loops.program import Program
from tfmultigpu.addons.loops.workers import check_alike
from tfmultigpu.arguments import check_count
from tfmultigpu.errors import DataError
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.evaluate import EvalStep
from tfmultigpu.steps.make import check_verify
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.scopes import check_backend
from tfmultigpu.types import (
    KerasModel,
    LossScaling,
    Model,
    ShardUpdate,
    StepsPerCall,
    Verbose,
    Verify,
)

if TYPE_CHECKING:
    from keras.callbacks import History


class KerasArguments(TypedDict, total=False):
    """Arguments of ``keras.Model.fit`` beside the data; they mean what they mean there.

    Attributes:
        shuffle: Whether to reshuffle arrays in each pass. The order depends only on the seed of
            ``keras.utils.set_random_seed``, not on the number of replicas.
        verbose: 0, 1 (a progress bar), 2 (a line per epoch) or ``"auto"``, which is 1. Only the
            chief prints.
    """

    batch_size: int | None
    epochs: int
    verbose: Verbose
    callbacks: Any
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: Mapping[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | Sequence[int]


@in_one_thread
def fit(
    model: Model,
    data: Any = None,
    y: Any = None,
    *,
    x: Any = None,
    forward: Callable[[Any, Any, bool], Any] | None = None,
    step: TrainStep | ChainedStep | None = None,
    eval_step: EvalStep | None = None,
    micro_batches: int | Sequence[int] = 1,
    clip_norm: float | None = None,
    loss_scale: LossScaling = None,
    shard_update: ShardUpdate = "auto",
    shares: Sequence[float] | None = None,
    steps_per_call: StepsPerCall = "auto",
    verify: Verify = "first",
    **arguments: Unpack[KerasArguments],
) -> History:
    """Trains a model for epochs; the result equals ``model.fit`` on one device.

    Runs Keras' own ``fit`` with the compiled losses of the model, with ``forward``, or with
    ``step``, on the strategy whose scope the model was created in, or else on one device. All
    workers must call it with the same data.

    Args:
        model: A compiled Keras model; with ``step`` it need not be compiled. Its optimizer and
            metrics hold their state afterwards.
        data: Arrays ``(x, y)`` or ``(x, y, sample_weight)``, each an array or a structure of
            arrays; or a ``tf.data.Dataset`` or ``PyDataset`` of global batches, a function that
            returns a generator of them, or a result of ``distribute_dataset``.
        y: Labels, if ``data`` is arrays of inputs only.
        x: Another name for ``data``, as in Keras.
        forward: See ``make_train_step``; replaces compiled losses. The values that it returns for
            the logs are shown like metrics, over the whole epoch. Compile the model with an
            optimizer only. A second call of ``fit`` traces it anew; a ``step`` is not traced again.
        step: A step of ``make_train_step`` or ``chain_steps``. Its logs are shown: ``"loss"``, or
            ``"NAME_loss"`` for each step of a chain, and its metrics, likewise.
        eval_step: A step of ``make_eval_step`` for validation; None means ``forward``, or the
            compiled losses.
        micro_batches: See ``make_train_step``.
        clip_norm: See ``make_train_step``.
        loss_scale: See ``make_train_step``.
        shard_update: See ``make_train_step``.
        shares: Relative share of each global batch per replica; None means equal shares.
        steps_per_call: Steps in one call into TensorFlow. ``"auto"`` takes as many as fit into a
            tenth of a second; callbacks that need every batch still get it. A number calls the
            callbacks after that many steps. ``steps_per_execution`` of ``compile`` sets it too.
        verify: See ``make_train_step``; also applies to validation.
        **arguments: All others of ``keras.Model.fit``, with its defaults, such as ``batch_size``
            (of arrays), ``epochs``, ``validation_data``, ``class_weight`` and ``callbacks``.

    Returns:
        The ``keras.callbacks.History``; ``history.history`` has the logs of each epoch.

    Raises:
        LossError: The model is not compiled, or replaces ``train_step`` or another method that
            Keras calls; or losses, metrics or callbacks do not work on replicas.
        ScopeError: The model, its optimizer or a metric was created outside the scope.
        DataError: The data is empty, has no end and no ``steps_per_epoch``, or does not fit.
        TypeError: An argument is not of its type.
        ValueError: Arguments exclude each other.
        ClusterError: The workers have different arguments, models, losses or optimizers; or a
            callback of only some workers changed the learning rate or the weights.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> strategy = tmg.create_strategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse", metrics=["mae"])
        >>> history = tmg.fit(model, (np.ones((7, 2)), np.ones((7, 1))), epochs=3, verbose=0)
        >>> {name: len(values) for name, values in history.history.items()}
        {'loss': 3, 'mae': 3}
    """
    check_backend(model, arguments.get("callbacks"))
    check_verify(verify)
    kwargs = checked_arguments(arguments)
    for name in ("epochs", "initial_epoch"):  # Keras would train nothing, without a word.
        kwargs[name] = check_count(name, kwargs[name], 0)
    data = labelled(data, x, y, kwargs.pop("sample_weight"), "fit")
    options = {"micro_batches": micro_batches, "clip_norm": clip_norm, "loss_scale": loss_scale,
               "shard_update": shard_update}  # fmt: skip
    program = Program.of(model, forward, step, eval_step, verify, options)
    strategy = program.strategy
    callbacks = kwargs["callbacks"] = to_list(kwargs["callbacks"])
    width = _steps_of_a_call(model, steps_per_call)
    steps = 0 if step is None else len(step.names)
    ours = {**options, "shares": shares, "steps_per_call": steps_per_call, "verify": verify,
            "forward": forward, "steps of step": steps}  # fmt: skip
    _check_same_arguments(strategy, {**kwargs, **ours})
    split = kwargs.pop("validation_split")
    if split and kwargs["validation_data"] is None:
        data, kwargs["validation_data"] = split_off(data, split)
    if step is not None and not getattr(model, "compiled", False):
        own = [each for each in step.train_steps if each.model is model] or step.train_steps
        keras.Model.compile(model, optimizer=own[0].optimizer)
    hooks = FitHooks(
        callbacks, model, strategy, verbose=kwargs.pop("verbose"), step=step,
        epochs=kwargs["epochs"], first_epoch=kwargs["initial_epoch"],
    )  # fmt: skip
    with ExitStack() as owned:
        owned.callback(hooks.exit)
        feed = feed_of(
            model, "training", data, strategy, kwargs["batch_size"], kwargs["steps_per_epoch"],
            shuffle=kwargs.pop("shuffle"), seed=hooks.seed, first_pass=hooks.first_epoch,
            class_weight=kwargs.pop("class_weight"), shares=shares, position=hooks.position,
        )  # fmt: skip
        owned.enter_context(feed)
        loop = program.training_loop(feed, width)
        if kwargs["validation_data"] is not None:
            size = kwargs["validation_batch_size"] or kwargs["batch_size"]
            validation = feed_of(
                model, "validation", kwargs["validation_data"], strategy, size,
                kwargs["validation_steps"],
            )  # fmt: skip
            owned.enter_context(validation)
            program.check_validation()
            frequency, start = kwargs["validation_freq"], hooks.start
            feed.skip_validations(validation, frequency, start.first_epoch, start.epoch)
            kwargs["validation_data"] = validation
            hooks.serve(program.evaluation_loop(validation))
        hooks.train(loop)
        for part in loop.step.train_steps:
            check_values_alike(strategy, part.model, part.optimizer)
        kwargs |= {"initial_epoch": hooks.start.epoch, "callbacks": hooks}
        owned.enter_context(
            setting(model, **around(loop), **evaluation_methods(model, verify, hooks))
        )
        return run_keras(model, "fit", feed, **kwargs)


def _steps_of_a_call(model: KerasModel, steps: Any) -> int | None:
    """Returns the steps of a call that the user has set, or None."""
    if isinstance(steps, str) and steps == "auto":
        steps = model.steps_per_execution or 1
        return int(steps) if steps > 1 else None
    return check_count("steps_per_call", steps, other="'auto'")


def _check_same_arguments(strategy: Any, arguments: Mapping[str, Any]) -> None:
    """Checks that workers were given the same arguments, as far as these can be compared."""
    resuming = [hasattr(callback, "on_fit_begin") for callback in arguments["callbacks"]]
    compared: dict[str, Any] = {"callbacks of tmg.Checkpoints": sum(resuming)}
    for name, value in arguments.items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        is_plain = all(isinstance(part, (int, float, str, type(None))) for part in parts)
        compared[name] = value if is_plain and name != "validation_data" else value is None
    del compared["verbose"], compared["callbacks"]
    check_alike(strategy, "fit", compared)


def checked_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments, with the defaults of Keras."""
    known, of_keras = KerasArguments.__annotations__, inspect.signature(keras.Model.fit).parameters
    explicit = list(inspect.signature(fit).parameters)[:-1]
    check_names("fit", kwargs, {*known, *explicit})
    arguments = {name: kwargs.get(name, of_keras[name].default) for name in known}
    for name in ("steps_per_epoch", "validation_steps"):
        check_steps(arguments[name], name)
    if not isinstance(arguments["shuffle"], bool):
        raise DataError("shuffle must be True or False.", f"shuffle={arguments['shuffle']!r}")
    # A limit for debugging: Keras counts by it, and the steps must not run ahead of it.
    if most := getattr(keras.config, "max_steps_per_epoch", lambda: None)():
        arguments["steps_per_epoch"] = min(most, arguments["steps_per_epoch"] or most)
    return arguments
