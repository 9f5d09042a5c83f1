"""Files of several workers, and signals in threads: what is promised of them, broken on purpose."""

from __future__ import annotations

from mutation import broken

FILE = "test_files_of_workers.py"
ONE_PATH = f"{FILE}::test_one_path_on_two_workers_is_an_error_whose_lines_help"
SIGTERM = "test_sigterm_in_threads.py"

FILES = (
    broken(
        "two workers may write one file",
        "if sum(count > 0 for count in counts) < 2:",
        "if True:",
        ONE_PATH,
    ),
    broken(
        "paths of workers are compared as texts",
        'if "://" in self.text:',
        "if True:",
        ONE_PATH,
    ),
    broken(
        "a file of one name in two folders is taken for one",
        "return self.folder is None or (self.folder / mark).exists()",
        "return True",
        ONE_PATH,
    ),
    broken(
        "only the worker that shares a path raises, and the other one waits",
        "    if workers:\n        received, attribute",
        "    if workers and exchange.worker == 0:\n        received, attribute",
        ONE_PATH,
    ),
    broken(
        "own_path is one path for all workers",
        "    if is_first():\n        return text",
        "    return text",
        ONE_PATH,
    ),
    broken(
        "every worker takes itself for the first",
        "return cluster is None or cluster.index == 0",
        "return True",
        ONE_PATH,
    ),
    broken(
        "one worker alone begins to save a model that all have to save",
        "    if on_read:",
        "    if on_read and False:",
        f"{FILE}::test_a_model_that_all_workers_have_to_save",
    ),
    broken(
        "a worker that has ended without an error is a reason to start all again",
        "if ended and all(end == FINISHED for end in ended.values()):",
        "if False:",
        f"{FILE}::test_a_last_call_of_one_worker_is_not_to_be_started_again",
    ),
    broken(
        "a training in a thread is silent about the SIGTERM that it will not hear",
        "if not self._signal.listen():",
        "if self.signal.listen() is None:",
        f"{SIGTERM}::test_a_training_in_a_thread_says_that_it_will_not_hear_sigterm",
        f"{SIGTERM}::test_what_the_warning_tells_to_write_keeps_the_steps[another]",
    ),
)
