"""Messages of TensorFlow that interrupt a notebook, where it shows those of level INFO too."""

from __future__ import annotations

import logging

import tensorflow as tf

# TensorFlow writes them at each trace, and an error from replicas once more than Python does.
_PROGRESS = (
    "Using MirroredStrategy with devices",
    "MultiWorkerMirroredStrategy with",
    "Single-worker MultiWorkerMirroredStrategy with",
    "Reduce to ",
    "Gather to ",
    "batch_all_reduce: ",
    "Collective ",
    "Error reported to Coordinator: ",
)


def leave_out_progress() -> None:
    """Has TensorFlow's logger leave out the progress of strategies; others of INFO stay."""
    tf.get_logger().addFilter(_keep)  # Once: a logger does not take the same filter twice.


def _keep(record: logging.LogRecord) -> bool:
    return record.levelno != logging.INFO or not record.getMessage().startswith(_PROGRESS)
