"""fit, evaluate, predict and prepare: models, data, callbacks and arguments."""

from __future__ import annotations

import functools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from lines.messages import Told, example
from lines.parts import (
    X,
    Y,
    batches,
    compiled,
    dense,
    distribute,
    fit,
    fitted,
    made,
    optimizer_of,
    single_examples,
    step,
    strategy_of,
)


def mean_of(model: Any, batch: Any, training: bool) -> Any:
    return tmg.loss_sum("mse", batch[1], model(batch[0], training=training))


def trained_by(model: Any, **options: Any) -> Any:
    return step(model, None, model.optimizer, forward=mean_of, **options)


@example("{} needs a keras.Model")
def a_layer(told: Told) -> None:
    layer = keras.layers.Dense(2)
    with told():
        tmg.predict(layer, X)
    tmg.predict(made(lambda: keras.Sequential([layer])), X, verbose=0)


@example("{} was called inside the scope of another strategy")
def fit_in_another_scope(told: Told) -> None:
    model = fitted()
    with told(tmg.ScopeError, "fit outside the scope"), strategy_of(3).scope():
        fit(X, Y, model=model)
    fit(X, Y, model=model)


@example("the data has no labels. Received")
def no_labels_in_fit(told: Told) -> None:
    with told():
        fit(batches(X).map(lambda x: x))
    fit((X, Y))
    fit((X, Y, np.ones(8)))


@example("The model is not compiled, so it has no loss")
def not_compiled(told: Told) -> None:
    model = made()
    with told():
        fit(X, Y, model=model)
    with strategy_of(2).scope():
        model.compile("adam", loss="mse")
    fit(X, Y, model=model)
    other = made()
    tmg.fit(other, (X, Y), step=step(other), verbose=0)


@example("Keras would train the sum over the rows")
def reduction_none(told: Told) -> None:
    with told(tmg.errors.LossError, "reduction='sum'"):
        fit(X, Y, model=compiled(keras.losses.MeanSquaredError(reduction=None)))
    for reduction in ("sum", "sum_over_batch_size"):
        fit(X, Y, model=compiled(keras.losses.MeanSquaredError(reduction=reduction)))


class Counts(keras.Sequential):
    """Has two metrics of its own, which ``forward`` updates."""

    def watch(self, *names: str) -> Any:
        with strategy_of(2).scope():
            self.means = [keras.metrics.Mean(name=name) for name in names]
            self.compile(optimizer=keras.optimizers.SGD(0.1))
        return self

    @staticmethod
    def forward(model: Any, batch: Any, training: bool) -> Any:
        for mean in model.means:
            mean.update_state(batch[0][:, 0])
        return mean_of(model, batch, training)


def counting(*names: str) -> Any:
    return made(lambda: Counts([keras.Input((4,)), keras.layers.Dense(2)])).watch(*names)


@example("Two metrics have one name, so the logs would hold one of them")
def two_metrics_of_one_name(told: Told) -> None:
    with told():
        model = counting("mean", "mean")
        tmg.fit(model, (X, Y), step=step(model, None, model.optimizer, forward=model.forward),
                verbose=0)  # fmt: skip
    fit(X, Y, model=(model := counting("mean", "other")), forward=model.forward)


@example("A metric has the name of a loss")
def a_metric_named_loss(told: Told) -> None:
    with told(ValueError, r"Received: \['loss'\]\. Give the metric another"):
        fit(X, Y, model=(model := counting("loss")), forward=model.forward)
    fit(X, Y, model=(model := counting("first")), forward=model.forward)


@example("Your input ran out of data")
def too_little_data(told: Told) -> None:
    with told():
        fit(batches(), steps_per_epoch=3, epochs=2)
    fit(batches().repeat(), steps_per_epoch=3, epochs=2)


@example("verbose must be 0, 1, 2 or 'auto'")
def verbose_of_three(told: Told) -> None:
    with told(ValueError):
        fit(X, Y, verbose=3)
    fit(X, Y, verbose=0)


@example("A callback must be a keras.callbacks.Callback")
def a_callback_as_a_class(told: Told) -> None:
    model = compiled()
    with told(TypeError):
        fit(X, Y, model=model, callbacks=[keras.callbacks.EarlyStopping])
    checkpoints = tmg.Checkpoints("run", model, model.optimizer)
    stopping = keras.callbacks.EarlyStopping(monitor="loss")
    fit(X, Y, model=model, callbacks=[stopping, checkpoints.callback()])


@example("BackupAndRestore resumes only Keras' own fit")
def backup_and_restore(told: Told) -> None:
    model = compiled()
    with told(tmg.CheckpointError):
        fit(X, Y, model=model, callbacks=[keras.callbacks.BackupAndRestore("backup")])
    checkpoints = tmg.Checkpoints("run", model, model.optimizer)
    checkpoints.restore()
    fit(X, Y, model=model, callbacks=[checkpoints.callback()])


def chained(model: Any) -> Any:
    other = step()
    return tmg.chain_steps(trained_by(model), other, names=("first", "second"))


@example("TerminateOnNaN reads the log 'loss'")
def terminate_on_nan_in_a_chain(told: Told) -> None:
    class Stop(keras.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            if not np.isfinite(logs["first_loss"]):
                self.model.stop_training = True

    model = compiled()
    with told(tmg.errors.LossError, r"with steps \['first', 'second'\]\. Write"):
        tmg.fit(model, (X, Y), step=chained(model), callbacks=[keras.callbacks.TerminateOnNaN()])
    tmg.fit(model, (X, Y), step=chained(model), callbacks=[Stop()], verbose=0)


@example("The fit of Keras cannot put moving averages into sharded variables")
def moving_averages_of_sharded_variables(told: Told) -> None:
    def sharded(**options: Any) -> Any:
        with strategy_of(2).scope(), tmg.sharded_variables(at_least=0):
            model = dense()
            model.compile(keras.optimizers.SGD(0.1, **options), "mse")
        return model

    with told(tmg.errors.LossError, "SGD with use_ema"):
        fit(X, Y, model=sharded(use_ema=True))
    fit(X, Y, model=sharded())
    model = sharded(use_ema=True)
    step(model, "mse", model.optimizer)((X, Y))


@example("{} uses the optimizer of the model, which the step does not train with")
def a_schedule_of_another_optimizer(told: Told) -> None:
    model, optimizer = made(), optimizer_of()
    trained = step(model, optimizer=optimizer)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)
    with strategy_of(2).scope():
        model.compile(keras.optimizers.SGD(0.1))
    with told():
        tmg.fit(model, (X, Y), step=trained, callbacks=[schedule], verbose=0)
    with strategy_of(2).scope():
        model.compile(optimizer)
    tmg.fit(model, (X, Y), step=trained, callbacks=[schedule], verbose=0)


@example("they cannot run inside a tf.function")
def fit_in_a_function(told: Told) -> None:
    with told(tmg.errors.DataError):
        tf.function(lambda: fit(X, Y), autograph=False)()
    fit(X, Y)
    trained = step()
    (batch,) = distribute(batches(size=8))
    iterator = iter(distribute(batches(size=8)))
    tf.function(lambda it: trained(next(it))["loss"], autograph=False)(iterator)
    trained(batch)


@example(" needs data. Received: none")
def no_data(told: Told) -> None:
    with told(TypeError, r"evaluate needs data\. .* Write tmg\.evaluate\(model, data\)"):
        tmg.evaluate(fitted())
    tmg.evaluate(fitted(), (X, Y), verbose=0)


@example(" takes its data once: x is Keras' name of it")
def data_and_x(told: Told) -> None:
    with told(
        TypeError, r"predict takes .* Received: data and x\. Write tmg\.predict\(model, data\)"
    ):
        tmg.predict(fitted(), X, x=X)
    tmg.predict(fitted(), X, verbose=0)


@example("A tuple is (x, y), so it holds labels already")
def a_tuple_beside_labels(told: Told) -> None:
    with told(tmg.errors.DataError, r"a tuple of 2, and y\. Write tmg\.fit\(model, \(x, y"):
        fit((X, X), Y)
    fit((X, Y))
    with strategy_of(2).scope():
        first, second = keras.Input((4,)), keras.Input((4,))
        added = keras.layers.Add()([first, second])
        model = keras.Model([first, second], keras.layers.Dense(2)(added))
        model.compile("sgd", "mse")
    fit([X, X], Y, model=model)


@example("validation_split works only for arrays")
def a_split_of_a_dataset(told: Told) -> None:
    with told(tmg.errors.DataError):
        fit(batches(), validation_split=0.5)
    fit(batches().take(1), validation_data=batches().skip(1))


@example("validation_split is a fraction that leaves examples")
def a_split_that_leaves_nothing(told: Told) -> None:
    with told(tmg.errors.DataError, "of 8 examples"):
        fit(X, Y, validation_split=0.999)
    fit(X, Y, validation_split=0.5)


@example("only if an epoch is one pass over the data")
def checkpoints_with_steps_per_epoch(told: Told) -> None:
    model = compiled()
    dataset = single_examples()
    callback = tmg.Checkpoints("first", model, model.optimizer).callback()
    for data in ((X, Y), dataset.batch(2)):
        with told(tmg.errors.DataError, r"take\(steps\)"):
            fit(data, model=model, steps_per_epoch=3, callbacks=[callback])
    checkpoints = tmg.Checkpoints(
        "run", model, model.optimizer,
        data=lambda epoch: dataset.shuffle(8, seed=epoch).batch(2).take(3),
    )  # fmt: skip
    fit(checkpoints.data, model=model, callbacks=[checkpoints.callback()])


@example("The data was distributed for another strategy than the model's")
def data_for_three(told: Told) -> None:
    again = tmg.create_strategy(devices=2)  # As a notebook's cell that is run once more.
    for data in (distribute(batches(), 3), tmg.distribute_dataset(batches(), again)):
        with told():
            fit(data)
    fit(batches())
    with again.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    fit(tmg.distribute_dataset(batches(), again), model=model)
    fit(tmg.distribute_dataset(batches(), strategy_of(2)))


@example("The data has no end, so a pass over it would never finish")
def endless(told: Told) -> None:
    with told(tmg.errors.DataError, r"steps=100, or leave out \.repeat"):
        tmg.evaluate(fitted(), batches().repeat())
    tmg.evaluate(fitted(), batches().repeat(), steps=100, verbose=0)
    tmg.evaluate(fitted(), batches(), verbose=0)


@example("{} works only for arrays (x, y). Received")
def sample_weight_beside_a_dataset(told: Told) -> None:
    with told(tmg.errors.DataError):
        tmg.evaluate(fitted(), batches(), sample_weight=np.ones(8))
    tmg.evaluate(fitted(), batches(X, Y, np.ones(8, "float32")), verbose=0)


@example("The data is already distributed, so {} cannot be applied")
def shares_of_distributed_data(told: Told) -> None:
    with told(tmg.errors.DataError):
        fit(distribute(batches()), shares=(1, 2))
    fit(batches(), shares=(1, 2))
    fit(distribute(batches()))


@example("Keras gave its own data to a step of tfmultigpu")
def train_on_batch_in_a_callback(told: Told) -> None:
    class Calls(keras.callbacks.Callback):
        def __init__(self, call: Any) -> None:
            super().__init__()
            self.call = call

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.call(self.model)

    def both(model: Any) -> None:
        model.evaluate(X, Y, verbose=0)
        model.predict(X, verbose=0)

    model = compiled()
    with told():
        fit(X, Y, model=model, callbacks=[Calls(lambda model: model.train_on_batch(X, Y))])
    fit(X, Y, model=model, callbacks=[Calls(both)])
    trained = step(model, "mse", model.optimizer)
    fit(X, Y, model=model, callbacks=[Calls(lambda model: trained((X, Y)))])


@example("A callback or the data raised an error with which Keras silently ends")
def stop_iteration(told: Told) -> None:
    class Ends(keras.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            raise StopIteration

    class Stops(keras.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    model = compiled()
    with told():
        fit(X, Y, model=model, callbacks=[Ends()])
    fit(X, Y, model=model, callbacks=[Stops()])


@example("{} has no argument {}")
def an_unknown_argument(told: Told) -> None:
    with told(TypeError, "Received.*Write epochs"):
        fit(X, Y, epoch=1)
    fit(X, Y, epochs=1)
    with told(
        TypeError, r"Received: metrics=\['mae'\].*Write model\.compile\(\.\.\., metrics=\.\.\.\)"
    ):
        fit(X, Y, metrics=["mae"])
    fit(X, Y, model=compiled(metrics=["mae"]))


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return {}


@example("The model replaces {} of Keras")
def a_train_step(told: Told) -> None:
    def own() -> Any:
        return OwnStep([keras.Input((4,)), keras.layers.Dense(2)])

    model = compiled(build=own)
    with told():
        fit(X, Y, model=model)
    with strategy_of(2).scope():
        model.compile(keras.optimizers.SGD(0.1))

    def forward(model: Any, batch: Any, training: bool) -> Any:
        x, y = batch
        values = tf.reduce_sum(tf.square(y - model(x, training=training)), axis=-1)
        return tmg.LossSum(tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32))

    tmg.fit(model, (X, Y), forward=forward, verbose=0)


class OwnLosses(keras.Sequential):
    """Adds a penalty in a property that Keras' train_step reads."""

    @property
    def losses(self) -> Any:
        return [*super().losses, 0.01 * tf.reduce_sum(tf.square(self.layers[-1].kernel))]


class OwnTrained(keras.Sequential):
    """Names what it trains in such a property."""

    @property
    def trainable_weights(self) -> Any:
        return super().trainable_weights[-2:]


@example("The model replaces {} of Keras")
def a_property_that_keras_reads(told: Told) -> None:
    def own(kind: Any = OwnLosses, penalty: Any = None) -> Any:
        head = keras.layers.Dense(2, kernel_regularizer=penalty)
        return compiled(build=lambda: kind([keras.Input((4,)), keras.layers.Dense(3), head]))

    with told(tmg.errors.LossError, r"OwnLosses\.losses.*kernel_regularizer='l2'"):
        fit(X, Y, model=own())
    model = own(keras.Sequential, "l2")
    fit(X, Y, model=model)
    with told(tmg.errors.LossError, r"OwnTrained\.trainable_weights.*layer\.trainable = False"):
        fit(X, Y, model=own(OwnTrained))
    model = own(keras.Sequential)
    model.layers[0].trainable = False
    before = model.layers[0].get_weights()[0]
    fit(X, Y, model=model)
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], before)


@example("The predictions of the batches do not make one array")
def predictions_of_other_lengths(told: Told) -> None:
    model = made(lambda: keras.Sequential([keras.Input((None,)), keras.layers.Identity()]))

    def make() -> Any:
        return iter([X[:, :3], X])

    spec = tf.TensorSpec([None, None])
    data = tf.data.Dataset.from_generator(make, output_signature=spec)
    with told():
        tmg.predict(model, data, verbose=0)
    padded = data.map(lambda x: tf.pad(x, [[0, 0], [0, 4 - tf.shape(x)[1]]]))
    tmg.predict(model, padded, verbose=0)
    predict = tmg.make_predict_step(model, strategy_of(2), verify=False)
    assert [predict(batch).shape for batch in distribute(data)] == [(8, 3), (8, 4)]


@example("prepare takes a keras.Model")
def prepared_layer(told: Told) -> None:
    with told(TypeError, "Received: Dense"):
        tmg.prepare(keras.layers.Dense(2))
    tmg.prepare(fitted()).close()


@example("The step does not train the model, which callbacks would save")
def a_step_of_another_model(told: Told) -> None:
    trained = step(other := made())
    with told(ValueError, "and a step that trains "):
        tmg.fit(made(), (X, Y), step=trained, verbose=0)
    tmg.fit(other, (X, Y), step=trained, verbose=0)


@example("forward computes the loss itself and shows no labels")
def a_loss_beside_forward(told: Told) -> None:
    model = compiled("mse")
    with told(tmg.errors.LossError, "compiled with loss"):
        fit(X, Y, model=model, forward=mean_of)
    with strategy_of(2).scope():
        model.compile(optimizer=keras.optimizers.SGD(0.1))
    fit(X, Y, model=model, forward=mean_of)
    fit(X, Y, model=(other := counting("mean")), forward=other.forward)


@example("There is nothing to evaluate: no loss and no metric was given")
def nothing_to_evaluate(told: Told) -> None:
    with strategy_of(2).scope():
        model = dense()
        model.compile("sgd")
    with told(tmg.errors.LossError, r"forward=f\)"):
        tmg.evaluate(model, X, Y, verbose=0)
    step = tmg.make_eval_step(model, None, strategy_of(2), forward=mean_of)
    assert step((X, Y))["loss"] > 0
    with strategy_of(2).scope():
        model.compile(loss="mse")
    assert tmg.evaluate(model, X, Y, verbose=0) > 0


def weighted_mean_of(model: Any, batch: Any, training: bool) -> Any:
    x, y, weight = batch
    return tmg.loss_sum("mse", y, model(x), weight)


def optimized() -> Any:
    with strategy_of(2).scope():
        model = dense()
        model.compile("sgd")
    return model


@example("The forward computes a loss that the sample weights do not reach. Received: {}, and")
def a_forward_without_weights(told: Told) -> None:
    weights, model = np.arange(8.0), optimized()
    of_classes = {"class_weight": {0: 1.0, 1: 5.0}, "forward": mean_of}
    of_rows = {"sample_weight": weights}
    ways: list[tuple[Any, dict[str, Any]]] = [
        ((X, Y), {**of_rows, "forward": mean_of}),
        ((X, Y, weights), {"forward": mean_of}),
        ((X, Y[:, :1]), of_classes),
        (batches(X, Y[:, :1]), of_classes),
        ((X, Y), {**of_rows, "step": trained_by(model), "verify": "first"}),
        ((X, Y), {"validation_data": (X, Y, weights), "forward": mean_of}),
    ]
    for data, options in ways:
        with told(tmg.errors.LossError):
            fit(data, model=model, **options)
    fit((X, Y, weights), model=model, forward=weighted_mean_of)


@example("{} Received: batches of three parts, the last of {}")
def a_forward_that_leaves_a_part_out(told: Told) -> None:
    three = batches(X, Y, np.arange(8.0, dtype="float32"))
    with told(UserWarning, "do not reach.*Or leave that part out"):
        fit(three, model=optimized(), forward=mean_of)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(three, model=optimized(), forward=weighted_mean_of)
        fit(three.map(lambda x, y, _: (x, y)), model=optimized(), forward=mean_of)
        fit(batches(X, Y, np.arange(8)), model=optimized(), forward=mean_of)  # Numbers of rows.


@example("validation_batch_size is for arrays, and other data yields batches by itself")
def a_validation_batch_size_of_a_dataset(told: Told) -> None:
    with told(tmg.errors.DataError, "validation_batch_size=4"):
        fit(X, Y, validation_data=batches(), validation_batch_size=4)
    fit(X, Y, validation_data=batches())
    fit(X, Y, validation_data=(X, Y), validation_batch_size=4)


@example("fit validates only with validation_data or validation_split")
def options_of_no_validation(told: Told) -> None:
    of_step = tmg.make_eval_step(fitted(), "mse", strategy_of(2))
    options = {"validation_steps": 2, "validation_freq": 2, "validation_batch_size": 4}
    for name, value in {**options, "eval_step": of_step}.items():
        with told(UserWarning, name):
            fit(X, Y, **{name: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(X, Y)
        fit(X, Y, validation_data=(X, Y), **options)


@example("compile in a callback takes away the functions")
def compile_in_a_callback(told: Told) -> None:
    model = compiled()

    class Compiles(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                self.model.compile("sgd", "mse")

    with told(tmg.errors.LossError, "Write two calls"):
        fit(X, Y, model=model, epochs=3, callbacks=[Compiles()])
    fit(X, Y, model=model)
    with strategy_of(2).scope():
        model.compile("sgd", "mse")
    assert fit(X, Y, model=model, initial_epoch=1, epochs=3).epoch == [1, 2]


@example("{} is a function that is called as {}")
def functions_of_other_arguments(told: Told) -> None:
    def trying(size: int) -> None:
        if size > 2:
            raise MemoryError

    def training() -> Any:
        return tmg.testing.Training(dense(), keras.optimizers.SGD(0.1), "mse")

    examples = single_examples()
    same = tmg.testing.assert_replica_invariant
    mistakes: list[tuple[str, Any]] = [
        (r"forward=<lambda>\(model, batch\)", lambda: trained_with(lambda model, batch: None)),
        ("forward='mse'", lambda: trained_with("mse")),
        (r"loss=mean_of\(model: ", lambda: step(loss=mean_of)),
        (r"preprocess=<lambda>\(x, y\)",
         lambda: distribute(examples, batch_size=4, preprocess=lambda x, y: (x, y))),
        (r"data=<lambda>\(a, b\)", lambda: distribute(lambda a, b: None)),
        (r"try_batch=<lambda>\(\)", lambda: tmg.find_batch_size(lambda: None)),
        (r"build=<lambda>\(strategy\)", lambda: same(lambda strategy: None, [(X, Y)])),
    ]  # fmt: skip
    for received, mistake in mistakes:
        with told(TypeError, received):
            mistake()
    with told(tmg.errors.TfMultiGpuError, r"train=training\(\)"):
        same(training)
    trained_with(functools.partial(lambda _, *three: mean_of(*three), None))
    trained_with(tf.function(mean_of, autograph=False))
    step(loss=lambda y_true, y_pred, more=None: keras.losses.mean_squared_error(y_true, y_pred))
    distribute(examples, batch_size=4, preprocess=lambda example, seed: example)
    distribute(lambda: iter([(X, Y)]))
    assert tmg.find_batch_size(trying, start=1) == 2
    same(training, [(X, Y)])
    same(lambda strategy: [1.0])


def trained_with(forward: Any) -> Any:
    model = made()
    return tmg.make_train_step(model, optimizer_of(), None, strategy_of(2), forward=forward)


@example("The model comes first, and the strategy later")
def a_strategy_first(told: Told) -> None:
    model, optimizer, strategy = made(), optimizer_of(), strategy_of(2)
    with told(TypeError):
        tmg.make_train_step(strategy, model, optimizer, "mse")  # type: ignore[arg-type]
    tmg.make_train_step(strategy=strategy, model=model, optimizer=optimizer, loss="mse")


@example("A step has its own options")
def options_beside_a_step(told: Told) -> None:
    model = compiled()
    with told(ValueError, "Received: clip_norm and a step"):
        tmg.fit(model, (X, Y), step=trained_by(model), clip_norm=1.0, verbose=0)
    tmg.fit(model, (X, Y), step=trained_by(model, clip_norm=1.0), verbose=0)
    fit(X, Y, model=model, clip_norm=1.0)


@example("fit has validation data and nothing to validate with")
def nothing_to_validate_with(told: Told) -> None:
    model = made()
    trained = step(model)
    with told(tmg.errors.LossError, "eval_step="):
        tmg.fit(model, (X, Y), step=trained, validation_data=(X, Y), verbose=0)
    evaluate = tmg.make_eval_step(model, "mse", strategy_of(2), verify=False)
    tmg.fit(model, (X, Y), step=trained, eval_step=evaluate, validation_data=(X, Y), verbose=0)
    other = compiled("mse")
    tmg.fit(other, (X, Y), step=trained_by(other), validation_data=(X, Y), verbose=0)


@example("step must come from tmg.make_train_step or tmg.chain_steps")
def a_function_as_step(told: Told) -> None:
    model = compiled()
    with told():
        tmg.fit(model, (X, Y), step=lambda batch: {})
    tmg.fit(model, (X, Y), step=trained_by(model), verbose=0)
    tmg.fit(model, (X, Y), step=chained(model), verbose=0)


@example("The step was made for another strategy than the model's")
def a_step_for_three(told: Told) -> None:
    other = made(replicas=3)
    trained = tmg.make_train_step(other, optimizer_of(3), "mse", strategy_of(3), verify=False)
    with told():
        tmg.fit(compiled(), (X, Y), step=trained)
    model = compiled()
    tmg.fit(model, (X, Y), step=trained_by(model), verbose=0)


@example("shuffle must be True or False")
def shuffle_of_batches(told: Told) -> None:
    with told(tmg.errors.DataError):
        fit(X, Y, shuffle="batch")
    fit(X, Y, shuffle=True)
    fit(X, Y, shuffle=False)


@example("Two threads cannot train or evaluate one model at a time")
def two_threads_with_one_model(told: Told) -> None:
    model, other = fitted(), compiled()

    class Meanwhile(keras.callbacks.Callback):
        """Calls a function in another thread, while this one trains."""

        def __init__(self, call: Any) -> None:
            super().__init__()
            self.call = call

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self.call).result()

    with told():
        fit(X, Y, callbacks=[Meanwhile(lambda: fit(X, Y))])
    thread = threading.Thread(target=lambda: fit(X, Y))
    thread.start()
    thread.join()
    fit(X, Y, callbacks=[Meanwhile(lambda: fit(X, Y, model=other))])
    fit(X, Y, callbacks=[Meanwhile(lambda: tmg.predict(model, X, verbose=0, verify=False))])
