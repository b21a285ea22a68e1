"""The reference engine passes every core case, for each family, tied and untied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hotbunk.conformance.backends.reference import ReferenceUnderTest
from hotbunk.conformance.case import Case, Status, all_cases
from hotbunk.conformance.kit import distinct
from hotbunk.conformance.runner import run_case

PASSED = (Status.PASS, Status.NOT_RUN, Status.UNSUPPORTED)


@pytest.fixture(scope="module", params=["llama", "qwen2-tied", "qwen3"])
def under_test(request: pytest.FixtureRequest) -> Iterator[ReferenceUnderTest]:
    family, _, tied = request.param.partition("-")
    made = ReferenceUnderTest(family=family, tied=bool(tied))
    yield made
    made.close()


def test_goldens_of_versions_differ_on_every_prompt(under_test: ReferenceUnderTest) -> None:
    n = under_test.tokens
    assert distinct(
        [[under_test.golden(p, version, n) for p in under_test.prompts] for version in range(4)]
    )


@pytest.mark.anyio
@pytest.mark.parametrize("one", all_cases(), ids=lambda case: case.name)
async def test_core(one: Case, under_test: ReferenceUnderTest) -> None:
    result = await run_case(one, under_test)
    assert result.status in PASSED, result.detail
