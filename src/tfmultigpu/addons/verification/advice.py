"""Advice for code whose result depends on how a batch was cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.addons.verification.compare import Quantity
from tfmultigpu.addons.verification.locate import Located
from tfmultigpu.addons.verification.one_device import OneDevice

# The images of a batch are mixed or compared by these; two of them only through Equalization, whose
# histogram is that of all images together.
_MIX_ROWS = {"AugMix", "CutMix", "Equalization", "MixUp", "RandAugment", "RandomElasticTransform"}

_IN_PARTS = (
    "What is computed for a row, its loss included, must depend on that row alone if a batch is "
    "computed in parts. Write micro_batches=1."
)
_LOSS = (
    "What is computed for a row, its loss included, must depend on that row alone. Write a loss "
    "over the whole batch with tmg.gather_rows(tensor), which returns the rows of all replicas; "
    "docs/coupled-losses.md has examples."
)
_ADDED = (
    "What a layer gives to add_loss counts as a mean over its rows. If it is a sum over them, give "
    "one value for each row: self.add_loss(values)."
)
_WEIGHT = (
    "A LossSum holds the sum over the rows of one replica and their number. Write "
    "tmg.LossSum(tf.reduce_sum(values), tf.size(values))."
)
_VALUE = (
    "A value for the logs is a sum over the rows of one replica, with what divides it. Write "
    '{"name": (tf.reduce_sum(values), tf.size(values))}; compute a maximum or a correlation from '
    "the rows of all replicas: tmg.gather_rows(tensor)."
)
_METRIC = (
    "It is a metric's, and not a sum over rows: replicas are added. Give update_state a value for "
    "each row, metric.update_state(values), and keep sums and counts in a metric of your own."
)
_STATE = (
    "In call, add sums over the replicas before you assign them: context = "
    "tf.distribute.get_replica_context(); total, count = context.all_reduce('SUM', [total, count])."
)
_UPDATE = (
    "Its gradient is that of one device and its update is not. A feature that changes gradients is "
    "applied on one device too if its on_one_device returns one like it: return self. Without such "
    "a feature please report it, with the optimizer and its settings."
)


def explain(
    found: Sequence[Quantity], located: Located | None, device: OneDevice
) -> tuple[str, str]:
    """Returns the first thing that depends on the cut, and the line to write."""
    in_parts = located is not None and located.in_parts
    if located is not None and located.layer is not None:
        layer = located.layer
        path = getattr(layer, "path", None) or getattr(layer, "name", "")
        return f"{type(layer).__name__} {path!r}", _of_layer(layer, in_parts=in_parts)
    states = [each for each in found if each.kind in ("state", "copy")]
    terms = [each for each in found if each.kind == "term"]
    if not terms and states:
        variable = device.states[states[0].number]
        is_metric = variable.aggregation == "sum" and variable.synchronization == "on_read"
        return states[0].name, _METRIC if is_metric else _STATE
    if found and all(each.kind == "update" for each in found):
        return found[0].name, _UPDATE
    own = device.twin.trace.layout.own if terms else []
    if terms and all(own[term.number % len(own)].logged for term in terms):
        return terms[0].name, _VALUE
    if terms and own[terms[0].number % len(own)].added:
        return terms[0].name, _ADDED
    if terms and terms[0].number >= len(own):
        return terms[0].name, _WEIGHT
    # All layers agree: it is the loss, if the few rows that were looked at show it too.
    shown = terms and located is not None and any(each.apart for each in located.terms)
    return terms[0].name if shown else "", _IN_PARTS if in_parts else _LOSS


def _of_layer(layer: Any, *, in_parts: bool) -> str:
    import keras

    if isinstance(layer, keras.layers.BatchNormalization):
        if in_parts:
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
    if in_parts:
        return "It computes with several rows at once. Write micro_batches=1."
    return (
        "It computes with several rows at once. Let it look at one row at a time (axis=-1), or "
        "compute it in forward= from the rows of all replicas: tmg.gather_rows(tensor)."
    )
