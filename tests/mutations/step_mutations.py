"""What a step promises, broken on purpose: weights, clipping, draws, owners, failures, calls."""

from __future__ import annotations

from mutation import Mutation

W = "promises/test_weights.py::test_sums_are_divided_by_the_weight_of_the_global_batch"
ZERO = "promises/test_weights.py::test_a_batch_without_weight_still_regularises"
HAND = "promises/test_weights.py::test_sums_of_shards_add_up_to_those_of_the_batch"
CLIP = "promises/test_clipping.py::test_the_global_gradient_is_clipped_once"
DRAWS = "promises/test_draws.py::test_draws_are_those_of_one_device_bit_for_bit"
OWNERS = "promises/test_shard_update.py::test_owners_update_as_one_device_does"
SKIP = "promises/test_overflow.py::test_one_row_that_overflows_skips_the_step_on_all"
FAILS = "promises/test_failing_step.py::test_training_continues_as_if_the_bad_batches_had_not_been"
RUN = "promises/test_run.py::test_the_data_ends_within_a_call"
EVAL = "promises/test_eval_predict_steps.py::test_loss_and_metrics_are_over_each_row_once"
ROWS = "promises/test_eval_predict_steps.py::test_each_row_is_predicted_once_and_in_order"
CHAIN = "promises/test_chain.py::test_each_batch_trains_the_steps_in_turn"

STEPS = (
    # test_weights ---------------------------------------------------------------------------------
    Mutation(
        "hidden tokens count as elements",
        "accumulation/loss_sum.py",
        (
            (
                "LossTerm(total, valid * elements / tf.cast(tf.size(mask), total.dtype))",
                "LossTerm(total, elements)",
            ),
        ),
        (f"{W}[N=2, sum_over_batch_size]",),
    ),
    Mutation(
        "the weight of hidden tokens counts",
        "accumulation/loss_sum.py",
        (("return tf.reduce_sum(weight * kept)", "return tf.reduce_sum(weight)"),),
        (f"{W}[N=3, mean_with_sample_weight]", f"{HAND}[3]"),
    ),
    Mutation(
        "a batch without weight divides by zero",
        "losses/objective.py",
        (
            (
                "tf.math.divide_no_nan(sums[i], tf.cast(total, sums[i].dtype)), tf.float32",
                "sums[i] / tf.cast(total, sums[i].dtype), tf.float32",
            ),
        ),
        (f"{ZERO}[N=3, mean_with_sample_weight]",),
    ),
    Mutation(
        "a row of a small batch counts once for each copy",
        "losses/objective.py",
        (
            (
                "return stats if row_weight is None else stats * tf.cast(row_weight, dtype)",
                "return stats",
            ),
        ),
        (f"{W}[N=3, sum]",),
    ),
    Mutation(
        "global_mean is a mean of means",
        "accumulation/loss_sum.py",
        (
            (
                "total, weight = context.all_reduce(tf.distribute.ReduceOp.SUM, [shard_sum, shard_weight])",
                "total = context.all_reduce(tf.distribute.ReduceOp.MEAN, shard_sum / shard_weight)\n"
                "        weight = tf.ones_like(shard_weight)",
            ),
        ),
        (f"{HAND}[2]", f"{HAND}[3]"),
    ),
    Mutation(
        "regularisation is not in the loss",
        "steps/train_step.py",
        (('"loss": logs["loss"] + penalty', '"loss": logs["loss"] + 0.0 * penalty'),),
        (f"{W}[N=3, sum]", f"{ZERO}[N=1, mean_with_sample_weight]"),
    ),
    # test_clipping --------------------------------------------------------------------------------
    Mutation(
        "the norm in the logs is that after clipping",
        "steps/train_step.py",
        (
            (
                '"gradient_norm": tf.cast(norm, tf.float32)',
                '"gradient_norm": tf.cast(global_norm(gradients), tf.float32)',
            ),
        ),
        (f"{CLIP}[clip_norm]",),
    ),
    Mutation(
        "a gradient below the limit is scaled up",
        "accumulation/clipping.py",
        (
            (
                "scaled, _ = tf.clip_by_global_norm(alike, limit, use_norm=tf.cast(norm, dtype))",
                "scaled = [one * limit / tf.cast(norm, dtype) for one in alike]",
            ),
        ),
        (f"{CLIP}[clip_norm]",),
    ),
    Mutation(
        "clip_norm is taken for a limit of each replica's part",
        "steps/train_step.py",
        (
            (
                "gradients = clipped(gradients, clip_norm, norm)",
                "gradients = clipped(gradients, clip_norm / self.strategy.num_replicas_in_sync, norm)",
            ),
        ),
        (
            f"{CLIP}[clip_norm]",
            f"{CLIP}[clip_norm of make_train_step before clipvalue of the optimizer]",
        ),
    ),
    Mutation(
        "the limits of the optimizer are for the sum of N gradients",
        "optimizers/update.py",
        (
            (
                "optimizer.apply(list(summed), list(kept))",
                "optimizer.apply([one / replicas for one in summed], list(kept))",
            ),
        ),
        (f"{CLIP}[clipnorm]", f"{CLIP}[global_clipnorm]"),
    ),
    # test_draws -----------------------------------------------------------------------------------
    Mutation(
        "a micro-batch draws the numbers of the first one",
        "steps/random_draws.py",
        (("first=lambda: self.first() + bounds()[0],", "first=self.first,"),),
        (f"{DRAWS}[noise without seeds, N=2]",),
    ),
    Mutation(
        "seeds do not move on",
        "steps/train_step.py",
        (("if states:  #", "if False:  #"),),
        (f"{DRAWS}[noise, N=3]", f"{DRAWS}[images without seeds, N=3]"),
    ),
    Mutation(
        "normal noise is drawn by each replica for itself",
        "steps/random_draws.py",
        (('        "stateless_normal": _normal,\n', ""),),
        (f"{DRAWS}[noise, N=3]", f"{DRAWS}[noise without seeds, N=2]"),
    ),
    Mutation(
        "dropout is drawn by each replica for itself",
        "steps/random_draws.py",
        (
            ('by_row["stateless_dropout"] = dropout_drawn_by(by_row["stateless_uniform"])\n', "\n"),
            ('        "stateless_uniform": _uniform,\n', ""),
        ),
        (f"{DRAWS}[noise, N=3]",),
    ),
    # test_shard_update ----------------------------------------------------------------------------
    Mutation(
        "the owner's value reaches the replicas after it only",
        "optimizers/sharded.py",
        (("if replica != owner:", "if replica > owner:"),),
        (f"{OWNERS}[SGD with momentum, clip_norm, EMA]", f"{OWNERS}[AdamW, EMA]"),
    ),
    Mutation(
        "an owner is skipped",
        "optimizers/sharded.py",
        (
            (
                "if self.owners[id(v)] == owner]\n                    with",
                "if self.owners[id(v)] == owner > 0]\n                    with",
            ),
        ),
        (f"{OWNERS}[RMSprop, clipnorm]", f"{OWNERS}[Lion, schedule]"),
    ),
    Mutation(
        "an owner updates twice",
        "optimizers/sharded.py",
        (
            (
                "own.apply([gradients[i] for i in mine], twins)",
                "own.apply([gradients[i] for i in mine], twins)\n"
                "                                own.apply([gradients[i] for i in mine], twins)",
            ),
        ),
        (f"{OWNERS}[Adam, global_clipnorm]",),
    ),
    Mutation(
        "global_clipnorm sees one variable",
        "optimizers/sharded.py",
        (("global_norm(gradients))", "global_norm(gradients[:1]))"),),
        (f"{OWNERS}[Adam, global_clipnorm]",),
    ),
    # test_overflow --------------------------------------------------------------------------------
    Mutation(
        "what is not finite is applied",
        "steps/train_step.py",
        (("tf.cond(reduced.finite, update, lambda: tf.constant(False))", "update()"),),
        (f"{SKIP}[dynamic, N=3]", f"{SKIP}[a number, N=2]"),
    ),
    Mutation(
        "the scale falls by more than half",
        "accumulation/loss_scale.py",
        (("tf.maximum(scale * 0.5, 1.0)", "tf.maximum(scale * 0.25, 1.0)"),),
        (f"{SKIP}[dynamic, N=3]", f"{SKIP}[LossScaleOptimizer, N=3]"),
    ),
    Mutation(
        "a skipped step is not in the logs",
        "steps/train_step.py",
        (
            (
                "1.0 - tf.cast(reduced.finite, tf.float32)",
                "0.0 * tf.cast(reduced.finite, tf.float32)",
            ),
        ),
        (f"{SKIP}[dynamic, N=2, shard_update]",),
    ),
    Mutation(
        "gradients of float16 stay scaled",
        "steps/step.py",
        (("return 1.0 / factor if correction is None", "return None if correction is None"),),
        ("promises/test_overflow.py::test_the_scale_falls_until_gradients_of_float16_fit",),
    ),
    # test_failing_step ----------------------------------------------------------------------------
    Mutation(
        "an update does not wait for the checks of layers, losses and metrics",
        "steps/forward_backward.py",
        (
            (
                "with tf.control_dependencies([*effects_of(made), *states]):",
                "with tf.control_dependencies([]):",
            ),
        ),
        (f"{FAILS}[N=2, synchronized norm]",),
    ),
    Mutation(
        "states are assigned before the checks have passed",
        "steps/train_step.py",
        (("assign_held(reduced.held, s, [*after, *g])", "assign_held(reduced.held, s, [])"),),
        (f"{FAILS}[N=2, synchronized norm]",),
    ),
    Mutation(
        "owners do not wait for the checks",
        "optimizers/sharded.py",
        (("with tf.control_dependencies([after]):", "with tf.control_dependencies([]):"),),
        (f"{FAILS}[N=3, micro-batches, shard_update]",),
    ),
    # test_run -------------------------------------------------------------------------------------
    Mutation(
        "the loss of several steps is a mean of means",
        "steps/multi_step.py",
        (
            (
                'return (logs[name] - _of_outputs(logs)) * logs["weight"]',
                "return logs[name] - _of_outputs(logs)",
            ),
            (
                'loss = logs["loss"] / tf.where(weight > 0, weight, 1.0)',
                'loss = logs["loss"] / tf.cast(done, tf.float64)',
            ),
        ),
        (f"{RUN}[N=2]", f"{RUN}[N=3]"),
    ),
    Mutation(
        "the end of the data is counted as a step",
        "steps/multi_step.py",
        (
            (
                "return (left - 1) * ran, done + ran, sums, last",
                "return (left - 1) * ran, done + 1, sums, last",
            ),
        ),
        (f"{RUN}[N=2]", f"{RUN}[N=1]"),
    ),
    Mutation(
        "the logs of a call are those of its first step",
        "steps/multi_step.py",
        (
            (
                "return sums + tf.stack(added), tf.concat([tf.stack(ends), terms], 0)",
                "return sums + tf.stack(added), tf.concat([tf.where(tf.reduce_any(last[:2] > 0), "
                "last[:2], tf.stack(ends)), terms], 0)",
            ),
        ),
        (f"{RUN}[N=3]",),
    ),
    # test_eval_predict_steps ----------------------------------------------------------------------
    Mutation(
        "evaluation runs as training does",
        "steps/evaluate.py",
        (
            (
                "terms, outputs = self._objective(shard, training=False)",
                "terms, outputs = self._objective(shard, training=True)",
            ),
        ),
        (f"{EVAL}[2]",),
    ),
    Mutation(
        "evaluation leaves regularisation out",
        "steps/evaluate.py",
        (('return {**logs, "loss": logs["loss"] + penalty}', "return logs"),),
        (f"{EVAL}[1]", f"{EVAL}[3]"),
    ),
    Mutation(
        "the second step of a chain runs first",
        "steps/chain.py",
        (
            (
                "for (name, step), times in zip(self.steps.items(), self.times, strict=True):\n"
                "            with",
                "for (name, step), times in reversed([*zip(self.steps.items(), self.times)]):\n"
                "            with",
            ),
        ),
        (CHAIN, "promises/test_chain.py::test_several_batches_in_one_call"),
    ),
    Mutation(
        "a chain over several batches has the mean of their losses",
        "steps/multi_step.py",
        (
            (
                "return logs[name.sum] if name.sum else logs[name] * logs[name.weight]",
                "return logs[name]",
            ),
            (
                "logs[name] = tf.math.divide_no_nan(logs[name], logs[name.weight])",
                "logs[name] = logs[name] / tf.cast(done, tf.float64)",
            ),
        ),
        ("promises/test_chain.py::test_several_batches_in_one_call",),
    ),
    Mutation(
        "the History of a chain is a mean over batches",
        "steps/train_step.py",
        (("sums[name] = value * tf.cast(rows, value.dtype)", "sums[name] = value"),),
        ("promises/test_chain.py::test_fit_runs_the_chain_on_each_batch",),
    ),
    Mutation(
        "out of memory does not name the batch",
        "steps/failures.py",
        (
            (
                "        rows = None if count_rows is None else count_rows()\n"
                "        raise _out_of_memory(error, strategy, rows) from error\n    except (tf",
                "        raise _out_of_memory(error, strategy, None) from error\n    except (tf",
            ),
        ),
        ("promises/test_out_of_memory.py::test_the_replica_the_batch_and_the_way_out_are_named",),
    ),
)
