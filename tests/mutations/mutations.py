"""All mutations: each breaks a clause of the law, or a promise of the README."""

from __future__ import annotations

from bits_mutations import BITS
from block_mutations import BLOCKS
from first_step_mutations import FIRST_STEP
from float16_mutations import FLOAT16
from foreign_mutations import FOREIGN
from law_mutations import LAW
from loop_mutations import LOOPS
from mutation import ROOT, Mutation
from programs_mutations import PROGRAMS
from state_mutations import STATE
from step_mutations import STEPS
from tables_mutations import TABLES
from threads_mutations import THREADS
from worker_mutations import PROCESSES

__all__ = ["MUTATIONS", "ROOT", "Mutation"]

MUTATIONS = (
    *(*BITS, *LAW, *STEPS, *BLOCKS, *LOOPS, *PROCESSES, *FLOAT16, *STATE),
    *(*THREADS, *FOREIGN, *TABLES, *FIRST_STEP, *PROGRAMS),
)
