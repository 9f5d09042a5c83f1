"""What is promised of float16 and of the pieces by hand, broken on purpose."""

from __future__ import annotations

from mutation import broken

EXACT = "test_float16.py::test_a_scaled_pair_is_what_one_device_gives"
SKIPS = "test_float16.py::test_by_hand_no_update_is_skipped_that_the_step_makes"
TOLD = "test_float16.py::test_float16_without_a_loss_scale_is_told_once"
LINE = "test_float16.py::test_the_line_to_write_is_said"

FLOAT16 = (
    broken(
        "by hand a loss scale multiplies the sum of the losses",
        "tf.where(weight > 0, weight, tf.ones_like(weight)) * (replicas * _ROOM)",
        "tf.ones_like(weight)",
        f"{SKIPS}[1]",
        f"{SKIPS}[3]",
    ),
    broken(
        "by hand a loss scale leaves no room for the other batches of a window",
        "_ROOM = 32.0",
        "_ROOM = 1.0",
        f"{SKIPS}[1]",
        f"{SKIPS}[3]",
    ),
    broken(
        "a window divides a scaled pair twice",
        "return gradient * tf.cast(self._divisor, gradient.dtype)",
        "return gradient",
        f"{EXACT}[1-sum_over_batch_size]",
        f"{EXACT}[2-mean_with_sample_weight]",
        f"{EXACT}[3-sum]",
    ),
    broken(
        "a window multiplies by the weight of the pair alone",
        "use.divide(divisor)",
        "use.divide(divisor / replicas)",
        f"{EXACT}[2-mean_with_sample_weight]",
    ),
    broken(
        "the weight of a scaled pair does not stand for the pair",
        "    for part in pair:\n        with suppress(AttributeError):  # A number",
        "    for part in pair[:1]:\n        with suppress(AttributeError):  # A number",
        f"{EXACT}[1-sum_over_batch_size]",
    ),
    broken(
        "a scaled pair that reaches no window is not told",
        "if any(use.lost for use in uses):",
        "if False:",
        "test_float16.py::test_a_pair_without_a_scale_and_a_scale_without_a_window",
    ),
    broken(
        'the weight 1 of reduction="sum" is added over a window',
        "[0.0, 1.0] if fixed else [divisor, 0.0]",
        "[divisor, 0.0]",
        f"{EXACT}[3-sum]",
    ),
    broken(
        "float16 without a loss scale trains untold",
        "_warn_of_float16(self._model)",
        "pass",
        f"{TOLD}[nested]",
        f"{TOLD}[a map of policies]",
        f"{TOLD}[fit]",
        "test_float16.py::test_it_is_told_before_a_step_is_lost",
    ),
    broken(
        "float16 inside another layer is not seen",
        "for layer in all_layers(model) if _computes_in_float16(layer)",
        "for layer in [model] if _computes_in_float16(layer)",
        f"{TOLD}[nested]",
    ),
    broken(
        "float16 is told of at each trace",
        "            self._warns = False  # Not",
        "            # Not",
        f"{TOLD}[nested]",
    ),
    broken(
        "bfloat16 is told of as float16",
        'return layer.compute_dtype == "float16" and',
        'return str(layer.compute_dtype).endswith("float16") and',
        f"{TOLD}[bfloat16]",
    ),
    broken(
        "a weight of 1 is answered as a loss that couples rows",
        '    if "weight" in first:\n',
        "    if False:\n",
        f"{LINE}[a weight that is not of rows]",
    ),
)
