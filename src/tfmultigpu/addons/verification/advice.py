"""Advice for code whose result depends on how a batch was cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.addons.verification.locate import Located, name_of
from tfmultigpu.addons.verification.one_device import OneDevice
from tfmultigpu.addons.verification.rounding import Deviation, deviations

__all__ = ["explain"]

# The images of a batch are mixed or compared by these; two of them only through Equalization, whose
# histogram is that of all images together.
_MIX_ROWS = {"AugMix", "CutMix", "Equalization", "MixUp", "RandAugment", "RandomElasticTransform"}

WEIGHT = (
    "A LossSum holds the sum over the rows of one replica and their number. Write "
    "tmg.LossSum(tf.reduce_sum(values), tf.size(values))."
)
VALUE = (
    "A value for the logs is a sum over the rows of one replica, with what divides it. Write "
    '{"name": (tf.reduce_sum(values), tf.size(values))}; compute a maximum or a correlation '
    "from the rows of all replicas: tmg.gather_rows(tensor)."
)
UPDATE = (
    "The gradient is that of one device and its update is not, which is an error of this library "
    "or of a feature. Compare with shard_update=False, and please report it."
)


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


def advice_for_state(variable: Any) -> str:
    """Returns the line to write for a state, a Keras variable, that the given rows decide."""
    if variable.aggregation == "sum" and variable.synchronization == "on_read":
        return (
            "It is a metric's, and not a sum over rows: replicas are added. Write "
            "metric.update_state(values) with a value for each row, and keep sums and counts in a "
            "metric of your own."
        )
    return (
        "In call, add sums over the replicas before you assign them: context = "
        "tf.distribute.get_replica_context(); total, count = context.all_reduce('SUM', [total, "
        "count])."
    )


def explain(
    found: Sequence[Deviation], located: Located | None, device: OneDevice
) -> tuple[str, str]:
    """Returns the first thing that depends on the cut, and the line to write."""
    by_parts = located is not None and located.in_parts
    if located is not None and located.layer is not None:
        layer = located.layer
        return name_of(layer), advice_for_layer(layer, by_micro_batches=by_parts)
    states = [each.quantity for each in found if each.quantity.kind in ("state", "copy")]
    terms = [each.quantity for each in found if each.quantity.kind in ("sum", "weight")]
    if not terms and states:
        return states[0].name, advice_for_state(device.states[states[0].number])
    if found and all(each.quantity.kind == "update" for each in found):
        return found[0].quantity.name, UPDATE
    if terms and all(device.twin.trace.layout.own[term.number].logged for term in terms):
        return terms[0].name, VALUE
    if terms and terms[0].kind == "weight":
        return terms[0].name, WEIGHT
    # All layers agree: it is the loss, if the few rows that were looked at show it too.
    shown = located is not None and terms and deviations(located.terms)
    return terms[0].name if shown else "", advice_for_loss(by_micro_batches=by_parts)
