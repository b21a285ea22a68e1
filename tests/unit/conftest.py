"""Fixtures of the unit tests."""

from __future__ import annotations

from typing import Any

import pytest

from hotbunk.rollout.backends.oracle import VirtualTimeLoop


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Coroutine tests run in virtual time: a deadline of minutes passes at once.

    A module whose tests use threads or other processes defines its own, on a real clock.
    """
    return "asyncio", {"loop_factory": VirtualTimeLoop}
