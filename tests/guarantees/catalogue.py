"""All cases, in the order of the page."""

from __future__ import annotations

import cases_input
import cases_layers
import cases_losses
import cases_optimizers
from guarantee import Case

CASES: list[Case] = [
    *cases_losses.CASES,
    *cases_optimizers.CASES,
    *cases_layers.CASES,
    *cases_input.CASES,
]
