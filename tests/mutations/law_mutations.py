"""The clauses of the law, each broken on purpose."""

from __future__ import annotations

from mutation import broken

BATCHES = "test_batches.py::test_any_sizes_weights_and_masks"
NORM = f"{BATCHES}[synchronized norm]"
SHARES = f"{BATCHES}[shares]"
SKIP = "test_overflow.py::test_one_row_that_overflows_skips_the_step_on_all"
RUN = "test_run.py"
DATASETS = "test_datasets.py"
EVALUATION = "test_eval_predict_steps.py"
ACCUMULATOR = "test_blocks_alone.py::test_the_accumulator_alone_over_uneven_windows"
GATHERED = "test_touching_rows.py::test_gathered_rows_make_a_contrastive_loss_exact"
SMALL = "test_small_batches.py::test_code_of_the_user_sees_one_copy[2]"
TOLD = "test_small_batches.py::test_what_is_wrong_for_copies_or_from_other_states_is_told"
TOUCHING = "test_touching_rows.py::test_the_first_step_names_what_depends_on_the_cut"
LAW = (
    # Sums and weights, divided once ---------------------------------------------------------------
    broken(
        "the sum is divided by a constant batch size",
        "steps/tally.py:Layout.targets",
        "rows * (term.per_row or 1.0) => 64.0 * (term.per_row or 1.0)",
        NORM,
    ),
    broken(
        "a mean of the means of the replicas",
        "steps/phases.py:train_replica",
        "layout.targets(terms, total, rows.weight, factor)"
        " => layout.targets(terms, tf.cast(rows.count * step.strategy.num_replicas_in_sync, tf.float64), rows.weight, factor)",
        NORM,
    ),
    broken(
        "a mean of the means of the micro-batches",
        "steps/values.py:Rows.cut",
        "weight = partition.part_weight(self.count < parts, number) => ...; weight *= tf.cast(self.count / ((stop - start) * parts), tf.float64)",
        SHARES,
    ),
    broken(
        "the last micro-batch is left out",
        "steps/features/micro_batches.py:one_after_the_other",
        "number < count => number < count - 1",
        SHARES,
    ),
    broken(
        "the optimizer steps for each micro-batch",
        "steps/train.py:TrainStep._compute",
        "phases.update(self.update, gradient, after)"
        ' => for _ in range(next((f.count for f in self.features if hasattr(f, "count")), 1)): ...',
        SHARES,
    ),
    broken(
        "the weight is the rows where it should be the sample weights",
        "accumulation/losses.py:loss_term",
        "tf.reduce_sum(functools.reduce(operator.mul, parts)) => tf.cast(tf.size(values), total.dtype)",
        NORM,
    ),
    broken(
        "what a mask hides is in the weight",
        "accumulation/losses.py:loss_term",
        "functools.reduce(tf.logical_and, masks) => None",
        NORM,
    ),
    broken(
        'reduction="sum" is divided by the number of replicas',
        "accumulation/losses.py:loss_term",
        "LossTerm(total, tf.ones_like(total), fixed=True) => LossTerm(total, tf.ones_like(total))",
        NORM,
    ),
    broken(
        "losses that layers add are not weighted by rows",
        "steps/objective.py:_term_of_added",
        "LossTerm(tf.reduce_sum(value) * rows, rows, per_row=1.0, added=True) => LossTerm(tf.reduce_sum(value), tf.ones_like(rows))",
        NORM,
    ),
    broken(
        "gradients are added over the replicas once more",
        "accumulation/replicated.py:Replicated._apply",
        "apply(optimizer, gradients, variables)"
        " => many = self.strategy.num_replicas_in_sync; apply(optimizer, [g * many for g in gradients], variables)",
        NORM,
    ),
    broken(
        "an embedding row that is looked up twice gets one gradient, not two",
        "strategies/row_lists.py:as_tensor",
        "tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])"
        " => tf.tensor_scatter_nd_update(tf.zeros(shape, gradient.dtype), gradient.indices[:, None], gradient.values)",
        NORM,
    ),
    broken(
        "the loss of many steps is a mean of their losses",
        "steps/tally.py:Layout.means",
        "by_rows => True",
        f"{RUN}::test_the_data_ends_within_a_call[N=2]",
    ),
    broken(
        "losses of several outputs are weighed alike over many steps",
        "steps/tally.py:Layout.means",
        "numbers.sums, numbers.weights => numbers.sums, [numbers.rows] * len(self.terms)",
        f"{EVALUATION}::test_several_batches_in_one_call",
    ),
    # Weight regularisation ------------------------------------------------------------------------
    broken(
        "weights are regularised by each replica",
        "steps/phases.py:_regularize",
        "penalty, gradient = found => ...; gradient *= step.strategy.num_replicas_in_sync",
        NORM,
    ),
    broken(
        "weights are regularised by each micro-batch",
        "steps/phases.py:_regularize",
        'penalty, gradient = found => ...; gradient *= next((f.count for f in step.features if hasattr(f, "count")), 1)',
        SHARES,
    ),
    broken(
        "the regularisation is divided by the weight",
        "steps/phases.py:_regularize",
        "penalty, gradient = found => ...; gradient /= step.weights[0]",
        NORM,
        also=(
            (
                "steps/phases.py:_divide_here",
                "penalty = _regularize(step, trained, layout) => step.weights = weights; ...",
            ),
        ),
    ),
    # What is decided about the whole gradient -----------------------------------------------------
    broken(
        "each replica clips before the sum",
        "steps/train.py:TrainStep._look",
        "passes = for_all_replicas(self, replica)(shards, trace)"
        ' => ...; limit = next((f._limit for f in self.features if hasattr(f, "_limit")), 1e9);'
        " norms = [global_norm(one.addends[:-1]) for one in passes];"
        " passes = [one.with_addends([*clipped(one.addends[:-1], limit, norm), one.addends[-1]]) for one, norm in zip(passes, norms, strict=True)]",
        NORM,
        also=(
            (
                "steps/train.py",
                "from tfmultigpu.accumulation.settings import Settings => ...; from tfmultigpu.accumulation.gradients import clipped, global_norm",
            ),
        ),
    ),
    broken(
        "the norm is that of one replica's gradient",
        "steps/train.py:TrainStep._look",
        "passes = for_all_replicas(self, replica)(shards, trace) => ...; trace.one = passes[0].addends[:-1]",
        NORM,
        also=(("steps/phases.py:_gradient_of", "global_norm(tensors) => global_norm(trace.one)"),),
    ),
    broken(
        "whether gradients are finite is read from replica 0",
        "steps/train.py:TrainStep._look",
        "passes = for_all_replicas(self, replica)(shards, trace) => ...; self.one = passes[0].addends[:-1]",
        f"{SKIP}[dynamic, N=3]",
        also=(
            (
                "steps/phases.py:_ask_features",
                "gradient = gradient.completed_by(before)"
                " => if gradient.valid is not None: gradient = gradient._replace(valid=all_finite(step.one))",
            ),
            (
                "steps/phases.py",
                "from tfmultigpu.accumulation.gradients import check_gradients, global_norm, warn_of_variables"
                " => ...; from tfmultigpu.accumulation.gradients import all_finite",
            ),
        ),
    ),
    broken(
        "gradients stay multiplied by the loss scale",
        "steps/phases.py:_corrections",
        "factor is not None => False",
        NORM,
    ),
    broken(
        "a skipped step is counted",
        "steps/phases.py:update",
        "tf.cond(gradient.valid, apply, tf.no_op)"
        " => tf.cond(gradient.valid, apply, lambda: (updates.optimizer.iterations.assign_add(1), tf.no_op())[1])",
        f"{SKIP}[dynamic, N=3]",
    ),
    broken(
        "a skipped step counts as a good one for the loss scale",
        "accumulation/loss_scale.py:LossScale.update",
        "tf.where(finite & ~grow, good + 1, tf.zeros_like(good)) => tf.where(grow, tf.zeros_like(good), good + 1)",
        f"{SKIP}[LossScaleOptimizer, N=3]",
    ),
    broken(
        "a step is counted although the data had ended",
        "accumulation/replicated.py:Replicated.apply.update",
        "_compat.waiting_for(before) => _compat.waiting_for([])",
        f"{RUN}::test_the_end_of_the_data_in_a_function_of_the_user",
    ),
    # Rows -----------------------------------------------------------------------------------------
    broken(
        "the last, partial batch is dropped",
        "data/sources.py:global_batches",
        "tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)"
        " => tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size, drop_remainder=True)",
        f"{DATASETS}::test_arrays_and_generators[2]",
    ),
    broken(
        "rows that replicas cannot divide are dropped",
        "data/partition.py:row_offsets",
        "rows * index // parts => rows // parts * index",
        NORM,
    ),
    broken(
        "a replica gets no rows, as TensorFlow splits",
        "data/partition.py:row_offsets",
        "rows * index // parts => tf.minimum(index * ((rows + parts - 1) // parts), rows)",
        f"{DATASETS}::test_no_replica_of_a_step_is_without_rows[3]",
    ),
    broken(
        "a batch smaller than the replicas leaves some without rows",
        "data/partition.py:shard_offsets",
        "rows < parts => False",
        f"{DATASETS}::test_no_replica_of_a_step_is_without_rows[3]",
    ),
    broken(
        "a small batch counts once for each replica",
        "steps/values.py:Shards.of",
        "partition.part_weight(total < replicas, 1) => first",
        NORM,
    ),
    broken(
        "evaluation counts a small batch once for each replica",
        "steps/evaluate.py:EvalStep._replica",
        "rows.weight => None",
        f"{EVALUATION}::test_several_batches_in_one_call",
    ),
    broken(
        "metrics see every copy of a small batch",
        "steps/evaluate.py:EvalStep._replica",
        "rows.counts() => True",
        f"{EVALUATION}::test_loss_and_metrics_are_over_each_row_once[8]",
    ),
    broken(
        "metrics in a forward function see every copy of a small batch",
        "steps/assignments.py:DeferredAssignments.add_update",
        "self._counts is not True => False",
        "test_metrics_in_forward.py::test_each_row_counts_once",
    ),
    broken(
        "copies of a small batch add to a gradient that is not linear",
        "steps/phases.py:train_replica",
        "rows.counts() is not True and may_not_be_linear(begin) => False",
        SMALL,
    ),
    broken(
        "copies of a small batch add to the sums of users, and to rows that are gathered",
        "steps/sums_of_users.py:_given",
        "rows.counted => tf.identity",
        SMALL,
        f"{GATHERED}[3-against_itself-against_gathered]",
    ),
    broken(
        'a weight with aggregation="sum" has the value before once for each replica',
        "steps/assignments.py:_addend",
        "adds and tf.get_static_value(context.replica_id_in_sync_group) != 0 => False and tf.get_static_value(context.replica_id_in_sync_group) != 0",
        SMALL,
    ),
    broken(
        "a small batch is not compared with one device",
        "addons/verification/verify.py:Verify._small_sizes",
        "[replicas - 1] => []",
        f"{TOLD}[by_hand-2-1 row(s)]",
    ),
    broken(
        "states of zero hide what they are multiplied by",
        "addons/verification/one_device.py:OneDevice.begin",
        "tf.ones_like(each.value) => each.value",
        f"{TOLD}[with_the_state-0-seen]",
    ),
    broken(
        "a factor of zero hides what it is multiplied by",
        "addons/verification/one_device.py:OneDevice._states_alike",
        "[*self.own, *read] => self.own",
        "test_small_batches.py::test_a_factor_that_is_zero_hides_nothing",
    ),
    broken(
        "rows that are gathered have the gradients of their own replica alone",
        "steps/global_rows.py:gather_rows",
        "all_reduce_sum(context, padded) => [x + tf.stop_gradient(y - x) for x, y in zip(padded, ...)]",
        f"{GATHERED}[2-views-views_by_labels]",
    ),
    broken(
        "replicas draw the same numbers",
        "steps/features/draws.py:_place",
        "first * times => first * 0",
        NORM,
    ),
    broken(
        "predictions come by replica, the last one first",
        "steps/predict.py:join_rows.join",
        "tf.concat(list(parts), 0) => tf.concat(list(parts)[::-1], 0)",
        f"{EVALUATION}::test_each_row_is_predicted_once_and_in_order[3]",
    ),
    broken(
        "a small batch is predicted once for each replica",
        "steps/predict.py:PredictStep._look.first_copy",
        "slice_rows(rows, 0, count_rows(rows) // copies) => rows",
        f"{EVALUATION}::test_each_row_is_predicted_once_and_in_order[8]",
    ),
    # Windows over batches -------------------------------------------------------------------------
    broken(
        "a short window is divided by the weight of a whole one",
        "accumulation/accumulator.py:GradientAccumulator.reduce",
        "totals = sum_over_replicas(self._strategy, parts) => ...; totals[0][-1] = tf.maximum(totals[0][-1], 15.0)",
        f"{ACCUMULATOR}[3]",
    ),
    broken(
        "a window begins with what the one before left",
        "accumulation/accumulator.py:_Dense.reset",
        "copy.assign => copy.assign_add",
        f"{ACCUMULATOR}[3]",
    ),
    broken(
        "adding to a window communicates",
        "accumulation/accumulator.py:GradientAccumulator.add",
        'divisor = tf.cast(divisor, self._weights.dtype) => self._context().all_reduce("SUM", tf.cast(divisor, tf.float32)); ...',
        "test_windows.py::test_adding_to_a_window_waits_for_no_other_replica",
    ),
    # Verification ---------------------------------------------------------------------------------
    broken(
        "the first step is not verified",
        "addons/verification/verify.py:Verify.around_call",
        "functools.partial(self._call, call) => call",
        f"{TOUCHING}[a batch mean in a Lambda]",
    ),
    broken(
        "the tolerance of the verification is a thousand times as large",
        "addons/verification/compare.py:Rounding.__init__",
        "self.compute * 16.0 => 1e5 * self.compute * 16.0",
        f"{TOUCHING}[a hundredth of the batch mean in a Lambda]",
    ),
    broken(
        "every difference is taken for rounding",
        "addons/verification/compare.py:Rounding.__init__",
        "self.compute * 16.0 * math.sqrt(len(layers)), 16.0 => self.compute * 16.0 * math.sqrt(len(layers)), 1e9",
        f"{TOUCHING}[a hundredth of the batch mean in a Lambda]",
    ),
    broken(
        "states that layers assign are not compared",
        "addons/verification/compare.py:compared",
        "device.states => ()",
        f"{TOUCHING}[a number of rows kept in a layer]",
    ),
    broken(
        "a batch that divides evenly is verified with all its rows",
        "addons/verification/verify.py:Verify._sizes",
        "most - 1 => most",
        "test_touching_rows.py::test_the_first_batch_that_does_not_divide_evenly_is_checked_too[27]",
    ),
)
