"""``fit``: training over epochs as in Keras, on every strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfmultigpu.arguments import check_count
from tfmultigpu.data.seeds import draw_seed
from tfmultigpu.errors import DataError
from tfmultigpu.loops.callbacks import (
    BatchHooks,
    adapt_callbacks,
    check_callbacks,
    class_names,
    count_required_on_all_workers,
    data_skips_batches,
    make_callbacks,
    on_exit,
    resume_at,
    skips_fit,
    to_list,
)
from tfmultigpu.loops.compiled import compile_arguments
from tfmultigpu.loops.epoch import Clock
from tfmultigpu.loops.fit_state import FitState, restored_start
from tfmultigpu.loops.inputs import check_steps, labelled, no_batches, with_weights
from tfmultigpu.loops.keras_methods import arrays_as_in_keras
from tfmultigpu.loops.mlflow_logging import with_mlflow
from tfmultigpu.loops.model_methods import evaluating_in_callbacks
from tfmultigpu.loops.program import Program
from tfmultigpu.loops.running_fits import training
from tfmultigpu.loops.steps_per_call import check_steps_per_call
from tfmultigpu.loops.training_data import make_epoch_iterator, split_off
from tfmultigpu.loops.validation import Validation
from tfmultigpu.loops.worker_agreement import check_alike, is_chief, union
from tfmultigpu.loops.worker_sync import WorkerSync
from tfmultigpu.optimizers.update import finish_values
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.evaluate import EvalStep
from tfmultigpu.steps.train_step import TrainStep
from tfmultigpu.steps.value_agreement import check_values_alike
from tfmultigpu.steps.verification import check_verify
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
    eval_forward: Callable[[Any, Any, bool], Any] | None = None,
    step: TrainStep | ChainedStep | Sequence[TrainStep] | None = None,
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
    preprocess: Callable[..., Any] | None = None,
    preprocess_batched: bool = False,
    steps_per_call: StepsPerCall = "auto",
    verify: Verify = "first",
    verbose: Verbose = "auto",
) -> History:
    """Trains a model for epochs; the result is that of ``model.fit`` on one device.

    Trains with the compiled losses of the model, with ``forward``, or with ``step``. Callbacks,
    validation, ``History`` and progress bar are those of Keras.

    Runs on the strategy whose scope the model was created in, or else on one device. All workers
    must call it with the same data.

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
        eval_forward: The same for validation, instead of compiled losses; None means ``forward``.
        step: A step of ``make_train_step`` or ``chain_steps``, or a list of train steps that take
            each batch in turn. Its logs are shown: ``"loss"``, or ``"NAME_loss"`` for each step.
        eval_step: A step of ``make_eval_step`` for validation.
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
        preprocess: See ``distribute_dataset``; ``data`` is then single examples, arrays of them, or
            an object with ``len(data)`` and ``data[i]``. What can be read by number is shuffled.
            Validation data is not preprocessed: give ``distribute_dataset(..., preprocess=f)``.
        preprocess_batched: See ``distribute_dataset``.
        steps_per_call: Steps in one call into TensorFlow. ``"auto"`` finds the smallest number that
            hides the cost of a call; callbacks that need every batch still get it. A number calls
            the callbacks after that many steps. ``steps_per_execution`` of ``compile`` sets it too.
        verify: See ``make_train_step``; also applies to validation.
        verbose: 0, 1 (a progress bar), 2 (a line per epoch) or ``"auto"``, which is 1. Only the
            chief prints.

    Returns:
        The ``keras.callbacks.History``; ``history.history`` has the logs of each epoch.

    Raises:
        LossError: The model is not compiled, or replaces ``train_step`` or another method of
            Keras that cannot run on several replicas; a callback works only in Keras' own ``fit``,
            or uses an optimizer that the ``step`` does not train with; or there is nothing to
            validate with.
        ScopeError: The model, its optimizer or a metric was created outside the scope.
        DataError: The data is infinite and ``steps_per_epoch`` is None, is empty, is of an unknown
            kind, or does not fit another argument.
        LossError: The losses do not fit the outputs, are not one value per example, or are given
            beside ``forward``.
        LossError: A metric cannot be summed over replicas.
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
    check_backend()
    check_steps(steps_per_epoch, "steps_per_epoch")
    check_steps_per_call(steps_per_call)
    check_verify(verify)
    data = labelled(data, x, y)
    options = {
        "micro_batches": (micro_batches, 1),
        "clip_norm": (clip_norm, None),
        "loss_scale": (loss_scale, None),
        "shard_update": (shard_update, "auto"),
        "verify": (verify, "first"),
    }
    given = {name: value for name, (value, _) in options.items()}
    program = Program.of(
        model,
        forward=forward,
        eval_forward=eval_forward,
        step=step,
        eval_step=eval_step,
        options=options,
    )
    strategy = program.strategy
    unused = "eval_step" if eval_step is not None else "eval_forward" if eval_forward else None
    if unused and validation_data is None and not validation_split:
        raise ValueError(
            f"There is nothing to validate. Received: {unused} and no validation_data. Give "
            "validation_data, or leave it out."
        )
    if isinstance(callbacks, Iterator):
        callbacks = to_list(callbacks)
    optimizer = program.trained[0].optimizer
    check_callbacks(callbacks, optimizer)
    program.check_callbacks(to_list(callbacks))
    if steps_per_call == "auto" and (model.steps_per_execution or 1) > 1:
        steps_per_call = model.steps_per_execution
    asked = None if steps_per_call == "auto" else int(steps_per_call)
    epochs = check_count("epochs", epochs, 0)
    initial_epoch = check_count("initial_epoch", initial_epoch, 0)
    check_alike(
        strategy,
        "fit",
        {
            "batch_size": batch_size,
            "epochs": epochs,
            "initial_epoch": initial_epoch,
            "steps_per_epoch": steps_per_epoch,
            "validation_data is None": validation_data is None,
            "validation_split": validation_split,
            "validation_freq": validation_freq,
            "validation_batch_size": validation_batch_size,
            "validation_steps": validation_steps,
            "shuffle": shuffle,
            "shares": shares,
            "preprocess is None": preprocess is None,
            "preprocess_batched": preprocess_batched,
            "steps_per_call": steps_per_call,
            **given,
            "forward is None": forward is None,
            "steps of step": len(program.trained) if program.step is not None else 0,
            "callbacks of tmg.Checkpoints": count_required_on_all_workers(callbacks),
        },
    )
    if sample_weight is not None:
        data = with_weights(data, sample_weight)
    data, validation_data = (arrays_as_in_keras(model, one) for one in (data, validation_data))
    if validation_split and validation_data is None:
        if preprocess is not None:
            raise DataError(
                "validation_split divides arrays, and preprocess is for the training part alone. "
                f"Received: validation_split={validation_split} with preprocess. Give "
                "validation_data=tmg.distribute_dataset(source, strategy, batch_size=64, "
                "preprocess=f)."
            )
        data, validation_data = split_off(data, validation_split)
    seed = draw_seed(strategy)
    if skips_fit(callbacks, model, epochs):
        return _history_of(model)
    seed, initial_epoch = restored_start(to_list(callbacks), seed, initial_epoch)
    epoch_iterator, spec = make_epoch_iterator(
        model,
        data,
        strategy,
        batch_size=batch_size,
        steps_per_epoch=None if steps_per_epoch is None else int(steps_per_epoch),
        shuffle=_checked_shuffle(shuffle),
        seed=seed,
        first_pass=initial_epoch,
        class_weight=class_weight,
        shares=shares,
        preprocess=preprocess,
        preprocess_batched=preprocess_batched,
    )
    program.check_batches(spec, options)
    validation = Validation.of(
        validation_data,
        validation_freq,
        program,
        validation_batch_size or batch_size,
        validation_steps,
        verify,
    )
    trainer = program.make_trainer(
        spec,
        jit_compile=step is None and compile_arguments(model).get("jit_compile") is True,
        **given,
    )
    adapt_callbacks(callbacks, optimizer)
    logged = {"batch_size": batch_size, "epochs": epochs, "initial_epoch": initial_epoch, **given}
    callbacks = with_mlflow(callbacks, strategy, logged)
    callback_list = make_callbacks(
        callbacks,
        model,
        epochs=epochs,
        steps=epoch_iterator.steps,
        verbose=verbose,
        shown=is_chief(strategy),
    )
    clock = Clock(trainer.tuner, strategy)
    worker_sync = WorkerSync(strategy, model, program.trained, class_names(callbacks))
    hooks = BatchHooks(
        callback_list,
        "train",
        steps_per_call=asked,
        elapsed=clock.elapsed,
        agree=functools.partial(union, strategy),
    )
    state = FitState(
        strategy, callback_list, trainer, epoch_iterator, model, hooks, seed, initial_epoch
    )
    if validation is not None:
        epoch_iterator.after_skipped_epochs(validation.skip, initial_epoch)
    model.stop_training = False
    own = evaluating_in_callbacks(model, strategy, verify)
    with on_exit(callback_list), training(model, trainer.metrics), own:
        with state.beginning():
            callback_list.on_train_begin()
        position = resume_at(callback_list)
        check_alike(strategy, "fit", {"resume_at of a callback": position})
        for one in program.trained:
            check_values_alike(strategy, one.model, one.optimizer)
        start, first_step = position or (initial_epoch, 0)
        logs: dict[str, Any] = {}
        has_ended = state.has_ended()
        for epoch in range(epochs if has_ended else start, epochs):
            callback_list.on_epoch_begin(epoch)
            epoch_iterator.begin_epoch()
            resumes = position is not None and epoch == start
            first = 0
            if resumes:
                first = epoch_iterator.skip(
                    start - initial_epoch,
                    first_step,
                    data_skips_batches=data_skips_batches(callback_list),
                )
            state.begin_epoch(resumed=resumes and first_step > 0)
            found = trainer.epoch(
                epoch_iterator,
                hooks,
                first=first,
                sums=state.sums,
                steps_per_call=asked,
                stops=worker_sync.asked_to_stop(),
                stopped=worker_sync.stopped,
                clock=clock,
            )
            if found is None and resumes:
                # The checkpoint was saved at the end of this epoch.
                found = state.logs()
                if found is None:
                    continue
            if found is None:
                raise no_batches(data)
            logs = found
            if validation is not None and validation.is_due(epoch):
                logs = {**logs, **validation(callback_list)}
            callback_list.on_epoch_end(epoch, logs)
            if worker_sync.end_epoch():
                break
        if epochs > 0:
            for one in program.trained:
                finish_values(one.optimizer, one.variables, strategy)
        callback_list.on_train_end(logs)
        worker_sync.check()
    return _history_of(model)


def _checked_shuffle(shuffle: Any) -> bool:
    if not isinstance(shuffle, bool):
        raise DataError(
            "shuffle must be True or False; the order within a batch changes nothing. Received: "
            f"shuffle={shuffle!r}."
        )
    return shuffle


def _history_of(model: Any) -> History:
    """Returns the callback that has recorded the logs of the last training."""
    return model.history
