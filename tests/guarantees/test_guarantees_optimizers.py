"""Optimizers, clipping, accumulation, precision: each line of the page, measured again."""

from __future__ import annotations

import pytest
from cases_optimizers import CASES
from guarantee import Case
from held import Outcomes, hold_ours, hold_plain, outcomes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Outcomes:
    return outcomes(CASES, request)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_this_library(case: Case, found: Outcomes) -> None:
    hold_ours(case, found)


@pytest.mark.versions
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plain_code(case: Case, found: Outcomes) -> None:
    hold_plain(case, found)
