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
# A gradient that forgets to meet the other replicas.
LONE = """def lone(add: Any) -> Any:
    def added(context: Any, tensors: Any) -> Any:
        return [
            one + tf.stop_gradient(every - one)
            for one, every in zip(tensors, add(context, tensors), strict=True)
        ]

    return added


def _rows_here("""


LAW = (
    # Sums and weights, divided once ---------------------------------------------------------------
    broken(
        "the sum is divided by a constant batch size",
        "1.0 if term.fixed else rows * (",
        "1.0 if term.fixed else 64.0 * (",
        NORM,
    ),
    broken(
        "a mean of the means of the replicas",
        "layout.targets(terms, total, rows",
        "layout.targets(terms, tf.cast(rows.count * step.strategy.num_replicas_in_sync, tf.float64), rows",
        NORM,
    ),
    broken(
        "a mean of the means of the micro-batches",
        "        weight = partition.part_weight(self.count < parts, number)\n",
        "        weight = partition.part_weight(self.count < parts, number)\n        weight *= tf.cast(self.count / ((stop - start) * parts), tf.float64)\n",
        SHARES,
    ),
    broken(
        "the last micro-batch is left out",
        "*_: number < count,",
        "*_: number < count - 1,",
        SHARES,
    ),
    broken(
        "the optimizer steps for each micro-batch",
        "        phases.update(self.update, gradient, after)\n",
        '        for _ in range(next((f.count for f in self.features if hasattr(f, "count")), 1)):\n            phases.update(self.update, gradient, after)\n',
        SHARES,
    ),
    broken(
        "the weight is the rows where it should be the sample weights",
        "tf.reduce_sum(functools.reduce(operator.mul, parts))",
        "tf.cast(tf.size(values), total.dtype)",
        NORM,
    ),
    broken(
        "what a mask hides is in the weight",
        "    if masks:\n",
        "    if False:\n",
        NORM,
    ),
    broken(
        'reduction="sum" is divided by the number of replicas',
        "(total, tf.ones_like(total), fixed=True)",
        "(total, tf.ones_like(total))",
        NORM,
    ),
    broken(
        "losses that layers add are not weighted by rows",
        "LossTerm(tf.reduce_sum(value) * rows, rows, per_row=1.0, added=True)",
        "LossTerm(tf.reduce_sum(value), tf.ones_like(rows))",
        NORM,
    ),
    broken(
        "gradients are added over the replicas once more",
        "            apply(optimizer, gradients, variables)\n",
        "            many = self.strategy.num_replicas_in_sync\n            apply(optimizer, [g * many for g in gradients], variables)\n",
        NORM,
    ),
    broken(
        "an embedding row that is looked up twice gets one gradient, not two",
        "gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])",
        "gradient = tf.tensor_scatter_nd_update(\n            tf.zeros(shape, gradient.dtype), "
        "gradient.indices[:, None], gradient.values)",
        NORM,
    ),
    broken(
        "the loss of many steps is a mean of their losses",
        "        if by_rows:\n            sums, divisors",
        "        if True:\n            sums, divisors",
        f"{RUN}::test_the_data_ends_within_a_call[N=2]",
    ),
    broken(
        "losses of several outputs are weighed alike over many steps",
        "sums, divisors = numbers.sums, numbers.weights",
        "sums, divisors = numbers.sums, [numbers.rows] * len(self.terms)",
        f"{EVALUATION}::test_several_batches_in_one_call",
    ),
    # Weight regularisation ------------------------------------------------------------------------
    broken(
        "weights are regularised by each replica",
        "                penalty, gradient = found\n",
        "                penalty, gradient = found\n                gradient *= step.strategy.num_replicas_in_sync\n",
        NORM,
    ),
    broken(
        "weights are regularised by each micro-batch",
        "                penalty, gradient = found\n",
        '                penalty, gradient = found\n                gradient *= next((f.count for f in step.features if hasattr(f, "count")), 1)\n',
        SHARES,
    ),
    broken(
        "the regularisation is divided by the weight",
        "                penalty, gradient = found\n",
        "                penalty, gradient = found\n                gradient /= step.weights[0]\n",
        NORM,
        also=(
            (
                "    penalty = _regularize(step, trained, layout)\n",
                "    step.weights = weights\n    penalty = _regularize(step, trained, layout)\n",
            ),
        ),
    ),
    # What is decided about the whole gradient -----------------------------------------------------
    broken(
        "each replica clips before the sum",
        "        passes = for_all_replicas(self, replica)(shards, trace)\n        sums",
        '        passes = for_all_replicas(self, replica)(shards, trace)\n        limit = next((f._limit for f in self.features if hasattr(f, "_limit")), 1e9)\n        norms = [global_norm(one.addends[:-1]) for one in passes]\n        passes = [\n            one.with_addends([*clipped(one.addends[:-1], limit, norm), one.addends[-1]])\n            for one, norm in zip(passes, norms, strict=True)\n        ]\n        sums',
        NORM,
        also=(
            (
                "from tfmultigpu.accumulation.settings import Settings\n",
                "from tfmultigpu.accumulation.settings import Settings\nfrom tfmultigpu.accumulation.gradients import clipped, global_norm\n",
            ),
        ),
    ),
    broken(
        "the norm is that of one replica's gradient",
        "        passes = for_all_replicas(self, replica)(shards, trace)\n        sums",
        "        passes = for_all_replicas(self, replica)(shards, trace)\n        trace.one = passes[0].addends[:-1]\n        sums",
        NORM,
        also=(("norm = global_norm(tensors)", "norm = global_norm(trace.one)"),),
    ),
    broken(
        "whether gradients are finite is read from replica 0",
        "        passes = for_all_replicas(self, replica)(shards, trace)\n        sums",
        "        passes = for_all_replicas(self, replica)(shards, trace)\n        self.one = passes[0].addends[:-1]\n        sums",
        f"{SKIP}[dynamic, N=3]",
        also=(
            (
                "        gradient = gradient.completed_by(before)\n",
                "        if gradient.valid is not None:\n            gradient = gradient._replace(valid=all_finite(step.one))\n",
            ),
            (
                "import check_gradients, global_norm, warn_of_variables",
                "import all_finite, check_gradients, global_norm, warn_of_variables",
            ),
        ),
    ),
    broken(
        "gradients stay multiplied by the loss scale",
        "    if factor is not None:\n        for target",
        "    if False:\n        for target",
        NORM,
    ),
    broken(
        "a skipped step is counted",
        "tf.cond(gradient.valid, apply, tf.no_op)",
        "tf.cond(\n            gradient.valid,\n            apply,\n            lambda: (updates.optimizer.iterations.assign_add(1), tf.no_op())[1],\n        )",
        f"{SKIP}[dynamic, N=3]",
    ),
    broken(
        "a skipped step counts as a good one for the loss scale",
        "tf.where(finite & ~grow, good + 1, tf.zeros_like(good))",
        "tf.where(grow, tf.zeros_like(good), good + 1)",
        f"{SKIP}[LossScaleOptimizer, N=3]",
    ),
    broken(
        "a step is counted although the data had ended",
        "_compat.waiting_for(before),",
        "_compat.waiting_for([]),",
        f"{RUN}::test_the_end_of_the_data_in_a_function_of_the_user",
    ),
    # Rows -----------------------------------------------------------------------------------------
    broken(
        "the last, partial batch is dropped",
        "from_tensor_slices(arrays).batch(batch_size)",
        "from_tensor_slices(arrays).batch(batch_size, drop_remainder=True)",
        f"{DATASETS}::test_arrays_and_generators[2]",
    ),
    broken(
        "rows that replicas cannot divide are dropped",
        "return rows * index // parts\n",
        "return rows // parts * index\n",
        NORM,
    ),
    broken(
        "a replica gets no rows, as TensorFlow splits",
        "return rows * index // parts\n",
        "return tf.minimum(index * ((rows + parts - 1) // parts), rows)\n",
        f"{DATASETS}::test_no_replica_of_a_step_is_without_rows[3]",
    ),
    broken(
        "a batch smaller than the replicas leaves some without rows",
        "tf.where(rows < parts, copies, ",
        "tf.where(False, copies, ",
        f"{DATASETS}::test_no_replica_of_a_step_is_without_rows[3]",
    ),
    broken(
        "a small batch counts once for each replica",
        "others = partition.part_weight(total < replicas, 1)",
        "others = first",
        NORM,
    ),
    broken(
        "evaluation counts a small batch once for each replica",
        "Pass((), stack(terms, rows.weight), deferred",
        "Pass((), stack(terms, None), deferred",
        f"{EVALUATION}::test_several_batches_in_one_call",
    ),
    broken(
        "metrics see every copy of a small batch",
        "DeferredAssignments(trace.before(()), rows.counts()) as deferred:\n",
        "DeferredAssignments(trace.before(()), True) as deferred:\n",
        f"{EVALUATION}::test_loss_and_metrics_are_over_each_row_once[8]",
    ),
    broken(
        "metrics in a forward function see every copy of a small batch",
        'if variable.aggregation == "sum" and self._counts is not True:',
        'if variable.aggregation == "sum" and False:',
        "test_metrics_in_forward.py::test_each_row_counts_once",
    ),
    broken(
        "copies of a small batch add to a gradient that is not linear",
        "rows.counts() is not True and may_not_be_linear(begin)",
        "False",
        SMALL,
    ),
    broken(
        "copies of a small batch add to the sums of users, and to rows that are gathered",
        "value = rows.counted(value)",
        "value = tf.identity(value)",
        SMALL,
        f"{GATHERED}[3-against_itself-against_gathered]",
    ),
    broken(
        'a weight with aggregation="sum" has the value before once for each replica',
        "if adds and tf",
        "if False and tf",
        SMALL,
    ),
    broken(
        "a small batch is not compared with one device",
        "sizes = [replicas - 1]",
        "sizes = []",
        f"{TOLD}[by_hand-2-1 row(s)]",
    ),
    broken(
        "states of zero hide what they are multiplied by",
        "each.contents.assign(tf.ones_like(each.value))",
        "each.contents.assign(each.value)",
        f"{TOLD}[with_the_state-0-seen]",
    ),
    broken(
        "rows that are gathered have the gradients of their own replica alone",
        "added = all_reduce_sum(",
        "added = lone(all_reduce_sum)(",
        f"{GATHERED}[2-views-views_by_labels]",
        also=(("def _rows_here(", LONE),),
    ),
    broken(
        "replicas draw the same numbers",
        "return first * times, tf",
        "return first * 0, tf",
        NORM,
    ),
    broken(
        "predictions come by replica, the last one first",
        "        return tf.concat(list(parts), 0)\n\n    return tf.nest",
        "        return tf.concat(list(parts)[::-1], 0)\n\n    return tf.nest",
        f"{EVALUATION}::test_each_row_is_predicted_once_and_in_order[3]",
    ),
    broken(
        "a small batch is predicted once for each replica",
        "slice_rows(rows, 0, count_rows(rows) // copies)",
        "rows",
        f"{EVALUATION}::test_each_row_is_predicted_once_and_in_order[8]",
    ),
    # Windows over batches -------------------------------------------------------------------------
    broken(
        "a short window is divided by the weight of a whole one",
        "        totals = sum_over_replicas(self._strategy, parts)\n",
        "        totals = sum_over_replicas(self._strategy, parts)\n"
        "        totals[0][-1] = tf.maximum(totals[0][-1], 15.0)\n",
        f"{ACCUMULATOR}[3]",
    ),
    broken(
        "a window begins with what the one before left",
        "copy.assign(tf.zeros(copy.shape, copy.dtype))",
        "copy.assign_add(tf.zeros(copy.shape, copy.dtype))",
        f"{ACCUMULATOR}[3]",
    ),
    broken(
        "adding to a window communicates",
        "        divisor = tf.cast(divisor, self._weights.dtype)",
        "        self._context().all_reduce('SUM', tf.cast(divisor, tf.float32))\n"
        "        divisor = tf.cast(divisor, self._weights.dtype)",
        "test_windows.py::test_adding_to_a_window_waits_for_no_other_replica",
    ),
    # Verification ---------------------------------------------------------------------------------
    broken(
        "the first step is not verified",
        "        return functools.partial(self._call, call)",
        "        return call",
        f"{TOUCHING}[a batch mean in a Lambda]",
    ),
    broken(
        "the tolerance of the verification is a thousand times as large",
        "bound, self.margin = self.compute * 16.0",
        "bound, self.margin = 1e5 * self.compute * 16.0",
        f"{TOUCHING}[a hundredth of the batch mean in a Lambda]",
    ),
    broken(
        "every difference is taken for rounding",
        "math.sqrt(len(layers)), 16.0\n",
        "math.sqrt(len(layers)), 1e9\n",
        f"{TOUCHING}[a batch mean in float32]",
    ),
    broken(
        "states that layers assign are not compared",
        "for i, variable in enumerate(device.states):",
        "for i, variable in enumerate(()):",
        f"{TOUCHING}[a number of rows kept in a layer]",
    ),
    broken(
        "a batch that divides evenly is verified with all its rows",
        "uneven = most - 1",
        "uneven = most",
        "test_touching_rows.py::test_the_first_batch_that_does_not_divide_evenly_is_checked_too",
    ),
)
