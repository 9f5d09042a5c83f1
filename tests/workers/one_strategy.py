"""The strategy of a process that runs several of the scripts beside it: a process has but one."""

from __future__ import annotations

import os

import tensorflow as tf

import tfmultigpu as tmg

strategy = (
    tmg.create_strategy(prefer="multi_worker", fallback=False)
    if "TF_CONFIG" in os.environ
    else tf.distribute.get_strategy()
)
