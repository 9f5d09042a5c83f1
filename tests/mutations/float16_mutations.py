"""What is promised of float16 and of the pieces by hand, broken on purpose."""

from __future__ import annotations

from mutation import broken

EXACT = "test_float16.py::test_a_scaled_pair_is_what_one_device_gives"
SKIPS = "test_float16.py::test_by_hand_no_update_is_skipped_that_the_step_makes"
TOLD = "test_float16.py::test_float16_without_a_loss_scale_is_told_once"

FLOAT16 = (
    broken(
        "by hand a loss scale multiplies the sum of the losses",
        "accumulation/loss_scale.py:LossScale.scale_loss",
        "tf.where(weight > 0, weight, tf.ones_like(weight)) * (replicas * _ROOM) => tf.ones_like(weight)",
        f"{SKIPS}[1]",
        f"{SKIPS}[3]",
    ),
    broken(
        "by hand a loss scale leaves no room for the other batches of a window",
        "accumulation/loss_scale.py",
        "_ROOM = 32.0 => _ROOM = 1.0",
        f"{SKIPS}[1]",
        f"{SKIPS}[3]",
    ),
    broken(
        "a window divides a scaled pair twice",
        "accumulation/losses.py:Use.undo",
        "gradient * tf.cast(self._divisor, gradient.dtype) => gradient",
        f"{EXACT}[1-sum_over_batch_size]",
        f"{EXACT}[2-mean_with_sample_weight]",
        f"{EXACT}[3-sum]",
    ),
    broken(
        "a window multiplies by the weight of the pair alone",
        "accumulation/loss_scale.py:LossScale.scale_loss",
        "use.divide(divisor) => use.divide(divisor / replicas)",
        f"{EXACT}[2-mean_with_sample_weight]",
    ),
    broken(
        "the weight of a scaled pair does not stand for the pair",
        "accumulation/losses.py:note_use",
        "setattr(part, _USE, use) => part is pair[0] and ...",
        f"{EXACT}[1-sum_over_batch_size]",
    ),
    broken(
        "a scaled pair that reaches no window is not told",
        "accumulation/loss_scale.py:LossScale.unscale",
        "any(use.lost for use in uses) => False",
        "test_float16.py::test_a_pair_without_a_scale_and_a_scale_without_a_window",
    ),
    broken(
        'the weight 1 of reduction="sum" is added over a window',
        "accumulation/accumulator.py:GradientAccumulator.add",
        "[0.0, 1.0] if fixed else [divisor, 0.0] => [divisor, 0.0]",
        f"{EXACT}[3-sum]",
    ),
    broken(
        "float16 without a loss scale trains untold",
        "steps/features/loss_scaling.py:LossScaling.loss_factor",
        "_warn_of_float16(self._model) => pass",
        f"{TOLD}[nested]",
        f"{TOLD}[a map of policies]",
        f"{TOLD}[fit]",
        "test_float16.py::test_it_is_told_before_a_step_is_lost",
    ),
    broken(
        "float16 inside another layer is not seen",
        "steps/features/loss_scaling.py:_warn_of_float16",
        "all_layers(model) => [model]",
        f"{TOLD}[nested]",
    ),
    broken(
        "float16 is told of at each trace",
        "steps/features/loss_scaling.py:LossScaling.loss_factor",
        "self._warns = False => pass",
        f"{TOLD}[nested]",
    ),
    broken(
        "bfloat16 is told of as float16",
        "steps/features/loss_scaling.py:_computes_in_float16",
        'layer.compute_dtype == "float16" => str(layer.compute_dtype).endswith("float16")',
        f"{TOLD}[bfloat16]",
    ),
    broken(
        "a weight of 1 is answered as a loss that couples rows",
        "addons/verification/locate.py:explain",
        '"weight" in first => False',
        "test_float16.py::test_the_line_to_write_is_said[a weight that is not of rows]",
    ),
)
