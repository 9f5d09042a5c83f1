"""``fit``: training over epochs, as Keras does it, on every strategy."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tfmultigpu.arguments import check_count
from tfmultigpu.errors import DataError
from tfmultigpu.loops.callbacks import (
    BatchHooks,
    adapt_callbacks,
    check_callbacks,
    count_of_all_workers,
    leaving,
    make_callbacks,
    names_of,
    passes_over,
    resume_at,
    to_list,
)
from tfmultigpu.loops.compiled import check_labels, compile_arguments
from tfmultigpu.loops.epoch import Clock, make_trainer
from tfmultigpu.loops.evaluate import REPLACED
from tfmultigpu.loops.fit_state import FitState, stored_beginning
from tfmultigpu.loops.inputs import check_steps, no_batches, with_weights
from tfmultigpu.loops.step_cache import checked_strategy
from tfmultigpu.loops.steps_per_call import check_steps_per_call
from tfmultigpu.loops.training_data import make_feed, split_off
from tfmultigpu.loops.validation import Validation
from tfmultigpu.loops.worker_agreement import check_alike, is_chief, of_any, of_chief
from tfmultigpu.loops.worker_sync import WorkerSync
from tfmultigpu.steps.value_agreement import check_values_alike
from tfmultigpu.steps.verification import check_verify
from tfmultigpu.strategies.scopes import check_backend

__all__ = ["fit"]


def fit(
    model: Any,
    data: Any,
    *,
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
    loss_scale: str | float | None = None,
    shard_update: str | bool = "auto",
    shares: Sequence[float] | None = None,
    steps_per_call: int | str = "auto",
    verify: bool | str = "first",
    verbose: int | str = "auto",
) -> Any:
    """Trains a compiled model; the result is that of ``model.fit`` on one device.

    Runs on the strategy in whose scope the model was created, one device where in none. Under
    several workers every worker calls it with the same data.

    Args:
        model: A Keras model, compiled; its optimizer and its metrics are used, and hold their state
            afterwards.
        data: Arrays ``(x, y)`` or ``(x, y, sample_weight)``, each one array or a structure of them;
            or what ``distribute_dataset`` takes: a ``tf.data.Dataset`` or ``PyDataset`` of global
            batches, a function that returns a generator of them; or what it returned.
        batch_size: Rows of a global batch, for arrays only; 32 where None.
        epochs: Number of the last epoch.
        initial_epoch: Epochs that were trained before.
        steps_per_epoch: Batches of an epoch; the next goes on where it stopped. None: one pass.
        validation_data: What ``evaluate`` takes, evaluated after epochs.
        validation_split: Part of arrays to validate with in place of that: their last rows.
        validation_freq: After each how many epochs, or a list of epochs, counted from 1.
        validation_batch_size: For arrays; ``batch_size`` where None.
        validation_steps: Batches of an evaluation at most. None: all of them.
        shuffle: Shuffle arrays, in each pass anew. The order follows from the seed set by
            ``keras.utils.set_random_seed`` and is the same for any number of replicas.
        class_weight: A dict from class number to weight, for one output.
        sample_weight: Weights beside arrays ``(x, y)``.
        callbacks: Keras callbacks.
        micro_batches: See ``make_train_step``.
        clip_norm: See ``make_train_step``.
        loss_scale: See ``make_train_step``.
        shard_update: See ``make_train_step``.
        shares: Relative share of each global batch per replica; equal where None.
        steps_per_call: Steps in one call into TensorFlow. ``"auto"``: the least number that makes
            the cost of calls small; a callback that looks at each batch still gets each. A number:
            callbacks are called after that many. ``steps_per_execution`` of ``compile`` is one.
        verify: See ``make_train_step``; validation is verified likewise.
        verbose: 0, 1 (a progress bar), 2 (a line an epoch) or ``"auto"``, which is 1. Among workers
            only the first prints.

    Returns:
        The ``keras.callbacks.History``; ``history.history`` has the logs of each epoch.

    Raises:
        CompileError: The model is not compiled, or replaces ``train_step``, ``compute_loss`` or
            ``compute_metrics``; or a callback works only in Keras' own ``fit``.
        ScopeError: The model, its optimizer or a metric was created outside the scope.
        DataError: The data has no end and ``steps_per_epoch`` is None; or no batches; or is no
            data; or what stands beside it does not fit it.
        LossError: The losses do not fit the outputs, or are not one value per example.
        MetricError: A metric cannot be added over replicas.
        WorkersDifferError: Workers call it with different arguments, models, losses or
            optimizers, or a callback of only some of them changed the learning rate or the weights.

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
    strategy = checked_strategy(model, "fit", "train_step", *REPLACED)
    arguments = compile_arguments(model)
    if isinstance(callbacks, Iterator):
        callbacks = to_list(callbacks)
    check_callbacks(callbacks, model.optimizer)
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
            "micro_batches": micro_batches,
            "clip_norm": clip_norm,
            "loss_scale": loss_scale,
            "shares": shares,
            "steps_per_call": steps_per_call,
            "verify": verify,
            "callbacks of tmg.Checkpoints": count_of_all_workers(callbacks),
        },
    )
    if sample_weight is not None:
        data = with_weights(data, sample_weight)
    if validation_split and validation_data is None:
        data, validation_data = split_off(data, validation_split)
    seed = int(of_chief(strategy, random.randrange(2**31)))
    seed, initial_epoch = stored_beginning(to_list(callbacks), seed, initial_epoch)
    feed, spec = make_feed(
        data,
        strategy,
        batch_size=batch_size,
        steps_per_epoch=None if steps_per_epoch is None else int(steps_per_epoch),
        shuffle=_checked_shuffle(shuffle),
        seed=seed,
        first_pass=initial_epoch,
        class_weight=class_weight,
        shares=shares,
    )
    check_labels(model, spec)
    validation = Validation.of(
        validation_data,
        validation_freq,
        model,
        strategy,
        validation_batch_size or batch_size,
        validation_steps,
        verify,
    )
    trainer = make_trainer(
        model,
        strategy,
        spec,
        micro_batches=micro_batches,
        clip_norm=clip_norm,
        loss_scale=loss_scale,
        shard_update=shard_update,
        jit_compile=arguments.get("jit_compile") is True,
        verify=verify,
    )
    adapt_callbacks(callbacks, model.optimizer)
    called = make_callbacks(
        callbacks,
        model,
        epochs=epochs,
        steps=feed.steps,
        verbose=verbose,
        shown=is_chief(strategy),
    )
    clock = Clock(trainer.pace, strategy)
    together = WorkerSync(strategy, model, names_of(callbacks))
    hooks = BatchHooks(
        called,
        "train",
        steps_per_call=asked,
        elapsed=clock.elapsed,
        agree=functools.partial(of_any, strategy),
    )
    state = FitState(strategy, called, trainer, feed, model, hooks, seed, initial_epoch)
    if validation is not None:
        feed.read_between(validation.pass_over, initial_epoch)
    model.stop_training = False
    with leaving(called):
        with state.beginning():
            called.on_train_begin()
        place = resume_at(called)
        check_alike(strategy, "fit", {"resume_at of a callback": place})
        check_values_alike(strategy, model, model.optimizer)
        start, step = place or (initial_epoch, 0)
        logs: dict[str, Any] = {}
        over = state.has_ended()
        for epoch in range(epochs if over else start, epochs):
            called.on_epoch_begin(epoch)
            feed.begin_epoch()
            goes_on = place is not None and epoch == start
            first = 0
            if goes_on:
                first = feed.skip(start - initial_epoch, step, done=passes_over(called))
            state.begin_epoch(resumed=goes_on and step > 0)
            found = trainer.epoch(
                feed,
                hooks,
                first=first,
                sums=state.sums,
                steps_per_call=asked,
                stops=together.asked_to_stop(),
                stopped=together.stopped,
                clock=clock,
            )
            if found is None and goes_on:
                # The epoch had ended just where the run is gone on with.
                found = state.logs()
                if found is None:
                    continue
            if found is None:
                raise no_batches(data)
            logs = found
            if validation is not None and validation.is_due(epoch):
                logs = {**logs, **validation(called)}
            called.on_epoch_end(epoch, logs)
            if together.end_epoch():
                break
        if epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        called.on_train_end(logs)
        together.check()
    return model.history


def _checked_shuffle(shuffle: Any) -> bool:
    if not isinstance(shuffle, bool):
        raise DataError(
            "shuffle is True or False: within a batch the order changes nothing. Received: "
            f"shuffle={shuffle!r}."
        )
    return shuffle
