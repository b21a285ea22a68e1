"""The reference engine passes every case, tied and untied, and each family its goldens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hotbunk.conformance.backends.reference import ReferenceUnderTest
from hotbunk.conformance.case import REGISTRY, Case, Status, all_cases
from hotbunk.conformance.kit import distinct
from hotbunk.conformance.runner import accepted, run_case

WHOLE = ("llama", "qwen2-tied")
# Differs in the model alone, so only what depends on the model is run again.
MODEL_ONLY = ("qwen3", "qwen3_moe")
# What does not depend on the model at all is tried with one.
NO_MODEL = ("colocate", "phases")


def _concerns(model: str, module: str) -> bool:
    if module in NO_MODEL:
        return model == WHOLE[0]
    return model in WHOLE or module == "goldens"


PAIRS = [
    pytest.param(model, one, id=f"{model}-{one.name}")
    for model in (*WHOLE, *MODEL_ONLY)
    for one in all_cases()
    if _concerns(model, one.run.__module__.rpartition(".")[2])
]
Made = Callable[[str], ReferenceUnderTest]


@pytest.fixture(scope="module")
def under_test() -> Iterator[Made]:
    made: dict[str, ReferenceUnderTest] = {}

    def get(model: str) -> ReferenceUnderTest:
        if model not in made:
            family, _, tied = model.partition("-")
            made[model] = ReferenceUnderTest(family=family, tied=bool(tied))
        return made[model]

    yield get
    for one in made.values():
        one.close()


@pytest.mark.parametrize("model", [*WHOLE, *MODEL_ONLY])
def test_goldens_of_versions_differ_on_every_prompt(model: str, under_test: Made) -> None:
    it = under_test(model)
    assert distinct(
        [[it.golden(p, version, it.tokens) for p in it.prompts] for version in range(4)]
    )


@pytest.mark.anyio
async def test_it_fails_at_every_point_of_an_update(under_test: Made) -> None:
    result = await run_case(REGISTRY["an_engine_fails_in_each_phase"], under_test(WHOLE[0]))
    assert (result.status, result.detail) == (Status.PASS, "")


@pytest.mark.anyio
@pytest.mark.parametrize("model, one", PAIRS)
async def test_case(model: str, one: Case, under_test: Made) -> None:
    it = under_test(model)
    result = await run_case(one, it)
    assert accepted(result, it), result.detail
