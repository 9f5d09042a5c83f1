"""What several processes promise, broken on purpose."""

from __future__ import annotations

from mutation import broken

WORKERS = "test_workers.py"
BITS = "test_same_bits_workers.py::test_steps_and_what_is_resumed_on_one_device"

PROCESSES = (
    broken(
        "limits set on the optimizer are lost where workers add by collectives",
        "accumulation/replicated.py:Replicated._apply",
        'applying(optimizer, clipped=clipped) => applying(optimizer, clipped="Collective" in type(self.strategy).__name__)',
        f"{WORKERS}::test_clipping_set_on_the_optimizer_and_shares",
    ),
    broken(
        "a lost worker is an error of TensorFlow, which names none or another one",
        "addons/workers/lost.py:JoinedWorkers.explaining",
        "raise explained from error => raise",
        f"{WORKERS}::test_a_killed_worker_is_named_to_the_other",
    ),
    broken(
        "each worker counts the rows of a batch from its own first one",
        "data/preprocessing.py:Preprocessing.own_rows.own",
        "tf.range(first_row + start, first_row + stop) => tf.range(first_row, first_row + stop - start)",
        f"{WORKERS}::test_each_worker_preprocesses_its_own_rows",
    ),
    broken(
        "each worker reads all rows of a batch",
        "data/preprocessing.py:Preprocessing.own_rows.own",
        "own_range(partition.shard_offsets(rows, shares), local) => tf.zeros_like(rows), rows",
        f"{WORKERS}::test_each_worker_preprocesses_its_own_rows",
    ),
    broken(
        "the rows of a table are those of one worker",
        "strategies/collectives.py:all_reduce_sum",
        "context.all_reduce(add, unique(tensor)) => unique(tensor)",
        "test_workers.py::test_tables_of_embeddings[adagrad]",
    ),
    broken(
        "a loop of workers sends lists of several lengths in one call",
        "steps/program.py:_sends_other_shapes",
        "gathers or any(LISTED in name for name in names) => gathers",
        "test_workers.py::test_tables_of_embeddings_in_fit",
    ),
    broken(
        "what metrics add is counted by the first replica of each worker",
        "steps/phases.py:settle_states",
        "local_replicas(step.strategy)[number] => number",
        f"{BITS}[2 workers]",
    ),
    broken(
        "workers that are far apart add first",
        "strategies/collectives.py:sum_over_workers",
        "list(meetings_in_pairs(workers)) => ...[::-1]",
        f"{BITS}[4 workers]",
    ),
    broken(
        "a worker without a partner adds once more what another one has added",
        "strategies/collectives.py:sum_over_workers",
        "is_idle => is_idle and number < 0",
        f"{BITS}[3 workers]",
    ),
)
