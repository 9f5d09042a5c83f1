"""Each case of the table: N replicas give what one device gives."""

from __future__ import annotations

import keras
import pytest
from keras import layers

from cases.case import Case, hold
from cases.layers import CASES as LAYERS, NOT_TRAINED
from cases.table import CASES
from tfmultigpu.strategies.scopes import all_layers


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replicas_give_what_one_device_gives(case: Case) -> None:
    hold(case)


def test_every_layer_of_keras_is_trained_by_a_case_or_is_named() -> None:
    """Looks into the models of the cases, so that what they hold cannot be claimed falsely."""
    trained_kinds = {type(layer) for case in LAYERS for layer in all_layers(case.build().model)}
    forgotten = [
        name
        for name, kind in vars(layers).items()
        if isinstance(kind, type)
        and kind not in trained_kinds
        and name not in NOT_TRAINED
        and not name.startswith("Random")  # DRAWS, all of them.
    ]
    assert not forgotten, (
        f"Keras {keras.__version__} has layers that no case trains: {forgotten}. Add them to a "
        "case in cases/layers.py, or say in NOT_TRAINED why they are not trained."
    )
    needless = [name for name in NOT_TRAINED if getattr(layers, name, None) in trained_kinds]
    assert not needless, f"These are trained by a case; remove them from NOT_TRAINED: {needless}."
