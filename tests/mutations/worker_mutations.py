"""What several processes promise, broken on purpose."""

from __future__ import annotations

from mutation import Mutation

WORKERS = "promises/test_workers.py"

PROCESSES = (
    Mutation(
        "limits set on the optimizer are lost where workers add by collectives",
        "accumulation/replicated.py",
        (
            (
                'hidden = ["loss_scale_factor"]',
                'several = "Collective" in type(self.strategy).__name__\n        hidden = ["loss_scale_factor"] + ["clipnorm", "global_clipnorm"] * several',
            ),
        ),
        (f"{WORKERS}::test_clipping_set_on_the_optimizer_and_shares",),
    ),
    Mutation(
        "a lost worker is an error of TensorFlow, which names none or another one",
        "addons/workers/lost.py",
        (("            raise explained from error", "            raise"),),
        (f"{WORKERS}::test_a_killed_worker_is_named_to_the_other",),
    ),
    Mutation(
        "each worker counts the rows of a batch from its own first one",
        "data/preprocessing.py",
        (
            (
                "places = tf.range(first_row + start, first_row + stop)",
                "places = tf.range(first_row, first_row + stop - start)",
            ),
        ),
        (f"{WORKERS}::test_each_worker_preprocesses_its_own_rows",),
    ),
    Mutation(
        "each worker reads all rows of a batch",
        "data/preprocessing.py",
        (
            (
                "start, stop = own_range(partition.shard_offsets(rows, shares), local)",
                "start, stop = tf.zeros_like(rows), rows",
            ),
        ),
        (f"{WORKERS}::test_each_worker_preprocesses_its_own_rows",),
    ),
)
