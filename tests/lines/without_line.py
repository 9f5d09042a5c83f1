"""Messages without an example, with the reason: most need what a CPU of one machine has not."""

from __future__ import annotations

_INSIDE = "is caught inside and told as part of another message"
_RESTART = "the line is to restart all workers: tests/workers/test_launch_resume.py does"
_RESULT = "states a difference that was found; what to write depends on it"

WITHOUT = {
    # A cluster of several machines, a TPU, or the end of the process.
    "The workers met, but TensorFlow could not start": _RESTART,
    "Another worker is gone, and the others cannot continue": _RESTART,
    "workers did not come within": _RESTART,
    "the first one, did not come within": _RESTART,
    "Two processes say that they are worker": _RESTART,
    "The workers disagree about": _RESTART,
    "{} cannot start": _RESTART,
    "its address {} {}": _INSIDE,
    "TensorFlow had started its devices before create_strategy": _INSIDE,
    "The workers do not call the same things in the same order": _RESTART,
    "worker {} was in {}, and workers {} were elsewhere": _RESTART,
    "Two strategies over different devices have used": _RESTART,
    "The workers read different data": "tests/workers/test_data_workers.py makes the mistake and "
    "reads again with a seed; who is told depends on who reads first",
    "The workers would shard different variables": "needs several GPUs on each worker",
    "The workers create different variables": "needs several GPUs on each worker",
    "Another worker could not determine the memory": "needs a GPU of unknown memory on one worker",
    "answers, but TensorFlow finds no TPU there": "needs a TPU",
    "The variables do not fit on the devices": "needs devices whose memory is known",
    "Kernels of a GPU may add in any order": "needs a GPU; "
    "tests/steps/test_logical_replicas.py has a strategy that names one",
    "The bits of a logical replica depend on the worker": "needs two machines that are not alike; "
    "tests/steps/test_logical_replicas.py has workers that say so",
    "A replica failed on one of these batches": "TensorFlow loses an error by chance, where "
    "no batch is kept: tests/steps/test_traced_once.py makes the mistake and accepts both",
    # What no user sees by itself.
    "module {} has no attribute {}": "is Python's own, of a name that does not exist",
    "it does not answer": _INSIDE,
    "it closed the connection": _INSIDE,
    "it sends no messages of a worker": _INSIDE,
    "The worker has another __main__": _INSIDE,
    "{} is not an array": _INSIDE,
    # What a test of the user's is told.
    "First differences, after step {}": _RESULT,
    "train returned other names on replicas": _RESULT,
    "Worker {} of {} {}. Its last output": "shows the output of a program that failed",
}
