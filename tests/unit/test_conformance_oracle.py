"""The oracle passes every core case, and refuses what it is told not to have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hotbunk.conformance.backends.oracle import OracleUnderTest
from hotbunk.conformance.case import Case, Status, all_cases
from hotbunk.conformance.negative import ATTEMPTS
from hotbunk.conformance.runner import run, run_case, write_matrix
from hotbunk.rollout.backends.oracle.options import ABILITIES

CASES = all_cases()


def name(one: Case) -> str:
    return one.name


@pytest.mark.anyio
@pytest.mark.parametrize("one", CASES, ids=name)
async def test_core(one: Case) -> None:
    result = await run_case(one, OracleUnderTest())
    assert result.status in (Status.PASS, Status.NOT_RUN), result.detail
