"""Advice for code whose result depends on how a batch was cut."""

from __future__ import annotations

from typing import Any

from tfmultigpu._compat import is_part_of_keras

__all__ = [
    "advice_for_layer",
    "advice_for_loss",
    "advice_for_state",
    "advice_for_value",
    "advice_for_weight",
    "name_of",
]

# The images of a batch are mixed or compared by these; two of them only through Equalization, whose
# histogram is that of all images together.
_MIX_ROWS = {"AugMix", "CutMix", "Equalization", "MixUp", "RandAugment", "RandomElasticTransform"}


def advice_for_layer(layer: Any, *, by_micro_batches: bool) -> str:
    """Returns the line to write for a layer that computes with several rows at once."""
    import keras

    if isinstance(layer, keras.layers.BatchNormalization):
        if by_micro_batches:
            return (
                "BatchNormalization computes with the rows of one micro-batch. Write "
                "micro_batches=1, or take a layer that looks at one row at a time, such as "
                "keras.layers.GroupNormalization."
            )
        if not getattr(layer, "synchronized", False):
            return (
                "BatchNormalization sees only the rows of its own replica. Write "
                "keras.layers.BatchNormalization(synchronized=True), or for a model you did not "
                "write tmg.synchronize_batch_norm(model)."
            )
    if type(layer).__name__ in _MIX_ROWS and is_part_of_keras(type(layer)):
        return (
            "It mixes or compares the images of a batch. Apply it to global batches: "
            "dataset.map(lambda x, y: (layer(x, training=True), y))."
        )
    if getattr(layer, "seed_generator", None) is not None:
        return (
            "It draws for rows in another order than that of the batch, such as those of "
            "tf.concat([real, fake], 0). Call the model for each: model(real), model(fake)."
        )
    if by_micro_batches:
        return "It computes with several rows at once. Write micro_batches=1."
    return (
        "It computes with several rows at once. Let it look at one row at a time (axis=-1), or "
        "compute it in forward= from the rows of all replicas: tmg.gather_rows(tensor)."
    )


def advice_for_loss(*, by_micro_batches: bool) -> str:
    """Returns the line to write for a loss that compares rows, or is not a sum over them."""
    if by_micro_batches:
        return (
            "What is computed for a row, its loss included, must depend on that row alone if a "
            "batch is computed in parts. Write micro_batches=1."
        )
    return (
        "What is computed for a row, its loss included, must depend on that row alone. Write a "
        "loss over the whole batch with tmg.gather_rows(tensor), which returns the rows of all "
        "replicas; docs/coupled-losses.md has examples."
    )


def advice_for_weight() -> str:
    """Returns the line to write for a loss that is divided by something else on replicas."""
    return (
        "A LossSum holds the sum over the rows of one replica and their number. Write "
        "tmg.LossSum(tf.reduce_sum(values), tf.size(values))."
    )


def advice_for_value() -> str:
    """Returns the line to write for a value for the logs that is not a sum over rows."""
    return (
        "A value for the logs is a sum over the rows of one replica, with what divides it. Write "
        '{"name": (tf.reduce_sum(values), tf.size(values))}; compute a maximum or a correlation '
        "from the rows of all replicas: tmg.gather_rows(tensor)."
    )


def advice_for_state(variable: Any) -> str:
    """Returns the line to write for a state that is computed from the rows that are given.

    Args:
        variable: The state, a Keras variable.
    """
    if variable.aggregation == "sum" and variable.synchronization == "on_read":
        return (
            "It is a metric's, which was not given one value per row: each replica counts the mean "
            "of its rows as one. Write metric.update_state(values) with a value for each row."
        )
    return (
        "In call, add sums over the replicas before you assign them: context = "
        "tf.distribute.get_replica_context(); total, count = context.all_reduce('SUM', [total, "
        "count])."
    )


def name_of(layer: Any) -> str:
    """Returns a layer as its class and its path."""
    path = getattr(layer, "path", None) or getattr(layer, "name", "")
    return f"{type(layer).__name__} {path!r}"
