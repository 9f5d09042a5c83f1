"""Steps that ``fit`` trains and validates with: of compiled losses or a forward, or made before."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfmultigpu.addons.loops.cache import build_if_needed, checked_strategy, get_or_make
from tfmultigpu.addons.loops.compiled import (
    EpochMetrics,
    check_labels,
    choose_compilation,
    compile_arguments,
    metrics_inside,
    read_compiled,
)
from tfmultigpu.addons.loops.feed import Feed
from tfmultigpu.addons.loops.hooks import Hooks
from tfmultigpu.addons.loops.loop import EvaluationLoop, TrainingLoop
from tfmultigpu.addons.loops.methods import refuse_own_methods, replaces
from tfmultigpu.errors import LossError, ScopeError
from tfmultigpu.steps.chain import ChainedStep
from tfmultigpu.steps.evaluate import EvalStep
from tfmultigpu.steps.make import asked_for, make_eval_step, make_train_step
from tfmultigpu.steps.objective import Objective
from tfmultigpu.steps.pace import CallLength
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.topology import describe
from tfmultigpu.types import Function, KerasModel, Options, Verify

_log = logging.getLogger("tfmultigpu")
_Step = TypeVar("_Step", TrainStep, EvalStep)


@dataclasses.dataclass(frozen=True)
class Program:
    """The training and the validation of one ``fit``, or an evaluation.

    Attributes:
        model: The model that callbacks see.
        strategy: The strategy that it was created on.
        forward, step, eval_step, verify: See ``fit``.
        options: Further options of ``make_train_step``.
    """

    model: KerasModel
    strategy: tf.distribute.Strategy
    forward: Function | None = None
    step: TrainStep | ChainedStep | None = None
    eval_step: EvalStep | None = None
    verify: Verify = "first"
    options: Options = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: KerasModel,
        forward: Function | None,
        step: TrainStep | ChainedStep | None,
        eval_step: EvalStep | None,
        verify: Verify,
        options: Options,
    ) -> Program:
        """Checks the arguments of ``fit``; see there."""
        strategy = checked_strategy(model, "fit")
        options_of_step = {"forward": forward, **options, "verify": verify}
        beside = list(asked_for(options_of_step))
        if step is not None and beside:
            raise ValueError(
                f"A step has its own options. Received: {beside[0]} and a step. Give it to "
                "tmg.make_train_step, or leave out the step."
            )
        for name, made in (("step", step), ("eval_step", eval_step)):
            kinds = (TrainStep, ChainedStep) if name == "step" else EvalStep
            if made is not None and not isinstance(made, kinds):
                raise TypeError(
                    "step must come from tmg.make_train_step or tmg.chain_steps(first, second), "
                    "and eval_step from tmg.make_eval_step. Received: "
                    f"{name}={type(made).__name__}."
                )
            if made is not None and made.strategy is not strategy:
                raise ScopeError(
                    "The step was made for another strategy than the model's.",
                    f"a step for {describe(made.strategy)}; model {model.name!r} of "
                    f"{describe(strategy)}",
                    "Make both in the scope of one strategy.",
                )
        if step is not None:
            _check_trains(step, model)
        elif forward is not None:
            _check_only_optimizer(model)
        else:
            compile_arguments(model)
            refuse_own_methods(model, "fit")
        return cls(model, strategy, forward, step, eval_step, verify, options)

    def compile_with_optimizer(self) -> None:
        """Compiles a model that is not, with the optimizer of its step, which Keras asks for."""
        if self.step is None or getattr(self.model, "compiled", False):
            return
        optimizer = self.step.train_steps[0].optimizer
        for part in self.step.train_steps:
            if part.model is self.model:
                optimizer = part.optimizer
                break
        keras.Model.compile(self.model, optimizer=optimizer)

    def training_loop(self, hooks: Hooks, feed: Feed, width: int | None, seen: int) -> TrainingLoop:
        """Returns what the loop of Keras calls to train.

        Args:
            hooks: The callbacks.
            feed: The data.
            width: The batches of a call that the user has set, or None.
            seen: Batches before a restart.
        """
        step, metrics = self._train_step(feed.element_spec)
        # A tenth of a second: callbacks of a batch, and Ctrl-C, come between calls.
        calls = functools.partial(CallLength, self.strategy, seconds=0.1, largest=64, measured=8)
        pace = get_or_make(self.model, "pace", weakref.ref(step), calls)
        return TrainingLoop(self.model, hooks, feed, step, metrics, pace, width=width, seen=seen)

    def _train_step(self, spec: Any) -> tuple[TrainStep | ChainedStep, EpochMetrics]:
        """Returns the step that trains on such batches, and the metrics in the logs."""
        model, strategy, step = self.model, self.strategy, self.step
        # A reference to the model would be a cycle that holds it until it is searched for.
        proxy = weakref.proxy(model)
        options = {**self.options, "verify": self.verify}
        if step is None:
            build_if_needed(model, strategy, spec)
            compilation = choose_compilation(model, strategy, spec)
            _log.debug("XLA: %s: %s", compilation.by_xla, compilation.reason)
            options["jit_compile"] = compilation.by_xla
        if step is None and self.forward is None:

            def make(loss: Objective, metrics: Any) -> TrainStep:
                given = {"metrics": metrics, **options}
                return make_train_step(proxy, model.optimizer, loss, strategy, **given)

            # A new layer needs a new step; the step itself handles frozen layers.
            key = id(model.optimizer), *map(id, model.variables), options
            return self._of_compiled("fit", key, spec, make)
        if step is None:
            step = make_train_step(
                proxy, model.optimizer, None, strategy, forward=self.forward, **options
            )
        steps = step.steps if isinstance(step, ChainedStep) else {"": step}
        inside: list[Any] = []
        for part in step.train_steps:
            inside += metrics_inside(part.model)
        return step, EpochMetrics(inside, None, steps)

    def _of_compiled(
        self, purpose: str, key: object, spec: Any, make: Callable[..., _Step]
    ) -> tuple[_Step, EpochMetrics]:
        """Returns the step for what the model was compiled with, and the metrics in its logs.

        They belong to the last call with the same key and ``model.compile``.
        """
        arguments = compile_arguments(self.model)
        check_labels(self.model, spec)

        def make_all() -> tuple[_Step, EpochMetrics, object]:
            losses, metrics = read_compiled(self.model, self.strategy, spec)
            plain = losses.pop("metrics", ())
            # The arguments stay alive, or another object could have their id.
            return make(Objective(**losses), plain), metrics, arguments

        key = self.strategy, id(arguments), key
        step, metrics, _ = get_or_make(self.model, purpose, key, make_all)
        return step, metrics

    def check_validation(self) -> None:
        """Checks that there is something to validate with."""
        if self.eval_step is not None or self.forward is not None:
            return
        if not (getattr(self.model, "compiled", False) and compile_arguments(self.model)["loss"]):
            raise LossError(
                "fit has validation data and nothing to validate with.",
                f"model {self.model.name!r} without a compiled loss",
                "Give eval_step=tmg.make_eval_step(model, loss, strategy), or compile a loss.",
            )
        refuse_own_methods(self.model, "evaluate")

    def evaluation_loop(self, hooks: Hooks, feed: Feed) -> EvaluationLoop:
        """Returns what the loop of Keras calls to evaluate."""
        model, strategy, spec = self.model, self.strategy, feed.element_spec
        proxy, pace = weakref.proxy(model), CallLength(strategy, measured=0, steps=32)
        dealt = self.options.get("logical_replicas")
        if self.step is not None:
            dealt = self.step.logical_replicas
        if self.eval_step is not None or self.forward is not None:
            step = self.eval_step or make_eval_step(
                proxy,
                None,
                strategy,
                forward=self.forward,
                verify=self.verify,
                logical_replicas=dealt,
            )
            metrics = EpochMetrics(metrics_inside(model), None, {"": step})
            return EvaluationLoop(model, hooks, feed, step, metrics, pace)
        build_if_needed(model, strategy, spec)

        def make(loss: Objective, metrics: Any) -> EvalStep:
            options: Options = {"verify": self.verify, "logical_replicas": dealt}
            return make_eval_step(proxy, loss, strategy, metrics=metrics, **options)

        # A new layer or a frozen layer needs a new step.
        variables = [(id(variable), variable.trainable) for variable in model.variables]
        key = variables, self.verify, dealt
        step, metrics = self._of_compiled("evaluate", key, spec, make)
        return EvaluationLoop(model, hooks, feed, step, metrics, pace)


def _check_trains(step: TrainStep | ChainedStep, model: KerasModel) -> None:
    """Checks that a step trains the model, or a part of it: callbacks save that model."""
    of_model = set(map(id, model.variables))
    trained: set[int] = set()
    for part in step.train_steps:
        trained.update(map(id, part.forward.trained))
    if of_model and trained and not of_model & trained:
        names = ", ".join(repr(part.model.name) for part in step.train_steps)
        raise ValueError(
            "The step does not train the model, which callbacks would save and restore. Received: "
            f"model {model.name!r}, and a step that trains {names}. Give one of these models."
        )


def _check_only_optimizer(model: KerasModel) -> None:
    arguments = compile_arguments(model)
    names = ["metrics", "weighted_metrics"]
    if not replaces(model, "compute_loss"):  # In which super().compute_loss reads the loss.
        names.insert(0, "loss")
    compiled = [name for name in names if arguments.get(name)]
    if compiled:
        raise LossError(
            "forward computes the loss itself and shows no labels and predictions to metrics.",
            f"forward, and a model compiled with {' and '.join(compiled)}",
            "Write model.compile(optimizer=...). A metric is an attribute of the model, "
            "model.accuracy = keras.metrics.BinaryAccuracy() in the scope, and forward updates it: "
            "model.accuracy.update_state(y, outputs).",
        )
