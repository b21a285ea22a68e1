"""The suite against a server that already runs, seen from outside alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotbunk.conformance.backends.served import NEEDS_BYTES, NEEDS_HANDS, ServedUnderTest
from hotbunk.conformance.case import REGISTRY, Status, all_cases
from hotbunk.conformance.command import described
from hotbunk.conformance.runner import accepted, run_case
from hotbunk.rollout.errors import ConfigError, ReplicaLost

CHOSEN = ("goldens_of_two_versions", "discarded_weights_never_serve", "another_rank_fails")


@pytest.mark.anyio
async def test_one_server_for_all_cases(server: Any, model: Path) -> None:
    """Each finds it as a fresh engine would be, whatever the last one left; and one that is unseen."""
    all_cases()
    served = ServedUnderTest(url=server.url, model=str(model))
    try:
        for name in (*CHOSEN, CHOSEN[0]):
            result = await run_case(REGISTRY[name], served)
            assert result.status is Status.PASS, f"{name}: {result.detail}"
        result = await run_case(REGISTRY["bytes_are_the_ones_sent"], served)
        assert result.status is Status.NOT_RUN
        assert accepted(result, served)
    finally:
        served.close()
        server.ok("/update_weights_from_disk")


def test_what_is_not_seen_are_cases() -> None:
    assert {*NEEDS_BYTES, *NEEDS_HANDS} <= {one.name for one in all_cases()}


def test_nobody_there_is_said_once(model: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        described("served", {"url": "http://127.0.0.1:9"})
    with pytest.raises(ReplicaLost):
        described("served", {"url": "http://127.0.0.1:9", "model": str(model)})
