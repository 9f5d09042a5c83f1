"""``fit``: training over epochs by the loop of Keras, on every strategy.

Keras' own ``fit`` is the loop; ``loop.Loop`` says what it calls here, and when.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import keras
import tensorflow as tf

from tfmultigpu._patch import setting
from tfmultigpu.addons.loops.evaluation import evaluation_methods
from tfmultigpu.addons.loops.hooks import Hooks, is_resuming, to_list
from tfmultigpu.addons.loops.inputs import (
    Reading,
    Source,
    check_steps,
    feed_of,
    source_of,
    split_off,
    validation_source,
)
from tfmultigpu.addons.loops.loop import FitCallbacks
from tfmultigpu.addons.loops.methods import around, check_names, in_one_thread, run_keras
from tfmultigpu.addons.loops.program import Program
from tfmultigpu.addons.loops.workers import check_alike
from tfmultigpu.arguments import brief, check_count
from tfmultigpu.errors import DataError
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.evaluate import EvalStep
from tfmultigpu.steps.make import StepOptions, all_options, check_verify
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.scopes import check_backend
from tfmultigpu.types import (
    ForwardFunction,
    KerasModel,
    Model,
    Nested,
    Options,
    StepsPerCall,
    Verbose,
    Verify,
)
from tfmultigpu.user_code import warn

if TYPE_CHECKING:
    from keras.callbacks import History


class KerasArguments(TypedDict, total=False):
    """Arguments of ``keras.Model.fit`` beside the data; they mean what they mean there.

    Attributes:
        shuffle: Whether to reshuffle arrays in each pass. The order depends only on the seed of
            ``keras.utils.set_random_seed``, not on the number of replicas.
    """

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


class FitArguments(StepOptions, KerasArguments):
    """Arguments of ``fit`` that mean what they mean in ``make_train_step`` and in Keras."""


@in_one_thread
def fit(
    model: Model,
    data: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Verbose = "auto",
    *,
    x: Any = None,
    forward: ForwardFunction | None = None,
    step: TrainStep | ChainedStep | None = None,
    eval_step: EvalStep | None = None,
    shares: Sequence[float] | None = None,
    steps_per_call: StepsPerCall = "auto",
    verify: Verify = "first",
    **arguments: Unpack[FitArguments],
) -> History:
    """Trains a model for epochs; the result equals ``model.fit`` on one device.

    Runs Keras' own ``fit`` with the compiled losses of the model, with ``forward``, or with
    ``step``. It runs on the strategy in whose scope the model was created, or else on one device.
    All workers must call it with the same data.

    Args:
        model: A compiled Keras model; with ``step`` it need not be compiled. Its optimizer and
            metrics hold their state afterwards.
        data: Arrays ``(x, y)`` or ``(x, y, sample_weight)``, each an array or a structure of
            arrays; or a ``tf.data.Dataset`` or ``PyDataset`` of global batches, a function that
            returns a generator of them, or a result of ``distribute_dataset``.
        y: Labels, if ``data`` is arrays of inputs only.
        batch_size: Examples in a global batch, for arrays only; None means 32.
        epochs: Train up to this epoch, counted from ``initial_epoch``'s 0.
        verbose: 0, 1 (a progress bar), 2 (a line per epoch) or ``"auto"``, which is 1. Only the
            chief prints.
        x: Keras' name of ``data``, for calls that were written for ``model.fit``.
        forward: See ``make_train_step``; replaces compiled losses. Metrics that are attributes of
            the model, and that it updates, are shown in the logs. Compile the model with an
            optimizer only. Each call of ``fit`` traces it anew; a ``step`` is traced once.
        step: A step of ``make_train_step`` or ``chain_steps``. ``fit`` shows its logs: ``"loss"``,
            or ``"NAME_loss"`` for each step of a chain, and its metrics.
        eval_step: A step of ``make_eval_step`` for validation; None means ``forward``, or the
            compiled losses.
        shares: Relative share of each global batch per replica; None means equal shares.
        steps_per_call: Steps in one call into TensorFlow. ``"auto"`` takes as many as fit into a
            tenth of a second; callbacks that need every batch still get it. A number calls the
            callbacks after that many steps. ``steps_per_execution`` of ``compile`` sets it too.
        verify: See ``make_train_step``; also applies to validation.
        **arguments: Options of ``make_train_step``, such as ``micro_batches`` and ``clip_norm``;
            all but ``metrics``, ``jit_compile``, ``variables`` and ``features``.
            ``logical_replicas`` also applies to validation. And all other arguments of
            ``keras.Model.fit``, with its defaults, such as ``validation_data``, ``class_weight``
            and ``callbacks``.

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
    of_keras = {**arguments, "batch_size": batch_size, "epochs": epochs, "verbose": verbose}
    given = checked_arguments(of_keras)
    source = source_of("fit", data, x=x, y=y, sample_weight=given["sample_weight"])
    options = all_options(arguments)
    program = Program.of(model, forward, step, eval_step, verify, options)
    strategy = program.strategy
    callbacks = to_list(given["callbacks"])
    width = _steps_of_a_call(model, steps_per_call)
    compared = {
        **given,
        **options,
        "shares": shares,
        "steps_per_call": steps_per_call,
        "verify": verify,
        "forward": forward,
        "steps of step": 0 if step is None else len(step.names),
    }
    _check_same_arguments(strategy, compared, callbacks)

    # Validation has data of its own, or the last part of that of the training.
    validation = None
    if given["validation_data"] is not None:
        validation = validation_source(given["validation_data"])
    elif given["validation_split"]:
        source, validation = split_off(source, given["validation_split"])
    _check_validation_is_read(given, validation, eval_step)
    program.compile_with_optimizer()

    # A callback may resume an earlier fit, in the middle of its data.
    hooks = Hooks(
        callbacks,
        model,
        strategy,
        verbose=given["verbose"],
        epochs=given["epochs"],
        step=step,
        add_history=True,
    )
    start = hooks.find_start(given["initial_epoch"])
    with ExitStack() as owned:
        owned.callback(hooks.exit)
        reading = Reading(
            "training",
            given["batch_size"],
            given["steps_per_epoch"],
            shuffle=given["shuffle"],
            class_weight=given["class_weight"],
            shares=shares,
            start=start,
            resumes=hooks.resumes,
        )
        feed = owned.enter_context(feed_of(model, strategy, source, reading))
        training = program.training_loop(hooks, feed, width, start.batches)

        evaluation = None
        if validation is not None:
            size = given["validation_batch_size"] or given["batch_size"]
            reading = Reading("validation", size, given["validation_steps"])
            validated = owned.enter_context(feed_of(model, strategy, validation, reading))
            program.check_validation()
            feed.pass_over_validations(validated, given["validation_freq"], start)
            evaluation = program.evaluation_loop(hooks, validated)

        running = FitCallbacks(hooks, start, training, evaluation)
        hooks.announce(running)
        for part in training.step.train_steps:
            check_values_alike(strategy, part.model, part.optimizer)
        dealt = training.step.logical_replicas
        methods = {**around(training), **evaluation_methods(model, verify, dealt, running)}
        owned.enter_context(setting(model, **methods))
        return run_keras(
            model,
            "fit",
            feed,
            running,
            epochs=given["epochs"],
            initial_epoch=start.epoch,
            steps_per_epoch=given["steps_per_epoch"],
            validation_data=None if evaluation is None else evaluation.feed,
            validation_steps=given["validation_steps"],
            validation_freq=given["validation_freq"],
        )


def _steps_of_a_call(model: KerasModel, steps: object) -> int | None:
    """Returns the steps of a call that the user has set, or None."""
    if isinstance(steps, str) and steps == "auto":
        steps = model.steps_per_execution or 1
        return int(steps) if steps > 1 else None
    return check_count("steps_per_call", steps, other="'auto'")


def _check_validation_is_read(
    given: Options, validation: Source | None, eval_step: EvalStep | None
) -> None:
    """Checks that the options of a validation have one that reads them."""
    size = given["validation_batch_size"]
    if validation is not None:
        if size is not None and not validation.is_arrays:
            raise DataError(
                "validation_batch_size is for arrays, and other data yields batches by itself.",
                f"validation_batch_size={brief(size)} and validation_data of type "
                f"{type(validation.data).__name__}",
                "Leave validation_batch_size out.",
            )
        return
    options = {name: given[name] for name in ("validation_steps", "validation_freq")}
    options |= {"validation_batch_size": size, "eval_step": eval_step}
    for name, value in options.items():
        if value not in (None, 1):
            warn(
                f"fit validates only with validation_data or validation_split, so it does not read "
                f"{name}. Received: {name}={brief(value)}. Give validation_data=(x, y), or leave "
                f"{name} out."
            )


def _check_same_arguments(
    strategy: tf.distribute.Strategy,
    arguments: Mapping[str, Nested],
    callbacks: Sequence[Any],
) -> None:
    """Checks that workers were given the same arguments, as far as these can be compared."""
    resuming = [callback for callback in callbacks if is_resuming(callback)]
    compared: dict[str, object] = {"callbacks of tmg.Checkpoints": len(resuming)}
    for name, value in arguments.items():
        if name in ("verbose", "callbacks"):
            continue
        parts = value if isinstance(value, (list, tuple)) else [value]
        is_plain = all(isinstance(part, (int, float, str, type(None))) for part in parts)
        compared[name] = value if is_plain and name != "validation_data" else value is None
    check_alike(strategy, compared)


def checked_arguments(kwargs: Mapping[str, object]) -> Options:
    """Returns all arguments, with the defaults of Keras."""
    of_keras = inspect.signature(keras.Model.fit).parameters
    explicit = list(inspect.signature(fit).parameters)[:-1]
    check_names("fit", kwargs, {*FitArguments.__annotations__, *explicit})
    arguments = dict(kwargs)
    for name in KerasArguments.__annotations__:
        arguments.setdefault(name, of_keras[name].default)
    for name in ("steps_per_epoch", "validation_steps"):
        arguments[name] = check_steps(arguments[name], name)
    if not isinstance(arguments["shuffle"], bool):
        raise DataError("shuffle must be True or False.", f"shuffle={brief(arguments['shuffle'])}")
    for name in ("epochs", "initial_epoch"):  # Keras would train nothing, without a word.
        arguments[name] = check_count(name, arguments[name], 0)
    return arguments
