"""Functions by which Keras normalizes a batch, which it looks up at each call."""

from __future__ import annotations

import pkgutil
from typing import Any


def moments_of_batch() -> tuple[Any, str]:
    """Returns the class and the name of what gives the mean and the variance of a batch.

    Private: ``keras.layers.BatchNormalization._moments``, which ignores ``synchronized`` for masked
    inputs. No public method is called between the moments and the normalization. Without it each
    replica normalizes masked inputs by its own rows.
    """
    return pkgutil.resolve_name("keras:layers.BatchNormalization"), "_moments"


def sum_in_moments() -> tuple[Any, str]:
    """Returns the module and the name of what adds the rows that a mask leaves.

    Private: ``keras.src.ops.sum``, of which the public ``keras.ops.sum`` is another name, which
    Keras does not look up. Without it each replica normalizes masked inputs by its own rows.
    """
    return pkgutil.resolve_name("keras.src.ops"), "sum"
