"""vLLM passes every core case, or refuses what it declares not to have and changes nothing."""

from __future__ import annotations

import pytest

from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.conformance.case import Case, Status, ability, all_cases
from hotbunk.conformance.kit import distinct
from hotbunk.conformance.runner import accepted, run_case

pytestmark = pytest.mark.anyio

# Nothing of this is mapped yet; whatever else a case needs, vLLM must have.
MISSING = {
    "adapter",
    "delta",
    "gate.in_engine",
    "keep_kv",
}
CASES = [pytest.param(one, id=one.name) for one in all_cases()]
# A tied head differs in what an update must reach.
OF_UPDATES = [
    pytest.param(one, id=one.name)
    for one in all_cases()
    if one.run.__module__.rpartition(".")[2] in ("goldens", "updates")
    and not MISSING & set(one.capabilities)
]


async def _check(one: Case, under_test: VllmUnderTest) -> None:
    result = await run_case(one, under_test)
    if result.status is Status.UNSUPPORTED:
        assert MISSING & set(one.capabilities), f"refused, though it needs {one.capabilities}"
    elif result.status is Status.NOT_RUN:
        assert accepted(result, under_test) or MISSING & set(one.capabilities), result.detail
    else:
        assert result.status is Status.PASS, result.detail


async def test_goldens_of_versions_differ_on_every_prompt(
    untied: VllmUnderTest, tied: VllmUnderTest
) -> None:
    for it in (untied, tied):
        assert distinct(
            [[it.golden(p, version, it.tokens) for p in it.prompts] for version in range(4)]
        )


@pytest.mark.parametrize("one", CASES)
async def test_core(one: Case, untied: VllmUnderTest) -> None:
    await _check(one, untied)


@pytest.mark.parametrize("one", OF_UPDATES)
async def test_core_tied(one: Case, tied: VllmUnderTest) -> None:
    await _check(one, tied)


async def test_nothing_else_is_declared_missing(untied: VllmUnderTest) -> None:
    caps = (await untied.start()).capabilities
    needed = {name for one in all_cases() for name in one.capabilities}
    assert {name for name in needed if not ability(caps, name)} <= MISSING
