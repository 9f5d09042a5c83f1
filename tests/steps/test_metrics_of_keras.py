"""Every metric of Keras that compares labels with predictions: its state and its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases.case import SIZES, cut
from one_device import strategy_of
from problems import integers, normal

import tfmultigpu as tmg

m = keras.metrics
ROWS = sum(SIZES)
X = normal(ROWS, 4)
CODES = integers(3, ROWS, seed=1)
LABELS = {
    "flags": integers(2, ROWS, 3, seed=2).astype("float32"),
    "kind": np.eye(3, dtype="float32")[CODES],
    "code": CODES,
    "pick": CODES,
    "size": 2.0 + normal(ROWS, 3, seed=3),
    "score": integers(2, ROWS, 1, seed=4).astype("float32"),
}
# Nothing on one replica in the first batch, nothing anywhere in the fourth. In quarters, whose sums
# are exact: AUC keeps differences of sums, which else are rounding noise near zero.
WEIGHTS = (1 + integers(8, ROWS, seed=5)).astype("float32") / 4.0
WEIGHTS[[0, 1, 2, 3, 17, 18]] = 0.0
# Where Keras counts each flag by itself it wants weights that broadcast to them.
SAMPLE_WEIGHTS = {**dict.fromkeys(LABELS, WEIGHTS), "flags": WEIGHTS[:, None]}

# Those of intersections count in integers unless told otherwise, and warn about other weights.
METRICS: dict[str, dict[str, Callable[[], Any]]] = {
    "flags": {
        "AUC": lambda: m.AUC(num_thresholds=20),
        "AUC by label": lambda: m.AUC(
            num_thresholds=20, multi_label=True, num_labels=3, label_weights=[1.0, 2.0, 0.5]
        ),
        "BinaryAccuracy": lambda: m.BinaryAccuracy(threshold=0.4),
        "BinaryCrossentropy": lambda: m.BinaryCrossentropy(label_smoothing=0.1),
        "FalseNegatives": lambda: m.FalseNegatives(thresholds=[0.3, 0.5]),
        "FalsePositives": lambda: m.FalsePositives(thresholds=[0.3, 0.5]),
        "Hinge": m.Hinge,
        "MeanSquaredLogarithmicError": m.MeanSquaredLogarithmicError,
        "Poisson": m.Poisson,
        "Precision": lambda: m.Precision(thresholds=[0.3, 0.5, 0.7]),
        "Precision of the best": lambda: m.Precision(top_k=2, class_id=1),
        "Recall": lambda: m.Recall(thresholds=[0.3, 0.5, 0.7]),
        "Recall of the best": lambda: m.Recall(top_k=2),
        "SquaredHinge": m.SquaredHinge,
        "TrueNegatives": lambda: m.TrueNegatives(thresholds=[0.3, 0.5]),
        "TruePositives": lambda: m.TruePositives(thresholds=[0.3, 0.5]),
    },
    "kind": {
        "CategoricalAccuracy": m.CategoricalAccuracy,
        "CategoricalCrossentropy": m.CategoricalCrossentropy,
        "CategoricalHinge": m.CategoricalHinge,
        "F1Score": lambda: m.F1Score(),
        "F1Score, macro": lambda: m.F1Score(average="macro", threshold=0.3),
        "F1Score, weighted": lambda: m.F1Score(average="weighted"),
        "FBetaScore": lambda: m.FBetaScore(average="micro", beta=0.5, threshold=0.4),
        "KLDivergence": m.KLDivergence,
        "OneHotIoU": lambda: m.OneHotIoU(3, [0, 2], dtype="float32"),
        "OneHotMeanIoU": lambda: m.OneHotMeanIoU(3, dtype="float32"),
        "TopKCategoricalAccuracy": lambda: m.TopKCategoricalAccuracy(k=2),
    },
    "code": {
        "IoU": lambda: m.IoU(3, [0, 2], sparse_y_pred=False, dtype="float32"),
        "MeanIoU": lambda: m.MeanIoU(3, sparse_y_pred=False, ignore_class=1, dtype="float32"),
        "SparseCategoricalAccuracy": m.SparseCategoricalAccuracy,
        "SparseCategoricalCrossentropy": m.SparseCategoricalCrossentropy,
        "SparseTopKCategoricalAccuracy": lambda: m.SparseTopKCategoricalAccuracy(k=2),
    },
    "pick": {"Accuracy": m.Accuracy, "MeanIoU of picks": lambda: m.MeanIoU(3, dtype="float32")},
    "size": {
        "ConcordanceCorrelation": m.ConcordanceCorrelation,
        "CosineSimilarity": m.CosineSimilarity,
        "LogCoshError": m.LogCoshError,
        "MeanAbsoluteError": m.MeanAbsoluteError,
        "MeanAbsolutePercentageError": m.MeanAbsolutePercentageError,
        "MeanMetricWrapper": lambda: m.MeanMetricWrapper(keras.losses.mean_absolute_error),
        "MeanSquaredError": m.MeanSquaredError,
        "PearsonCorrelation": m.PearsonCorrelation,
        "R2Score": m.R2Score,
        "R2Score, by variance": lambda: m.R2Score(class_aggregation="variance_weighted_average"),
        "RootMeanSquaredError": m.RootMeanSquaredError,
    },
    "score": {
        "AUC of precision and recall": lambda: m.AUC(
            num_thresholds=20, curve="PR", summation_method="minoring"
        ),
        "BinaryIoU": lambda: m.BinaryIoU([0, 1], threshold=0.4, dtype="float32"),
        "PrecisionAtRecall": lambda: m.PrecisionAtRecall(0.5, num_thresholds=20),
        "RecallAtPrecision": lambda: m.RecallAtPrecision(0.7, num_thresholds=20),
        "SensitivityAtSpecificity": lambda: m.SensitivityAtSpecificity(0.5, num_thresholds=20),
        "SpecificityAtSensitivity": lambda: m.SpecificityAtSensitivity(0.5, num_thresholds=20),
    },
}
# Of values, not of labels and predictions: refused, see the tests of metrics.
OF_VALUES = {"Mean", "Sum"}


class Pick(keras.layers.Layer):
    """The most probable class, as a number."""

    def call(self, probabilities: Any) -> Any:
        return tf.cast(tf.argmax(probabilities, axis=-1), "float32")


def model() -> keras.Model:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, "tanh")(inputs)
    code = keras.layers.Dense(3, "softmax")(hidden)
    return keras.Model(
        inputs,
        {
            "flags": keras.layers.Dense(3, "sigmoid")(hidden),
            "kind": keras.layers.Dense(3, "softmax")(hidden),
            "code": code,
            "pick": Pick()(code),
            "size": keras.layers.Dense(3)(hidden),
            "score": keras.layers.Dense(1, "sigmoid")(hidden),
        },
    )


LOSSES = {
    "flags": "binary_crossentropy",
    "kind": "categorical_crossentropy",
    "code": "sparse_categorical_crossentropy",
    "size": "mse",
    "score": "binary_crossentropy",
}


def metrics() -> dict[str, list[Any]]:
    return {output: [make() for make in made.values()] for output, made in METRICS.items()}


BATCHES = cut(X, LABELS, SAMPLE_WEIGHTS)


def evaluated() -> dict[str, tuple[np.ndarray, ...]]:
    """For each metric its result by an eval step on two replicas, and by Keras; then weighted."""
    keras.utils.set_random_seed(0)
    strategy = strategy_of(2)
    with strategy.scope():
        ours, plain, weighted = model(), metrics(), metrics()
    objective = tmg.steps.Objective(LOSSES, weighted_metrics=weighted)
    step = tmg.make_eval_step(ours, objective, strategy, metrics=plain)
    truth, weighted_truth = metrics(), metrics()
    for x, y, weight in BATCHES:
        step((x, y, weight))
        predicted = ours(x)
        for output in METRICS:
            for one, other in zip(truth[output], weighted_truth[output], strict=True):
                one.update_state(y[output], predicted[output])
                other.update_state(y[output], predicted[output], sample_weight=weight[output])
    return {
        name: tuple(
            np.asarray(each[output][i].result())
            for each in (plain, truth, weighted, weighted_truth)
        )
        for output, made in METRICS.items()
        for i, name in enumerate(made)
    }


def test_an_eval_step() -> None:
    for name, (plain, truth, weighted, weighted_truth) in evaluated().items():
        np.testing.assert_allclose(plain, truth, rtol=1e-6, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(
            weighted, weighted_truth, rtol=1e-6, atol=1e-6, err_msg=f"{name}, weighted"
        )
        assert np.all(np.isfinite(truth)), name
        assert np.any(truth != 0.0), f"{name}: nothing to compare"
        assert np.any(truth != weighted_truth), f"{name}: weights must change it"


def test_every_metric_of_keras_is_here() -> None:
    here = {type(metric).__name__ for made in metrics().values() for metric in made}
    theirs = {
        name
        for name, value in vars(m).items()
        if inspect.isclass(value) and issubclass(value, m.Metric) and value is not m.Metric
    }
    assert theirs == here | OF_VALUES
