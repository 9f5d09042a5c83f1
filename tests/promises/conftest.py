"""What several files of promises share."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """Has Keras make float64 by default, losses of ``compile`` too: there 1e-7 is no rounding."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
