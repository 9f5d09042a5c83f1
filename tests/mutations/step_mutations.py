"""What a step promises, broken on purpose: weights, clipping, draws, owners, failures, calls."""

from __future__ import annotations

from mutation import broken

W = "test_weights.py::test_sums_are_divided_by_the_weight_of_the_global_batch"
ZERO = "test_weights.py::test_a_batch_without_weight_still_regularises"
HAND = "test_weights.py::test_sums_of_shards_add_up_to_those_of_the_batch"
CLIP = "test_clipping.py::test_the_global_gradient_is_clipped_once"
DRAWS = "test_draws.py::test_draws_are_those_of_one_device_bit_for_bit"
OWNERS = "test_shard_update.py::test_owners_update_as_one_device_does"
SKIP = "test_overflow.py::test_one_row_that_overflows_skips_the_step_on_all"
FAILS = "test_failing_step.py::test_training_continues_as_if_the_bad_batches_had_not_been"
RUN = "test_run.py::test_the_data_ends_within_a_call"
EVAL = "test_eval_predict_steps.py::test_loss_and_metrics_are_over_each_row_once"
ROWS = "test_eval_predict_steps.py::test_each_row_is_predicted_once_and_in_order"

FOREIGN = "test_foreign_objects.py::test_a_compute_loss_with_loss_objects_trains_as_in_keras"

STEPS = (
    broken(
        "the mean of a Keras loss is divided by the replicas",
        "steps/objective.py:undivided_losses",
        "def keep(_: Function, value: Tensor) -> Tensor: return value"
        " => def keep(divide: Function, value: Tensor) -> Tensor: return divide(value)",
        FOREIGN,
    ),
    broken(
        "penalties are added to a compute_loss that has them",
        "steps/phases.py:_regularize",
        "layout.is_whole => not layout",
        FOREIGN,
    ),
    # test_weights ---------------------------------------------------------------------------------
    broken(
        "the weight of hidden tokens counts",
        "accumulation/losses.py:loss_term",
        "functools.reduce(operator.mul, parts) => parts[-1]",
        f"{W}[N=3, mean_with_sample_weight]",
        f"{HAND}[3]",
    ),
    broken(
        "a batch without weight divides by zero",
        "steps/tally.py:Layout.corrections",
        "tf.math.divide_no_nan(tf.cast(rows, weight.dtype), weight) => tf.cast(rows, weight.dtype) / weight",
        f"{ZERO}[N=3, mean_with_sample_weight]",
    ),
    broken(
        "global_mean is a mean of means",
        "accumulation/losses.py:global_mean",
        'total, weight = context.all_reduce("SUM", list(map(tf.convert_to_tensor, loss_sum)))'
        ' => total = context.all_reduce("MEAN", tf.math.divide_no_nan(*loss_sum)); weight = tf.ones_like(total)',
        f"{HAND}[2]",
        f"{HAND}[3]",
    ),
    broken(
        "regularisation is not in the loss",
        "steps/tally.py:Tally.of_step",
        "tf.cast(penalty, tf.float64) => 0.0",
        f"{W}[N=3, sum]",
        f"{ZERO}[N=1, mean_with_sample_weight]",
    ),
    # test_clipping --------------------------------------------------------------------------------
    broken(
        "the norm in the logs is that after clipping",
        "steps/phases.py:_divide_here",
        "norm => global_norm(gradient.tensors)",
        f"{CLIP}[clip_norm]",
    ),
    broken(
        "a gradient below the limit is scaled up",
        "accumulation/gradients.py:clipped",
        "tf.clip_by_global_norm([tf.ones_like(norm)], limit, norm)[0][0] => limit / norm",
        f"{CLIP}[clip_norm]",
    ),
    broken(
        "clip_norm is taken for a limit of each replica's part",
        "steps/features/clipping.py:ClipByNorm.on_gradient",
        "self._limit => self._limit / 3.0",
        f"{CLIP}[clip_norm]",
        f"{CLIP}[clip_norm of make_train_step before clipvalue of the optimizer]",
    ),
    broken(
        "the limits of the optimizer are for the sum of N gradients",
        "accumulation/replicated.py:Replicated._apply",
        "apply(optimizer, gradients, variables)"
        " => many = self.strategy.num_replicas_in_sync; apply(optimizer, [g / many for g in gradients], variables)",
        f"{CLIP}[clipnorm]",
        f"{CLIP}[global_clipnorm]",
    ),
    # test_draws -----------------------------------------------------------------------------------
    broken(
        "a micro-batch draws the numbers of the first one",
        "steps/values.py:Rows.cut",
        "self.first + start => self.first",
        f"{DRAWS}[noise without seeds, N=2]",
    ),
    broken(
        "seeds do not move on",
        "steps/phases.py:commit",
        "strategy.run(replica, args=(values, weights)) => pass",
        f"{DRAWS}[noise, N=3]",
        f"{DRAWS}[images without seeds, N=3]",
    ),
    broken(
        "normal noise is drawn by each replica for itself",
        "steps/features/draws.py:Draws.around_model",
        '(*_COUNTED, *_CUT) => ("stateless_uniform", "stateless_random_uniform", *_CUT)',
        f"{DRAWS}[noise, N=3]",
        f"{DRAWS}[noise without seeds, N=2]",
    ),
    broken(
        "dropout is drawn by each replica for itself",
        "steps/features/draws.py:Draws.around_model",
        '(*_COUNTED, *_CUT) => ("stateless_uniform", "stateless_normal", *_CUT)',
        f"{DRAWS}[noise, N=3]",
    ),
    # test_shard_update ----------------------------------------------------------------------------
    broken(
        "the owner's value reaches the replicas after it only",
        "accumulation/replicated.py:Owned._update",
        "number == owner => number <= owner",
        f"{OWNERS}[SGD with momentum, clip_norm, EMA]",
        f"{OWNERS}[AdamW, EMA]",
    ),
    broken(
        "an owner is skipped",
        "accumulation/replicated.py:Owned._update",
        "_on_copy(copies[owner], of_copy) => _on_copy(copies[owner] if owner else None, of_copy)",
        f"{OWNERS}[RMSprop, clipnorm]",
        f"{OWNERS}[Lion, schedule]",
    ),
    broken(
        "an owner updates twice",
        "accumulation/replicated.py:Owned._update",
        "ids = args[0].indices if lists_rows(args) else None => original(variable, _on_copy(copies[owner], of_copy), args, kwargs=kwargs); ...",
        f"{OWNERS}[Adam, global_clipnorm]",
    ),
    # test_overflow --------------------------------------------------------------------------------
    broken(
        "what is not finite is applied",
        "steps/phases.py:update",
        "gradient.valid is None => True",
        f"{SKIP}[dynamic, N=3]",
        f"{SKIP}[a number, N=2]",
    ),
    broken(
        "the scale falls by more than half",
        "accumulation/loss_scale.py:LossScale.update",
        "scale * 0.5 => scale * 0.25",
        f"{SKIP}[dynamic, N=3]",
        f"{SKIP}[LossScaleOptimizer, N=3]",
    ),
    broken(
        "a skipped step is not in the logs",
        "steps/phases.py:_divide_here",
        "0.0 if gradient.valid is None else ~gradient.valid => 0.0",
        f"{SKIP}[dynamic, N=2, shard_update]",
    ),
    broken(
        "gradients of float16 stay scaled",
        "steps/phases.py:_corrections",
        "1.0 if correction is None else tf.cast(correction, tf.float32) => factor if correction is None else tf.cast(correction, tf.float32)",
        "test_overflow.py::test_the_scale_falls_until_gradients_of_float16_fit",
    ),
    # test_failing_step ----------------------------------------------------------------------------
    broken(
        "an update does not wait for the checks of layers, losses and metrics",
        "steps/phases.py:train_replica",
        "[*effects, *new_state] => []",
        f"{FAILS}[N=2, synchronized norm]",
    ),
    broken(
        "states are assigned before the checks have passed",
        "steps/phases.py:commit",
        "after => []",
        f"{FAILS}[N=2, synchronized norm]",
    ),
    broken(
        "owners do not wait for the checks",
        "accumulation/replicated.py:Replicated.apply.update",
        "_compat.waiting_for(before) => _compat.waiting_for([])",
        f"{FAILS}[N=3, micro-batches, shard_update]",
    ),
    # test_run -------------------------------------------------------------------------------------
    broken(
        "the end of the data is counted as a step",
        "steps/program.py:_loop_over.body",
        "vectors = tf.cond(more, lambda: step(optional.get_value(), vectors), lambda: vectors)"
        " => ...; ended = tf.cast(~more, tf.float64); size = tf.size(vectors[0]); vectors = (vectors[0] + tf.one_hot(0, size, ended), *vectors[1:])",
        f"{RUN}[N=2]",
    ),
    broken(
        "the logs of a call are those of its first step",
        "steps/tally.py:Tally.__add__",
        "other.last => tf.cond(tf.size(self.last) > 0, lambda: self.last, lambda: other.last)",
        f"{RUN}[N=3]",
    ),
    # test_eval_predict_steps ----------------------------------------------------------------------
    broken(
        "evaluation runs as training does",
        "steps/evaluate.py:EvalStep._replica",
        "self.forward(shard, training=False) => self.forward(shard, training=True)",
        f"{EVAL}[2]",
    ),
    broken(
        "evaluation leaves regularisation out",
        "steps/evaluate.py:EvalStep._look",
        "Tally.of_step(layout, sums_of_losses, weights, penalty, shards.total) => Tally.of_step(layout, sums_of_losses, weights, 0.0, shards.total)",
        f"{EVAL}[1]",
        f"{EVAL}[3]",
    ),
    broken(
        "the second step of a chain runs first",
        "steps/chain.py:ChainedStep.compute",
        "self.steps.items() => reversed([*...])",
        "test_chain.py::test_each_batch_trains_the_steps_in_turn",
        "test_chain.py::test_several_batches_in_one_call",
    ),
    broken(
        "the History of a chain is a mean over batches",
        "steps/tally.py:Layout.means",
        "[numbers.rows] => [numbers.steps]",
        "test_chain.py::test_fit_runs_the_chain_on_each_batch",
        also=(("steps/tally.py:Tally.of_step", "means * rows => means"),),
    ),
    broken(
        "out of memory does not name the batch",
        "steps/failures.py:_explain",
        "_out_of_memory(line or error.message, strategy, count_rows) => _out_of_memory(line or error.message, strategy, None)",
        "test_out_of_memory.py::test_the_replica_the_batch_and_the_way_out_are_named",
    ),
)
