"""The suite over and over: one seed gives one result, and every deployment of the reference engine passes.

With HOTBUNK_CONFORMANCE_ROUNDS (``make soak``: 10) that is every case, so often; else the oracle twice, in
virtual time, and the sharpest cases of each deployment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.case import REGISTRY, CaseResult, Level, Status, all_cases
from hotbunk.conformance.runner import Session, run
from hotbunk.conformance.under_test import BackendUnderTest

ROUNDS = int(os.environ.get("HOTBUNK_CONFORMANCE_ROUNDS", "0"))
LEVEL = Level.ALL if ROUNDS else Level.SMOKE
SEED = 7
pytestmark = pytest.mark.timeout(3600 if ROUNDS else 300)


def outcomes(results: list[CaseResult]) -> list[tuple[str, Status, str]]:
    """What a seed decides; seconds and what was measured are the machine's."""
    return [(r.case, r.status, r.detail if r.status is not Status.PASS else "") for r in results]


@pytest.fixture
def described(request: pytest.FixtureRequest) -> Iterator[BackendUnderTest]:
    it = under_test(request.param)
    yield it
    it.close()


@pytest.mark.parametrize(
    "described", ["oracle", "reference"] if ROUNDS else ["oracle"], indirect=True
)
def test_one_seed_gives_one_result(described: BackendUnderTest) -> None:
    first = outcomes(run(described, LEVEL, SEED))
    assert all(
        status in (Status.PASS, Status.UNSUPPORTED, Status.NOT_RUN) for _, status, _ in first
    )
    for number in range(1, max(ROUNDS, 2)):
        again = outcomes(run(described, LEVEL, SEED))
        assert again == first, f"run {number + 1} is not as the first"


@pytest.mark.parametrize("backend", ["reference_process", "hotbunk_http"])
def test_other_deployments_pass(backend: str) -> None:
    """As users run it: by the command, in a process of its own."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hotbunk", "conformance", "--backend", backend),
            *("--level", LEVEL.value, "--seed", str(SEED)),
        ],
        check=False,
        text=True,
        capture_output=True,
        timeout=3000 if ROUNDS else 280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_a_drain_that_is_frozen_over_http() -> None:
    """Two calls over a wire have no order; the case has one."""
    all_cases()
    described = under_test("hotbunk_http")
    try:
        with Session(described) as session:
            for seed in range(30 if ROUNDS else 1):
                result = session.run(REGISTRY["keep_after_wait_freezes"], seed)
                assert result.status is Status.PASS, f"time {seed + 1}: {result.detail}"
    finally:
        described.close()
