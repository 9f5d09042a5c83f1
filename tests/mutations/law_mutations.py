"""The clauses of the law, each broken on purpose."""

from __future__ import annotations

from mutation import Mutation

BATCHES = "promises/test_batches.py::test_any_sizes_weights_and_masks"
NORM = f"{BATCHES}[synchronized norm]"
SHARES = f"{BATCHES}[shares]"
SKIP = "promises/test_overflow.py::test_one_row_that_overflows_skips_the_step_on_all"
RUN = "promises/test_run.py"
DATASETS = "promises/test_datasets.py"
EVALUATION = "promises/test_eval_predict_steps.py"
ACCUMULATOR = "promises/test_blocks_alone.py::test_the_accumulator_alone_over_uneven_windows"
GATHERED = "promises/test_touching_rows.py::test_gathered_rows_make_a_contrastive_loss_exact"
TOUCHING = "promises/test_touching_rows.py::test_the_first_step_names_what_depends_on_the_cut"
# A gradient that forgets to meet the other replicas.
LONE = """def lone(add: Any) -> Any:
    def added(context: Any, tensors: Any) -> Any:
        return [
            one + tf.stop_gradient(every - one)
            for one, every in zip(tensors, add(context, tensors), strict=True)
        ]

    return added


def _source("""


LAW = (
    # Sums and weights, divided once ---------------------------------------------------------------
    Mutation(
        "the sum is divided by a constant batch size",
        "losses/objective.py",
        (("1.0 if term.fixed else global_rows * (", "1.0 if term.fixed else 64.0 * ("),),
        (NORM,),
    ),
    Mutation(
        "a mean of the means of the replicas",
        "steps/forward_backward.py",
        (
            (
                "layout.scales(global_rows)",
                "layout.scales(tf.cast(count_rows(shard) "
                "* self._strategy.num_replicas_in_sync, tf.float64))",
            ),
        ),
        (NORM,),
    ),
    Mutation(
        "a mean of the means of the micro-batches",
        "steps/forward_backward.py",
        (
            (
                "            shard = partition.cut_part(shard, part.count, part.number)",
                "            whole = count_rows(shard)\n"
                "            shard = partition.cut_part(shard, part.count, part.number)\n"
                "            own = whole / (count_rows(shard) * part.count)\n"
                "            own = tf.cast(own, weight.dtype)\n"
                "            weight *= tf.where(tf.equal(once, 1.0), own, 1.0)",
            ),
        ),
        (SHARES,),
    ),
    Mutation(
        "the last micro-batch is left out",
        "steps/forward_backward.py",
        (
            (
                "\n            lambda micro, *_: micro < count,",
                "\n            lambda micro, *_: micro < count - 1,",
            ),
        ),
        (SHARES,),
    ),
    Mutation(
        "the optimizer steps for each micro-batch",
        "steps/train_step.py",
        (
            (
                "            self.strategy.run(apply, args=(gradients,))",
                "            for _ in range(self._phase._micro_batches):\n"
                "                self.strategy.run(apply, args=(gradients,))",
            ),
        ),
        (SHARES,),
    ),
    Mutation(
        "the weight is the rows where it should be the sample weights",
        "accumulation/loss_sum.py",
        (
            (
                "_sum_of_weights(sample_weight, mask, total.dtype)",
                "tf.cast(tf.size(values), total.dtype)",
            ),
        ),
        (NORM,),
    ),
    Mutation(
        "what a mask hides is in the weight",
        "accumulation/loss_sum.py",
        (("    mask = _mask(y_pred, ", "    mask = None and _mask(y_pred, "),),
        (NORM,),
    ),
    Mutation(
        'reduction="sum" is divided by the number of replicas',
        "accumulation/loss_sum.py",
        (("(total, tf.ones_like(total), fixed=True)", "(total, tf.ones_like(total))"),),
        (NORM,),
    ),
    Mutation(
        "losses that layers add are not weighted by rows",
        "losses/added_losses.py",
        (
            (
                "LossTerm(tf.reduce_sum(value) * rows, rows, per_row=1.0, added=True)",
                "LossTerm(tf.reduce_sum(value), tf.ones_like(rows))",
            ),
        ),
        (NORM,),
    ),
    Mutation(
        "gradients are added over the replicas once more",
        "optimizers/update.py",
        (("(list(summed), list(kept))", "([g * replicas for g in summed], list(kept))"),),
        (NORM,),
    ),
    Mutation(
        "of a row that an embedding looks up twice one gradient counts",
        "steps/forward_backward.py",
        (
            (
                "    gradient = tf.convert_to_tensor(gradient)\n",
                "    if isinstance(gradient, tf.IndexedSlices):\n"
                "        gradient = tf.tensor_scatter_nd_update(\n"
                "            tf.zeros(shape, gradient.dtype), gradient.indices[:, None],\n"
                "            gradient.values)\n",
            ),
        ),
        (NORM,),
    ),
    Mutation(
        "the loss of many steps is a mean of their losses",
        "steps/multi_step.py",
        (("tf.where(weight > 0, loss, plain", "tf.where(weight > 1e9, loss, plain"),),
        (f"{RUN}::test_the_data_ends_within_a_call[N=2]",),
    ),
    Mutation(
        "losses of several outputs are weighed alike over many steps",
        "steps/multi_step.py",
        (
            (
                "logs[name] = tf.math.divide_no_nan(logs[name], logs[name.weight])",
                "logs[name] = tf.math.divide_no_nan(logs[name], logs['weight'])",
            ),
        ),
        (f"{EVALUATION}::test_several_batches_in_one_call",),
    ),
    # Weight regularisation ------------------------------------------------------------------------
    Mutation(
        "weights are regularised by each replica",
        "steps/train_step.py",
        (
            (
                "        corrections: list[Any] = ",
                "        replicas = self.strategy.num_replicas_in_sync\n"
                "        penalties = [p if p is None else p * replicas for p in penalties]\n"
                "        corrections: list[Any] = ",
            ),
        ),
        (NORM,),
    ),
    Mutation(
        "weights are regularised by each micro-batch",
        "steps/train_step.py",
        (
            (
                "        corrections: list[Any] = ",
                "        parts = self._phase._micro_batches\n"
                "        penalties = [p if p is None else p * parts for p in penalties]\n"
                "        corrections: list[Any] = ",
            ),
        ),
        (SHARES,),
    ),
    Mutation(
        "the regularisation is divided by the weight",
        "steps/train_step.py",
        (
            (
                "        corrections: list[Any] = ",
                "        penalties = [p if p is None else p / weights[0] for p in penalties]\n"
                "        corrections: list[Any] = ",
            ),
        ),
        (NORM,),
    ),
    # What is decided about the whole gradient -----------------------------------------------------
    Mutation(
        "each replica clips before the sum",
        "steps/train_step.py",
        (
            (
                "result = self._phase(shards, scale)",
                "result = self._phase(shards, scale)\n"
                "        result = dataclasses.replace(result, parts=[\n"
                "            [*clipped(one[:-1], self._options.clip_norm or 1e9, "
                "global_norm(one[:-1])), one[-1]]\n"
                "            for one in result.parts])",
            ),
        ),
        (NORM,),
    ),
    Mutation(
        "the norm is that of one replica's gradient",
        "steps/train_step.py",
        (
            (
                "result = self._phase(shards, scale)",
                "result = self._phase(shards, scale)\n        self._one = result.parts[0][:-1]",
            ),
            ("norm = global_norm(counted)", "norm = global_norm(self._one)"),
        ),
        (NORM,),
    ),
    Mutation(
        "whether gradients are finite is read from replica 0",
        "steps/train_step.py",
        (
            (
                "result = self._phase(shards, scale)",
                "result = self._phase(shards, scale)\n        self._one = result.parts[0][:-1]",
            ),
            ("else all_finite(checked)", "else all_finite(self._one)"),
        ),
        (f"{SKIP}[dynamic, N=3]",),
    ),
    Mutation(
        "gradients stay multiplied by the loss scale",
        "steps/train_step.py",
        (("unscaled(correction, scale) for", "unscaled(correction, None) for"),),
        (NORM,),
    ),
    Mutation(
        "a skipped step is counted",
        "steps/train_step.py",
        (
            (
                "update, lambda: tf.constant(False))",
                "update, lambda: self.strategy.run(\n"
                "            lambda: optimizer.iterations.assign_add(1)) is None)",
            ),
        ),
        (f"{SKIP}[dynamic, N=3]",),
    ),
    Mutation(
        "a skipped step counts as a good one for the loss scale",
        "accumulation/loss_scale.py",
        (
            (
                "tf.where(finite & ~grow, good + 1, tf.zeros_like(good))",
                "tf.where(grow, tf.zeros_like(good), good + 1)",
            ),
        ),
        (f"{SKIP}[LossScaleOptimizer, N=3]",),
    ),
    Mutation(
        "weights are not overwritten by their averages",
        "steps/train_step.py",
        (("            overwrite_with_averages(optimizer, self.strategy, variables)\n", ""),),
        (NORM,),
    ),
    Mutation(
        "averages that overwrite weights are not constrained",
        "optimizers/update.py",
        (("constraints.get(id(variable)) or tf.convert_to_tensor", "tf.convert_to_tensor"),),
        (NORM,),
    ),
    Mutation(
        "a step is counted although the data had ended",
        "steps/train_step.py",
        (
            (
                "            with tf.control_dependencies([*after, *gradients]):",
                "            if True:",
            ),
        ),
        (f"{RUN}::test_the_end_of_the_data_in_a_function_of_the_user",),
    ),
    # Rows -----------------------------------------------------------------------------------------
    Mutation(
        "the last, partial batch is dropped",
        "data/sources.py",
        ((".batch(batch_size)\n", ".batch(batch_size, drop_remainder=True)\n"),),
        (f"{DATASETS}::test_arrays_and_generators[2]",),
    ),
    Mutation(
        "rows that replicas cannot divide are dropped",
        "data/partition.py",
        (("return rows * index // parts\n", "return rows // parts * index\n"),),
        (NORM,),
    ),
    Mutation(
        "a replica gets no rows, as TensorFlow splits",
        "data/partition.py",
        (
            (
                "return rows * index // parts\n",
                "return tf.minimum(index * ((rows + parts - 1) // parts), rows)\n",
            ),
        ),
        (f"{DATASETS}::test_no_replica_of_a_step_is_without_rows[3]",),
    ),
    Mutation(
        "a batch smaller than the replicas leaves some without rows",
        "data/partition.py",
        (("    whole = rows < len(shares)\n", "    whole = tf.constant(False)\n"),),
        (f"{DATASETS}::test_no_replica_of_a_step_is_without_rows[3]",),
    ),
    Mutation(
        "a small batch counts once for each replica",
        "steps/forward_backward.py",
        (("partition.row_weight(shards.global_rows, replicas) if replicas > 1", "None if True"),),
        (NORM,),
    ),
    Mutation(
        "evaluation counts a small batch once for each replica",
        "steps/evaluate.py",
        (
            (
                "if replicas > 1 else None\n"
                "        shard = per_replica(self.strategy, shards.local)\n"
                "        with",
                "if False else None\n"
                "        shard = per_replica(self.strategy, shards.local)\n"
                "        with",
            ),
        ),
        (f"{EVALUATION}::test_loss_and_metrics_are_over_each_row_once[8]",),
    ),
    Mutation(
        "metrics see every copy of a small batch",
        "losses/metrics.py",
        (("return True if row_weight is None or first == 0 else tf", "return True or tf"),),
        (f"{EVALUATION}::test_loss_and_metrics_are_over_each_row_once[8]",),
    ),
    Mutation(
        "metrics in a forward function see every copy of a small batch",
        "losses/metrics.py",
        (("return tf.where(counts, tf.cast(value", "return tf.where(True, tf.cast(value"),),
        ("promises/test_metrics_in_forward.py::test_each_row_counts_once",),
    ),
    Mutation(
        "rows that are gathered in a small batch have the gradients of all copies",
        "steps/row_gathering.py",
        (("tf.where(small, own, every)", "tf.where(False, own, every)"),),
        (f"{GATHERED}[3-against_itself-against_gathered]",),
    ),
    Mutation(
        "rows that are gathered have the gradients of their own replica alone",
        "steps/row_gathering.py",
        (("added = all_reduce_sum(", "added = lone(all_reduce_sum)("), ("def _source(", LONE)),
        (f"{GATHERED}[2-views-views_by_labels]",),
    ),
    Mutation(
        "replicas draw the same numbers",
        "steps/random_draws.py",
        (("first=lambda: shards.first_row(replica),", "first=lambda: tf.zeros([], tf.int64),"),),
        (NORM,),
    ),
    Mutation(
        "predictions come by replica, the last one first",
        "steps/evaluate.py",
        (("joined = tf.concat(parts, axis=0)", "joined = tf.concat(parts[::-1], axis=0)"),),
        (f"{EVALUATION}::test_each_row_is_predicted_once_and_in_order[3]",),
    ),
    Mutation(
        "a small batch is predicted once for each replica",
        "steps/evaluate.py",
        (("return joined[: tf.where(small, once, joined_rows)]", "return joined"),),
        (f"{EVALUATION}::test_each_row_is_predicted_once_and_in_order[8]",),
    ),
    # Windows over batches -------------------------------------------------------------------------
    Mutation(
        "a short window is divided by the weight of a whole one",
        "accumulation/accumulator.py",
        (
            (
                "        totals = sum_over_replicas(strategy, parts)\n",
                "        totals = sum_over_replicas(strategy, parts)\n"
                "        totals[0][-1] = tf.maximum(totals[0][-1], 15.0)\n",
            ),
        ),
        (f"{ACCUMULATOR}[3]",),
    ),
    Mutation(
        "a window begins with what the one before left",
        "accumulation/accumulator.py",
        (
            (
                "            self._clear()\n        divided",
                "            self.count\n        divided",
            ),
        ),
        (f"{ACCUMULATOR}[3]",),
    ),
    Mutation(
        "adding to a window communicates",
        "accumulation/accumulator.py",
        (
            (
                "        self._weight.assign_add(tf.cast(weight, tf.float32))",
                "        self._context().all_reduce('SUM', tf.cast(weight, tf.float32))\n"
                "        self._weight.assign_add(tf.cast(weight, tf.float32))",
            ),
        ),
        ("promises/test_windows.py::test_adding_to_a_window_waits_for_no_other_replica",),
    ),
    # Verification ---------------------------------------------------------------------------------
    Mutation(
        "the first step is not verified",
        "steps/verification/verifier.py",
        (("_ATTEMPTS if verify and needed else 0", "0"),),
        (f"{TOUCHING}[a batch mean in a Lambda]",),
    ),
    Mutation(
        "the tolerance of the verification is a thousand times as large",
        "steps/verification/rounding.py",
        (("self.bound = self.compute *", "self.bound = 1e5 * self.compute *"),),
        (f"{TOUCHING}[a hundredth of the batch mean in a Lambda]",),
    ),
    Mutation(
        "every difference is taken for rounding",
        "steps/verification/rounding.py",
        (("4.0 if half else 16.0\n", "1e9\n"),),
        (f"{TOUCHING}[a batch mean in float32]",),
    ),
    Mutation(
        "states that layers assign are not compared",
        "steps/verification/verifier.py",
        (
            (
                "found += compare_states(states, computed, self._strategy, self._rounding)",
                "found += []",
            ),
        ),
        (f"{TOUCHING}[a number of rows kept in a layer]",),
    ),
)
