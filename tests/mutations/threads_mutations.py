"""What is promised of several threads and of steps that are traced again, broken on purpose."""

from __future__ import annotations

from mutation import broken

_TURNS = "test_threads.py::test_trainings_in_turns_of_threads_are_those_of_one_after_the_other"
_ALONE = "test_threads.py::test_one_model_is_trained_by_one_thread_at_a_time_and_predicts_for_all"
_ROWS = "test_threads.py::test_replicas_of_each_thread_know_their_own_rows"

THREADS = (
    broken(
        "the update of owners is set on the strategy for all threads",
        '    with patching(strategy.extended, "update", called):\n        yield\n',
        "    before = strategy.extended.update\n"
        "    strategy.extended.update = functools.partial(called, before)\n    yield\n"
        "    strategy.extended.update = before\n",
        _TURNS,
    ),
    broken(
        "eager replicas find the batch of another thread",
        "class _Eager(threading.local):",
        "class _Eager:",
        f"{_ROWS}[2-True]",
        f"{_ROWS}[3-True]",
    ),
    broken(
        "threads shard by the limits of each other",
        "class _Given(threading.local):",
        "class _Given:",
        "test_threads.py::test_each_thread_shards_by_its_own_limits",
    ),
    broken(
        "calls of one step overlap",
        "for lock in self.locks:",
        "for lock in ():",
        "test_threads.py::test_one_step_serves_several_threads",
    ),
    broken(
        "a second thread trains or evaluates a model meanwhile",
        "if not lock.acquire(blocking=False):",
        "if not (lock := threading.RLock()).acquire(blocking=False):",
        _ALONE,
        also=(
            ("import difflib\nimport functools\n", "import difflib, threading\nimport functools\n"),
        ),
    ),
    broken(
        "what a loop does not warn of, nobody is warned of any more",
        "return cls.message in _thread.ignored",
        "return True",
        "test_threads.py::test_overlapping_loops_leave_the_filters_of_warnings",
    ),
    broken(
        "a step that is traced at each call says nothing",
        "if self._in_a_row > _MOST and",
        "if False and",
        "test_retraces.py::test_a_step_that_is_traced_at_each_call_says_what_changes",
    ),
    broken(
        "a trace that is used again counts as one in a row",
        "self._in_a_row + 1 if self._count > before else 0",
        "self._in_a_row + (self._count > before)",
        "test_retraces.py::test_traces_that_are_used_again_are_no_matter",
    ),
)
