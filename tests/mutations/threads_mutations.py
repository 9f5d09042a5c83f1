"""What is promised of threads, signals, and files of several workers, broken on purpose."""

from __future__ import annotations

from mutation import broken

ROWS = "test_threads.py::test_replicas_of_each_thread_know_their_own_rows"
FILE = "test_files_of_workers.py"
ONE_PATH = f"{FILE}::test_one_path_on_two_workers_is_an_error_whose_lines_help"
SIGTERM = "test_sigterm_in_threads.py"

THREADS = (
    broken(
        "the update of owners is set on the strategy for all threads",
        "accumulation/applying.py:updating_by",
        'with patching(strategy.extended, "update", called): yield'
        " => before = strategy.extended.update; strategy.extended.update = functools.partial(called, before);"
        " yield; strategy.extended.update = before",
        "test_threads.py::test_trainings_in_turns_of_threads_are_those_of_one_after_the_other",
    ),
    broken(
        "eager replicas find the batch of another thread",
        "strategies/marked_runs.py:_Eager",
        "threading.local => object",
        f"{ROWS}[2-True]",
        f"{ROWS}[3-True]",
    ),
    broken(
        "threads shard by the limits of each other",
        "addons/sharding/loads.py:_Given",
        "threading.local => object",
        "test_threads.py::test_each_thread_shards_by_its_own_limits",
    ),
    broken(
        "calls of one step overlap",
        "steps/runner.py:Runner._alone",
        "self.locks => ()",
        "test_threads.py::test_one_step_serves_several_threads",
    ),
    broken(
        "a second thread trains or evaluates a model meanwhile",
        "addons/loops/methods.py:in_one_thread.call",
        "lock.acquire => (lock := threading.RLock()).acquire",
        "test_threads.py::test_one_model_is_trained_by_one_thread_at_a_time_and_predicts_for_all",
        also=(("addons/loops/methods.py", "import difflib => ..., threading"),),
    ),
    broken(
        "what a loop does not warn of, nobody is warned of any more",
        "_patch.py:_OfThread.__subclasscheck__",
        "cls.message in _thread.ignored => True",
        "test_threads.py::test_overlapping_loops_leave_the_filters_of_warnings",
    ),
    broken(
        "a step that is traced at each call says nothing",
        "steps/retraces.py:Retraces.watch",
        "self._in_a_row > _MOST => False",
        "test_retraces.py::test_a_step_that_is_traced_at_each_call_says_what_changes",
    ),
    broken(
        "a trace that is used again counts as one in a row",
        "steps/retraces.py:Retraces.watch",
        "self._in_a_row + 1 if self._count > before else 0 => self._in_a_row + (self._count > before)",
        "test_retraces.py::test_traces_that_are_used_again_are_no_matter",
    ),
    broken(
        "two workers may write one file",
        "addons/loops/files.py:check_files",
        "sum(count > 0 for count in counts) < 2 => True",
        ONE_PATH,
    ),
    broken(
        "paths of workers are compared as texts",
        "addons/loops/files.py:WrittenPath.find_folder",
        '"://" in self.text => True',
        ONE_PATH,
    ),
    broken(
        "a file of one name in two folders is taken for one",
        "addons/loops/files.py:WrittenPath.sees",
        "self.folder is None or (self.folder / mark).exists() => True",
        ONE_PATH,
    ),
    broken(
        "only the worker that shares a path raises, and the other one waits",
        "addons/loops/files.py:check_files",
        "shared, workers = _shared_paths(exchange, paths, counts, marks) => ...; workers = workers if exchange.worker == 0 else []",
        ONE_PATH,
    ),
    broken(
        "own_path is one path for all workers",
        "addons/workers/files.py:own_path",
        "is_first() => True",
        ONE_PATH,
    ),
    broken(
        "every worker takes itself for the first",
        "addons/workers/files.py:is_first",
        "cluster is None or cluster.index == 0 => True",
        ONE_PATH,
    ),
    broken(
        "one worker alone begins to save a model that all have to save",
        "addons/loops/files.py:_check_all_save",
        "is_on_read(variable) => False",
        f"{FILE}::test_a_model_that_all_workers_have_to_save",
    ),
    broken(
        "a worker that has ended without an error is a reason to start all again",
        "addons/workers/lost.py:JoinedWorkers._lost",
        "ended and all(end == FINISHED for end in ended.values()) => False",
        f"{FILE}::test_a_last_call_of_one_worker_is_not_to_be_started_again",
    ),
    broken(
        "a training in a thread is silent about the SIGTERM that it will not hear",
        "addons/checkpoints/manager.py:Checkpoints._listen",
        "not self._signal.listen() => self._signal.listen() is None",
        f"{SIGTERM}::test_a_training_in_a_thread_says_that_it_will_not_hear_sigterm",
        f"{SIGTERM}::test_what_the_warning_tells_to_write_keeps_the_steps[another]",
    ),
)
