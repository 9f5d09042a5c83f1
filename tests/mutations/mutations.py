"""All mutations: each breaks a clause of the law, or a promise of the README."""

from __future__ import annotations

from bits_mutations import BITS
from block_mutations import BLOCKS
from divided_mutations import DIVIDED
from files_mutations import FILES
from first_step_mutations import FIRST_STEP
from float16_mutations import FLOAT16
from foreign_mutations import FOREIGN
from hooks_mutations import HOOKS
from law_mutations import LAW
from loop_mutations import LOOPS
from memory_mutations import MEMORY
from mutation import ROOT, Mutation
from operations_mutations import OPERATIONS
from programs_mutations import PROGRAMS
from remat_mutations import REMAT
from state_mutations import STATE
from step_mutations import STEPS
from tables_mutations import TABLES
from testing_mutations import TESTING
from threads_mutations import THREADS
from words_mutations import WORDS
from worker_mutations import PROCESSES

__all__ = ["MUTATIONS", "ROOT", "Mutation"]

MUTATIONS = (
    *BITS,
    *(*LAW, *STEPS, *BLOCKS, *LOOPS, *PROCESSES, *FLOAT16, *STATE),
    *(*THREADS, *FOREIGN, *REMAT, *HOOKS, *FILES, *TESTING, *TABLES, *DIVIDED, *FIRST_STEP),
    *(*OPERATIONS, *WORDS, *PROGRAMS, *MEMORY),
)
