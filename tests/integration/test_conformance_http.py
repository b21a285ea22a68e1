"""The conformance suite over a server: what else a wire may spoil, beside the sharpest cases, which
test_conformance_soak.py runs. All of them: ``hotbunk conformance --backend hotbunk_http``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.case import REGISTRY, Status, all_cases
from hotbunk.conformance.runner import run_case
from hotbunk.conformance.under_test import BackendUnderTest

pytestmark = pytest.mark.anyio
CHOSEN = (
    "a_flipped_bit_is_named",
    "a_sender_is_asked_for_each_step_once",
    "a_start_is_finished_once",
    "an_update_in_steps",
    "finish_without_start",
    "sender_hangs",
    "the_engine_itself_refuses",
    "the_old_version_heals",
    "without_fingerprints",
)


@pytest.fixture(scope="module")
def http() -> Iterator[BackendUnderTest]:
    described = under_test("hotbunk_http")
    yield described
    described.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CHOSEN)
async def test_over_http(http: BackendUnderTest, name: str) -> None:
    all_cases()
    result = await run_case(REGISTRY[name], http)
    assert result.status is Status.PASS, result.detail
