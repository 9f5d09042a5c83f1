"""Steps that ``fit`` trains and validates with: of compiled losses or a forward, or made before."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import LossError, ScopeError
from tfmultigpu.loops.compiled import check_labels, compile_arguments
from tfmultigpu.loops.epoch import Trainer, make_trainer
from tfmultigpu.loops.evaluator import Evaluator, make_evaluator
from tfmultigpu.loops.keras_methods import make_method_evaluator, make_method_trainer
from tfmultigpu.loops.own_loss import own_loss, runs_as_in_keras
from tfmultigpu.loops.own_methods import EVALUATION, OWN_METRICS, own_methods
from tfmultigpu.loops.step_cache import build, checked_strategy
from tfmultigpu.loops.steps_per_call import StepsPerCallTuner
from tfmultigpu.loops.tracked_metrics import TrackedMetrics, metrics_that_assign
from tfmultigpu.loops.worker_agreement import value_of_chief
from tfmultigpu.optimizers.loss_scaling import unwrap_optimizer
from tfmultigpu.steps.chain import ChainedStep, chain_steps
from tfmultigpu.steps.evaluate import EvalStep, make_eval_step
from tfmultigpu.steps.train import make_train_step
from tfmultigpu.steps.train_step import Trained, TrainStep
from tfmultigpu.strategies.topology import describe, strategy_of
from tfmultigpu.types import Verify

__all__ = ["Program", "evaluator_of"]


@dataclasses.dataclass(frozen=True)
class Program:
    """The training and the validation of one ``fit``.

    Attributes:
        model: The model that callbacks see.
        strategy: The strategy that it is trained on.
        forward: The ``forward`` of the user, or None.
        eval_forward: The ``forward`` for validation, or None.
        step: The train step of the user, or None.
        eval_step: The eval step of the user, or None.
    """

    model: Any
    strategy: tf.distribute.Strategy
    forward: Callable[..., Any] | None = None
    eval_forward: Callable[..., Any] | None = None
    step: TrainStep | ChainedStep | None = None
    eval_step: EvalStep | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        forward: Any = None,
        eval_forward: Any = None,
        step: Any = None,
        eval_step: Any = None,
        options: Mapping[str, tuple[Any, Any]],
    ) -> Program:
        """Checks the arguments of ``fit``.

        Args:
            model: The model.
            forward: See ``fit``.
            eval_forward: See ``fit``.
            step: See ``fit``.
            eval_step: See ``fit``.
            options: Options of ``make_train_step``: what was given, and the default.

        Raises:
            LossError: The model is not compiled, or replaces a method of Keras and is on several
                replicas.
            LossError: There are a ``forward`` and compiled losses or metrics.
            ScopeError: A step runs on another strategy than that of the model.
            TypeError: A step is not a step, or a forward not a function.
            ValueError: Arguments exclude each other, or the step trains other models.
        """
        if forward is not None and step is not None:
            raise ValueError(
                "A step has its own forward. Received: forward beside step. Give forward to "
                "make_train_step, or leave out step."
            )
        if eval_forward is not None and eval_step is not None:
            raise ValueError(
                "An eval step has its own forward. Received: eval_forward beside eval_step. Give "
                "one of them."
            )
        if eval_step is not None and not isinstance(eval_step, EvalStep):
            raise TypeError(
                "eval_step must come from tmg.make_eval_step. Received: "
                f"{type(eval_step).__name__}."
            )
        for name, function in (("forward", forward), ("eval_forward", eval_forward)):
            if function is not None and not callable(function):
                raise TypeError(
                    f"{name} must be a function f(model, batch, training). Received: "
                    f"{name}={function!r}. For a Keras loss, write model.compile(optimizer, loss)."
                )
        if step is not None:
            step = _as_one(step)
            changed = _changed(options)
            if changed:
                raise ValueError(
                    f"A step has its own options. Received: {changed[0]}="
                    f"{options[changed[0]][0]!r} beside step. Give it to make_train_step."
                )
            strategy = checked_strategy(model, "fit")
        elif forward is not None:
            strategy = checked_strategy(model, "fit")
            _check_only_optimizer(model)
            eval_forward = forward if eval_forward is None and eval_step is None else eval_forward
        else:
            strategy = checked_strategy(model, "fit")
            compile_arguments(model)
            if model.optimizer is None:
                raise LossError(
                    "fit counts steps by the optimizer of the model. Received: "
                    f"{type(model).__name__} compiled with optimizer=None. Compile it with one of "
                    "the optimizers that its train_step uses."
                )
            if runs_as_in_keras(model, strategy, "fit"):
                _check_options_of_keras(model, options)
        for one in (step, eval_step):
            if one is not None and one.strategy is not strategy:
                raise ScopeError(
                    "The step was made for another strategy than that of the model. Received: a "
                    f"step for {describe(one.strategy)}; model {model.name!r} of "
                    f"{describe(strategy_of(model))}. Make both in the scope of one strategy."
                )
        if step is not None:
            _check_trains(step, model)
        return cls(model, strategy, forward, eval_forward, step, eval_step)

    @property
    def is_compiled(self) -> bool:
        """True if it trains with the compiled losses of the model."""
        return self.forward is None and self.step is None

    @property
    def trained(self) -> tuple[Trained, ...]:
        """Each trained model with its optimizer and variables."""
        if self.step is not None:
            return self.step.trained
        return (Trained(self.model, self.model.optimizer, self.model.trainable_variables),)

    def check_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Checks that callbacks that use the optimizer of the model find one that a step trains.

        Raises:
            LossError: One would find another optimizer, or none.
        """
        import keras

        if self.step is None:
            return
        nan = [one for one in callbacks if isinstance(one, keras.callbacks.TerminateOnNaN)]
        if nan and isinstance(self.step, ChainedStep):
            first = next(iter(self.step.steps))
            raise LossError(
                "TerminateOnNaN reads the log 'loss', and a chain logs a loss for each step. "
                f"Received: TerminateOnNaN with steps {list(self.step.steps)}. Write a callback "
                f"that sets model.stop_training if logs['{first}_loss'] is not finite."
            )
        names = ("LearningRateScheduler", "ReduceLROnPlateau", "SwapEMAWeights", "TensorBoard")
        kinds = tuple(getattr(keras.callbacks, name) for name in names)
        found = [type(one).__name__ for one in callbacks if isinstance(one, kinds)]
        own = getattr(self.model, "optimizer", None)
        trained = [unwrap_optimizer(one.optimizer) for one in self.step.trained]
        if found and not any(one is unwrap_optimizer(own) for one in trained):
            received = "no optimizer" if own is None else f"the optimizer {own.name!r}"
            raise LossError(
                f"{found[0]} uses the optimizer of the model, which the step does not train with. "
                f"Received: {found[0]}, and model {self.model.name!r} with {received}. In the "
                "scope, write model.compile(optimizer) with the optimizer given to "
                "make_train_step."
            )

    def runs_as_in_keras(self, spec: Any = None) -> bool:
        """Returns whether the model trains by a ``train_step`` that it replaces.

        Args:
            spec: The type specs of a batch; None leaves ``compute_loss`` for a later call.
        """
        return self.is_compiled and runs_as_in_keras(self.model, self.strategy, "fit", spec)

    def check_batches(self, spec: Any, options: Mapping[str, tuple[Any, Any]]) -> None:
        """Checks that training batches have the labels that compiled losses need.

        Args:
            spec: The type specs of a batch.
            options: See ``of``.

        Raises:
            LossError: ``compute_loss`` of the model cannot run on several replicas.
            DataError: There are no labels.
            ValueError: An option cannot act in a ``train_step`` of Keras.
        """
        if not self.is_compiled:
            return
        if self.runs_as_in_keras(spec):
            _check_options_of_keras(self.model, options)
        elif own_loss(self.model, self.strategy, spec) is None:
            check_labels(self.model, spec)

    def make_trainer(self, spec: Any, **options: Any) -> Trainer:
        """Returns the ``Trainer`` for batches of these types.

        Args:
            spec: The type specs of a batch.
            options: Arguments for ``make_train_step``.
        """
        if self.runs_as_in_keras(spec):
            return make_method_trainer(self.model, self.strategy, spec)
        if self.is_compiled:
            return make_trainer(self.model, self.strategy, spec, **options)
        step = self.step
        if step is None:
            build(self.model, self.strategy, spec)
            # A reference to the model would be a cycle that holds it until it is searched for.
            proxy = weakref.proxy(self.model)
            step = make_train_step(
                proxy, self.model.optimizer, None, self.strategy, forward=self.forward, **options
            )
        steps = step.steps if isinstance(step, ChainedStep) else {"": step}
        models = [one.model for one in step.trained]
        metrics = {name: _updated_metrics(one, models, spec) for name, one in steps.items()}
        tuner = StepsPerCallTuner(functools.partial(value_of_chief, self.strategy))
        return Trainer(TrackedMetrics.of(metrics), step, tuner)

    def check_validation(self, spec: Any) -> None:
        """Checks that there is something to validate with, and that batches have its labels.

        Raises:
            LossError: There is not.
        """
        if self.eval_step is not None or self.eval_forward is not None:
            return
        if (
            getattr(self.model, "compiled", False)
            and own_methods(self.model, *EVALUATION)
            and (
                runs_as_in_keras(self.model, self.strategy, "evaluate", spec)
                or own_loss(self.model, self.strategy, spec) is not None
            )
        ):
            return
        own = self.step is not None or self.runs_as_in_keras()
        if own and not (
            getattr(self.model, "compiled", False) and compile_arguments(self.model).get("loss")
        ):
            raise LossError(
                "fit was given a step and validation data, but nothing to validate with. Received: "
                f"model {self.model.name!r} without a compiled loss. Give eval_step="
                "tmg.make_eval_step(model, loss, strategy), or eval_forward."
                if self.step is not None
                else "The model replaces train_step of Keras, but has nothing to validate with. "
                f"Received: {type(self.model).__name__} without a compiled loss and without "
                "test_step. Write a test_step, or compile it with a loss."
            )
        check_labels(self.model, spec)

    def make_evaluator(self, spec: Any, verify: Verify) -> Evaluator:
        """Returns the ``Evaluator`` for validation batches of these types."""
        if self.eval_step is None and self.eval_forward is None:
            return evaluator_of(self.model, self.strategy, spec, verify)
        if not self._evaluators:
            step = self.eval_step or make_eval_step(
                weakref.proxy(self.model),
                None,
                self.strategy,
                forward=self.eval_forward,
                verify=verify,
            )
            metrics = _updated_metrics(step, [self.model], spec)
            self._evaluators.append(Evaluator(TrackedMetrics.of({"": metrics}), step))
        return self._evaluators[0]

    @functools.cached_property
    def _evaluators(self) -> list[Evaluator]:
        """The evaluator of the eval step, once it is made: its batches have the same types."""
        return []


def _updated_metrics(step: Any, models: Sequence[Any], spec: Any) -> tuple[Any, ...]:
    """Returns the metrics that a step updates: its own, and those that ``forward`` does."""
    if not any(getattr(model, "metrics", None) for model in models):
        return tuple(step.metrics)
    return (*step.metrics, *metrics_that_assign(models, step.assigned(spec)))


def evaluator_of(
    model: Any, strategy: tf.distribute.Strategy, spec: Any, verify: Verify
) -> Evaluator:
    """Returns the ``Evaluator`` of a compiled model: by our step, or by its own ``test_step``.

    Raises:
        LossError: The model replaces a method that cannot run on several replicas.
        DataError: The batches have no labels, which the compiled losses or metrics need.
    """
    if runs_as_in_keras(model, strategy, "evaluate", spec):
        return make_method_evaluator(model, strategy, spec)
    if own_loss(model, strategy, spec) is None:
        check_labels(model, spec)
    return make_evaluator(model, strategy, spec, verify)


def _changed(options: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [name for name, (given, default) in options.items() if given != default]


def _check_options_of_keras(model: Any, options: Mapping[str, tuple[Any, Any]]) -> None:
    """Checks that no option is given that a ``train_step`` of Keras does not know.

    ``verify`` compares replicas, of which there is one, and ``shard_update=False`` is what it does.
    """
    acting = [name for name in _changed(options) if name != "verify"]
    acting = [name for name in acting if options[name][0] is not False]
    if acting:
        name = acting[0]
        own = own_methods(model, "train_step", *OWN_METRICS, "compute_loss")[0]
        raise ValueError(
            f"{name} acts in the step of this library, and {own} of the model replaces that. "
            f"Received: {name}={options[name][0]!r}, and {type(model).__name__}.{own}. Leave it "
            "out, or write the loss as a forward: tmg.fit(model, data, forward=forward)."
        )


def _as_one(step: Any) -> TrainStep | ChainedStep:
    if isinstance(step, (TrainStep, ChainedStep)):
        return step
    if isinstance(step, Sequence) and not isinstance(step, str):
        return chain_steps(*step)
    raise TypeError(
        "step must come from tmg.make_train_step or tmg.chain_steps, or be a list of train steps. "
        f"Received: {type(step).__name__}."
    )


def _check_trains(step: TrainStep | ChainedStep, model: Any) -> None:
    """Checks that a step trains the model, or a part of it: callbacks save that model."""
    own = {id(variable) for variable in model.variables}
    trained = {id(variable) for one in step.trained for variable in one.variables}
    if own and trained and not own & trained:
        names = ", ".join(repr(one.model.name) for one in step.trained)
        raise ValueError(
            "The step does not train the model, which callbacks would save and restore. Received: "
            f"model {model.name!r}, and a step that trains {names}. Give one of these models."
        )


def _check_only_optimizer(model: Any) -> None:
    if not getattr(model, "compiled", False):
        raise LossError(
            "The model is not compiled, so it has no optimizer. Received: "
            f"{type(model).__name__} {model.name!r}. In the scope, write "
            'model.compile(optimizer="adam").'
        )
    arguments = compile_arguments(model)
    given = [name for name in ("loss", "metrics", "weighted_metrics") if arguments.get(name)]
    if given:
        raise LossError(
            "forward computes the loss itself and shows no labels and predictions to metrics. "
            f"Received: forward, and a model compiled with {' and '.join(given)}. Write "
            'model.compile(optimizer=...), and return values for the logs: loss, {"name": (sum, '
            "weight)}."
        )
