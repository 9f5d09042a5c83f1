"""The clauses of the law, each broken in the source on purpose, and the tests that must notice.

A mutation replaces texts that stand exactly once in a file. Where a text was rewritten, the
mutation fails and says so: find the new place, and keep the text short.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One clause of the law, broken.

    Attributes:
        name: What is done wrong, in a few words.
        file: The file of the package it is done in.
        changes: Texts that stand once in the file, and what is put in their place.
        tests: Tests all of which must fail, as pytest names them, below ``tests/``.
    """

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def apply(self, package: Path) -> None:
        """Breaks a copy of the package."""
        path = package / self.file
        text = path.read_text()
        for old, new in self.changes:
            count = text.count(old)
            assert count == 1, (
                f"The mutation {self.name!r} changes a text that stands {count} times in "
                f"{self.file}, not once. Find where the code went: {old!r}"
            )
            text = text.replace(old, new)
        path.write_text(text)


# Short names for tests of many files.
EXACT = "parity/test_exactness.py::test_twenty_sgd_steps_at_every_batch_size"
OUTPUTS = "parity/test_outputs.py::test_losses_of_many_steps_are_those_of_all_rows"
LAYERS = "parity/test_features.py::test_add_loss_and_activity_regularisers_on_partial_batches"
METRICS = "parity/test_metrics.py::test_metrics_are_those_of_one_device"
WEIGHTS = "invariance/test_sample_weights.py::test_replicas_give_what_one_device_gives"
WINDOW = "invariance/test_windows.py::test_micro_batches_are_one_window"
LOOP = "invariance/test_windows.py::test_a_window_of_batches_is_one_batch_of_all_their_rows"
SCALING = "optimizers/test_loss_scaling.py::test_loss_scale_optimizer_as_keras_has_it_on_one_device"
EVALUATION = "steps/test_evaluate.py::test_loss_and_metrics_over_all_rows"
PREDICTION = "steps/test_evaluate.py::test_each_row_is_predicted_once_and_in_order"
TOUCHING = (
    "parity/test_touching_rows.py::test_replicas_give_one_devices_answer_or_say_that_they_do_not"
)
SPARSE = "invariance/test_sparse_gradients.py::test_replicas_give_the_dense_result_of_one_device"
COUPLED = "steps/test_row_gathering.py::test_a_loss_over_the_whole_batch_is_that_of_one_device"
# A gradient that forgets to meet the other replicas.
LONE = """def lone(add: Any) -> Any:
    def added(context: Any, tensors: Any) -> Any:
        return [
            one + tf.stop_gradient(every - one)
            for one, every in zip(tensors, add(context, tensors), strict=True)
        ]

    return added


def _source("""


MUTATIONS = (
    # Sums and weights, divided once ---------------------------------------------------------------
    Mutation(
        "the sum is divided by a constant batch size",
        "losses/objective.py",
        (("1.0 if term.fixed else global_rows * (", "1.0 if term.fixed else 64.0 * ("),),
        (f"{EXACT}[2-1-weights]",),
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
        (f"{EXACT}[2-1-weights]",),
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
        (f"{EXACT}[2-3-clip]",),
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
        (f"{WINDOW}[what counts steps counts windows: sum in 2 micro-batches]",),
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
        (f"{WINDOW}[what counts steps counts windows: sum in 2 micro-batches]",),
    ),
    Mutation(
        "the weight is the rows where it should be the sample weights",
        "losses/loss_sum.py",
        (
            (
                "_sum_of_weights(sample_weight, mask, total.dtype)",
                "tf.cast(tf.size(values), total.dtype)",
            ),
        ),
        (f"{WEIGHTS}[weights far apart, mean_with_sample_weight]",),
    ),
    Mutation(
        "what a mask hides is in the weight",
        "losses/loss_sum.py",
        (("    mask = _mask(y_pred, ", "    mask = None and _mask(y_pred, "),),
        (f"{WEIGHTS}[masks without weights, every reduction]",),
    ),
    Mutation(
        'reduction="sum" is divided by the number of replicas',
        "losses/loss_sum.py",
        (("(total, tf.ones_like(total), fixed=True)", "(total, tf.ones_like(total))"),),
        (f"{WEIGHTS}[weights far apart, sum]",),
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
        (f"{LAYERS}[2-3]",),
    ),
    Mutation(
        "gradients are added over the replicas once more",
        "optimizers/update.py",
        (("(list(summed), list(kept))", "([g * replicas for g in summed], list(kept))"),),
        (f"{EXACT}[2-1-weights]",),
    ),
    Mutation(
        "of a row that an embedding looks up twice one gradient counts",
        "steps/forward_backward.py",
        (
            (
                "    gradient = tf.convert_to_tensor(gradient)\n",
                "    if isinstance(gradient, tf.IndexedSlices):\n"
                "        gradient = tf.tensor_scatter_nd_update(\n"
                "            tf.zeros(shape), gradient.indices[:, None], gradient.values)\n",
            ),
        ),
        (f"{SPARSE}[embedding, SGD]",),
    ),
    Mutation(
        "the loss of many steps is a mean of their losses",
        "steps/multi_step.py",
        (("tf.where(weight > 0, loss, plain", "tf.where(weight > 1e9, loss, plain"),),
        ("parity/test_feeding.py::test_many_steps_in_one_call_end_where_the_data_ends[1]",),
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
        (f"{OUTPUTS}[eval-3-{{}}-mean_with_sample_weight-masks and weights]",),
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
        (f"{EXACT}[3-1-l2]",),
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
        (f"{EXACT}[2-2-l2]",),
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
        (f"{EXACT}[2-2-l2]",),
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
        (f"{EXACT}[4-1-clip]",),
    ),
    Mutation(
        "the norm is that of one replica's gradient",
        "steps/train_step.py",
        (
            (
                "result = self._phase(shards, scale)",
                "result = self._phase(shards, scale)\n        self._one = result.parts[0][:-1]",
            ),
            ("norm = global_norm(gradients)", "norm = global_norm(self._one)"),
        ),
        (f"{EXACT}[4-1-clip]",),
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
        (f"{SCALING}[1]",),
    ),
    Mutation(
        "gradients stay multiplied by the loss scale",
        "steps/train_step.py",
        (("unscaled(correction, scale) for", "unscaled(correction, None) for"),),
        (f"{SCALING}[1]",),
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
        (f"{SCALING}[1]",),
    ),
    Mutation(
        "a skipped step counts as a good one for the loss scale",
        "optimizers/loss_scaling.py",
        (
            (
                "tf.where(finite & ~grow, good + 1, tf.zeros_like(good))",
                "tf.where(grow, tf.zeros_like(good), good + 1)",
            ),
        ),
        (
            "optimizers/test_loss_scaling.py::test_a_dynamic_scale_halves_doubles_and_stays_in_bounds",
        ),
    ),
    Mutation(
        "weights are not overwritten by their averages",
        "steps/train_step.py",
        (("            overwrite_with_averages(optimizer, self.strategy, variables)\n", ""),),
        (f"{WINDOW}[what counts steps counts windows: sum in 2 micro-batches]",),
    ),
    Mutation(
        "averages that overwrite weights are not constrained",
        "optimizers/update.py",
        (("constraints.get(id(variable)) or tf.convert_to_tensor", "tf.convert_to_tensor"),),
        (f"{WINDOW}[what counts steps counts windows: sum in 2 micro-batches]",),
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
        ("parity/test_feeding.py::test_step_inside_a_function_of_the_user",),
    ),
    # Rows -----------------------------------------------------------------------------------------
    Mutation(
        "the last, partial batch is dropped",
        "data/sources.py",
        ((".batch(batch_size)\n", ".batch(batch_size, drop_remainder=True)\n"),),
        ("data/test_sources.py::test_arrays_are_batched_in_order[arrays0-expected0]",),
    ),
    Mutation(
        "rows that replicas cannot divide are dropped",
        "data/partition.py",
        (("return rows * index // parts\n", "return rows // parts * index\n"),),
        ("data/test_partition.py::test_every_row_is_in_one_part_and_no_part_is_empty",),
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
        ("data/test_partition.py::test_known_cuts[9-shares0-expected0]",),
    ),
    Mutation(
        "a batch smaller than the replicas leaves some without rows",
        "data/partition.py",
        (("    whole = rows < len(shares)\n", "    whole = tf.constant(False)\n"),),
        ("data/test_partition.py::test_a_small_batch_goes_whole_to_every_part",),
    ),
    Mutation(
        "a small batch counts once for each replica",
        "steps/forward_backward.py",
        (("partition.row_weight(shards.global_rows, replicas) if replicas > 1", "None if True"),),
        (f"{EXACT}[2-1-weights]", f"{WEIGHTS}[weights far apart, sum]"),
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
        (f"{EVALUATION}[8]",),
    ),
    Mutation(
        "metrics see every copy of a small batch",
        "losses/metrics.py",
        (("return True if row_weight is None or first == 0 else tf", "return True or tf"),),
        (f"{METRICS}[4-{{}}]", f"{EVALUATION}[8]"),
    ),
    Mutation(
        "metrics in a forward function see every copy of a small batch",
        "losses/metrics.py",
        (("return tf.where(counts, tf.cast(value", "return tf.where(True, tf.cast(value"),),
        ("losses/test_metrics_in_forward.py::test_in_evaluation[4]",),
    ),
    Mutation(
        "rows that are gathered in a small batch have the gradients of all copies",
        "steps/row_gathering.py",
        (("tf.where(small, own, every)", "tf.where(False, own, every)"),),
        (f"{COUPLED}[simclr-4]",),
    ),
    Mutation(
        "rows that are gathered have the gradients of their own replica alone",
        "steps/row_gathering.py",
        (("added = all_reduce_sum(", "added = lone(all_reduce_sum)("), ("def _source(", LONE)),
        (f"{COUPLED}[simclr-2]",),
    ),
    Mutation(
        "replicas draw the same numbers",
        "steps/random_draws.py",
        (("first=lambda: shards.first_row(replica),", "first=lambda: tf.zeros([], tf.int64),"),),
        ("steps/test_random_draws.py::test_layers_draw_what_one_device_draws[dropout-2]",),
    ),
    Mutation(
        "predictions come by replica, the last one first",
        "steps/evaluate.py",
        (("joined = tf.concat(parts, axis=0)", "joined = tf.concat(parts[::-1], axis=0)"),),
        (f"{PREDICTION}[2]",),
    ),
    Mutation(
        "a small batch is predicted once for each replica",
        "steps/evaluate.py",
        (("return joined[: tf.where(small, once, joined_rows)]", "return joined"),),
        (f"{PREDICTION}[8]",),
    ),
    # Windows over batches -------------------------------------------------------------------------
    Mutation(
        "a short window is divided by the weight of a whole one",
        "optimizers/accumulation.py",
        (
            (
                "        with tf.control_dependencies(parts):",
                "        weight = tf.maximum(weight, 15.0)\n"
                "        with tf.control_dependencies(parts):",
            ),
        ),
        (f"{LOOP}[3-sum_over_batch_size]",),
    ),
    Mutation(
        "a window begins with what the one before left",
        "optimizers/accumulation.py",
        (
            (
                "        with tf.control_dependencies(parts):\n            self._clear()",
                "        self._count.assign(0)",
            ),
        ),
        (f"{LOOP}[3-sum_over_batch_size]",),
    ),
    Mutation(
        "adding to a window communicates",
        "optimizers/accumulation.py",
        (
            (
                "        self._weight.assign_add(tf.cast(weight, tf.float32))",
                "        all_reduce_sum(self._context(), [tf.cast(weight, tf.float32)])\n"
                "        self._weight.assign_add(tf.cast(weight, tf.float32))",
            ),
        ),
        ("optimizers/test_accumulation.py::test_one_all_reduce_for_a_window",),
    ),
    # Verification ---------------------------------------------------------------------------------
    Mutation(
        "the first step is not verified",
        "steps/verification/verifier.py",
        (("_ATTEMPTS if verify and needed else 0", "0"),),
        (f"{TOUCHING}[a loss centred on the batch mean]",),
    ),
    Mutation(
        "the tolerance of the verification is a thousand times as large",
        "steps/verification/rounding.py",
        (("self.bound = self.compute *", "self.bound = 1e5 * self.compute *"),),
        (f"{TOUCHING}[a loss that compares rows: ranking]",),
    ),
    Mutation(
        "every difference is taken for rounding",
        "steps/verification/rounding.py",
        (("4.0 if half else 16.0\n", "1e9\n"),),
        (f"{TOUCHING}[a loss centred on the batch mean]",),
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
        (f"{TOUCHING}[a Mean inside a layer]",),
    ),
)
