"""Each line of the page, measured again: this library and plain code."""

from __future__ import annotations

import pytest
from catalogue import CASES
from guarantee import Case
from held import Outcomes, hold_ours, hold_plain, outcomes

pytestmark = [pytest.mark.slow, pytest.mark.versions]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Outcomes:
    chosen = {item.callspec.params["case"].name for item in request.session.items if ours(item)}
    return outcomes([case for case in CASES if case.name in chosen])


def ours(item: pytest.Item) -> bool:
    return getattr(item, "originalname", None) == "test_the_line_holds"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_line_holds(case: Case, found: Outcomes) -> None:
    hold_ours(case, found)
    hold_plain(case, found)
