"""Steps from a model, an optimizer and a loss: the features that their options stand for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tfmultigpu.arguments import brief, check_count
from tfmultigpu.steps.build_model import is_built
from tfmultigpu.steps.evaluate import EvalStep
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.features.clipping import ClipByNorm
from tfmultigpu.steps.features.draws import Draws
from tfmultigpu.steps.features.feature import RunsParts
from tfmultigpu.steps.features.logical_replicas import LogicalReplicas
from tfmultigpu.steps.features.lookups import Lookups
from tfmultigpu.steps.features.loss_scaling import LossScaling
from tfmultigpu.steps.features.micro_batches import MicroBatches
from tfmultigpu.steps.features.remat import CallOnce, Recompute
from tfmultigpu.steps.features.xla import CompileByXla
from tfmultigpu.steps.objective import Forward
from tfmultigpu.steps.outputs import StepMetrics
from tfmultigpu.steps.predict import PredictStep
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.strategies.attached import attached
from tfmultigpu.strategies.scopes import check_backend, check_kinds, check_scope, current_strategy
from tfmultigpu.types import (
    ForwardFunction,
    KerasVariable,
    LossScaling as Scaling,
    Model,
    Optimizer,
    Options,
    ShardUpdate,
    Strategy,
    Verify,
)


class StepOptions(TypedDict, total=False):
    """Options that ``fit`` hands on to ``make_train_step``, and that a step is shown with."""

    micro_batches: int | Sequence[int]
    clip_norm: float | None
    loss_scale: Scaling
    logical_replicas: int | None
    shard_update: ShardUpdate


def make_train_step(
    model: Model,
    optimizer: Optimizer,
    loss: Any,
    strategy: Strategy | None = None,
    *,
    metrics: Any = (),
    micro_batches: int | Sequence[int] = 1,
    forward: ForwardFunction | None = None,
    clip_norm: float | None = None,
    loss_scale: Scaling = None,
    logical_replicas: int | None = None,
    shard_update: ShardUpdate = "auto",
    jit_compile: bool = False,
    variables: Sequence[KerasVariable] | None = None,
    verify: Verify = "first",
    features: Sequence[Feature] = (),
) -> TrainStep:
    """Makes a train step that gives on N replicas what one device gives on the same global batches.

    Args:
        model: A Keras model created in ``strategy.scope()``.
        optimizer: A Keras optimizer created in the scope. Clipping set on it acts on the gradient
            of the global batch.
        loss: A Keras loss, its name, a function ``f(y_true, y_pred)`` of per-example values, or a
            dict or list of them for several outputs; ``tmg.steps.Objective`` adds loss weights and
            metrics with sample weights. None with ``forward``.
        strategy: The strategy; None: ``tf.distribute.get_strategy()``.
        metrics: Keras metrics created in the scope, for several outputs a dict by output. Their
            states are added over replicas, so a metric of your own must keep sums and counts.
        micro_batches: Into how many parts each replica's shard is cut, to save memory. Layers that
            look at a whole batch (BatchNormalization) or count calls see each part. If you give a
            number for each replica, all take the largest.
        forward: ``f(model, batch, training) -> LossSum`` for a loss that needs more than labels and
            predictions.
        clip_norm: Largest global norm of the gradient; larger ones are scaled down to it.
        loss_scale: For float16: ``"dynamic"`` or a number. A step whose global gradient is not
            finite is skipped on every replica.
        logical_replicas: Into how many parts each batch is cut, however many replicas compute them:
            the bits of the result depend on this number alone, not on the replicas. It fits one
            replica, or 1, 2, 4, 8 ... parts on each. What rows do together, as in a plain
            BatchNormalization, they do within a part. None means one part for each replica.
        shard_update: Whether one replica updates each variable, keeps its optimizer state, and
            copies it to the others: True, False, or ``"auto"``, which does so if that is known
            to be faster.
        jit_compile: Compile forward and backward with XLA, anew for each size of a batch. Pass True
            on GPUs if all batches have one size and layers do many small operations; time a few
            steps both ways. One device that also compiles gives the same results.
        variables: The variables to train, of the model; None means all its trainable ones.
        verify: When to compare a step with what one device computes on the same global batch, and
            warn about a difference: ``"first"`` (the first batch, and the first that does not
            divide evenly), True for every step, False, or ``"gradients"``, element by element.
        features: Further ``tmg.steps.Feature`` objects. They see the gradient after clipping.

    Returns:
        The step: ``logs = step(batch)``, ``logs = step.run(iterator, steps)``. In the logs are
        ``"loss"``, what one device would report, regularisation included; ``"weight"``, what its
        sum was divided by (with several outputs: the number of rows); ``"gradient_norm"``, before
        clipping; ``"skipped"``, 1 if loss scaling skipped the update; ``"loss_scale"``; and for
        each of several outputs ``"NAME_loss"`` and ``"NAME_weight"``. All are float32 scalars;
        ``run`` adds ``"steps"``, an int64 scalar.

    Raises:
        ScopeError: Model, optimizer or a metric was created outside the scope.
        LossError: ``loss`` is None, or not one value per example.
        TfMultiGpuError: Keras does not run on TensorFlow; or the requested option is not available.
        ValueError: An option is invalid.
        ClusterError: Workers have different programs; here or at the first step.

    Warns:
        ReplicaDependenceWarning: A verified step computed another result than one device.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> strategy = tmg.create_strategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     optimizer = keras.optimizers.SGD(0.1)
        >>> arrays = np.ones((5, 3)), np.ones((5, 1))
        >>> data = tmg.distribute_dataset(arrays, strategy, batch_size=2)
        >>> step = tmg.make_train_step(model, optimizer, "mse", strategy)
        >>> [float(step(batch)["weight"]) for batch in data]
        [2.0, 2.0, 1.0]
    """
    options: StepOptions = {
        "micro_batches": micro_batches,
        "clip_norm": clip_norm,
        "loss_scale": loss_scale,
        "logical_replicas": logical_replicas,
        "shard_update": shard_update,
    }
    settings = {"loss": loss, "forward": forward, "metrics": metrics, **options}
    settings["variables"] = variables and [variable.path for variable in variables]
    check_backend(model, optimizer, loss, metrics)
    check_kinds(model, strategy, optimizer)
    strategy = current_strategy(strategy, "make_train_step", model)
    passes = Forward.of(model, loss, forward, variables)
    parts = check_options(options)
    check_features(features)
    # In this order. Of the functions of replicas the first feature is the innermost; the gradient
    # goes from the first to the last.
    ours: list[Feature] = []
    if jit_compile:
        ours.append(CompileByXla())  # Innermost: a loop of micro-batches is not compiled with it.
    if parts > 1:
        ours.append(MicroBatches(parts, _loop_of(features)))  # Inside of one set of seeds.
    ours += _dealt(logical_replicas)
    ours.append(Draws(by_xla=jit_compile))
    ours.append(Lookups())
    ours.append(Recompute())
    ours.append(LossScaling(loss_scale))  # Decides about the gradient before it is clipped.
    if clip_norm is not None:
        ours.append(ClipByNorm(clip_norm))
    ours.extend(features)  # Those of users see the clipped gradient. Verification is the last.
    step = TrainStep(
        passes, optimizer, strategy, _features(strategy, ours, verify),
        metrics=StepMetrics(metrics, passes, strategy),
        shard_update=shard_update, settings=settings,
        options=asked_for(options),
    )  # fmt: skip
    step.bind()
    if is_built(passes.model):
        step.build()
    else:  # The rest is built from the first batch.
        check_scope(passes.model.variables, strategy, "model")
    return step


def make_eval_step(
    model: Model,
    loss: Any,
    strategy: Strategy | None = None,
    *,
    metrics: Any = (),
    forward: ForwardFunction | None = None,
    logical_replicas: int | None = None,
    verify: Verify = "first",
) -> EvalStep:
    """Makes a step that computes loss and metrics without training.

    Args:
        model: The model. All arguments are as for ``make_train_step``.
        loss: The loss; None for metrics alone.
        strategy: The strategy.
        metrics: Keras metrics.
        forward: A forward pass of your own.
        logical_replicas: Into how many parts each batch is cut; see there.
        verify: ``"first"``, True or False.

    Returns:
        The step: ``logs = step(batch)`` with ``"loss"`` and ``"weight"``, float32 scalars, and
        ``logs = step.run(iterator, steps)``, whose loss is the mean over all rows seen.

    Raises:
        ScopeError: The model or a metric was created outside the scope.
        LossError: ``loss`` is None, or not one value per example.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> step = tmg.make_eval_step(model, "mse")
        >>> float(step((np.ones((5, 3)), np.ones((5, 1))))["weight"])
        5.0
    """
    check_backend(model, loss, metrics)
    check_kinds(model, strategy)
    strategy = current_strategy(strategy, "make_eval_step", model)
    passes = Forward.of(model, loss, forward)
    ours = [*_dealt(logical_replicas), Draws(), Lookups(), CallOnce()]
    parts = _features(strategy, ours, verify)
    return EvalStep(passes, strategy, parts, metrics=StepMetrics(metrics, passes, strategy)).bind()


def make_predict_step(
    model: Model,
    strategy: Strategy | None = None,
    *,
    verify: Verify = "first",
) -> PredictStep:
    """Makes a step that predicts each row of a batch once, in the order of the batch.

    Args:
        model: The model. All arguments are as for ``make_train_step``.
        strategy: The strategy.
        verify: ``"first"``, True or False; predictions are compared row by row.

    Returns:
        The step: ``outputs = step(batch)``, tensors of shape ``[rows of the global batch, ...]`` in
        the structure of the model's outputs.

    Raises:
        ScopeError: The model was created outside the scope.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> tmg.make_predict_step(model)(np.ones((5, 3))).shape
        TensorShape([5, 2])
    """
    check_backend(model)
    check_kinds(model, strategy)
    strategy = current_strategy(strategy, "make_predict_step", model)
    return PredictStep(
        model, strategy, _features(strategy, [Draws(), Lookups(), CallOnce()], verify)
    ).bind()


# Options of a train step --------------------------------------------------------------------------


def all_options(given: Mapping[str, object]) -> Options:
    """Returns each of ``StepOptions`` as it is given, or else its default."""
    parameters = inspect.signature(make_train_step).parameters
    return {name: given.get(name, parameters[name].default) for name in StepOptions.__annotations__}


def asked_for(options: Mapping[str, object]) -> Options:
    """Returns the options of ``make_train_step`` that are not its default."""
    parameters = inspect.signature(make_train_step).parameters
    return {name: v for name, v in options.items() if v != parameters[name].default}


def check_verify(verify: object) -> None:
    """Checks the option ``verify``."""
    if not isinstance(verify, bool) and verify not in ("first", "gradients"):
        raise ValueError(
            f"verify is 'first', True, False or 'gradients'. Received: verify={brief(verify)}."
        )


def check_options(options: StepOptions) -> int:
    """Checks options, and returns how many parts of a shard ``micro_batches`` asks for."""
    shard_update = options["shard_update"]
    if not isinstance(shard_update, bool) and shard_update != "auto":
        raise ValueError(
            f"shard_update is True, False or 'auto'. Received: shard_update={brief(shard_update)}."
        )
    parts = options["micro_batches"]
    counts = parts if isinstance(parts, (list, tuple)) else [parts]
    return max(check_count("micro_batches", count, error=ValueError) for count in counts)


# Features -----------------------------------------------------------------------------------------


def check_features(features: Any) -> None:
    """Checks the features of a user."""
    is_list = isinstance(features, Sequence)
    if not is_list or not all(isinstance(each, Feature) for each in features):
        raise TypeError(
            "features takes a list of objects of subclasses of tmg.steps.Feature. Received: "
            f"features={features!r}. Write features=[Mine()], with class Mine(tmg.steps.Feature)."
        )


def _dealt(logical_replicas: int | None) -> list[Feature]:
    """Returns what deals logical replicas to devices, if there are any."""
    if logical_replicas is None:
        return []
    return [LogicalReplicas(check_count("logical_replicas", logical_replicas, error=ValueError))]


def _loop_of(features: Sequence[Feature]) -> RunsParts | None:
    """Returns how a feature wants micro-batches to be run; None for one after the other."""
    loops = [feature.loop for feature in features if feature.loop is not None]
    return loops[0] if loops else None


def _features(strategy: Strategy, ours: list[Feature], verify: Verify) -> list[Feature]:
    """Returns the features of a step, in their order."""
    check_verify(verify)
    # What an add-on has left with a strategy, such as for sharded variables.
    parts = [*(make() for make in attached(strategy).features), *ours]
    is_cut = strategy.num_replicas_in_sync > 1
    if not any(isinstance(feature, LogicalReplicas) for feature in ours):  # As on one device.
        is_cut = is_cut or any(isinstance(feature, MicroBatches) for feature in ours)
    if verify and is_cut:
        from tfmultigpu.addons.verification import Verify as VerifySteps

        parts.append(VerifySteps(verify))
    return parts
