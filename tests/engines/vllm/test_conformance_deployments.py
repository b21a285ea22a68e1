"""The sharpest cases on vLLM's other deployments; all of them are `make soak ENGINE=vllm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotbunk.cli.serve import TINY
from hotbunk.conformance.backends import under_test
from hotbunk.conformance.backends.vllm import VllmUnderTest
from hotbunk.conformance.case import REGISTRY, Case, Level, Status, all_cases
from hotbunk.conformance.runner import accepted, run_case
from hotbunk.rollout.errors import ConfigError
from hotbunk.trainer_hooks.recipes.models import build_tiny

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]
CASES = [pytest.param(one, id=one.name) for one in all_cases(Level.SMOKE)]


async def _check(one: Case, it: VllmUnderTest) -> None:
    result = await run_case(one, it)
    assert accepted(result, it), result.detail


@pytest.mark.parametrize("one", CASES)
async def test_in_a_process_of_its_own(one: Case, apart: VllmUnderTest) -> None:
    await _check(one, apart)


@pytest.mark.parametrize("one", CASES)
async def test_two_workers_that_hold_halves(one: Case, sharded: VllmUnderTest) -> None:
    await _check(one, sharded)


@pytest.mark.parametrize("one", CASES)
async def test_two_engine_cores(one: Case, copied: VllmUnderTest) -> None:
    await _check(one, copied)


@pytest.mark.slow
async def test_a_model_that_a_user_brings(tmp_path: Path) -> None:
    """Its versions are that model with noise; it is read, and not changed."""
    tiny = build_tiny(tmp_path / "tiny", **TINY)  # type: ignore[arg-type]
    before = {path.name: path.read_bytes() for path in tiny.iterdir()}
    it: Any = under_test("vllm", model=str(tiny))
    try:
        result = await run_case(REGISTRY["an_update_equals_a_fresh_engine"], it)
        assert result.status is Status.PASS, result.detail
    finally:
        await it.finish()
    assert {path.name: path.read_bytes() for path in tiny.iterdir()} == before


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        under_test("vllm", model=str(tmp_path))
