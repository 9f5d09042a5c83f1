"""``fit``: training over epochs by the loop of Keras, on every strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from tfmultigpu.addons.loops.callbacks import resuming, to_list
from tfmultigpu.addons.loops.evaluate import evaluation_methods
from tfmultigpu.addons.loops.hooks import FitHooks
from tfmultigpu.addons.loops.inputs import (
    as_keras_takes,
    check_steps,
    labelled,
    pass_feed,
    split_off,
    training_feed,
)
from tfmultigpu.addons.loops.methods import around, installed, run_keras
from tfmultigpu.addons.loops.program import Program
from tfmultigpu.addons.loops.workers import check_alike
from tfmultigpu.arguments import check_count
from tfmultigpu.errors import DataError, LossError
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.evaluate import EvalStep
from tfmultigpu.steps.make import check_verify
from tfmultigpu.steps.step import TrainStep
from tfmultigpu.strategies.scopes import check_backend
from tfmultigpu.types import LossScaling, Model, ShardUpdate, StepsPerCall, Verbose, Verify

if TYPE_CHECKING:
    from keras.callbacks import History

__all__ = ["fit"]


def fit(
    model: Model,
    data: Any = None,
    y: Any = None,
    *,
    x: Any = None,
    forward: Callable[[Any, Any, bool], Any] | None = None,
    step: TrainStep | ChainedStep | None = None,
    eval_step: EvalStep | None = None,
    batch_size: int | None = None,
    epochs: int = 1,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_data: Any = None,
    validation_split: float = 0.0,
    validation_freq: int | Sequence[int] = 1,
    validation_batch_size: int | None = None,
    validation_steps: int | None = None,
    shuffle: bool = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    callbacks: Any = (),
    micro_batches: int | Sequence[int] = 1,
    clip_norm: float | None = None,
    loss_scale: LossScaling = None,
    shard_update: ShardUpdate = "auto",
    shares: Sequence[float] | None = None,
    steps_per_call: StepsPerCall = "auto",
    verify: Verify = "first",
    verbose: Verbose = "auto",
) -> History:
    """Trains a model for epochs; the result is that of ``model.fit`` on one device.

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
            ``"NAME_loss"`` for each step of a chain.
        eval_step: A step of ``make_eval_step`` for validation; None means ``forward``, or the
            compiled losses.
        batch_size: Examples in a global batch, for arrays only; None means 32.
        epochs: Number of the last epoch.
        initial_epoch: Epochs that were trained before.
        steps_per_epoch: Batches of an epoch; the next epoch continues the pass. None: one pass.
        validation_data: Data for ``evaluate`` after epochs, of the same kinds as ``data``.
        validation_split: Fraction of arrays to validate with instead: the last examples.
        validation_freq: Epochs between validations, or a list of epochs, counted from 1.
        validation_batch_size: Like ``batch_size``, for validation; None means the same.
        validation_steps: The largest number of batches of a validation; None means all.
        shuffle: Whether to reshuffle arrays in each pass. The order depends only on the seed of
            ``keras.utils.set_random_seed``, not on the number of replicas.
        class_weight: A dict from class number to weight, for one output.
        sample_weight: Sample weights for arrays ``(x, y)``.
        callbacks: Keras callbacks.
        micro_batches: See ``make_train_step``.
        clip_norm: See ``make_train_step``.
        loss_scale: See ``make_train_step``.
        shard_update: See ``make_train_step``.
        shares: Relative share of each global batch per replica; None means equal shares.
        steps_per_call: Steps in one call into TensorFlow. ``"auto"`` takes as many as fit into a
            tenth of a second; callbacks that need every batch still get it. A number calls the
            callbacks after that many steps. ``steps_per_execution`` of ``compile`` sets it too.
        verify: See ``make_train_step``; also applies to validation.
        verbose: 0, 1 (a progress bar), 2 (a line per epoch) or ``"auto"``, which is 1. Only the
            chief prints.

    Returns:
        The ``keras.callbacks.History``; ``history.history`` has the logs of each epoch.

    Raises:
        LossError: The model is not compiled, or replaces ``train_step`` or another method of Keras
            that cannot run on several replicas; losses do not fit the outputs, or are given beside
            ``forward``; a metric cannot be summed over replicas; a callback works only in Keras'
            own ``fit``; or there is nothing to validate with.
        ScopeError: The model, its optimizer or a metric was created outside the scope.
        DataError: The data is infinite and ``steps_per_epoch`` is None, is empty, is of an unknown
            kind, or does not fit another argument.
        TypeError: An argument is not of its type.
        ValueError: Arguments exclude each other, or have a value that they cannot have.
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
    arguments = dict(locals())
    check_backend()
    import keras

    check_verify(verify)
    data = labelled(data, x, y, sample_weight, "fit")
    program = Program.of(
        model, forward=forward, step=step, eval_step=eval_step, verify=verify,
        micro_batches=micro_batches, clip_norm=clip_norm, loss_scale=loss_scale,
        shard_update=shard_update,
    )  # fmt: skip
    strategy, as_in_keras = program.strategy, program.runs_as_in_keras()
    callbacks = to_list(callbacks)
    width = _check_counts(model, arguments)
    _check_same_arguments(program, callbacks, arguments)
    if validation_split and validation_data is None:
        data, validation_data = split_off(data, validation_split)
    if validation_data is None and eval_step is not None:
        raise ValueError(
            "There is nothing to validate. Received: eval_step, and no validation_data. Give "
            "validation_data, or leave it out."
        )
    # A limit for debugging: Keras counts by it, and the steps must not run ahead of it.
    if most := getattr(keras.config, "max_steps_per_epoch", lambda: None)():
        steps_per_epoch = min(most, steps_per_epoch or most)
    if step is not None and not getattr(model, "compiled", False):
        keras.Model.compile(model, optimizer=program.trained[0].optimizer)
    counts = {"epochs": epochs, "steps_per_epoch": steps_per_epoch,
              "validation_steps": validation_steps, "validation_freq": validation_freq}  # fmt: skip
    if as_in_keras:
        if resuming(callbacks):
            raise LossError(
                "Keras runs the train_step of this model, and tmg.Checkpoints resumes only steps "
                f"of this library. Received: {type(model).__name__}. Write the loss as a forward, "
                "or use keras.callbacks.BackupAndRestore."
            )
        return run_keras(
            model, "fit", **as_keras_takes(data), validation_data=validation_data,
            batch_size=batch_size, validation_batch_size=validation_batch_size,
            initial_epoch=initial_epoch, shuffle=shuffle, class_weight=class_weight,
            callbacks=callbacks, verbose=verbose, **counts,
        )  # fmt: skip
    hooks = FitHooks(
        callbacks, model, strategy, verbose=verbose, step=step, epochs=epochs,
        first_epoch=initial_epoch,
    )  # fmt: skip
    try:
        feed = training_feed(
            model, data, strategy, batch_size=batch_size, steps=steps_per_epoch,
            shuffle=shuffle, seed=hooks.seed, first_pass=hooks.first_epoch,
            class_weight=class_weight, shares=shares, position=hooks.position,
        )  # fmt: skip
        if not feed.can_resume:
            hooks.refuse_resuming("with steps_per_epoch an epoch begins anywhere in a pass")
        loop = program.training_loop(feed, width)
        if validation_data is not None:
            size = validation_batch_size or batch_size
            validation = pass_feed(
                model, "validation", validation_data, strategy, size, validation_steps
            )
            feed.skip_validations(validation, validation_freq, hooks.first_epoch)
            if not program.validates_as_in_keras(validation.element_spec):
                validation_data = validation
        hooks.train(loop, program.trained)
        for part in program.trained:
            check_values_alike(strategy, part.model, part.optimizer)
        ours = {**around(loop), **evaluation_methods(program, hooks)}
        with installed(model, train_function=loop, **ours):
            return run_keras(
                model, "fit", feed, initial_epoch=hooks.begins_with, callbacks=hooks,
                validation_data=validation_data, validation_batch_size=validation_batch_size,
                **counts,
            )  # fmt: skip
    finally:
        hooks.exit()


def _check_counts(model: Any, arguments: dict[str, Any]) -> int | None:
    """Checks whole numbers, and returns the steps of a call that the user has set, or None."""
    check_steps(arguments["steps_per_epoch"], "steps_per_epoch")
    check_steps(arguments["validation_steps"], "validation_steps")
    check_count("epochs", arguments["epochs"], 0)
    check_count("initial_epoch", arguments["initial_epoch"], 0)
    frequency = arguments["validation_freq"]
    if isinstance(frequency, str) or not isinstance(frequency, Collection):
        check_count("validation_freq", frequency, other="a list of epochs counted from 1")
    shuffle, steps = arguments["shuffle"], arguments["steps_per_call"]
    if not isinstance(shuffle, bool):
        raise DataError(
            "shuffle must be True or False; the order within a batch changes nothing. Received: "
            f"shuffle={shuffle!r}."
        )
    if isinstance(steps, str) and steps == "auto":
        steps = model.steps_per_execution or 1
        return int(steps) if steps > 1 else None
    return check_count("steps_per_call", steps, other="'auto'")


def _check_same_arguments(
    program: Program, callbacks: list[Any], arguments: dict[str, Any]
) -> None:
    """Checks that workers were given the same arguments, as far as these can be compared."""
    shown = (int, float, str, bool, type(None), list, tuple)
    objects = ("data", "y", "x", "sample_weight", "validation_data", "class_weight", "callbacks")
    compared = {
        name: value if isinstance(value, shown) and name not in objects else value is None
        for name, value in arguments.items()
        if name not in ("verbose", "model", "step", "eval_step")
    }
    compared["steps of step"] = len(program.trained) if program.step is not None else 0
    compared["callbacks of tmg.Checkpoints"] = len(resuming(callbacks))
    check_alike(program.strategy, "fit", compared)
