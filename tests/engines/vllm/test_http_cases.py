"""The suite over a stock vLLM server that has hotbunk's weight-transfer engine in its workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.backends.vllm_http import VllmHttpUnderTest
from hotbunk.conformance.case import Case, Status, all_cases
from hotbunk.conformance.runner import accepted, run_case

pytestmark = pytest.mark.anyio

SMOKE = {
    "a_seed_repeats_its_draws",
    "abort_beats_wait",
    "an_update_equals_a_fresh_engine",
    "bad_offers_are_refused",
    "bad_tags_change_nothing",
    "caches_are_reset_by_name",
    "goldens_of_two_versions",
    "hostile_senders",
    "keep_after_wait_freezes",
    "kept_request_continues_under_new_weights",
    "log_probs_are_log_probs",
    "no_kv_outlives_its_weights",
    "partial_updates_need_their_base",
    "pause_abort",
    "pause_keep",
    "resume_during_a_drain",
    "samples_share_a_prompt",
    "sender_dies",
    "the_old_version_heals",
    "updating_many_times",
    "walk_backup",
}
CASES = [pytest.param(one, id=one.name) for one in all_cases() if one.name in SMOKE]


@pytest.fixture(scope="session")
async def server(anyio_backend: str) -> AsyncIterator[VllmHttpUnderTest]:
    it = under_test("vllm_http")
    assert isinstance(it, VllmHttpUnderTest)
    yield it
    await it.finish()


def test_there_is_what_is_named() -> None:
    assert len(CASES) == len(SMOKE)


@pytest.mark.parametrize("one", CASES)
async def test_smoke(one: Case, server: VllmHttpUnderTest) -> None:
    result = await run_case(one, server)
    assert accepted(result, server), result.detail
    assert result.status is (Status.UNSUPPORTED if one.name == "walk_backup" else Status.PASS)
