"""What a GPU waits for, broken on purpose: checks on the host, branches, shapes."""

from __future__ import annotations

from mutation import broken

_FILE = "test_no_update_waits_for_the_host.py"

OPERATIONS = (
    broken(
        "the values of the loss are looked at on the host",
        "    with tf.name_scope(_SCOPE):\n",
        "    tf.raw_ops.Assert(condition=tf.reduce_sum(values) < 1e30, data=['large'])\n"
        "    with tf.name_scope(_SCOPE):\n",
        f"{_FILE}::test_no_update_waits_for_the_host[plain]",
        f"{_FILE}::test_no_update_waits_for_the_host[clipped]",
    ),
    broken(
        "the next loss scale is one more branch",
        "grown = tf.where(grow & tf.math.is_finite(scale * 2.0), scale * 2.0, scale)",
        "grown = tf.cond(grow, lambda: scale * 2.0, lambda: scale)",
        f"{_FILE}::test_no_update_waits_for_the_host[dynamic scale]",
    ),
    broken(
        "the size of data is left open",
        "keeps = self._keeps_rows or (self._alone and fixed is not None)",
        "keeps = self._keeps_rows",
        "test_data_of_one_size.py::test_data_of_several_sizes_costs_two_traces_at_most[1]",
    ),
    broken(
        "the number of losses is not held to the rows",
        "    if is_counted and rows is not None:\n",
        "    if False:\n",
        f"{_FILE}::test_another_number_of_losses_than_rows_is_refused[plain]",
        f"{_FILE}::test_another_number_of_losses_than_rows_is_refused[by XLA]",
    ),
)
