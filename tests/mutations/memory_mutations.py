"""The plan of memory, broken on purpose."""

from __future__ import annotations

from mutation import broken

KEPT = "test_memory_before_a_run.py::test_what_is_kept_is_counted_to_one_percent"
BOUND = "test_memory_before_a_run.py::test_a_step_needs_what_it_is_said_to_need_at_least"

MEMORY = (
    broken(
        "of each variable one copy is counted",
        "            there |= by_id(copies_of(self._strategy, variable))",
        "            there |= by_id(copies_of(self._strategy, variable)[:1])",
        f"{KEPT}[copies]",
    ),
    broken(
        "a tensor that nothing reads any more is counted",
        "        alive = after[value.maker] & read",
        "        alive = after[value.maker]",
        BOUND,
    ),
)
